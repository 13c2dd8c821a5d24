"""The batch's arrays change by deltas only; slots and positions are worked out per token."""

import numpy as np
import pytest

from girih.device.cpu import process_bytes
from girih.kv.plan import get_kv_cache_configs
from girih.kv.specs.full_attention import FullAttentionSpec
from girih.kv.specs.sliding_window import SlidingWindowSpec
from girih.messages import NewRow, StepInput, TableUpdate
from girih.request import SamplingParams
from girih.worker.input_batch import InputBatch

NOTHING = TableUpdate(*(np.empty(0, np.int32),) * 3)


@pytest.fixture
def batch():
    specs = {
        "a": FullAttentionSpec(1, 8, "float32", block_size_multiple=1),
        "b": SlidingWindowSpec(1, 8, "float32", 8, block_size_multiple=1),
    }
    (config,) = get_kv_cache_configs([specs], [1 << 16], max_model_len=64, block_size=4)
    return InputBatch(config, max_num_seqs=4, eos_token_ids=(2,))


def test_rows_take_memory_when_they_are_used_not_before():
    (config,) = get_kv_cache_configs(
        [{"a": FullAttentionSpec(1, 8, "float32", block_size_multiple=1)}], [1 << 30], max_model_len=1 << 20
    )
    before = process_bytes()
    batch = InputBatch(config, max_num_seqs=256, eos_token_ids=())
    assert batch.token_ids.nbytes + batch.block_tables[0].nbytes > 1 << 30
    batch.apply([new_row(7, [1, 2, 3])], [NOTHING])
    assert (batch.block_tables[0][7] == config.null_block_id(0)).all()
    assert process_bytes() - before < 16 << 20


def update(*entries):
    return TableUpdate(*np.array(entries, np.int32).T)


def new_row(row, tokens, num_prompt=None):
    num_prompt = len(tokens) if num_prompt is None else num_prompt
    return NewRow(row, f"r{row}", np.array(tokens, np.int32), num_prompt, SamplingParams(seed=row))


def step(work):
    """Build a step; work: (row, num_computed, num_new)."""
    rows, computed, new = np.array(work, np.int32).T
    return StepInput(0, (), (), rows, computed, new, np.zeros(len(work), bool))


def test_flat_tokens_positions_and_slots(batch):
    batch.apply(
        [new_row(2, range(10, 22)), new_row(0, range(50, 60))],
        [update((2, 0, 7), (2, 1, 3), (2, 2, 5), (0, 2, 9)), update((2, 1, 4), (2, 2, 8), (0, 2, 1))],
    )
    flat = batch.flatten(step([(2, 6, 4), (0, 9, 1)]))
    assert flat.input_ids.tolist() == [16, 17, 18, 19, 59]
    assert flat.positions.tolist() == [6, 7, 8, 9, 9]
    assert flat.query_starts.tolist() == [0, 4, 5]
    first, second = flat.groups
    assert first.slot_mapping.tolist() == [3 * 4 + 2, 3 * 4 + 3, 5 * 4, 5 * 4 + 1, 9 * 4 + 1]
    assert second.slot_mapping.tolist() == [4 * 4 + 2, 4 * 4 + 3, 8 * 4, 8 * 4 + 1, 1 * 4 + 1]
    assert first.block_table[:, :3].tolist() == [[7, 3, 5], [batch.null_block_ids[0]] * 2 + [9]]
    assert first.num_computed_tokens.tolist() == [6, 9]


def test_a_new_row_starts_with_null_pages_whatever_was_there_before(batch):
    batch.apply([new_row(1, [5, 6])], [update((1, 0, 3), (1, 1, 4)), NOTHING])
    batch.apply([new_row(1, [7])], [NOTHING, NOTHING])
    for table, null in zip(batch.block_tables, batch.null_block_ids, strict=True):
        assert (table[1] == null).all()


def test_of_two_changes_of_one_entry_the_last_counts(batch):
    batch.apply([new_row(1, [5, 6])], [update((1, 0, 3), (1, 0, 8)), NOTHING])
    assert batch.block_tables[0][1, 0] == 8


def test_sampled_tokens_are_appended_and_a_restart_keeps_the_prompts_length(batch):
    batch.apply([new_row(3, [5, 6, 7]), new_row(1, [1, 2, 3, 4, 5], num_prompt=2)], [NOTHING, NOTHING])
    batch.append(np.array([1, 3]), np.array([30, 31]))
    assert batch.token_ids[1, :6].tolist() == [1, 2, 3, 4, 5, 30]
    assert batch.token_ids[3, :4].tolist() == [5, 6, 7, 31]
    assert batch.num_tokens[[1, 3]].tolist() == [6, 4]
    assert batch.num_prompt_tokens[[1, 3]].tolist() == [2, 3]


def test_the_longest_sequence_has_room_for_its_last_token(batch):
    batch.apply([new_row(0, [9] * 64)], [NOTHING, NOTHING])
    batch.append(np.array([0]), np.array([1]))
    assert batch.num_tokens[0] == 65
