"""`LLM`: the engine for programs. Prompts in, `RequestOutput`s out, in this process; from any of its threads."""

from __future__ import annotations

import dataclasses
import difflib
import itertools
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import Any

from girih.checkpoint.resolve import resolve_model
from girih.checkpoint.tokenizer import Tokenizer
from girih.config import EngineConfig
from girih.engine.core import EngineCore
from girih.engine.input_processing import (
    Prompt,
    TokenizedPrompt,
    as_list,
    check_grammar,
    check_salt,
    split_completions,
    tokenize,
)
from girih.engine.interrupts import uninterrupted
from girih.engine.output_processing import OutputProcessor, new_request_output
from girih.engine.report import EngineStats, StartupReport
from girih.errors import ConfigError, RequestError
from girih.kv.config import KVCacheConfig
from girih.request import RequestOutput, SamplingParams
from girih.units import parse_bytes

Message = Mapping[str, str]


class LLM:
    """A model that generates text. Use it with `with`, or call `shutdown` at the end.

        with LLM("smollm2", max_model_len=2048) as llm:
            outputs = llm.generate(["Once upon a time", "1 + 1 ="], SamplingParams(temperature=0))

    Args:
        model: a directory in Hugging Face format, a .gguf file, or a name that `girih pull` knows.
        kv_cache_memory: size of the KV cache, in bytes or like "1GiB"; left out, what is free is measured.
        **options: any field of `girih.config.EngineConfig`.

    Raises:
        GirihError: an unknown option, a model that cannot be loaded, or a plan that does not fit.
    """

    def __init__(self, model: str, *, kv_cache_memory: int | str | None = None, **options: Any):
        self.config = make_config(model, kv_cache_memory, options)
        report = StartupReport()
        with report.phase("find model"):
            directory = resolve_model(model)
        # before the core: a damaged tokenizer leaves nothing running, and its memory is on the bill for the cache
        with report.phase("load tokenizer"):
            self.tokenizer = Tokenizer.from_directory(directory)
        self.core = EngineCore(dataclasses.replace(self.config, model=str(directory)), report)
        self._outputs = OutputProcessor(self.tokenizer)
        self._lock = threading.RLock()  # several threads may call; each operation on the core is one at a time
        self._request_ids = map(str, itertools.count())
        self._next_seed = self.config.seed

    @property
    def kv_cache_configs(self) -> list[KVCacheConfig]:
        """Return the KV cache plan of every worker, by rank."""
        return self.core.kv_cache_configs

    @property
    def max_model_len(self) -> int:
        """Return the longest request in tokens, prompt and output: the solved value of "auto"."""
        return self.core.max_model_len

    @property
    def startup_report(self) -> StartupReport:
        """Return how long each phase of bring-up took."""
        return self.core.startup_report

    def stats(self) -> EngineStats:
        """Return what the engine is doing: requests, preemptions, cache."""
        return self.core.stats()

    def resize_kv_cache(self, memory: int | str) -> list[int]:
        """Give memory of the KV cache back to the system, or take it again, while the engine runs.

        Cached prefixes in the way move or are forgotten. Requests in progress go on; their output is cut to the
        longest request that can be served then.

        Args:
            memory: the most that each worker's KV cache may have, in bytes or like "1GiB"; whole slabs of it are used,
                never more than what was planned at start-up.

        Returns:
            The bytes that each worker's KV cache has now, by rank.

        Raises:
            CapacityError: requests in progress need more; nothing has changed.
            ConfigError: `memory` is no size.
        """
        memory_bytes = parse_bytes(memory)
        with self._lock:
            return self.core.resize_kv_cache(memory_bytes)

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        priorities: Sequence[int] | None = None,
        cache_salt: str = "",
        progress: Callable[[int, int], None] | None = None,
    ) -> list[RequestOutput]:
        """Complete prompts, all at once.

        Args:
            prompts: a text or a list of token ids, or a list of these.
            sampling_params: one for all, or one per prompt.
            priorities: one per prompt, smaller is more important; for the scheduling policy "priority".
            cache_salt: cached prefixes are shared only between requests with the same salt.
            progress: called with (prompts finished, prompts) whenever one has finished.

        Returns:
            One output per prompt, in order. `error` is set where the engine failed on the way.

        Raises:
            RequestError: a prompt or its parameters cannot be served; nothing was run. Names the prompt's index.
        """
        check_salt(cache_salt)
        items = as_list(prompts)
        params = _params_each(sampling_params, len(items))
        priority_of = _one_each("priorities", 0 if priorities is None else priorities, len(items), int)
        tokenized = [self._tokenize(i, prompt) for i, prompt in enumerate(items)]
        return self._run(tokenized, params, priority_of, cache_salt, progress)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        chat_template: str | None = None,
    ) -> list[RequestOutput]:
        """Answer a conversation, or several at once.

        Args:
            messages: {"role": ..., "content": ...} in order, or a list of such conversations.
            sampling_params: one for all, or one per conversation.
            chat_template: a jinja template instead of the model's own.

        Returns:
            One output per conversation, in order.

        Raises:
            GirihError: no message, no chat template, or what `generate` raises.
        """
        conversations = [messages] if messages and isinstance(messages[0], Mapping) else list(messages)
        if not conversations:
            raise RequestError("there is no message; give at least one")
        params = _params_each(sampling_params, len(conversations))
        tokenized = [self.render_chat(conversation, chat_template) for conversation in conversations]  # type: ignore[arg-type]
        return self._run(tokenized, params, [0] * len(tokenized), "", None)

    def render_chat(self, messages: Sequence[Message], chat_template: str | None = None) -> TokenizedPrompt:
        """Write a conversation as a prompt that the model answers; see `chat`."""
        if not messages:
            raise RequestError("there is no message; give at least one")
        text = self.tokenizer.apply_chat_template([dict(m) for m in messages], chat_template=chat_template)
        return tokenize(text, self.tokenizer, self.core.vocab_size, add_special_tokens=False)

    def stream(
        self, prompt: Prompt | TokenizedPrompt, sampling_params: SamplingParams | None = None
    ) -> Iterator[RequestOutput]:
        """Complete one prompt and show how it grows.

        Args:
            prompt: a text, a list of token ids, or what `render_chat` returns.
            sampling_params: how to sample.

        Yields:
            The same output after every step, with more tokens and text. Closing the iterator aborts the request.

        Raises:
            RequestError: it cannot be served.
        """
        params = sampling_params or SamplingParams()
        if not isinstance(prompt, TokenizedPrompt):
            first, *others = as_list(prompt)
            if others:
                raise RequestError(f"stream takes one prompt, not {1 + len(others)}; `generate` takes several")
            prompt = self._tokenize(0, first)
        output = new_request_output(next(self._request_ids), prompt.text, prompt.token_ids, params)
        core_ids: list[str] = []
        try:
            self._add(output, params, 0, "", core_ids)
            ended = False
            while not ended:
                if not output.finished:  # the steps of another call may have ended it
                    self._step()
                ended = output.finished
                yield output
        finally:
            self._abort(core_ids)

    def shutdown(self) -> None:
        """Release the model and its memory. A second call does nothing."""
        self.core.shutdown()

    def __enter__(self) -> LLM:
        """Return the engine itself."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Shut down."""
        self.shutdown()

    def _run(
        self,
        prompts: Sequence[TokenizedPrompt],
        params: Sequence[SamplingParams],
        priorities: Sequence[int],
        cache_salt: str,
        progress: Callable[[int, int], None] | None,
    ) -> list[RequestOutput]:
        outputs: list[RequestOutput] = []
        core_ids: list[str] = []
        try:
            for i, (prompt, its_params) in enumerate(zip(prompts, params, strict=True)):
                output = new_request_output(next(self._request_ids), prompt.text, prompt.token_ids, its_params)
                with _naming_prompt(i):
                    self._add(output, its_params, priorities[i], cache_salt, core_ids)
                outputs.append(output)
            unfinished = list(outputs)
            while unfinished:
                self._step()
                still = [output for output in unfinished if not output.finished]
                if progress is not None and len(still) < len(unfinished):
                    progress(len(outputs) - len(still), len(outputs))
                unfinished = still
        finally:
            self._abort(core_ids)
        return outputs

    def _add(
        self, output: RequestOutput, params: SamplingParams, priority: int, cache_salt: str, core_ids: list[str]
    ) -> None:
        """Queue the completions of one request; their core ids are added to `core_ids` one by one."""
        check_grammar(params.grammar)
        with self._lock, uninterrupted():
            children = split_completions(params, self.core.vocab_size, self._next_seed)
            if params.seed is None:
                self._next_seed += params.n
            for index, child in enumerate(children):
                core_id = self.core.add_request(
                    output.prompt_token_ids, child, priority=priority, cache_salt=cache_salt
                )
                core_ids.append(core_id)
                self._outputs.add(core_id, output, index, child)

    def _step(self) -> None:
        """Move every request on, those of other calls and threads too."""
        with self._lock:
            updates = self.core.step()
            with uninterrupted():
                for update in updates:
                    for core_id in self._outputs.process(update):
                        self.core.abort(core_id)

    def _abort(self, core_ids: Sequence[str]) -> None:
        with self._lock, uninterrupted():
            for core_id in self._outputs.abort(core_ids):
                self.core.abort(core_id)

    def _tokenize(self, index: int, prompt: Prompt) -> TokenizedPrompt:
        with _naming_prompt(index):
            return tokenize(prompt, self.tokenizer, self.core.vocab_size)


@contextmanager
def _naming_prompt(index: int) -> Iterator[None]:
    """Put the prompt's index in front of the message of a `RequestError`."""
    try:
        yield
    except RequestError as error:
        raise RequestError(f"prompt {index}: {error}") from error


def make_config(model: str, kv_cache_memory: int | str | None, options: Mapping[str, Any]) -> EngineConfig:
    """Turn keywords into an `EngineConfig`.

    Args:
        model: directory, file or name.
        kv_cache_memory: bytes or a size; another way to write `kv_cache_memory_bytes`.
        options: fields of `EngineConfig`.

    Raises:
        ConfigError: an unknown keyword, with the one that was probably meant, or a value out of range.
    """
    known = [field.name for field in dataclasses.fields(EngineConfig)] + ["kv_cache_memory"]
    for name in options:
        if name not in known:
            close = difflib.get_close_matches(name, known, n=1)
            hint = f"; did you mean {close[0]}?" if close else f"; known: {', '.join(known)}"
            raise ConfigError(f"LLM has no option {name!r}{hint}")
    if kv_cache_memory is None:
        return EngineConfig(model=model, **options)
    if options.get("kv_cache_memory_bytes") is not None:
        raise ConfigError("give kv_cache_memory or kv_cache_memory_bytes, not both")
    return EngineConfig(model=model, **{**options, "kv_cache_memory_bytes": parse_bytes(kv_cache_memory)})


def _one_each(what: str, value: Any, count: int, kind: type) -> list[Any]:
    """Return `count` values: one for all, or one per prompt.

    Raises:
        RequestError: neither one nor `count`.
    """
    if isinstance(value, kind):
        return [value] * count
    if not isinstance(value, Sequence) or not all(isinstance(item, kind) for item in value):
        raise RequestError(f"{what}={value!r} must be a {kind.__name__}, or a list with one per prompt")
    if len(value) != count:
        raise RequestError(f"{what}: got {len(value)} for {count} prompts; give one for all, or one per prompt")
    return list(value)


def _params_each(value: Any, count: int) -> list[SamplingParams]:
    return _one_each("sampling_params", SamplingParams() if value is None else value, count, SamplingParams)
