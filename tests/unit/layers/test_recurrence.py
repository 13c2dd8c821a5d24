"""Every page gets the state after the right tokens: of a layer whose state is the sum of the whole numbers it saw."""

import numpy as np
import pytest
import torch

from girih.attention import KVCacheView
from girih.kv.specs.state import StateSpec
from girih.layers import recurrence
from girih.layers.forward_context import ForwardContextBuilder, StateMetadata, bind_kv_cache
from girih.layers.recurrence import Recurrence, plan_spans

SPEC = StateSpec(((3,), (2, 2)), ("float32", "float64"))
NUM_PAGES = 40


def add_up(inputs, state):
    """Scan: the outputs are the running sums; the second tensor counts tokens."""
    sums = state[0].unsqueeze(1) + inputs.cumsum(1)
    return sums[:, :, :1], (sums[:, -1], state[1] + inputs.shape[1])


class Pages:
    """A cache of states full of NaN, and a layer over it; the null page is NaN too."""

    def __init__(self, scan=add_up):
        builder = ForwardContextBuilder()
        self.layer = Recurrence("r", spec=SPEC, scan=scan, output_size=1, builder=builder)
        pool = torch.full((NUM_PAGES + 1, 128), 0xFF, dtype=torch.uint8).view(torch.float64)
        tensors = {"state_0": pool.view(torch.float32)[:, 2:5], "state_1": pool[:, 8:12].unflatten(1, (2, 2))}
        self.sums, self.counts = tensors.values()
        self.context = bind_kv_cache({"r": KVCacheView(tensors, 0, 16)}, builder.build())

    def run(self, inputs, *metadata):
        step = StateMetadata(*(np.array(part, np.int64) for part in metadata))
        return self.layer(inputs, self.context.for_step({}, {0: step}))

    def written(self):
        return {page for page in range(NUM_PAGES + 1) if not self.sums[page].isnan().all()}


def test_a_state_starts_from_zero_and_goes_on_from_its_page():
    pages = Pages()
    inputs = torch.arange(15.0).view(5, 3)
    outputs = pages.run(inputs, [0, 5], [NUM_PAGES], [7], [], [], [])
    assert outputs[:, 0].tolist() == [0, 3, 9, 18, 30]
    assert pages.sums[7].tolist() == [30, 35, 40]
    assert pages.counts[7].tolist() == [[5, 5], [5, 5]]
    pages.run(inputs[:2], [0, 2], [7], [7], [], [], [])
    assert pages.sums[7].tolist() == [33, 40, 47]
    assert pages.written() == {7}


@pytest.mark.parametrize("num_tokens", [1, 2, 5])
def test_whether_a_row_starts_is_said_by_its_page_not_by_how_many_tokens_it_has(num_tokens):  # cases 46 and 47
    """A page that a former row left as it was is not read by the next, not even for a chunk of one token."""
    pages = Pages()
    pages.run(torch.ones(num_tokens, 3), [0, num_tokens], [NUM_PAGES], [3], [], [], [])
    pages.run(torch.ones(3, 3), [0, 1, 3], [NUM_PAGES, 3], [5, 3], [], [], [])
    assert pages.counts[[3, 5], 0, 0].tolist() == [num_tokens + 2, 1]


def test_a_shared_checkpoint_is_read_by_several_rows_and_written_by_none():
    pages = Pages()
    pages.sums[9], pages.counts[9] = 100, 10
    pages.run(torch.ones(4, 3), [0, 1, 2, 4], [9, 9, 9], [1, 2, 3], [], [], [])
    assert pages.counts[[1, 2, 3, 9], 0, 0].tolist() == [11, 11, 12, 10]
    assert pages.sums[[1, 2, 3, 9], 0].tolist() == [101, 101, 102, 100]


def test_cuts_may_lie_at_any_token_several_at_one_and_at_the_last():
    pages = Pages()
    inputs = torch.randint(9, (9, 3), generator=torch.Generator().manual_seed(0)).float()
    metadata = [0, 8, 9], [NUM_PAGES] * 2, [0, 1], [0, 0, 1, 0, 0], [8, 3, 1, 1, 3], [10, 11, 12, 13, 14]
    outputs = pages.run(inputs, *metadata)
    expected = {0: 8, 10: 8, 11: 3, 13: 1, 14: 3}
    for page, count in expected.items():
        assert pages.sums[page].tolist() == inputs[:count].sum(0).tolist()
        assert bool((pages.counts[page] == count).all())
    for page in (1, 12):
        assert pages.sums[page].tolist() == inputs[8].tolist()
    assert pages.written() == {*expected, 1, 12}
    assert outputs[:, 0].tolist() == [*inputs[:8, 0].cumsum(0).tolist(), float(inputs[8, 0])]


@pytest.mark.parametrize("rows_at_once", [1, 3, 1000])
@pytest.mark.parametrize("seed", range(5))
def test_random_steps_leave_in_every_page_the_sum_of_exactly_its_tokens(seed, rows_at_once, monkeypatch):
    monkeypatch.setattr(recurrence, "STATE_BYTES", rows_at_once * SPEC.page_size_bytes(16))
    random, pages = np.random.default_rng(seed), Pages()
    owner, seen = {row: None for row in range(8)}, {row: np.zeros(3) for row in range(8)}
    free = list(range(NUM_PAGES))
    for _ in range(20):
        rows = random.permutation(8)[: random.integers(1, 9)]
        num_tokens = np.where(random.random(rows.size) < 0.6, 1, random.integers(1, 7, rows.size))
        starts = np.concatenate(([0], np.cumsum(num_tokens)))
        inputs = random.integers(0, 50, (starts[-1], 3))
        state_in = [NUM_PAGES if owner[row] is None else owner[row] for row in rows]
        for row in rows:
            if owner[row] is None or random.random() < 0.3:
                free += [] if owner[row] is None else [owner[row]]
                owner[row] = free.pop(0)
        cuts = [
            (i, int(random.integers(1, n + 1))) for i, n in enumerate(num_tokens) for _ in range(random.integers(3))
        ]
        cuts = [cuts[k] for k in random.permutation(len(cuts))][: len(free)]
        cut_rows, cut_tokens = np.array(cuts, np.int64).reshape(-1, 2).T
        pages.run(
            torch.from_numpy(inputs).float(), starts, state_in, [owner[row] for row in rows], cut_rows, cut_tokens,
            free[: len(cuts)],
        )  # fmt: skip
        for (i, count), page in zip(cuts, free, strict=False):
            expected = seen[rows[i]] + inputs[starts[i] : starts[i] + count].sum(0)
            assert pages.sums[page].tolist() == expected.tolist()
        for i, row in enumerate(rows):
            seen[row] = seen[row] + inputs[starts[i] : starts[i + 1]].sum(0)
        for row, page in owner.items():
            assert page is None or pages.sums[page].tolist() == seen[row].tolist()


def test_rows_of_one_token_move_on_together_and_at_most_so_many_at_once():
    calls = []

    def scan(inputs, state):
        calls.append(inputs.shape[:2])
        return add_up(inputs, state)

    pages = Pages(scan)
    pages.layer.rows_at_once = 4
    num_tokens = [1, 1, 3, 1, 1, 1]
    pages.run(torch.ones(8, 3), np.cumsum([0, *num_tokens]), [NUM_PAGES] * 6, range(6), [], [], [])
    assert calls == [(4, 1), (1, 1), (1, 3)]
    assert pages.counts[:6, 0, 0].tolist() == num_tokens


@pytest.mark.parametrize("tokens", [0, 4])
def test_a_cut_outside_its_row_is_our_own_bug(tokens):
    metadata = ([0, 3], [9], [1], [0], [tokens], [2])
    with pytest.raises(AssertionError, match="a cut outside its row"):
        plan_spans(StateMetadata(*(np.array(part, np.int64) for part in metadata)), 9, 8)


def test_all_layers_of_a_group_share_one_plan_of_a_step():
    builder = ForwardContextBuilder()
    layers = [Recurrence(n, spec=SPEC, scan=add_up, output_size=1, builder=builder) for n in "ab"]
    caches = {
        n: KVCacheView({"state_0": torch.zeros(3, 3), "state_1": torch.zeros(3, 2, 2, dtype=torch.float64)}, 0, 16)
        for n in "ab"
    }
    nothing = np.zeros(0, np.int64)
    step = StateMetadata(np.array([0, 1]), np.array([2]), np.array([0]), nothing, nothing, nothing)
    context = bind_kv_cache(caches, builder.build()).for_step({}, {0: step})
    for layer in layers:
        layer(torch.ones(1, 3), context)
    assert len(context._made) == 1
    assert caches["a"].tensors["state_1"][0].tolist() == caches["b"].tensors["state_1"][0].tolist() == [[1, 1], [1, 1]]
