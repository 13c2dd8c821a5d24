"""From logits to tokens: penalties, temperature, top-k, top-p, min-p, seeds and log probabilities, batched.

Every row's result depends on its own logits, parameters, tokens and seed only, so it is the same alone, in any
batch, and after a preemption. The order of the steps:

    logits -> log probabilities for the report -> logit bias -> penalties -> min_tokens -> grammar
           -> temperature -> top-k -> top-p -> min-p -> one uniform number per row
           -> inverse of the cumulative distribution
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import torch

from girih.messages import TokenLogprobs
from girih.request import SamplingParams
from girih.worker.likely import draw, draw_likely

# the numbers of SamplingParams that the sampler reads, one column each; -1 log probabilities: none asked for
PARAMS_DTYPE = np.dtype(
    [
        ("temperature", np.float64),
        ("top_k", np.int64),
        ("top_p", np.float64),
        ("min_p", np.float64),
        ("repetition_penalty", np.float64),
        ("presence_penalty", np.float64),
        ("frequency_penalty", np.float64),
        ("min_tokens", np.int64),
        ("seed", np.int64),
        ("logprobs", np.int64),
        ("prompt_logprobs", np.int64),
        ("num_biased", np.int64),  # tokens with a bias
        ("changes_logits", np.int64),  # 1: by a bias, a penalty or min_tokens
    ]
)

Bias: TypeAlias = tuple[tuple[int, float], ...]

_OPTIONAL = ("logprobs", "prompt_logprobs")
_PLAIN = [name for name in PARAMS_DTYPE.names or () if name not in (*_OPTIONAL, "num_biased", "changes_logits")]


class SamplingRows:
    """The sampling parameters of every row of the batch.

    Args:
        max_num_seqs: rows.
        eos_token_ids: the model's end-of-sequence ids.
    """

    def __init__(self, max_num_seqs: int, eos_token_ids: Sequence[int]):
        self.params = np.zeros(max_num_seqs, PARAMS_DTYPE)
        self.eos_token_ids = tuple(eos_token_ids)
        self.end_token_ids: list[tuple[int, ...]] = [()] * max_num_seqs
        self.logit_bias: list[Bias] = [()] * max_num_seqs

    def set(self, row: int, params: SamplingParams) -> None:
        """Store a request's parameters; `params.seed` must be set."""
        own = self.params[row]
        for name in _OPTIONAL:
            own[name] = -1 if getattr(params, name) is None else getattr(params, name)
        for name in _PLAIN:
            own[name] = getattr(params, name)
        self.logit_bias[row] = tuple(dict(params.logit_bias).items())
        own["num_biased"] = len(params.logit_bias)
        own["changes_logits"] = own["num_biased"] > 0 or _is_penalised(own) or own["min_tokens"] > 0
        self.end_token_ids[row] = tuple(sorted({*self.eos_token_ids, *params.stop_token_ids}))


@dataclass(frozen=True)
class SampleInput:
    """The rows to sample for; arrays have one element per row, and few rows are asked for more.

    Args:
        params: `PARAMS_DTYPE` [n].
        num_tokens: int64 [n], known tokens.
        num_prompt_tokens: int64 [n], how many of them are the prompt.
        token_ids_of: from 0 .. n - 1 to the row's known tokens, int32.
        end_token_ids_of: from 0 .. n - 1 to the ids that `min_tokens` holds back.
        logit_bias_of: from 0 .. n - 1 to the row's biased ids and their biases.
        forbid: makes logits [n, vocab_size] minus infinity where a row's grammar does not allow the token.
    """

    params: np.ndarray
    num_tokens: np.ndarray
    num_prompt_tokens: np.ndarray
    token_ids_of: Callable[[int], np.ndarray]
    end_token_ids_of: Callable[[int], tuple[int, ...]]
    logit_bias_of: Callable[[int], Bias]
    forbid: Callable[[torch.Tensor], None]


def sample(logits: torch.Tensor, rows: SampleInput) -> np.ndarray:
    """Choose one token per row.

    Args:
        logits: float32 [n, vocab_size]; changed in place.
        rows: the rows' parameters and tokens.

    Returns:
        int32 [n]; -1 for a row without a likeliest token: a logit is NaN or infinite, or every id is held back
        or forbidden.
    """
    params = rows.params
    num_output_tokens = rows.num_tokens - rows.num_prompt_tokens
    if params["changes_logits"].any():
        _add_bias(logits, rows)
        _apply_penalties(logits, rows)
        _hold_back_end(logits, rows, num_output_tokens)
    rows.forbid(logits)
    largest, most_likely = logits.max(dim=-1)
    is_finite = np.isfinite(largest.numpy())
    token_ids = np.where(is_finite, most_likely.numpy(), -1).astype(np.int32)
    random = np.flatnonzero((params["temperature"] > 0) & is_finite)
    if random.size:
        params = params[random]
        uniforms = uniform(params["seed"], num_output_tokens[random])
        some = logits if random.size == len(logits) else logits[torch.from_numpy(random)]
        token_ids[random] = _sample_random(some, params, uniforms)
    return token_ids


def token_logprobs(logits: torch.Tensor, token_ids: np.ndarray, num_top: int) -> TokenLogprobs:
    """Report log probabilities of the model's own distribution.

    Args:
        logits: float32 [n, vocab_size], before penalties and temperature.
        token_ids: int [n], the tokens sampled or given.
        num_top: most likely tokens to report beside them.
    """
    logprobs = logits.log_softmax(dim=-1)
    actual = torch.from_numpy(token_ids.astype(np.int64)).unsqueeze(1)
    actual_logprobs = logprobs.gather(1, actual)
    top = logprobs.topk(min(num_top, logprobs.shape[1]), dim=-1)
    return TokenLogprobs(
        token_ids=torch.cat((actual, top.indices), dim=1).int().numpy(),
        logprobs=torch.cat((actual_logprobs, top.values), dim=1).numpy(),
        ranks=((logprobs > actual_logprobs).sum(dim=-1) + 1).int().numpy(),
    )


def uniform(seeds: np.ndarray, counters: np.ndarray) -> np.ndarray:
    """Return one number in [0, 1) per row that depends on its seed and counter only.

    Two rounds of the mixing function of SplitMix64 (Steele, Lea and Flood 2014): the seed is mixed first, so that
    neighbouring seeds (the n completions of a prompt) have unrelated sequences.

    Args:
        seeds: int64 [n].
        counters: int64 [n].

    Returns:
        float64 [n], multiples of 2**-53.
    """
    mixed = _mix(_mix(seeds.astype(np.uint64)) + counters.astype(np.uint64))
    return (mixed >> np.uint64(11)) * 2.0**-53


def _mix(values: np.ndarray) -> np.ndarray:
    values = values + np.uint64(0x9E3779B97F4A7C15)
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


def _is_penalised(params: Any) -> Any:
    """Return whether seen tokens change a row's logits: of one row's parameters, or of many."""
    return (params["repetition_penalty"] != 1) | (params["presence_penalty"] != 0) | (params["frequency_penalty"] != 0)


def _add_bias(logits: torch.Tensor, rows: SampleInput) -> None:
    for i in np.flatnonzero(rows.params["num_biased"]).tolist():
        ids, biases = zip(*rows.logit_bias_of(i), strict=True)
        logits[i, list(ids)] += torch.tensor(biases, dtype=logits.dtype)


def _apply_penalties(logits: torch.Tensor, rows: SampleInput) -> None:
    """Change the logits of tokens already seen; repetition counts prompt and output, the others the output only."""
    p = rows.params
    for i in np.flatnonzero(_is_penalised(p)).tolist():
        row, tokens = logits[i], rows.token_ids_of(i)
        seen = torch.from_numpy(np.unique(tokens).astype(np.int64))
        repetition = float(p["repetition_penalty"][i])
        row[seen] = torch.where(row[seen] > 0, row[seen] / repetition, row[seen] * repetition)
        ids, counts = np.unique(tokens[rows.num_prompt_tokens[i] :], return_counts=True)
        penalty = p["presence_penalty"][i] + p["frequency_penalty"][i] * counts
        row[torch.from_numpy(ids.astype(np.int64))] -= torch.from_numpy(penalty).float()
        row.clamp_(torch.finfo(row.dtype).min, torch.finfo(row.dtype).max)  # NaN stays NaN


def _hold_back_end(logits: torch.Tensor, rows: SampleInput, num_output_tokens: np.ndarray) -> None:
    """Forbid the ids that would end a row before its min_tokens; ids beyond the vocabulary cannot be sampled anyway."""
    for i in np.flatnonzero(num_output_tokens < rows.params["min_tokens"]).tolist():
        end = [token_id for token_id in rows.end_token_ids_of(i) if 0 <= token_id < logits.shape[1]]
        logits[i, end] = -torch.inf


def _sample_random(logits: torch.Tensor, params: np.ndarray, uniforms: np.ndarray) -> np.ndarray:
    """Draw a token per row: logits float32 [m, vocab_size], params [m], uniforms float64 [m] -> int32 [m]."""
    # no smaller than float32's own smallest, which is as good as greedy
    temperature = torch.from_numpy(params["temperature"]).clamp(min=1e-37).float().unsqueeze(1)
    # the largest logit becomes 0 first, so that a tiny temperature cannot make it infinite
    scaled = (logits - logits.amax(dim=-1, keepdim=True)) / temperature
    token_ids = draw_likely(scaled, params, uniforms)
    rest = np.flatnonzero(token_ids < 0)
    if rest.size:
        some = scaled if rest.size == len(scaled) else scaled[torch.from_numpy(rest)]
        token_ids[rest] = _draw_from_all(some, params[rest], uniforms[rest])
    return token_ids


def _draw_from_all(scaled: torch.Tensor, params: np.ndarray, uniforms: np.ndarray) -> np.ndarray:
    """Draw a token per row from logits below the largest, over the temperature; see `_sample_random`."""
    with_top_k = np.flatnonzero((params["top_k"] > 0) & (params["top_k"] < scaled.shape[1]))
    if with_top_k.size:
        index = torch.from_numpy(with_top_k)
        scaled[index] = _keep_top_k(scaled[index], params["top_k"][with_top_k])
    probabilities = scaled.softmax(dim=-1)
    with_top_p = np.flatnonzero(params["top_p"] < 1)
    if with_top_p.size:
        index = torch.from_numpy(with_top_p)
        probabilities[index] = _keep_top_p(probabilities[index], params["top_p"][with_top_p])
    if (params["min_p"] > 0).any():
        least = probabilities.amax(dim=-1, keepdim=True) * torch.from_numpy(params["min_p"]).unsqueeze(1)
        probabilities = probabilities.where(probabilities >= least.float(), 0)
    return draw(probabilities, uniforms).int().numpy()


def _keep_top_k(scaled: torch.Tensor, top_k: np.ndarray) -> torch.Tensor:
    """Set all but each row's top_k largest to minus infinity."""
    keep = torch.from_numpy(top_k).unsqueeze(1)
    least = scaled.topk(int(top_k.max()), dim=-1).values.gather(1, keep - 1)
    return scaled.masked_fill(~_best(scaled, least, keep), -torch.inf)


def _keep_top_p(probabilities: torch.Tensor, top_p: np.ndarray) -> torch.Tensor:
    """Set all but the smallest set of likely tokens that reaches top_p to zero, row by row."""
    wanted = torch.from_numpy(top_p).unsqueeze(1)
    largest = probabilities.sort(dim=-1, descending=True).values
    reached = largest.cumsum(dim=-1, dtype=torch.float64)
    keep = ((reached < wanted).sum(dim=-1, keepdim=True) + 1).clamp(max=probabilities.shape[1])
    return probabilities.where(_best(probabilities, largest.gather(1, keep - 1), keep), 0)


def _best(values: torch.Tensor, least: torch.Tensor, keep: torch.Tensor) -> torch.Tensor:
    """Mark exactly `keep` largest values of each row; of equal ones those with the lowest ids.

    Args:
        values: float32 [m, vocab_size].
        least: [m, 1], the smallest value to keep.
        keep: int64 [m, 1], how many to keep.

    Returns:
        bool [m, vocab_size].
    """
    larger, equal = values > least, values == least
    room = keep - larger.sum(dim=-1, keepdim=True)
    if bool((equal.sum(dim=-1, keepdim=True) == room).all()):
        return larger | equal
    return larger | (equal & (equal.cumsum(dim=-1, dtype=torch.int32) <= room))
