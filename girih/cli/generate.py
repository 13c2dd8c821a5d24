"""`girih generate`: complete prompts."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Optional

import typer

from girih.cli._options import CALM, build, with_options
from girih.cli._progress import find_model
from girih.config import EngineConfig
from girih.errors import GirihError, RequestError
from girih.request import SamplingParams

if TYPE_CHECKING:
    from girih.engine.llm import LLM
    from girih.request import RequestOutput


@with_options(EngineConfig, SamplingParams, defaults={**CALM, "max_tokens": 128})
def command(
    prompts: Annotated[
        Optional[list[str]],  # noqa: UP045  # typer reads it at run time
        typer.Argument(metavar="PROMPT...", help='Texts to complete; "-" reads one from standard input.'),
    ] = None,
    prompt_file: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option(help="A file that holds one prompt.", exists=True, dir_okay=False),
    ] = None,
    json_output: Annotated[
        bool, typer.Option("--json", help="Print one JSON object with everything instead of text.")
    ] = False,
    stats: Annotated[bool, typer.Option("--stats", help="Print start-up phases and cache counts to stderr.")] = False,
    **options: Any,
) -> None:
    """Complete one or more prompts, all at once.

    The text of a lone prompt appears as it is made. The KV cache plan and timings go to standard error.
    """
    config = build(EngineConfig, options)
    params = build(SamplingParams, options)
    texts = _read_prompts(prompts or [], prompt_file)
    find_model(config.model)
    _say(f"loading {config.model} ...")

    from girih.engine.llm import LLM

    with LLM(**vars(config)) as llm:
        _say(_describe(llm))
        start = time.perf_counter()
        live = not json_output and len(texts) == 1 and params.n == 1
        outputs = [_stream(llm, texts[0], params)] if live else llm.generate(texts, params, progress=_progress)
        elapsed_s = time.perf_counter() - start
        if json_output:
            answer = {
                "model": config.model,
                "quantization": config.quantization,
                "max_model_len": llm.max_model_len,
                "startup_s": llm.startup_report.total_s,
                "elapsed_s": elapsed_s,
                "outputs": [_as_json(output) for output in outputs],
            }
            print(json.dumps(answer, ensure_ascii=False, indent=2))
        elif not live:
            _print_texts(outputs)
        _say(_timing(outputs, elapsed_s))
        if stats:
            _say(_statistics(llm))
    errors = [output.error for output in outputs if output.error is not None]
    if errors:
        raise RequestError(errors[0])


def _read_prompts(prompts: list[str], prompt_file: Path | None) -> list[str]:
    source = "standard input"
    try:
        texts = [sys.stdin.read().removesuffix("\n") if prompt == "-" else prompt for prompt in prompts]
        if prompt_file is not None:
            source = str(prompt_file)
            texts.append(prompt_file.read_text("utf-8").removesuffix("\n"))
    except (OSError, UnicodeDecodeError) as error:
        raise GirihError(f"cannot read {source}: {error}") from error
    if not texts:
        raise RequestError('there is no prompt; give a text, "-" for standard input, or --prompt-file')
    return texts


def _stream(llm: LLM, prompt: str, params: SamplingParams) -> RequestOutput:
    shown = ""
    for output in llm.stream(prompt, params):
        text = prompt + output.outputs[0].text
        print(text[len(shown) :], end="", flush=True)
        shown = text
    print(flush=True)
    return output


def _progress(num_finished: int, num_prompts: int) -> None:
    if num_prompts > 1 and sys.stderr.isatty():
        end = "\n" if num_finished == num_prompts else ""
        print(f"\r{num_finished} of {num_prompts} prompts finished", end=end, file=sys.stderr, flush=True)


def _print_texts(outputs: list[RequestOutput]) -> None:
    """Print prompts with their completions, an empty line between two."""
    texts = [f"{output.prompt}{completion.text}\n" for output in outputs for completion in output.outputs]
    print("\n".join(texts), end="")


def _describe(llm: LLM) -> str:
    """Say in one line what was planned."""
    from girih.units import format_bytes

    plan, *others = llm.kv_cache_configs
    where = f" on the first of {1 + len(others)} workers" if others else ""
    groups = ", ".join(
        f"{len(group.layers)} layers {group.retention.describe()} in blocks of {group.block_size}"
        for group in plan.groups
    )
    weights = f"{llm.config.quantization} weights; " if llm.config.quantization else ""
    return (
        f"{weights}KV cache: {format_bytes(plan.pool_bytes)} in {plan.num_slabs} slabs{where}; "
        f"{groups or 'no layers'}; requests of up to {llm.max_model_len} tokens; "
        f"ready after {llm.startup_report.total_s:.1f} s"
    )


def _timing(outputs: list[RequestOutput], elapsed_s: float) -> str:
    num_prompt = sum(len(output.prompt_token_ids) for output in outputs)
    num_cached = sum(output.num_cached_tokens for output in outputs)
    num_output = sum(len(completion.token_ids) for output in outputs for completion in output.outputs)
    return (
        f"{num_prompt} prompt tokens ({num_cached} cached), {num_output} output tokens in {elapsed_s:.2f} s "
        f"({num_output / max(elapsed_s, 1e-9):.1f} tokens/s)"
    )


def _statistics(llm: LLM) -> str:
    lines = [f"{name}: {seconds:.3f} s" for name, seconds in llm.startup_report.phases_s.items()]
    lines += [report.describe() for report in llm.startup_report.memory]
    counts = llm.stats()
    lines += [
        f"{counts.num_steps} steps, {counts.num_preemptions} preemptions",
        f"prefix cache: {counts.cache.tokens_hit} of {counts.cache.tokens_looked_up} prompt tokens found, "
        f"{sum(counts.cache.cached_pages)} pages kept, {counts.cache.pages_evicted} evicted",
    ]
    return "\n".join(lines)


def _as_json(output: RequestOutput) -> dict[str, Any]:
    """Return an output as JSON; log probabilities as lists in the order of rank columns."""
    return {
        "request_id": output.request_id,
        "prompt": output.prompt,
        "prompt_token_ids": output.prompt_token_ids,
        "num_cached_tokens": output.num_cached_tokens,
        "prompt_logprobs": _logprobs_as_json(output.prompt_logprobs),
        "error": output.error,
        "outputs": [
            {
                "index": completion.index,
                "text": completion.text,
                "token_ids": completion.token_ids,
                "finish_reason": completion.finish_reason,
                "stop_reason": completion.stop_reason,
                "logprobs": _logprobs_as_json(completion.logprobs),
            }
            for completion in output.outputs
        ],
    }


def _logprobs_as_json(logprobs: Any) -> list[list[dict[str, Any]] | None] | None:
    if logprobs is None:
        return None
    return [
        None if position is None else [{"token_id": token_id, **vars(entry)} for token_id, entry in position.items()]
        for position in logprobs
    ]


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
