"""Prefix keys: a secret-keyed 128-bit hash of all tokens up to the end of a unit. Compiled, a whole prompt per call.

    root(salt)  ->  key of unit 0  ->  key of unit 1  -> ...       each key covers its parent and its own tokens
                                            └->  key of a tail      a few tokens behind a unit, at the end of a request

The hash is SipHash-2-4 with 128 bits of output (Aumasson and Bernstein, "SipHash: a fast short-input PRF", 2012, and
its reference implementation), so that nobody without the secret can make two prompts share a key. What goes in is
framed: a type, a length, then the part. A salt can never read as tokens, nor "ab" + "c" as "a" + "bc".
"""

from __future__ import annotations

import os

import numpy as np

from girih.errors import ConfigError
from girih.kv.compiled import entry, inner

SECRET_BYTES = 16

# the type of a message, in the lowest byte of its first word; the length stands above it
_SALT, _UNIT, _TAIL = 1, 2, 3
_LENGTH_SHIFT = np.uint64(8)

Key = tuple[np.uint64, np.uint64]
Lanes = tuple[np.uint64, np.uint64, np.uint64, np.uint64]


class TokenHasher:
    """Makes the keys of one manager.

    Args:
        unit: tokens per unit.
        secret: 16 bytes; processes that share a cache are given the same one. None takes a random one.

    Raises:
        ConfigError: the secret has another length.
    """

    def __init__(self, unit: int, secret: bytes | None = None):
        secret = os.urandom(SECRET_BYTES) if secret is None else secret
        if len(secret) != SECRET_BYTES:
            raise ConfigError(f"the prefix cache's secret has {len(secret)} bytes; give {SECRET_BYTES}, or None")
        self.unit = unit
        self.secret = np.frombuffer(secret, dtype="<u8").astype(np.uint64)

    def root(self, salt: str) -> np.ndarray:
        """Return the key that stands before unit 0, one per salt.

        Args:
            salt: requests with different salts share nothing; "" is the salt of everybody else.

        Returns:
            uint64 [2].
        """
        text = salt.encode()
        words = np.zeros(1 + -(-len(text) // 8), dtype=np.uint64)
        words[0] = _SALT + (len(text) << 8)
        words[1:] = np.frombuffer(text.ljust(8 * (len(words) - 1), b"\0"), dtype="<u8")
        return np.array(siphash128(self.secret, words), dtype=np.uint64)

    def chain(self, root: np.ndarray, token_ids: np.ndarray) -> np.ndarray:
        """Return the keys of all full units of a prompt.

        Args:
            root: uint64 [2]; the key before the first of these units.
            token_ids: int32 [num_tokens]; the tail has no key here.

        Returns:
            uint64 [num_tokens // unit, 2].
        """
        keys = np.empty((len(token_ids) // self.unit, 2), dtype=np.uint64)
        _hash_chain(self.secret, root, token_ids, self.unit, keys)
        return keys


@inner
def _rotate(word: np.uint64, bits: int) -> np.uint64:
    return (word << np.uint64(bits)) | (word >> np.uint64(64 - bits))


@inner
def _rounds(lanes: Lanes, count: int) -> Lanes:
    v0, v1, v2, v3 = lanes
    for _ in range(count):
        v0 += v1
        v2 += v3
        v1 = _rotate(v1, 13) ^ v0
        v3 = _rotate(v3, 16) ^ v2
        v0 = _rotate(v0, 32)
        v2 += v1
        v0 += v3
        v1 = _rotate(v1, 17) ^ v2
        v3 = _rotate(v3, 21) ^ v0
        v2 = _rotate(v2, 32)
    return v0, v1, v2, v3


@inner
def _begin(secret: np.ndarray) -> Lanes:
    return (
        np.uint64(0x736F6D6570736575) ^ secret[0],
        np.uint64(0x646F72616E646F6D) ^ secret[1] ^ np.uint64(0xEE),
        np.uint64(0x6C7967656E657261) ^ secret[0],
        np.uint64(0x7465646279746573) ^ secret[1],
    )


@inner
def _take(lanes: Lanes, word: np.uint64) -> Lanes:
    v0, v1, v2, v3 = _rounds((lanes[0], lanes[1], lanes[2], lanes[3] ^ word), 2)
    return v0 ^ word, v1, v2, v3


@inner
def _end(lanes: Lanes, num_words: int) -> Key:
    # the last word holds the message's length in bytes, modulo 256, in its highest byte
    v0, v1, v2, v3 = _take(lanes, np.uint64((8 * num_words) & 0xFF) << np.uint64(56))
    v0, v1, v2, v3 = _rounds((v0, v1, v2 ^ np.uint64(0xEE), v3), 4)
    first = v0 ^ v1 ^ v2 ^ v3
    v0, v1, v2, v3 = _rounds((v0, v1 ^ np.uint64(0xDD), v2, v3), 4)
    return first, v0 ^ v1 ^ v2 ^ v3


@entry
def siphash128(secret: np.ndarray, words: np.ndarray) -> Key:
    """Return SipHash-2-4-128 of a message of whole 8-byte words.

    Args:
        secret: uint64 [2].
        words: uint64 [n]; the message, little endian.

    Returns:
        The hash's first and second 8 bytes, little endian, as two uint64.
    """
    lanes = _begin(secret)
    for i in range(words.shape[0]):
        lanes = _take(lanes, words[i])
    return _end(lanes, words.shape[0])


@inner
def _hash_tokens(secret: np.ndarray, low: np.uint64, high: np.uint64, token_ids: np.ndarray, kind: int) -> Key:
    # two tokens per word
    count = token_ids.shape[0]
    lanes = _take(_begin(secret), np.uint64(kind) + (np.uint64(count) << _LENGTH_SHIFT))
    lanes = _take(_take(lanes, low), high)
    for i in range(0, count - 1, 2):
        word = np.uint64(np.uint32(token_ids[i])) | (np.uint64(np.uint32(token_ids[i + 1])) << np.uint64(32))
        lanes = _take(lanes, word)
    if count % 2:
        lanes = _take(lanes, np.uint64(np.uint32(token_ids[count - 1])))
    return _end(lanes, 3 + (count + 1) // 2)


@inner
def hash_unit(secret: np.ndarray, low: np.uint64, high: np.uint64, token_ids: np.ndarray) -> Key:
    """Return the key of a full unit, int32 [unit], behind the one with key (low, high)."""
    return _hash_tokens(secret, low, high, token_ids, _UNIT)


@inner
def hash_tail(secret: np.ndarray, low: np.uint64, high: np.uint64, token_ids: np.ndarray) -> Key:
    """Return the key of a tail, int32 [fewer than a unit], behind the unit with key (low, high)."""
    return _hash_tokens(secret, low, high, token_ids, _TAIL)


@inner
def hash_chain(secret: np.ndarray, root: np.ndarray, token_ids: np.ndarray, unit: int, keys: np.ndarray) -> None:
    """Fill `keys`, uint64 [num_units, 2], each from the one before; arguments as in `TokenHasher.chain`."""
    low, high = root[0], root[1]
    for i in range(keys.shape[0]):
        low, high = _hash_tokens(secret, low, high, token_ids[i * unit : (i + 1) * unit], _UNIT)
        keys[i, 0] = low
        keys[i, 1] = high


@entry
def _hash_chain(secret: np.ndarray, root: np.ndarray, token_ids: np.ndarray, unit: int, keys: np.ndarray) -> None:
    hash_chain(secret, root, token_ids, unit, keys)
