"""The batch's arrays change by deltas only; slots and positions are worked out per token."""

import dataclasses

import numpy as np
import pytest

from girih.device.cpu import process_bytes
from girih.errors import BindingError
from girih.kv.plan import get_kv_cache_configs
from girih.kv.specs.full_attention import FullAttentionSpec
from girih.kv.specs.sliding_window import SlidingWindowSpec
from girih.kv.specs.state import StateSpec
from girih.messages import CacheUpdate, NewRow, StateStep, StepInput, TableUpdate
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


def step(work, states=None):
    """Build a step; work: (row, num_computed, num_new)."""
    rows, computed, new = np.array(work, np.int32).T
    return StepInput(0, (), CacheUpdate((), (), (), states or {}), rows, computed, new, np.zeros(len(work), bool))


def test_flat_tokens_positions_and_slots(batch):
    batch.apply(
        [new_row(2, range(10, 22)), new_row(0, range(50, 60))],
        [update((2, 0, 7), (2, 1, 3), (2, 2, 5), (0, 2, 9)), update((2, 1, 4), (2, 2, 8), (0, 2, 1))],
    )
    flat = batch.flatten(step([(2, 6, 4), (0, 9, 1)]))
    assert flat.input_ids.tolist() == [16, 17, 18, 19, 59]
    assert flat.positions.tolist() == [6, 7, 8, 9, 9]
    assert flat.query_starts.tolist() == [0, 4, 5]
    first, second = flat.attention[0], flat.attention[1]
    assert not flat.states
    assert first.slot_mapping.tolist() == [3 * 4 + 2, 3 * 4 + 3, 5 * 4, 5 * 4 + 1, 9 * 4 + 1]
    assert second.slot_mapping.tolist() == [4 * 4 + 2, 4 * 4 + 3, 8 * 4, 8 * 4 + 1, 1 * 4 + 1]
    assert first.block_table[:, :3].tolist() == [[7, 3, 5], [batch.null_block_ids[0]] * 2 + [9]]
    assert first.num_computed_tokens.tolist() == [6, 9]


def test_a_new_row_starts_with_null_pages_whatever_was_there_before(batch):
    batch.apply([new_row(1, [5, 6])], [update((1, 0, 3), (1, 1, 4)), NOTHING])
    batch.apply([new_row(1, [7])], [NOTHING, NOTHING])
    for g, table in batch.block_tables.items():
        assert (table[1] == batch.null_block_ids[g]).all()


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


STATE = {"first": StateSpec(((4,),), ("float32",)), "a": FullAttentionSpec(1, 8, "float32", block_size_multiple=1)}
STATE_STEP = StateStep(*(np.array(part, np.int32) for part in ([3, 9], [4, 5], [1, 0], [1, 2], [6, 7])))


def batch_with_states(first_group):
    (config,) = get_kv_cache_configs([STATE], [1 << 16], max_model_len=64)
    assert [group.retention.holds_state for group in config.groups] == [True, False]
    return InputBatch(dataclasses.replace(config, first_group=first_group), max_num_seqs=4, eos_token_ids=())


@pytest.mark.parametrize("first_group", [0, 2])
def test_updates_and_states_are_those_of_the_own_groups_of_all_there_are(first_group):
    batch = batch_with_states(first_group)
    others = [update((2, 0, 99))] * first_group
    batch.apply([new_row(2, range(5)), new_row(0, range(5))], [*others, NOTHING, update((2, 0, 7)), update((2, 0, 98))])
    wrong = dataclasses.replace(STATE_STEP, state_out=np.array([0, 0], np.int32))
    states = {first_group: STATE_STEP, first_group + 2: wrong}
    flat = batch.flatten(step([(2, 0, 3), (0, 0, 1)], states))
    assert flat.attention.keys() == {1}
    assert flat.attention[1].block_table[0].tolist() == [7]
    assert flat.states.keys() == {0}
    state = flat.states[0]
    assert state.query_starts.tolist() == [0, 3, 4]
    assert [state.state_in.tolist(), state.state_out.tolist()] == [[3, 9], [4, 5]]
    assert [ids.tolist() for ids in (state.cut_rows, state.cut_tokens, state.cut_pages)] == [[1, 0], [1, 2], [6, 7]]
    assert {ids.dtype for ids in vars(state).values()} == {np.dtype(np.int64)}


@pytest.mark.parametrize("field", ["state_out", "cut_pages"])
@pytest.mark.parametrize("page", [-1, None])
def test_a_state_goes_to_a_page_of_the_pool_or_the_step_is_refused(field, page):
    batch = batch_with_states(3)
    page = batch.null_block_ids[0] if page is None else page
    wrong = dataclasses.replace(STATE_STEP, **{field: np.array([1, page], np.int32)})
    batch.apply([new_row(2, range(5)), new_row(0, range(5))], [NOTHING] * 5)
    with pytest.raises(BindingError, match=f"written to page {page} of group 3, whose pages are 0 to"):
        batch.flatten(step([(2, 0, 3), (0, 0, 1)], {3: wrong}))
