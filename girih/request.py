"""What a user asks and what comes back: `SamplingParams`, `RequestOutput`, `CompletionOutput`, `Logprob`."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from girih.errors import RequestError
from girih.grammar import Grammar


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How tokens are chosen and when a request ends.

    Args:
        n: completions of the prompt; completion i is seeded with seed + i.
        temperature: 0 is greedy.
        top_k: keep the k most likely tokens; 0 keeps all.
        top_p: keep the smallest set of likely tokens whose probability reaches this.
        min_p: drop tokens less likely than this share of the most likely one.
        repetition_penalty: > 1 makes tokens of prompt and output less likely: divides logits > 0, multiplies others.
        presence_penalty: subtracted once from the logits of tokens already in the output.
        frequency_penalty: subtracted per occurrence in the output.
        logit_bias: added to tokens' logits, -100 (almost never) to 100 (almost always); on the command line 42=-5.
        seed: same seed, same tokens, alone or in a batch; in bfloat16 up to rounding. Left out: one of the engine's.
        max_tokens: output tokens at most; where they have no such limit, the model's length is one.
        min_tokens: no end-of-sequence or stop id is sampled before this many output tokens.
        stop: strings that end the output; not part of it.
        stop_token_ids: token ids that end the output.
        ignore_eos: go on after the model's end-of-sequence token.
        logprobs: report this many most likely tokens per output token beside the sampled one; left out: none.
        prompt_logprobs: the same for the prompt's tokens.
        skip_special_tokens: leave special tokens out of the text.
        grammar: what the output must look like, and where it ends; on the command line regex=TEXT and the like.
    """

    n: int = 1
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] | tuple[tuple[int, float], ...] = ()
    seed: int | None = None
    max_tokens: int | None = 16
    min_tokens: int = 0
    stop: str | tuple[str, ...] | list[str] = ()
    stop_token_ids: tuple[int, ...] | list[int] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    skip_special_tokens: bool = True
    grammar: Grammar | None = None

    def __post_init__(self) -> None:
        """Normalise lists and `logit_bias` to tuples and refuse values out of range, naming field and range."""
        stop = (self.stop,) if isinstance(self.stop, str) else _as_tuple("stop", self.stop)
        object.__setattr__(self, "stop", stop)
        object.__setattr__(self, "stop_token_ids", _as_tuple("stop_token_ids", self.stop_token_ids))
        object.__setattr__(self, "logit_bias", _as_pairs(self.logit_bias))
        if not all(isinstance(text, str) and text for text in stop):
            raise RequestError(f"stop={self.stop!r} must be non-empty strings")
        for name, (low, high) in _INT_RANGES.items():
            value = getattr(self, name)
            if value is None and name in _OPTIONAL:
                continue
            if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
                raise RequestError(f"{name}={value!r} must be a whole number from {low} to {high}")
        for name, (least, most) in _FLOAT_RANGES.items():
            value = getattr(self, name)
            if not _is_number(value, least, most):
                raise RequestError(f"{name}={value!r} must be a number from {least} to {most}")
        for name in ("repetition_penalty", "top_p"):
            if getattr(self, name) <= 0:
                raise RequestError(f"{name}={getattr(self, name)!r} must be above 0")
        if self.grammar is not None:
            self._check_grammar()

    def _check_grammar(self) -> None:
        if not isinstance(self.grammar, Grammar):
            raise RequestError(f"grammar={self.grammar!r} must be a girih.Grammar")
        if self.ignore_eos:
            raise RequestError("ignore_eos=True cannot be used with a grammar: nothing may follow a complete output")
        if self.min_tokens > 0:
            raise RequestError(
                f"min_tokens={self.min_tokens} cannot be used with a grammar, which says itself where an output ends"
            )


def _as_tuple(name: str, value: Any) -> tuple[Any, ...]:
    """Return a list's items; None has none."""
    if value is not None and not isinstance(value, Iterable):
        raise RequestError(f"{name}={value!r} must be a list")
    return () if value is None else tuple(value)


def _as_pairs(logit_bias: Any) -> tuple[tuple[int, float], ...]:
    """Return (token id, bias) of each token that has one."""
    try:
        pairs = tuple(dict(logit_bias or ()).items())
    except (TypeError, ValueError):
        raise RequestError(f"logit_bias={logit_bias!r} must map token ids to numbers") from None
    for token_id, bias in pairs:
        if not _is_number(bias, -MAX_BIAS, MAX_BIAS):
            raise RequestError(
                f"logit_bias: {bias!r} of token id {token_id!r} must be a number from -{MAX_BIAS} to {MAX_BIAS}"
            )
    return pairs


def _is_number(value: Any, least: float, most: float) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and least <= value <= most


MAX_BIAS = 100
_INT_RANGES = {
    "n": (1, 1024),
    "top_k": (0, 2**31 - 1),
    "seed": (-(2**63), 2**63 - 1),
    "max_tokens": (1, 2**31 - 1),
    "min_tokens": (0, 2**31 - 1),
    "logprobs": (0, 128),
    "prompt_logprobs": (0, 128),
}
_OPTIONAL = {"seed", "max_tokens", "logprobs", "prompt_logprobs"}
_FLOAT_RANGES = {
    "temperature": (0.0, 1e4),
    "top_p": (0.0, 1.0),
    "min_p": (0.0, 1.0),
    "repetition_penalty": (0.0, 1e4),
    "presence_penalty": (-1e4, 1e4),
    "frequency_penalty": (-1e4, 1e4),
}
assert all(math.isfinite(high) for _, high in _FLOAT_RANGES.values())


@dataclass(frozen=True)
class Logprob:
    """One token's log probability at one position.

    Args:
        logprob: natural logarithm of the model's own probability.
        rank: 1 is the most likely token.
        decoded_token: the token's text.
    """

    logprob: float
    rank: int
    decoded_token: str


@dataclass
class CompletionOutput:
    """One completion of a prompt.

    Args:
        index: 0 .. n-1.
        token_ids: the output tokens, with the stop or end-of-sequence token where one ended it.
        text: their text, without a stop string.
        finish_reason: None while it runs; "stop", "length", "abort" or "error".
        stop_reason: the stop string or stop token id that ended it, if one did.
        logprobs: per output token {token id: Logprob}, if asked for.
    """

    index: int
    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    logprobs: list[Mapping[int, Logprob]] | None = None


@dataclass
class RequestOutput:
    """A prompt and its completions.

    Args:
        request_id: as given, or the engine's own.
        prompt: the prompt's text, if it came as text.
        prompt_token_ids: the prompt's tokens.
        outputs: n completions, by index.
        num_cached_tokens: prompt tokens that came from the prefix cache, for the first completion.
        prompt_logprobs: per prompt token {token id: Logprob}, None for the first one; if asked for.
        error: why the request could not be served, if it could not.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    num_cached_tokens: int = 0
    prompt_logprobs: list[Mapping[int, Logprob] | None] | None = None
    error: str | None = None

    @property
    def finished(self) -> bool:
        """Tell whether every completion has ended."""
        return all(output.finish_reason is not None for output in self.outputs)


def output_room(num_prompt_tokens: int, max_request_tokens: int) -> int:
    """Return the most tokens of output that a prompt leaves room for.

    Args:
        num_prompt_tokens: of the prompt.
        max_request_tokens: the longest request that can be served, prompt and output.

    Raises:
        RequestError: not one; the message gives both numbers.
    """
    room = max_request_tokens - num_prompt_tokens
    if room < 1:
        raise RequestError(
            f"a prompt of {num_prompt_tokens} tokens and one token of output exceed the longest request "
            f"that can be served, {max_request_tokens} tokens; shorten the prompt, or, up to "
            "the model's own limit, raise --max-model-len or the memory of the KV cache (--kv-cache-memory, "
            "--memory-utilization)"
        )
    return room
