"""Sampling: each option against a few lines of numpy, and the same token alone, in a batch and after a restart."""

import math

import numpy as np
import pytest
import torch

from girih.request import SamplingParams
from girih.worker import likely, sampler
from girih.worker.sampler import SampleInput, SamplingRows, sample, token_logprobs, uniform

V = 50
PROBABILITIES = np.array([0.4, 0.25, 0.15, 0.1, 0.06, 0.04])


def make_rows(params, token_ids=((1, 2, 3),), num_prompt=None, eos=(0,), forbid=lambda logits: None):
    """Build the sampler's input; params and token_ids one per row."""
    rows = SamplingRows(len(params), eos)
    for row, p in enumerate(params):
        rows.set(row, p)
    tokens = [np.array(t, np.int32) for t in token_ids]
    num_prompt = [t.size for t in tokens] if num_prompt is None else num_prompt
    num_tokens = np.array([t.size for t in tokens])
    return SampleInput(
        rows.params,
        num_tokens,
        np.array(num_prompt),
        tokens.__getitem__,
        rows.end_token_ids.__getitem__,
        rows.logit_bias.__getitem__,
        forbid,
    )


def support(logits, params, num_draws=400, **kwargs):
    """Return how often each token is drawn over many seeds."""
    n = num_draws
    rows = make_rows([params] * n, [(1, 2, 3)] * n, **kwargs)
    rows.params["seed"] = np.arange(n)
    drawn = sample(logits.repeat(n, 1), rows)
    return np.bincount(drawn, minlength=logits.shape[1])


def logits_of(probabilities):
    return torch.tensor(np.log(probabilities), dtype=torch.float32).unsqueeze(0)


def test_temperature_zero_takes_the_largest_and_the_first_of_equal_ones():
    logits = torch.tensor([[1.0, 3.0, 3.0, 2.0], [5.0, 1.0, 1.0, 1.0]])
    rows = make_rows([SamplingParams(temperature=0, seed=0)] * 2, [(1,), (1,)])
    assert sample(logits, rows).tolist() == [1, 0]


def test_frequencies_follow_the_distribution_and_its_temperature():
    n = 20_000
    for temperature in (1.0, 0.5, 3.0):
        expected = PROBABILITIES ** (1 / temperature)
        expected /= expected.sum()
        counts = support(logits_of(PROBABILITIES), SamplingParams(temperature=temperature, seed=0), n)
        np.testing.assert_allclose(counts / n, expected, atol=4 * math.sqrt(0.25 / n))


@pytest.mark.parametrize(
    ("options", "kept"),
    [
        ({"top_k": 1}, 1),
        ({"top_k": 3}, 3),
        ({"top_k": 6}, 6),
        ({"top_k": 100}, 6),
        ({"top_p": 0.3}, 1),
        ({"top_p": 0.401}, 2),
        ({"top_p": 0.79}, 3),
        ({"top_p": 0.99}, 6),
        ({"min_p": 1.0}, 1),
        ({"min_p": 0.37}, 3),
        ({"min_p": 0.01}, 6),
        ({"top_k": 2, "top_p": 0.6}, 1),  # 0.4 of 0.65 is 0.615
        ({"top_k": 4, "top_p": 0.9, "min_p": 0.5}, 2),
    ],
)
def test_filters_keep_exactly_the_most_likely(options, kept):
    counts = support(logits_of(PROBABILITIES), SamplingParams(seed=0, **options))
    assert set(np.flatnonzero(counts)) == set(range(kept))


@pytest.mark.parametrize("options", [{"top_k": 2}, {"top_p": 0.5}])
def test_of_equally_likely_tokens_the_first_are_kept(options):
    counts = support(torch.zeros(1, 4), SamplingParams(seed=0, **options))
    assert counts[:2].min() > 0
    assert counts[2:].sum() == 0


@pytest.mark.parametrize(
    "options", [{"top_p": 0.8}, {"top_k": 5}, {"top_k": 30, "top_p": 0.7}, {"top_p": 0.9, "min_p": 0.02}, {"top_k": 64}]
)
@pytest.mark.parametrize("widths", [(2,), (4, 16), (63,), (64, 1024)])
def test_few_likely_tokens_give_the_draw_of_the_whole_vocabulary(options, widths, monkeypatch):
    logits = torch.randn(6, 64, generator=torch.Generator().manual_seed(0)) * torch.tensor([[9.0, 0, 5, 0.1, 7, 0]]).T
    logits[4, :20] = 7.0  # as likely as each other, and cut somewhere between them
    rows = make_rows([SamplingParams(seed=i, **options) for i in range(6)], [(1,)] * 6)
    for seed in range(20):
        rows.params["seed"] = np.arange(6) + 6 * seed
        monkeypatch.setattr(likely, "WIDTHS", ())
        expected = sample(logits.clone(), rows)
        monkeypatch.setattr(likely, "WIDTHS", widths)
        assert sample(logits.clone(), rows).tolist() == expected.tolist()


def test_top_p_of_a_flat_distribution_looks_at_all_tokens(monkeypatch):
    monkeypatch.setattr(likely, "WIDTHS", (8,))
    counts = support(torch.zeros(1, 32), SamplingParams(seed=0, top_p=0.5), 2000)
    assert set(np.flatnonzero(counts)) == set(range(16))


@pytest.mark.parametrize("temperature", [1e-300, 1e-30, 1e-4, 1e4])
def test_extreme_temperatures_stay_finite(temperature):
    logits = torch.tensor([[3e38, -3e38, 0.0, 2e38]])
    counts = support(logits, SamplingParams(temperature=temperature, seed=0), 50)
    assert counts.sum() == 50
    assert temperature > 1 or counts[0] == 50


def test_penalties_match_their_formulas():
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(1, V, generator=generator)
    prompt, output = [3, 4, 4, 9], [4, 7, 7, 7]
    params = SamplingParams(temperature=0, seed=0, repetition_penalty=1.5, presence_penalty=0.3, frequency_penalty=-0.2)
    expected = logits[0].clone()
    for token in set(prompt + output):
        expected[token] = expected[token] / 1.5 if expected[token] > 0 else expected[token] * 1.5
    for token in set(output):
        expected[token] -= 0.3 - 0.2 * output.count(token)
    changed = logits.clone()
    sample(changed, make_rows([params], [prompt + output], num_prompt=[4]))
    torch.testing.assert_close(changed[0], expected)


def test_a_bias_is_added_before_penalties_to_its_row_alone():
    logits = torch.randn(3, V, generator=torch.Generator().manual_seed(0))
    biased = SamplingParams(temperature=0, seed=0, logit_bias={4: -100, 7: 2.5, 9: 100}, repetition_penalty=1.5)
    rows = make_rows([SamplingParams(temperature=0, seed=0), biased, SamplingParams(seed=1)], [(9,)] * 3)
    expected = logits.clone()
    expected[1, [4, 7, 9]] += torch.tensor([-100, 2.5, 100])
    expected[1, 9] /= 1.5
    assert sample(logits, rows)[1] == 9
    torch.testing.assert_close(logits, expected)


def test_a_penalty_lifts_nothing_that_is_forbidden():
    def all_but_one(logits):
        logits[:, 1:] = -torch.inf

    params = SamplingParams(temperature=0, seed=0, frequency_penalty=2, logit_bias={5: 100})
    assert sample(torch.zeros(1, V), make_rows([params], [(0, 0, 5)], [0], forbid=all_but_one)).tolist() == [0]
    assert sample(torch.zeros(1, V), make_rows([params], forbid=lambda logits: logits.fill_(-torch.inf))).tolist() == [
        -1
    ]


def test_min_tokens_holds_back_eos_and_stop_ids_until_reached():
    logits = torch.zeros(1, V)
    logits[0, 0], logits[0, 5], logits[0, 8] = 9, 8, 7
    params = SamplingParams(temperature=0, seed=0, min_tokens=2, stop_token_ids=(5, V + 3))
    for num_output, expected in ((0, 8), (1, 8), (2, 0)):
        rows = make_rows([params], [[1] * (3 + num_output)], num_prompt=[3], eos=(0,))
        assert sample(logits.clone(), rows).tolist() == [expected]


OPTIONS = [
    SamplingParams(temperature=0.8, seed=1),
    SamplingParams(temperature=0, seed=2),
    SamplingParams(temperature=1.3, top_k=7, seed=3),
    SamplingParams(top_p=0.7, seed=4),
    SamplingParams(min_p=0.05, seed=5, repetition_penalty=1.2),
    SamplingParams(seed=6, frequency_penalty=0.5, min_tokens=9),
    SamplingParams(top_p=0.95, top_k=20, seed=-1),
]


def test_a_row_gets_the_same_token_alone_and_in_any_batch():
    generator = torch.Generator().manual_seed(0)
    logits = 3 * torch.randn(len(OPTIONS), V, generator=generator)
    tokens = [list(range(2, 4 + row)) for row in range(len(OPTIONS))]
    together = sample(logits.clone(), make_rows(OPTIONS, tokens, num_prompt=[2] * len(OPTIONS)))
    order = [4, 0, 6, 2]
    some = sample(logits[order], make_rows([OPTIONS[i] for i in order], [tokens[i] for i in order], [2] * 4))
    assert some.tolist() == together[order].tolist()
    for i, params in enumerate(OPTIONS):
        assert sample(logits[i : i + 1].clone(), make_rows([params], [tokens[i]], [2])).tolist() == [together[i]]


def test_uniform_numbers_are_uniform_and_independent_of_neighbours():
    seeds, counters = np.meshgrid(np.arange(-50, 50), np.arange(100))
    numbers = uniform(seeds.ravel(), counters.ravel()).reshape(100, 100)
    assert 0 <= numbers.min() <= numbers.max() < 1
    assert len(np.unique(numbers)) == numbers.size
    np.testing.assert_allclose(np.histogram(numbers, 10, (0, 1))[0], 1000, atol=150)
    for axis in (0, 1):  # neighbouring seeds, neighbouring tokens
        a, b = np.take(numbers, range(99), axis).ravel(), np.take(numbers, range(1, 100), axis).ravel()
        assert abs(np.corrcoef(a, b)[0, 1]) < 0.04
    assert uniform(np.array([7]), np.array([3])) == numbers[3, 57]


def test_the_largest_uniform_number_never_picks_a_dropped_token(monkeypatch):
    monkeypatch.setattr(sampler, "uniform", lambda seeds, counters: np.full(seeds.shape, 1 - 2.0**-53))
    logits = torch.full((1, V), -torch.inf)
    logits[0, 10], logits[0, 20] = 0.0, -20.0
    assert sample(logits, make_rows([SamplingParams(seed=0)])).tolist() == [20]
    monkeypatch.setattr(sampler, "uniform", lambda seeds, counters: np.zeros(seeds.shape))
    assert sample(logits, make_rows([SamplingParams(seed=0)])).tolist() == [10]


@pytest.mark.parametrize("options", [{"temperature": 0}, {}, {"top_k": 3}, {"top_p": 0.5}, {"min_p": 0.1}])
def test_a_row_that_is_no_numbers_gets_no_token_and_the_others_get_theirs(options):
    logits = torch.randn(3, V, generator=torch.Generator().manual_seed(0))
    rows = [SamplingParams(**options, seed=0)] * 3
    expected = sample(logits.clone(), make_rows(rows, [(1,)] * 3))
    logits[1, 7] = torch.nan
    assert sample(logits, make_rows(rows, [(1,)] * 3)).tolist() == [expected[0], -1, expected[2]]


def test_logprobs_report_the_models_own_distribution():
    logits = torch.tensor([[1.0, 4.0, 2.0, 3.0], [0.0, 0.0, 5.0, 0.0]])
    report = token_logprobs(logits, np.array([2, 2]), num_top=2)
    assert report.token_ids.tolist() == [[2, 1, 3], [2, 2, report.token_ids[1, 2]]]
    assert report.ranks.tolist() == [3, 1]
    expected = logits.log_softmax(-1)
    np.testing.assert_allclose(report.logprobs[0], expected[0, [2, 1, 3]], rtol=1e-6)
    assert report.token_ids.dtype == np.int32
    assert report.logprobs.dtype == np.float32
    assert token_logprobs(logits, np.array([0, 0]), num_top=0).token_ids.tolist() == [[0], [0]]
    assert token_logprobs(logits, np.array([0, 0]), num_top=128).token_ids.shape == (2, 5)
