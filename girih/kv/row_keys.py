"""The block keys of running rows: which blocks have one, and the tokens that the next one will cover.

    |  block 0  |  block 1  |  block 2  |  block 3
     key         key         key = chain  tail: tokens of the block that is not full yet

A prompt's keys are made at once when it is looked up; a block of sampled tokens gets its key when it is full.
"""

from __future__ import annotations

import numpy as np

from girih.kv.hashing import BlockHasher

NO_KEYS = np.zeros((0, 2), dtype=np.uint64)


class RowKeys:
    """Keys of all rows.

    Args:
        hasher: makes the keys.
        max_num_seqs: rows.
    """

    def __init__(self, hasher: BlockHasher, max_num_seqs: int):
        self._hasher = hasher
        self._chain = np.zeros((max_num_seqs, 2), dtype=np.uint64)
        self._tail = np.zeros((max_num_seqs, hasher.block_size), dtype=np.int32)
        self._num_hashed = np.zeros(max_num_seqs, dtype=np.int64)
        self._unpublished = [NO_KEYS] * max_num_seqs  # of the prompt, up to its last full block
        self.has_unpublished = np.zeros(max_num_seqs, dtype=bool)
        """bool [max_num_seqs]; whether `take_prompt` still has keys of a row."""
        self._last_prompt: tuple[str, np.ndarray, np.ndarray] = ("", np.zeros(0, dtype=np.int32), NO_KEYS)

    def of_prompt(self, token_ids: np.ndarray, salt: str) -> np.ndarray:
        """Return the keys of all full blocks of a prompt, uint64 [num_tokens // block_size, 2].

        The last prompt's keys are remembered: a waiting request asks in every step.
        """
        last_salt, last_tokens, keys = self._last_prompt
        if salt != last_salt or not np.array_equal(token_ids, last_tokens):
            tokens = np.array(token_ids, dtype=np.int32)
            keys = self._hasher.chain(self._hasher.root(salt), tokens)
            self._last_prompt = (salt, tokens, keys)
        return keys

    def start(self, row: int, token_ids: np.ndarray, salt: str, num_published: int) -> None:
        """Begin a row.

        Args:
            row: the row.
            token_ids: int [num_tokens]; all known tokens.
            salt: its salt.
            num_published: leading blocks that were found in the index.
        """
        keys = self.of_prompt(token_ids, salt)
        self._unpublished[row] = keys[num_published:]
        self.has_unpublished[row] = len(keys) > num_published
        self._num_hashed[row] = len(keys)
        self._chain[row] = keys[-1] if len(keys) else self._hasher.root(salt)
        tail = token_ids[len(keys) * self._hasher.block_size :]
        self._tail[row, : len(tail)] = tail

    def take_prompt(self, row: int, until: int) -> tuple[int, np.ndarray]:
        """Hand out the prompt's keys not handed out before, up to block `until`.

        Returns:
            (first block, keys uint64 [n, 2]).
        """
        keys = self._unpublished[row]
        first = int(self._num_hashed[row]) - len(keys) if len(keys) else until
        count = max(0, until - first)
        self._unpublished[row] = keys[count:]
        self.has_unpublished[row] = len(keys) > count
        return first, keys[:count]

    def append(
        self, rows: np.ndarray, num_tokens: np.ndarray, token_ids: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Append one token per row, after making the keys of rows whose block was full.

        Args:
            rows: int [n], distinct.
            num_tokens: int [n]; tokens before this one, all computed.
            token_ids: int [n].

        Returns:
            (rows, blocks, keys uint64 [m, 2]) of the blocks that got their key.
        """
        position = num_tokens % self._hasher.block_size
        blocks = num_tokens // self._hasher.block_size
        full = np.flatnonzero((position == 0) & (blocks > self._num_hashed[rows]))
        done, keys = rows[full], NO_KEYS
        if len(full):
            keys = self._hasher.extend(self._chain[done], self._tail[done])
            self._chain[done] = keys
            self._num_hashed[done] = blocks[full]
        self._tail[rows, position] = token_ids
        return done, blocks[full] - 1, keys

    def drop(self, row: int) -> None:
        """End a row."""
        self._unpublished[row] = NO_KEYS
        self.has_unpublished[row] = False
