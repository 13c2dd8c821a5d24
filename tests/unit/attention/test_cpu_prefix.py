"""Leading pages that rows of a step share are read once for all of them, and no bit of a result changes."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from girih.attention import GroupMetadata, cpu
from girih.attention._cpu_prefix import MAX_ROWS, find_shared
from girih.attention._cpu_tile import PARTITION_TOKENS
from tests.dense_attention import paged_cache

TILE = 64


@pytest.fixture(autouse=True, scope="module")
def several_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(before)


def make_step(rows, block_size=16, num_new=None):
    """Return the metadata of rows (tokens before, row that it shares with, tokens that they share)."""
    num_new = np.ones(len(rows), np.int64) if num_new is None else np.array(num_new)
    computed = np.array([length for length, _, _ in rows])
    width = int((computed + num_new).max()) // block_size + 1
    table = np.random.default_rng(0).permutation(len(rows) * width).reshape(len(rows), width).astype(np.int32)
    for row, (_, other, num_shared) in enumerate(rows):
        table[row, : num_shared // block_size] = table[other, : num_shared // block_size]
    query_starts = np.concatenate(([0], np.cumsum(num_new)))
    return GroupMetadata(query_starts, computed, table, torch.zeros(0, dtype=torch.int64))


def one_row(metadata, row):
    """Return the same step with one row only, which shares nothing."""
    num_new = np.diff(metadata.query_starts)[row]
    here = slice(row, row + 1)
    return GroupMetadata(
        np.array([0, num_new]), metadata.num_computed_tokens[here], metadata.block_table[here], metadata.slot_mapping
    )


def check_bits(metadata, block_size, *, dtype=torch.float32, quantised=False, heads=(4, 2), size=16, window=None):
    """Check that every row's result has the bits that it has alone."""
    num_blocks, (num_heads, num_kv_heads) = metadata.block_table.size, heads
    cache = paged_cache(num_blocks, block_size, num_kv_heads, size, dtype=dtype, quantised=quantised)
    generator = torch.Generator().manual_seed(0)
    num_slots = num_blocks * block_size
    key, value = (torch.randn(num_slots, num_kv_heads, size, generator=generator).to(dtype) for _ in range(2))
    cpu.write(cache, key, value, torch.arange(num_slots))
    query = torch.randn(int(metadata.query_starts[-1]), num_heads, size, generator=generator).to(dtype)
    together = cpu.attend(query, cache, cpu.prepare(metadata, cache, window), 0.3)
    for row in range(len(metadata.num_computed_tokens)):
        tokens = slice(*metadata.query_starts[row : row + 2].tolist())
        alone = cpu.attend(query[tokens], cache, cpu.prepare(one_row(metadata, row), cache, window), 0.3)
        assert torch.equal(together[tokens], alone), row


def shared_tokens(metadata, block_size=16):
    """Return how many tokens of each row shared items read."""
    shared, tokens = find_shared(metadata, block_size, TILE), np.zeros(len(metadata.num_computed_tokens), int)
    if shared is not None:
        tokens[shared.rows] = shared.stop
    return tokens.tolist()


TREE = [(1400, 0, 0), (900, 0, 784), (1500, 0, 1300), (1030, 3, 0), (1025, 3, 1024), (10, 5, 0), (700, 1, 16)]


def test_rows_share_whole_tiles_of_the_pages_they_have_in_common():
    assert shared_tokens(make_step(TREE)) == [1280, 512, 1280, 1024, 1024, 0, 0]
    assert shared_tokens(make_step([(800, 0, 768)] * 5)) == [768] * 5
    assert shared_tokens(make_step([(70, 0, 64)] * 2)) == [64] * 2
    assert shared_tokens(make_step([(63, 0, 63)] * 2)) == [0] * 2, "less than a tile"
    assert shared_tokens(make_step([(1000, 0, 992)])) == [0]


def test_the_length_that_saves_most_is_chosen():
    assert shared_tokens(make_step([(400, 0, 384)] * 9 + [(400, 0, 64)])) == [384] * 9 + [0]
    assert shared_tokens(make_step([(400, 0, 64)] * 9 + [(400, 0, 96)])) == [64] * 10


def test_rows_of_several_tokens_share_nothing():
    assert shared_tokens(make_step([(800, 0, 768)] * 3, num_new=[1, 2, 1])) == [768, 0, 768]


def test_a_page_that_a_row_has_not_filled_is_not_shared():
    metadata = make_step([(800, 0, 768)] * 2)
    metadata.num_computed_tokens[1] = 130  # it has the pages, but no more tokens
    assert shared_tokens(metadata) == [128] * 2


def test_each_shared_token_is_read_once_for_many_rows():
    shared = find_shared(make_step([(800 + i, 0, 768) for i in range(64)]), 16, TILE)
    lengths = (shared.items["stop"] - shared.items["first"]).tolist()
    assert lengths == [PARTITION_TOKENS] * (64 // MAX_ROWS) + [256] * (64 // MAX_ROWS)
    assert shared.items["num_queries"].tolist() == [MAX_ROWS] * 4


@pytest.mark.parametrize(
    ("dtype", "quantised"), [(torch.float32, False), (torch.bfloat16, False), (torch.float32, True)], ids=str
)
@pytest.mark.parametrize("heads", [(4, 2), (9, 3), (5, 1)], ids=str)
def test_sharing_changes_no_bit(dtype, quantised, heads):
    check_bits(make_step(TREE), 16, dtype=dtype, quantised=quantised, heads=heads)


def test_sharing_changes_no_bit_beside_prompts_and_windows():
    metadata = make_step([(600, 0, 0), *TREE], num_new=[20, 1, 1, 1, 3, 1, 1, 1])
    check_bits(metadata, 16)
    check_bits(metadata, 16, window=300)


def test_sharing_changes_no_bit_of_many_rows_or_of_large_heads():
    check_bits(make_step([(800 + i, 0, 768) for i in range(40)]), 16)
    check_bits(make_step(TREE), 16, heads=(4, 1), size=250)


def test_own_items_that_are_split_go_on_where_shared_ones_end():
    check_bits(make_step([(9000, 0, 0), (700, 0, 640), (80, 0, 64)]), 16)


@st.composite
def steps(draw):
    """Draw rows that share some tokens with a row before them."""
    rows = []
    for row in range(draw(st.integers(2, 12))):
        length = draw(st.integers(0, 1300))
        other = draw(st.integers(0, max(0, row - 1)))
        most = min(length, rows[other][0]) if rows else 0
        rows.append((length, other, draw(st.integers(0, most) | st.just(most))))
    num_new = draw(st.lists(st.sampled_from([1, 1, 1, 1, 2, 17]), min_size=len(rows), max_size=len(rows)))
    block_size = draw(st.sampled_from([1, 3, 16, 48]))
    return make_step(rows, block_size, num_new), block_size


@settings(max_examples=25, deadline=None)
@given(steps())
def test_whatever_rows_share_no_bit_changes(case):
    metadata, block_size = case
    check_bits(metadata, block_size)
