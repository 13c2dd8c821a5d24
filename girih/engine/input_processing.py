"""What a user gives -> what the core takes: ids within the vocabulary, and parameters for each completion."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from numbers import Integral
from typing import TYPE_CHECKING, Any

from girih.checkpoint.tokenizer import Tokenizer
from girih.errors import RequestError
from girih.grammar import Grammar, describe_failure
from girih.request import SamplingParams

if TYPE_CHECKING:
    from llguidance import LLTokenizer

Prompt = str | Sequence[int]


@dataclass(frozen=True)
class TokenizedPrompt:
    """A prompt ready to run.

    Args:
        text: as given, or None when it came as ids.
        token_ids: at least one, all within the vocabulary.
    """

    text: str | None
    token_ids: list[int]


def as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """Return one prompt or several as a list; a flat list or array of ids is one prompt.

    Raises:
        RequestError: there is none.
    """
    if isinstance(prompts, str):
        return [prompts]
    items = _plain(prompts)
    if not isinstance(items, list):
        raise RequestError(f"a prompt must be a text or a list of token ids, not {prompts!r}")
    if not items:
        raise RequestError("there is no prompt; give a text, a list of token ids, or a list of these")
    if all(_is_token_id(item) for item in items):
        return [items]
    return items  # each one is checked when it is tokenized


def tokenize(
    prompt: Prompt, tokenizer: Tokenizer, vocab_size: int, *, add_special_tokens: bool = True
) -> TokenizedPrompt:
    """Make ids of one prompt and check them.

    Args:
        prompt: text or token ids.
        tokenizer: encodes text.
        vocab_size: rows of the model's embedding.
        add_special_tokens: put what the model expects in front of a text; off for a chat template, which has it.

    Raises:
        RequestError: empty, neither text nor ids, or an id outside the vocabulary.
    """
    if isinstance(prompt, str):
        _check_is_unicode(prompt)
        text, token_ids = prompt, tokenizer.encode(prompt, add_special_tokens=add_special_tokens)
    else:
        text, token_ids = None, _plain(prompt)
        if not isinstance(token_ids, list):
            token_ids = [token_ids]
        wrong = [item for item in token_ids if not _is_token_id(item)]
        if wrong:
            raise RequestError(f"a prompt must be a text or a list of token ids; it holds {wrong[0]!r}")
        token_ids = list(map(int, token_ids))
    if not token_ids:
        raise RequestError("the prompt is empty: it has no token; give at least one")
    _check_in_vocabulary("prompt token id", token_ids, vocab_size)
    return TokenizedPrompt(text, token_ids)


def split_completions(params: SamplingParams, vocab_size: int, seed: int) -> list[SamplingParams]:
    """Return the parameters of each of the `n` completions; completion i is seeded with seed + i.

    Only the first reports log probabilities of the prompt, which are the same for all.

    Args:
        params: as the user gave them.
        vocab_size: rows of the model's embedding.
        seed: taken when `params` has none.

    Raises:
        RequestError: an id of `stop_token_ids` or `logit_bias` outside the vocabulary.
    """
    _check_in_vocabulary("stop_token_ids:", params.stop_token_ids, vocab_size)
    _check_in_vocabulary("logit_bias:", dict(params.logit_bias), vocab_size)
    first = seed if params.seed is None else params.seed
    return [
        dataclasses.replace(
            params,
            n=1,
            seed=_wrap_int64(first + i),
            prompt_logprobs=params.prompt_logprobs if i == 0 else None,
        )
        for i in range(params.n)
    ]


def _check_is_unicode(text: str) -> None:
    """Refuse half surrogate pairs, which Python makes of bytes on a command line that are not UTF-8."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise RequestError(f"the prompt is not valid Unicode text at character {error.start}") from error


def _plain(value: Any) -> Any:
    """Return a list of what an iterable or an array of numpy or torch holds; anything else as it is."""
    if hasattr(value, "tolist"):
        return value.tolist()
    return list(value) if isinstance(value, Iterable) else value


def _is_token_id(item: object) -> bool:
    """Tell whether an item is an integer of Python or numpy; a bool is not."""
    return isinstance(item, Integral) and not isinstance(item, bool)


def _check_in_vocabulary(what: str, token_ids: Iterable[int], vocab_size: int) -> None:
    for token_id in token_ids:
        if not _is_token_id(token_id) or not 0 <= token_id < vocab_size:
            raise RequestError(f"{what} {token_id!r} is not in the vocabulary; ids go from 0 to {vocab_size - 1}")


def _wrap_int64(value: int) -> int:
    return (value + 2**63) % 2**64 - 2**63


def check_salt(cache_salt: str) -> None:
    """Refuse a cache salt that is not text.

    Raises:
        RequestError: it is not a string, or one that UTF-8 cannot write.
    """
    try:
        valid = isinstance(cache_salt, str) and cache_salt.encode() is not None
    except UnicodeEncodeError:
        valid = False
    if not valid:
        raise RequestError(f"cache_salt={cache_salt!r} must be text")


@lru_cache(maxsize=64)
def check_grammar(grammar: Grammar | None) -> None:
    """Refuse a grammar that no output could follow, or that llguidance finds too complex to start with.

    It takes about a millisecond, a second at worst, in which other threads run. Special tokens are unknown to it.

    Args:
        grammar: of a request; None is fine.

    Raises:
        RequestError: with llguidance's words.
    """
    if grammar is None:
        return
    try:
        matcher = grammar.matcher(_tokenizer_of_bytes())
    except ValueError as error:
        raise RequestError(f"the {grammar.kind} grammar cannot be used: {error}") from error
    matcher.compute_bitmask()
    if matcher.is_error():
        raise RequestError(f"the {grammar.kind} grammar cannot be used: {describe_failure(matcher)}")


class _Bytes:
    """A tokenizer, as llguidance asks for it, whose tokens are the 256 bytes and an end of sequence."""

    eos_token_id = 256
    bos_token_id = None
    tokens = (*(bytes([byte]) for byte in range(256)), b"<end>")
    special_token_ids = (256,)

    def __call__(self, text: bytes) -> list[int]:
        return list(text)


@cache
def _tokenizer_of_bytes() -> LLTokenizer:
    from llguidance import LLTokenizer, TokenizerWrapper

    return LLTokenizer(TokenizerWrapper(_Bytes()))
