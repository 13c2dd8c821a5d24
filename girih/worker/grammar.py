"""`GrammarRows`: a matcher for each row whose output has a grammar, on the worker that samples.

    new row -> matcher, past what was sampled before a preemption -> mask of the logits -> sampled token -> matcher

A worker does steps strictly in order, so a matcher has always seen the token before the one that it is asked about.
What goes wrong with a matcher is the end of its row alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

from girih.errors import RequestError
from girih.grammar import describe_failure
from girih.messages import NewRow
from girih.units import cdiv

if TYPE_CHECKING:
    from llguidance import LLExecutor, LLMatcher, LLTokenizer


class GrammarRows:
    """The matchers of a batch. llguidance and its form of the tokenizer are loaded when a grammar first comes.

    Args:
        directory: of the model.
        eos_token_ids: what may be sampled where an output is complete.
    """

    def __init__(self, directory: Path, eos_token_ids: Sequence[int]):
        self._directory = directory
        self._eos_token_ids = tuple(eos_token_ids)
        self._matchers: dict[int, LLMatcher] = {}
        self._failures: dict[int, str] = {}

    def apply(self, new_rows: Sequence[NewRow]) -> None:
        """Make the matchers of rows that enter the batch, and forget whose rows these were."""
        for new in new_rows:
            self._matchers.pop(new.row, None)
            self._failures.pop(new.row, None)
            grammar = new.sampling_params.grammar
            if grammar is None:
                continue
            try:
                matcher = grammar.matcher(self._tokenizer)
                matcher.consume_tokens(new.token_ids[new.num_prompt_tokens :].tolist())
                self._matchers[new.row] = matcher
            except Exception as error:  # whatever it is, the other rows have no part in it
                self._failures[new.row] = f"its grammar cannot be used with this model: {error}"

    def forbid(self, logits: torch.Tensor, rows: np.ndarray) -> None:
        """Let only such tokens be sampled as may come next.

        Args:
            logits: float32 [n, vocab_size]; changed in place, to NaN where a matcher has failed.
            rows: int32 [n].
        """
        if not self._matchers and not self._failures:
            return
        places = [(place, row) for place, row in enumerate(rows.tolist()) if row in self._matchers]
        if places:
            index = torch.tensor([place for place, _ in places])
            forbidden = self._forbidden([self._matchers[row] for _, row in places], logits.shape[1])
            logits[index] = logits[index].masked_fill(forbidden, -torch.inf)
        for _, row in places:
            if self._matchers[row].is_error():
                self._failures[row] = f"its grammar: {describe_failure(self._matchers.pop(row))}"
        failed = [place for place, row in enumerate(rows.tolist()) if row in self._failures]
        logits[failed] = torch.nan

    def failure(self, row: int) -> str | None:
        """Return why a row can be given no token, if that is because of its grammar."""
        return self._failures.get(row)

    def consume(self, rows: np.ndarray, token_ids: np.ndarray) -> None:
        """Take note of what was sampled.

        Args:
            rows: int32 [m].
            token_ids: int32 [m].
        """
        if not self._matchers:
            return
        for row, token_id in zip(rows.tolist(), token_ids.tolist(), strict=True):
            if row not in self._matchers:
                continue
            if token_id in self._eos_token_ids:
                del self._matchers[row]  # the output is complete; of a step under way the core drops what comes next
            else:
                self._matchers[row].consume_token(token_id)

    def _forbidden(self, matchers: Sequence[LLMatcher], vocab_size: int) -> torch.Tensor:
        """Return what may not come next in each output: bool [n, vocab_size]. Ids that stand for no token never may."""
        from llguidance.numpy import fill_next_token_bitmask_par

        bits = np.zeros((len(matchers), cdiv(self._tokenizer.vocab_size, 32)), np.int32)
        fill_next_token_bitmask_par(self._executor, [(matcher, i) for i, matcher in enumerate(matchers)], bits)
        num_tokens = min(vocab_size, self._tokenizer.vocab_size)
        allowed = np.unpackbits(bits.view(np.uint8), axis=1, count=num_tokens, bitorder="little")
        forbidden = np.ones((len(matchers), vocab_size), np.bool_)
        forbidden[:, :num_tokens] = allowed == 0
        return torch.from_numpy(forbidden)

    @cached_property
    def _tokenizer(self) -> LLTokenizer:
        from llguidance import LLTokenizer

        if not self._eos_token_ids:
            raise RequestError("it has no end-of-sequence token, with which an output that is complete must end")
        text = (self._directory / "tokenizer.json").read_text("utf-8")
        return LLTokenizer(text, eos_token=list(self._eos_token_ids))

    @cached_property
    def _executor(self) -> LLExecutor:
        from llguidance import LLExecutor

        return LLExecutor(torch.get_num_threads())
