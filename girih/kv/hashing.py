"""Block keys: a secret-keyed 128-bit hash of all tokens up to the end of a block. Compiled, a whole prompt per call.

    root(salt)  ->  key of block 0  ->  key of block 1  -> ...       each key covers its parent and its own tokens

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
_SALT, _BLOCK = 1, 2
_LENGTH_SHIFT = np.uint64(8)


class BlockHasher:
    """Makes the keys of one manager's blocks.

    Args:
        block_size: tokens per block.
        secret: 16 bytes; processes that share a cache are given the same one. None takes a random one.

    Raises:
        ConfigError: the secret has another length.
    """

    def __init__(self, block_size: int, secret: bytes | None = None):
        secret = os.urandom(SECRET_BYTES) if secret is None else secret
        if len(secret) != SECRET_BYTES:
            raise ConfigError(f"the prefix cache's secret has {len(secret)} bytes; give {SECRET_BYTES}, or None")
        self.block_size = block_size
        self._secret = np.frombuffer(secret, dtype="<u8").astype(np.uint64)

    def root(self, salt: str) -> np.ndarray:
        """Return the key that stands before block 0, one per salt.

        Args:
            salt: requests with different salts share nothing; "" is the salt of everybody else.

        Returns:
            uint64 [2].
        """
        text = salt.encode()
        words = np.zeros(1 + -(-len(text) // 8), dtype=np.uint64)
        words[0] = _SALT + (len(text) << 8)
        words[1:] = np.frombuffer(text.ljust(8 * (len(words) - 1), b"\0"), dtype="<u8")
        return np.array(siphash128(self._secret, words), dtype=np.uint64)

    def chain(self, root: np.ndarray, token_ids: np.ndarray) -> np.ndarray:
        """Return the keys of all full blocks of a prompt.

        Args:
            root: uint64 [2]; the key before the first of these blocks.
            token_ids: int32 [num_tokens]; the tail that fills no block has no key.

        Returns:
            uint64 [num_tokens // block_size, 2].
        """
        keys = np.empty((len(token_ids) // self.block_size, 2), dtype=np.uint64)
        hash_chain(self._secret, root, token_ids, self.block_size, keys)
        return keys

    def extend(self, parents: np.ndarray, token_ids: np.ndarray) -> np.ndarray:
        """Return the keys of one block for each of n sequences.

        Args:
            parents: uint64 [n, 2]; the keys of the blocks before.
            token_ids: int32 [n, block_size].

        Returns:
            uint64 [n, 2].
        """
        keys = np.empty_like(parents)
        hash_each(self._secret, parents, token_ids, keys)
        return keys


@inner
def _rotate(word: np.uint64, bits: int) -> np.uint64:
    return (word << np.uint64(bits)) | (word >> np.uint64(64 - bits))


@inner
def _rounds(v0: np.uint64, v1: np.uint64, v2: np.uint64, v3: np.uint64, count: int) -> tuple:
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


@entry
def siphash128(secret: np.ndarray, words: np.ndarray) -> tuple:
    """Return SipHash-2-4-128 of a message of whole 8-byte words.

    Args:
        secret: uint64 [2].
        words: uint64 [n]; the message, little endian.

    Returns:
        The hash's first and second 8 bytes, little endian, as two uint64.
    """
    v0 = np.uint64(0x736F6D6570736575) ^ secret[0]
    v1 = np.uint64(0x646F72616E646F6D) ^ secret[1] ^ np.uint64(0xEE)
    v2 = np.uint64(0x6C7967656E657261) ^ secret[0]
    v3 = np.uint64(0x7465646279746573) ^ secret[1]
    num_words = words.shape[0]
    for i in range(num_words + 1):
        # the last word holds the message's length in bytes, modulo 256, in its highest byte
        word = words[i] if i < num_words else np.uint64((8 * num_words) & 0xFF) << np.uint64(56)
        v3 ^= word
        v0, v1, v2, v3 = _rounds(v0, v1, v2, v3, 2)
        v0 ^= word
    v2 ^= np.uint64(0xEE)
    v0, v1, v2, v3 = _rounds(v0, v1, v2, v3, 4)
    first = v0 ^ v1 ^ v2 ^ v3
    v1 ^= np.uint64(0xDD)
    v0, v1, v2, v3 = _rounds(v0, v1, v2, v3, 4)
    return first, v0 ^ v1 ^ v2 ^ v3


@inner
def _hash_block(
    secret: np.ndarray, parent: np.ndarray, token_ids: np.ndarray, words: np.ndarray, key: np.ndarray
) -> None:
    # words: scratch of 3 + ceil(block_size / 2); two tokens per word
    words[0] = np.uint64(_BLOCK) + (np.uint64(token_ids.shape[0]) << _LENGTH_SHIFT)
    words[1] = parent[0]
    words[2] = parent[1]
    words[3:] = 0
    for i in range(token_ids.shape[0]):
        words[3 + i // 2] |= np.uint64(np.uint32(token_ids[i])) << np.uint64(32 * (i % 2))
    key[0], key[1] = siphash128(secret, words)


@entry
def hash_chain(secret: np.ndarray, root: np.ndarray, token_ids: np.ndarray, block_size: int, keys: np.ndarray) -> None:
    """Fill `keys`, uint64 [num_blocks, 2], each from the one before; arguments as in `BlockHasher.chain`."""
    words = np.empty(3 + (block_size + 1) // 2, dtype=np.uint64)
    parent = root
    for i in range(keys.shape[0]):
        _hash_block(secret, parent, token_ids[i * block_size : (i + 1) * block_size], words, keys[i])
        parent = keys[i]


@entry
def hash_each(secret: np.ndarray, parents: np.ndarray, token_ids: np.ndarray, keys: np.ndarray) -> None:
    """Fill `keys`, uint64 [n, 2], one block for each row; arguments as in `BlockHasher.extend`."""
    words = np.empty(3 + (token_ids.shape[1] + 1) // 2, dtype=np.uint64)
    for i in range(keys.shape[0]):
        _hash_block(secret, parents[i], token_ids[i], words, keys[i])
