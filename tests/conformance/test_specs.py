"""Every file in `kv/specs` keeps the rules that planner, manager and worker rely on, whatever kind it is.

What a kind is like is asked of the object: whether it reads another's cache, holds a state, grows with the tokens.
"""

import copy
import json
import pickle

import numpy as np
import pytest
from planner_models import EXAMPLES as BY_NAME

from girih import plugins
from girih.errors import PlanError
from girih.kv import specs
from girih.kv.retention import NO_LIMIT
from girih.units import dtype_bytes

KINDS = plugins.available("girih.kv.specs")
EXAMPLES = [pytest.param(spec, id=name) for name, spec in BY_NAME.items()]
RETENTIONS = list(dict.fromkeys(spec.retention_key(NO_LIMIT) for spec in BY_NAME.values()))
KEPT = [pytest.param(retention, id=retention.describe()) for retention in RETENTIONS]
BLOCK_SIZES = (1, 3, 16)
LOOKAHEADS = (0, 1, 3, 20)


def grows(retention):
    """Tell whether later tokens need more columns, that is, whether the blocks are those of the sequence."""
    return retention.live_range(1000, 1, 16)[1] > retention.live_range(0, 1, 16)[1]


# ---- values


@pytest.mark.parametrize("kind", KINDS)
def test_a_file_defines_its_spec_and_examples_under_its_own_name(kind):
    module = plugins.load("girih.kv.specs", kind, what="kind")
    assert module.SPEC.kind == kind
    assert module.EXAMPLES
    assert all(type(spec) is module.SPEC for spec in module.EXAMPLES)
    kept = getattr(module, "RETENTION", None)
    assert kept is None or kept.kind == kind
    assert kept is None or any(type(spec.retention_key(NO_LIMIT)) is kept for spec in module.EXAMPLES)


@pytest.mark.parametrize("spec", EXAMPLES)
def test_a_spec_is_a_value(spec):
    assert copy.deepcopy(spec) == spec == pickle.loads(pickle.dumps(spec))
    assert hash(copy.deepcopy(spec)) == hash(spec)
    assert specs.spec_from_json(json.loads(json.dumps(specs.spec_to_json(spec)))) == spec
    assert sum(spec == other for other in BY_NAME.values()) == 1
    with pytest.raises(AttributeError):
        spec.block_size_multiple = 1


@pytest.mark.parametrize("spec", EXAMPLES)
def test_a_retention_is_a_value(spec):
    retention = spec.retention_key(NO_LIMIT)
    assert retention == spec.retention_key(NO_LIMIT)
    assert hash(retention) == hash(spec.retention_key(NO_LIMIT))
    assert specs.retention_from_json(json.loads(json.dumps(retention.to_json()))) == retention


def test_different_retentions_read_differently_in_a_report():
    assert len({retention.describe() for retention in RETENTIONS}) == len(RETENTIONS)


@pytest.mark.parametrize("spec", EXAMPLES)
def test_another_backend_changes_the_block_sizes_and_nothing_else(spec):
    other = spec.with_block_size_multiple(48)
    assert other.block_size_multiple == 48
    assert other.view(48) == spec.view(48)
    assert other.retention_key(NO_LIMIT) == spec.retention_key(NO_LIMIT)
    assert other.cache_owner == spec.cache_owner
    assert other.with_block_size_multiple(spec.block_size_multiple) == spec


# ---- bytes


@pytest.mark.parametrize("spec", EXAMPLES)
@pytest.mark.parametrize("multiple", [1, 2, 5])
def test_the_tensors_of_a_page_fill_it_aligned_and_without_overlap(spec, multiple):
    block_size = spec.block_size_multiple * multiple
    views = spec.view(block_size)
    assert len({view.name for view in views}) == len(views) > 0
    end = 0
    for view in views:
        assert end <= view.offset_bytes < end + 16
        assert view.offset_bytes % spec.page_alignment_bytes == 0
        assert spec.page_alignment_bytes % dtype_bytes(view.dtype) == 0
        end = view.end_bytes
        assert end == view.offset_bytes + int(np.prod(view.shape)) * dtype_bytes(view.dtype)
    if spec.cache_owner is None:
        assert end <= spec.page_size_bytes(block_size) < end + 16
    else:
        assert spec.page_size_bytes(block_size) == 0
    assert spec.page_size_bytes(block_size) % spec.page_alignment_bytes == 0


@pytest.mark.parametrize("spec", EXAMPLES)
def test_a_page_is_as_large_as_its_tokens_and_a_state_as_itself(spec):
    size = spec.block_size_multiple
    once, twice = (sum(int(np.prod(view.shape)) for view in spec.view(n * size)) for n in (1, 2))
    assert twice == once if spec.retention_key(NO_LIMIT).holds_state else twice == 2 * once


@pytest.mark.parametrize("spec", EXAMPLES)
def test_ranks_hold_together_at_least_the_whole_and_each_at_most_that(spec):
    assert spec.shard(1) == spec
    for ranks in range(2, 33):
        try:
            mine = spec.shard(ranks)
        except PlanError:  # test_specs.py in unit/kv says which are refused, and how
            continue
        assert type(mine) is type(spec)
        assert mine.retention_key(NO_LIMIT) == spec.retention_key(NO_LIMIT)
        assert (mine.block_size_multiple, mine.cache_owner) == (spec.block_size_multiple, spec.cache_owner)
        assert mine.shard(1) == mine
        for part, whole in zip(mine.view(16), spec.view(16), strict=True):
            assert (part.name, part.dtype, len(part.shape)) == (whole.name, whole.dtype, len(whole.shape))
            assert np.prod(part.shape) <= np.prod(whole.shape) <= np.prod(part.shape) * ranks


# ---- tokens


@pytest.mark.parametrize("block_size", BLOCK_SIZES)
@pytest.mark.parametrize("retention", KEPT)
def test_live_ranges_of_arrays_are_those_of_their_elements_and_only_move_on(retention, block_size):
    computed = np.arange(0, 700, dtype=np.int32)
    new = 1 + computed % 7
    first, last = retention.live_range(computed, new, block_size, 2)
    alone = [retention.live_range(int(c), int(n), block_size, 2) for c, n in zip(computed, new, strict=True)]
    assert np.array_equal(np.stack([first, last], axis=1), alone)
    assert (np.diff(first) >= 0).all()
    assert (first < last).all()
    assert first[0] == 0
    if grows(retention):  # the new tokens and the lookahead have a place
        assert np.array_equal(last, -(-(computed + new + 2) // block_size))
    else:
        assert len(set(last.tolist())) == 1


@pytest.mark.parametrize("lookahead", LOOKAHEADS)
@pytest.mark.parametrize("block_size", BLOCK_SIZES)
@pytest.mark.parametrize("retention", KEPT)
def test_blocks_held_is_the_most_of_any_decode_step(retention, block_size, lookahead):
    most = 0
    for num_tokens in range(1, 600):
        first, last = retention.live_range(num_tokens - 1, 1, block_size, lookahead)
        most = max(most, last - first)
        assert retention.blocks_held(num_tokens, block_size, lookahead) == most, num_tokens
    assert retention.blocks_held(0, block_size, lookahead) <= retention.blocks_held(1, block_size, lookahead)


@pytest.mark.parametrize("lookahead", LOOKAHEADS)
@pytest.mark.parametrize("block_size", BLOCK_SIZES)
@pytest.mark.parametrize("retention", KEPT)
def test_peak_blocks_is_the_most_of_any_step_up_to_the_next_block_boundary(retention, block_size, lookahead):
    most = 0  # of the chunks that end below num_tokens
    for num_tokens in range(1, 600):
        start = (num_tokens - 1) // block_size * block_size
        for computed in range(start, num_tokens):
            first, last = retention.live_range(computed, num_tokens - computed, block_size, lookahead)
            most = max(most, last - first)
        assert retention.peak_blocks(num_tokens, block_size, lookahead) == most, num_tokens
        assert retention.blocks_held(num_tokens, block_size, lookahead) <= most
    assert retention.peak_blocks(0, block_size, lookahead) <= retention.peak_blocks(1, block_size, lookahead)


@pytest.mark.parametrize("lookahead", LOOKAHEADS)
@pytest.mark.parametrize("block_size", BLOCK_SIZES)
@pytest.mark.parametrize("retention", KEPT)
def test_a_table_has_a_column_for_every_block_of_any_step_and_no_more(retention, block_size, lookahead):
    for max_model_len in (1, 16, 64, 65, 333):
        last = max(retention.live_range(n, 1, block_size, lookahead)[1] for n in range(max_model_len))
        assert retention.table_width(max_model_len, block_size, lookahead) == last


# ---- reuse


@pytest.mark.parametrize("unit", BLOCK_SIZES)
@pytest.mark.parametrize("retention", KEPT)
def test_a_prefix_is_reused_by_what_the_next_token_reads_of_it(retention, unit):
    num_tokens = np.arange(0, 700)
    first = retention.hit_first(num_tokens, unit)
    assert first.tolist() == [retention.hit_first(int(n), unit) for n in num_tokens]
    assert (np.diff(first) >= 0).all()
    if retention.holds_state:  # one state stands for all tokens before it, so the unit at its end must be known
        assert np.array_equal(first, np.maximum(num_tokens - 1, 0) // unit)
    else:
        first_token, _ = retention.live_range(num_tokens, 1, 1)
        assert np.array_equal(first, first_token // unit)


@pytest.mark.parametrize("other", KEPT)
@pytest.mark.parametrize("retention", KEPT)
def test_who_covers_another_keeps_all_that_the_other_reads(retention, other):
    assert retention.covers(retention)
    if not retention.covers(other):
        return
    computed = np.arange(0, 700)
    assert retention.hit_trim_tokens == other.hit_trim_tokens
    assert (retention.holds_state, retention.prefix_cacheable) == (other.holds_state, other.prefix_cacheable)
    for kept, read in zip(retention.live_range(computed, 3, 16), other.live_range(computed, 3, 16), strict=True):
        assert (kept <= read).all()
    assert not other.covers(retention) or other == retention


@pytest.mark.parametrize("spec", EXAMPLES)
def test_a_limit_changes_nothing_that_a_request_within_it_could_tell(spec):
    for limit in (1, 20, 64, 600):
        limited, free = spec.retention_key(limit), spec.retention_key(NO_LIMIT)
        assert limited.covers(free)
        for n in range(limit):
            assert limited.live_range(n, 1, 16) == free.live_range(n, 1, 16)


def test_examples_have_every_kind_of_retention():
    assert {retention.holds_state for retention in RETENTIONS} == {True, False}
    assert {retention.prefix_cacheable for retention in RETENTIONS} == {True, False}
    assert {retention.hit_trim_tokens for retention in RETENTIONS} == {0, 1}
