"""What a refusal for want of memory says of weights as int8."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from girih.errors import CapacityError
from girih.units import format_bytes


@contextmanager
def offering_int8(saved_bytes: Callable[[], int]) -> Iterator[None]:
    """Let a `CapacityError` offer int8 weights as well, where these would make up for what is missing.

    Args:
        saved_bytes: returns what they would save on each worker; 0 or less if nothing.
    """
    try:
        yield
    except CapacityError as error:
        saved = saved_bytes()
        if not 0 < error.need_bytes - error.have_bytes <= saved:
            raise
        raise CapacityError(
            f"{error}, or keep the weights as int8 (--quantization int8), which saves {format_bytes(saved)}",
            need_bytes=error.need_bytes,
            have_bytes=error.have_bytes,
            fitting_tokens=error.fitting_tokens,
        ) from error
