"""`InputBatch`: what a worker remembers of each row between steps, in arrays, changed by deltas only."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from girih.attention import GroupMetadata
from girih.errors import BindingError
from girih.kv.config import KVCacheConfig
from girih.layers.forward_context import StateMetadata
from girih.messages import NewRow, StateStep, StepInput, TableUpdate
from girih.worker.sampler import SamplingRows


@dataclass(frozen=True)
class FlatBatch:
    """The tokens of a step, all rows one after the other.

    Args:
        input_ids: int64 [num_tokens].
        positions: int64 [num_tokens].
        query_starts: int64 [num_rows + 1]; row i has tokens query_starts[i] .. query_starts[i + 1].
        attention: each attention group's metadata.
        states: the metadata of each group of recurrent layers.
    """

    input_ids: torch.Tensor
    positions: torch.Tensor
    query_starts: np.ndarray
    attention: Mapping[int, GroupMetadata]
    states: Mapping[int, StateMetadata]


class InputBatch:
    """Token ids, sampling parameters and block tables of every row.

    Groups are numbered as in the plan of this worker; in messages, `first_group` comes on top. Groups of recurrent
    layers have no table: each step says where its rows' states are.

    Token ids and tables are as wide as the longest sequence, and not on the memory bill: the kernel gives their pages
    when a row first uses them, and a sequence's share is small beside its KV cache.

    Args:
        config: the plan; sets the widths of the tables and the longest sequence.
        max_num_seqs: rows.
        eos_token_ids: the model's end-of-sequence ids.
    """

    def __init__(self, config: KVCacheConfig, max_num_seqs: int, eos_token_ids: Sequence[int]):
        # one column more than the longest sequence: its last sampled token is stored but never computed
        self.token_ids = np.zeros((max_num_seqs, config.max_model_len + 1), np.int32)
        self.num_tokens = np.zeros(max_num_seqs, np.int64)
        self.num_prompt_tokens = np.zeros(max_num_seqs, np.int64)
        self.sampling = SamplingRows(max_num_seqs, eos_token_ids)
        self.first_group = config.first_group
        self.state_groups = [g for g, group in enumerate(config.groups) if group.retention.holds_state]
        tables = {g: group for g, group in enumerate(config.groups) if g not in self.state_groups}
        self.block_sizes = {g: group.block_size for g, group in tables.items()}
        self.null_block_ids = {g: config.null_block_id(g) for g in range(len(config.groups))}
        self.block_tables = {
            g: np.zeros(  # a row is filled with null pages when a request enters it; np.full would touch all rows now
                (
                    max_num_seqs,
                    group.retention.table_width(config.max_model_len, group.block_size, config.num_lookahead_tokens),
                ),
                np.int32,
            )
            for g, group in tables.items()
        }

    def apply(self, new_rows: Sequence[NewRow], table_updates: Sequence[TableUpdate]) -> None:
        """Initialise rows, then change block tables.

        Args:
            new_rows: rows that enter the batch.
            table_updates: one per group of the whole engine.
        """
        for new in new_rows:
            self.token_ids[new.row, : new.token_ids.size] = new.token_ids
            self.num_tokens[new.row] = new.token_ids.size
            self.num_prompt_tokens[new.row] = new.num_prompt_tokens
            self.sampling.set(new.row, new.sampling_params)
            for g, table in self.block_tables.items():
                table[new.row] = self.null_block_ids[g]
        for g, table in self.block_tables.items():
            update = table_updates[self.first_group + g]
            table[update.rows, update.columns] = update.block_ids

    def flatten(self, step: StepInput) -> FlatBatch:
        """Lay the step's tokens out one after the other and find each token's slot in each group."""
        num_new = step.num_scheduled_tokens.astype(np.int64)
        num_computed = step.num_computed_tokens.astype(np.int64)
        query_starts = np.concatenate(([0], np.cumsum(num_new)))
        token_rows = np.repeat(step.rows, num_new)
        positions = np.arange(query_starts[-1]) + np.repeat(num_computed - query_starts[:-1], num_new)
        longest = int((num_computed + num_new).max(initial=0))
        attention = {}
        for g, table in self.block_tables.items():
            block_size = self.block_sizes[g]
            pages = table[token_rows, positions // block_size].astype(np.int64)
            attention[g] = GroupMetadata(
                query_starts=query_starts,
                num_computed_tokens=num_computed,
                block_table=table[step.rows, : -(-longest // block_size)],
                slot_mapping=torch.from_numpy(pages * block_size + positions % block_size),
            )
        states = {g: self._states(g, step.cache.states[self.first_group + g], query_starts) for g in self.state_groups}
        return FlatBatch(
            input_ids=torch.from_numpy(self.token_ids[token_rows, positions].astype(np.int64)),
            positions=torch.from_numpy(positions),
            query_starts=query_starts,
            attention=attention,
            states=states,
        )

    def _states(self, group: int, step: StateStep, query_starts: np.ndarray) -> StateMetadata:
        pages = np.concatenate((step.state_out, step.cut_pages))
        wrong = pages[(pages < 0) | (pages >= self.null_block_ids[group])]
        if wrong.size:
            raise BindingError(
                f"a state would be written to page {int(wrong[0])} of group {self.first_group + group}, whose pages "
                f"are 0 to {self.null_block_ids[group] - 1}"
            )
        return StateMetadata(query_starts, **{name: ids.astype(np.int64) for name, ids in vars(step).items()})

    def append(self, rows: np.ndarray, token_ids: np.ndarray) -> None:
        """Append one sampled token to each row; both int [m]."""
        self.token_ids[rows, self.num_tokens[rows]] = token_ids
        self.num_tokens[rows] += 1
