"""Every file in `kv/specs` keeps the rules that planner, manager and worker rely on, whatever kind it is."""

import copy
import json
import pickle

import numpy as np
import pytest

from girih import plugins
from girih.kv import specs
from girih.units import cdiv, dtype_bytes

KINDS = plugins.available("girih.kv.specs")
EXAMPLES = [
    pytest.param(spec, id=f"{kind}-{index}")
    for kind in KINDS
    for index, spec in enumerate(plugins.load("girih.kv.specs", kind, what="kind").EXAMPLES)
]
NO_LIMIT = 1 << 40
BLOCK_SIZES = (1, 3, 16)


@pytest.mark.parametrize("kind", KINDS)
def test_a_file_defines_spec_retention_and_examples_under_its_own_name(kind):
    module = plugins.load("girih.kv.specs", kind, what="kind")
    assert module.SPEC.kind == module.RETENTION.kind == kind
    assert module.EXAMPLES
    assert all(type(spec) is module.SPEC for spec in module.EXAMPLES)


@pytest.mark.parametrize("spec", EXAMPLES)
def test_a_spec_is_a_value(spec):
    assert copy.deepcopy(spec) == spec == pickle.loads(pickle.dumps(spec))
    assert hash(copy.deepcopy(spec)) == hash(spec)
    assert specs.spec_from_json(json.loads(json.dumps(specs.spec_to_json(spec)))) == spec
    with pytest.raises(AttributeError):
        spec.block_size_multiple = 1


@pytest.mark.parametrize("spec", EXAMPLES)
def test_a_retention_is_a_value(spec):
    retention = spec.retention_key(NO_LIMIT)
    assert retention == spec.retention_key(NO_LIMIT)
    assert hash(retention) == hash(spec.retention_key(NO_LIMIT))
    assert specs.retention_from_json(json.loads(json.dumps(retention.to_json()))) == retention
    assert retention.describe()


@pytest.mark.parametrize("spec", EXAMPLES)
@pytest.mark.parametrize("multiple", [1, 2, 5])
def test_the_tensors_of_a_page_fill_it_aligned_and_without_overlap(spec, multiple):
    block_size = spec.block_size_multiple * multiple
    end = 0
    for view in spec.view(block_size):
        assert view.offset_bytes >= end
        assert view.offset_bytes % dtype_bytes(view.dtype) == 0
        end = view.offset_bytes + int(np.prod(view.shape)) * dtype_bytes(view.dtype)
    assert end <= spec.page_size_bytes(block_size) < end + 16 * len(spec.view(block_size))
    assert spec.page_size_bytes(block_size) % spec.page_alignment_bytes == 0


@pytest.mark.parametrize("block_size", BLOCK_SIZES)
@pytest.mark.parametrize("spec", EXAMPLES)
def test_live_ranges_of_arrays_are_those_of_their_elements_and_only_move_on(spec, block_size):
    retention = spec.retention_key(NO_LIMIT)
    computed = np.arange(0, 700, dtype=np.int32)
    new = 1 + computed % 7
    first, last = retention.live_range(computed, new, block_size, 2)
    alone = [retention.live_range(int(c), int(n), block_size, 2) for c, n in zip(computed, new, strict=True)]
    assert np.array_equal(np.stack([first, last], axis=1), alone)
    assert (np.diff(first) >= 0).all()
    assert first[0] == 0
    # the new tokens and the lookahead have a place
    assert (last * block_size >= computed + new + 2).all()


@pytest.mark.parametrize("lookahead", [0, 1, 3, 20])
@pytest.mark.parametrize("block_size", BLOCK_SIZES)
@pytest.mark.parametrize("spec", EXAMPLES)
def test_blocks_held_is_the_most_of_any_decode_step(spec, block_size, lookahead):
    retention = spec.retention_key(NO_LIMIT)
    most = 0
    for num_tokens in range(1, 600):
        first, last = retention.live_range(num_tokens - 1, 1, block_size, lookahead)
        most = max(most, last - first)
        assert retention.blocks_held(num_tokens, block_size, lookahead) == most, num_tokens


@pytest.mark.parametrize("lookahead", [0, 1, 3, 20])
@pytest.mark.parametrize("block_size", BLOCK_SIZES)
@pytest.mark.parametrize("spec", EXAMPLES)
def test_peak_blocks_is_the_most_of_any_step_up_to_the_next_block_boundary(spec, block_size, lookahead):
    retention = spec.retention_key(NO_LIMIT)
    most = 0  # of the chunks that end below num_tokens
    for num_tokens in range(1, 600):
        start = (num_tokens - 1) // block_size * block_size
        for computed in range(start, num_tokens):
            first, last = retention.live_range(computed, num_tokens - computed, block_size, lookahead)
            most = max(most, last - first)
        assert retention.peak_blocks(num_tokens, block_size, lookahead) == most, num_tokens
    assert retention.peak_blocks(599, block_size, lookahead) >= retention.blocks_held(599, block_size, 0)


@pytest.mark.parametrize("block_size", BLOCK_SIZES)
@pytest.mark.parametrize("spec", EXAMPLES)
def test_a_prefix_is_hit_exactly_where_all_that_the_next_token_reads_is_cached(spec, block_size):
    retention = spec.retention_key(NO_LIMIT)
    random = np.random.default_rng(block_size)
    for num_blocks in (0, 1, 2, 9, 40):
        for share in (0.0, 0.5, 0.9, 1.0):
            cached = random.random(num_blocks) < share
            expected = [
                bool(cached[retention.live_range(blocks * block_size, 1, block_size)[0] : blocks].all())
                for blocks in range(num_blocks + 1)
            ]
            hits = retention.hit_boundaries(cached, block_size)
            assert hits.dtype == bool
            assert hits.tolist() == expected
            assert hits[0]


@pytest.mark.parametrize("spec", EXAMPLES)
def test_a_table_has_a_column_for_every_block_of_the_longest_request(spec):
    retention = spec.retention_key(NO_LIMIT)
    for max_model_len, lookahead in ((64, 0), (64, 3), (65, 0), (1, 0)):
        last = retention.live_range(max_model_len - 1, 1, 16, lookahead)[1]
        assert retention.table_width(max_model_len, 16, lookahead) == last == cdiv(max_model_len + lookahead, 16)
