"""The core's updates -> `RequestOutput`s: text, stop strings, log probabilities, completions put together by index."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from girih.checkpoint.tokenizer import Tokenizer
from girih.engine.detokenizer import Detokenizer
from girih.messages import TokenLogprobs
from girih.request import CompletionOutput, Logprob, RequestOutput, SamplingParams
from girih.sched.updates import RequestUpdate, StepUpdate


class Completion:
    """One completion of a request on its way: a sequence of the core and what has come of it.

    Args:
        request: the request's output, which this fills in.
        index: which of its completions.
        params: its sampling parameters.
        tokenizer: for its text.
    """

    def __init__(self, request: RequestOutput, index: int, params: SamplingParams, tokenizer: Tokenizer):
        self.request = request
        self.output = CompletionOutput(index=index, logprobs=None if params.logprobs is None else [])
        request.outputs.append(self.output)
        self._tokenizer = tokenizer
        self._detokenizer = Detokenizer(
            tokenizer,
            stop=params.stop,
            skip_special_tokens=params.skip_special_tokens,
            min_tokens=params.min_tokens,
        )

    def apply(self, token_id: int | None, update: RequestUpdate | None) -> bool:
        """Take in what one step brought.

        Args:
            token_id: the new token, if there is one.
            update: what else became known, if anything.

        Returns:
            Whether a stop string ended it although the core goes on.
        """
        finish_reason = None
        if update is not None:
            finish_reason = update.finish_reason
            self._add_details(update)
        if token_id is not None:
            self.output.token_ids.append(token_id)
            is_stop_token = finish_reason == "stop"
            if not is_stop_token and self._show(self._detokenizer.append(token_id)):
                return finish_reason is None
        if update is not None and finish_reason is not None and not self._show(self._detokenizer.finish()):
            self.output.finish_reason, self.output.stop_reason = finish_reason, update.stop_reason
        return False

    def _show(self, shown: tuple[str, str | None]) -> bool:
        """Add text; tell whether a stop string ended it."""
        text, stop = shown
        self.output.text += text
        if stop is not None:
            self.output.finish_reason, self.output.stop_reason = "stop", stop
        return stop is not None

    def _add_details(self, update: RequestUpdate) -> None:
        if update.error is not None:
            self.request.error = update.error
        if update.logprobs is not None:
            assert self.output.logprobs is not None
            self.output.logprobs += _logprob_maps(update.logprobs, self._tokenizer)
        if self.output.index > 0:
            return
        if update.num_cached_tokens is not None:
            self.request.num_cached_tokens = update.num_cached_tokens
        if update.prompt_logprobs is not None:
            assert self.request.prompt_logprobs is not None
            self.request.prompt_logprobs += _logprob_maps(update.prompt_logprobs, self._tokenizer)


class OutputProcessor:
    """Maps the core's ids to completions and fills in their outputs.

    Args:
        tokenizer: for text.
    """

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer = tokenizer
        self._completions: dict[str, Completion] = {}

    def add(self, core_id: str, request: RequestOutput, index: int, params: SamplingParams) -> None:
        """Follow one sequence of the core; `request` gets one more completion."""
        self._completions[core_id] = Completion(request, index, params, self._tokenizer)

    def process(self, update: StepUpdate) -> list[str]:
        """Fill in what became known in one step.

        Returns:
            Core ids that the core must abort: a stop string has ended them, or nobody follows them because an abort
            was interrupted half-way.
        """
        stopped = []
        tokens = dict(zip(update.request_ids, update.token_ids, strict=True))
        for core_id in tokens | update.details:
            completion = self._completions.get(core_id)
            if completion is None:
                stopped.append(core_id)
                continue
            if completion.apply(tokens.get(core_id), update.details.get(core_id)):
                stopped.append(core_id)
            if completion.output.finish_reason is not None:
                del self._completions[core_id]
        return stopped

    def abort(self, core_ids: Sequence[str]) -> list[str]:
        """End sequences that nobody waits for any more.

        Returns:
            Those that had not ended; the core must abort them.
        """
        live = [core_id for core_id in core_ids if core_id in self._completions]
        for core_id in live:
            self._completions.pop(core_id).output.finish_reason = "abort"
        return live


def new_request_output(
    request_id: str, prompt: str | None, prompt_token_ids: list[int], params: SamplingParams
) -> RequestOutput:
    """Start the output of a request; its completions are added when their sequences are."""
    return RequestOutput(
        request_id=request_id,
        prompt=prompt,
        prompt_token_ids=prompt_token_ids,
        outputs=[],
        prompt_logprobs=None if params.prompt_logprobs is None else [None],
    )


def _logprob_maps(logprobs: TokenLogprobs, tokenizer: Tokenizer) -> list[Mapping[int, Logprob]]:
    """Return, per position, {token id: Logprob}: the actual token first, then the most likely, best first."""
    maps: list[Mapping[int, Logprob]] = []
    for token_ids, values, actual_rank in zip(
        logprobs.token_ids.tolist(), logprobs.logprobs.tolist(), logprobs.ranks.tolist(), strict=True
    ):
        entries: dict[int, Logprob] = {}
        for column, (token_id, value) in enumerate(zip(token_ids, values, strict=True)):
            rank = actual_rank if column == 0 else column
            text = tokenizer.token_to_text(token_id)
            entries.setdefault(token_id, Logprob(logprob=value, rank=rank, decoded_token=text))
        maps.append(entries)
    return maps
