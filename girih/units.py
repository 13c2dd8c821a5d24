"""Bytes, dtypes and rounding: the few numeric helpers that everything else shares."""

import re
from numbers import Integral

from girih.errors import ConfigError

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30

# dtype name (as in config.json, torch and our specs) -> bytes of one element
DTYPE_BYTES = {
    "float64": 8,
    "float32": 4,
    "bfloat16": 2,
    "float16": 2,
    "int64": 8,
    "int32": 4,
    "int16": 2,
    "int8": 1,
    "uint8": 1,
    "float8_e4m3fn": 1,
}

_SUFFIXES = {
    "": 1,
    "k": 10**3,
    "m": 10**6,
    "g": 10**9,
    "t": 10**12,
    "ki": KIB,
    "mi": MIB,
    "gi": GIB,
    "ti": 1 << 40,
}


def cdiv(numerator: int, denominator: int) -> int:
    """Divide and round up; both are non-negative integers."""
    return -(-numerator // denominator)


def round_up(value: int, multiple: int) -> int:
    """Return the smallest multiple of `multiple` that is >= `value`."""
    return cdiv(value, multiple) * multiple


def dtype_bytes(dtype: str) -> int:
    """Return the bytes of one element of a dtype name such as "bfloat16".

    Raises:
        ConfigError: the name is not known; the message lists those that are.
    """
    if dtype not in DTYPE_BYTES:
        raise ConfigError(f"unknown dtype {dtype!r}; known: {', '.join(DTYPE_BYTES)}")
    return DTYPE_BYTES[dtype]


def parse_bytes(text: str | int) -> int:
    """Read a size such as "1GiB", "512 MiB", "2e9" or "1.5G" (powers of 1000 without the i).

    Args:
        text: the size; a whole number, also numpy's, is taken as bytes.

    Returns:
        Bytes, a positive integer.

    Raises:
        ConfigError: not a size, or not positive.
    """
    if isinstance(text, Integral) and not isinstance(text, bool):
        value: float = int(text)
    else:
        pattern = r"\s*([0-9.]+(?:e[0-9]+)?)\s*([kmgt]?i?)b?\s*"
        match = re.fullmatch(pattern, text, re.IGNORECASE) if isinstance(text, str) else None
        try:
            if match is None or match[2].lower() not in _SUFFIXES:
                raise ValueError
            value = float(match[1]) * _SUFFIXES[match[2].lower()]
        except ValueError:
            raise ConfigError(f"{text!r} is not a size; write it like 512MiB, 4GiB or 2e9") from None
    if not 1 <= value < 1 << 62:
        raise ConfigError(f"size {text!r} is out of range; give between 1 byte and 4 EiB")
    return int(value)


def format_bytes(num_bytes: float) -> str:
    """Write bytes for people: 1536 -> "1.50 KiB"."""
    value = float(num_bytes)
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if abs(value) < 1024 or unit == "TiB":
            break
        value /= 1024
    return f"{value:.0f} B" if unit == "B" else f"{value:.2f} {unit}"
