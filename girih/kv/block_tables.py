"""Block tables: which page holds each block of each row, per group, and what changed since the last step.

    column            0     1     2     3     4
    table[row]     [null, null,  17,   18,  null, ...]      first = 2, last = 4: columns first..last-1 have pages

A column outside first..last-1 holds the group's null id, so that every entry can be dereferenced.
"""

from __future__ import annotations

import numpy as np

from girih.kv.config import KVCacheConfig
from girih.messages import TableUpdate


def ragged_range(starts: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """Return starts[0] .. starts[0]+counts[0]-1, starts[1] .., one after the other.

    Args:
        starts: int [n].
        counts: int [n]; may be 0.
    """
    ends = np.cumsum(counts)
    total = int(ends[-1]) if len(ends) else 0
    return np.repeat(starts - ends + counts, counts) + np.arange(total)


class BlockTables:
    """The tables of all groups and rows.

    Args:
        config: the plan.
        max_num_seqs: rows.
    """

    def __init__(self, config: KVCacheConfig, max_num_seqs: int):
        self.null_ids = [config.null_block_id(group) for group in range(len(config.groups))]
        self.tables = [
            np.full(
                (
                    max_num_seqs,
                    group.retention.table_width(config.max_model_len, group.block_size, config.num_lookahead_tokens),
                ),
                null_id,
                dtype=np.int32,
            )
            for group, null_id in zip(config.groups, self.null_ids, strict=True)
        ]
        """Per group int32 [max_num_seqs, width]; page ids of the group."""
        self.first = np.zeros((len(config.groups), max_num_seqs), dtype=np.int64)
        self.last = np.zeros((len(config.groups), max_num_seqs), dtype=np.int64)
        self._changes: list[list[tuple[np.ndarray, np.ndarray]]] = [[] for _ in config.groups]

    def place(self, group: int, row: int, first: int, block_ids: np.ndarray) -> None:
        """Give an empty row the pages of columns first, first + 1, ... of one group.

        Args:
            group: the group.
            row: a row without pages.
            first: the first column.
            block_ids: int [n]; page ids of the group.
        """
        self.first[group, row] = self.last[group, row] = first
        self.append(group, np.array([row]), np.array([len(block_ids)]), block_ids)

    def append(self, group: int, rows: np.ndarray, counts: np.ndarray, block_ids: np.ndarray) -> None:
        """Add pages behind the last live column of rows.

        Args:
            group: the group.
            rows: int [n].
            counts: int [n]; new pages of each row.
            block_ids: int [sum of counts]; row after row.
        """
        columns = ragged_range(self.last[group, rows], counts)
        self._write(group, np.repeat(rows, counts), columns, block_ids)
        self.last[group, rows] += counts

    def drop_before(self, group: int, rows: np.ndarray, first: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Set the live columns before `first` to null.

        Args:
            group: the group.
            rows: int [n].
            first: int [n]; the columns that stay, at most `last`.

        Returns:
            (rows, columns, page ids) that were dropped, int [m] each, by row and column.
        """
        counts = np.maximum(first - self.first[group, rows], 0)
        columns = ragged_range(self.first[group, rows], counts)
        flat_rows = np.repeat(rows, counts)
        block_ids = self.tables[group][flat_rows, columns]
        self._write(group, flat_rows, columns, self.null_ids[group])
        self.first[group, rows] += counts
        return flat_rows, columns, block_ids

    def clear(self, group: int, row: int) -> np.ndarray:
        """Empty a row in one group; return the page ids it had, by column, int32."""
        _, _, block_ids = self.drop_before(group, np.array([row]), self.last[group, [row]])
        self.first[group, row] = self.last[group, row] = 0
        return block_ids

    def take_updates(self) -> tuple[TableUpdate, ...]:
        """Return, per group, the entries written since the last call with the values they have now."""
        updates = []
        for table, changes in zip(self.tables, self._changes, strict=True):
            rows = np.concatenate([np.zeros(0, dtype=np.int32), *(rows for rows, _ in changes)], dtype=np.int32)
            columns = np.concatenate([np.zeros(0, dtype=np.int32), *(cols for _, cols in changes)], dtype=np.int32)
            updates.append(TableUpdate(rows, columns, table[rows, columns]))
            changes.clear()
        return tuple(updates)

    def _write(self, group: int, rows: np.ndarray, columns: np.ndarray, block_ids: np.ndarray | int) -> None:
        if len(rows):
            self.tables[group][rows, columns] = block_ids
            self._changes[group].append((rows, columns))
