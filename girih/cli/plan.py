"""`girih plan MODEL`: the KV cache of a model in some amount of memory, from its config alone; no torch, no weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from girih import plugins
from girih.cli._options import parse_length
from girih.config import EngineConfig
from girih.errors import ConfigError
from girih.units import dtype_bytes, format_bytes, parse_bytes

if TYPE_CHECKING:
    from girih.checkpoint.resolve import ModelFacts
    from girih.kv.config import KVCacheConfig

TYPICAL_LENGTHS = (1_000, 8_192)  # requests in tokens, counted beside those of the greatest length


def command(  # noqa: PLR0917 (typer calls it by name)
    model: Annotated[
        str, typer.Argument(metavar="MODEL", help="A name `girih pull` knows, a model directory or a .gguf file.")
    ],
    memory: Annotated[str | None, typer.Option(help="Budget for weights and KV cache, e.g. 4GiB.")] = None,
    kv_cache_memory: Annotated[str | None, typer.Option(help="Budget for the KV cache alone, e.g. 512MiB.")] = None,
    memory_utilization: Annotated[
        float, typer.Option(help="The budget as a share of this machine's memory, where no size is given.")
    ] = EngineConfig.memory_utilization,
    max_model_len: Annotated[str, typer.Option(help="Longest request in tokens, or auto.")] = "auto",
    dtype: Annotated[str, typer.Option(help="auto, float32 or bfloat16; of weights and KV cache.")] = "auto",
    block_size: Annotated[int | None, typer.Option(help="Tokens per block; default: the smallest that fits.")] = None,
    users: Annotated[int | None, typer.Option(help="Find the longest context for this many requests.", min=1)] = None,
    context: Annotated[int | None, typer.Option(help="Count the requests of this length.", min=1)] = None,
    svg: Annotated[Path | None, typer.Option(help="Also draw the plan into this file.", dir_okay=False)] = None,
    json_output: Annotated[bool, typer.Option("--json", help="Print JSON, without a picture.")] = False,
) -> None:
    """Plan and draw a model's KV cache, from its config alone.

    --memory counts weights and KV cache; the engine also measures activations when it starts.
    """
    from girih.checkpoint.resolve import model_facts

    options = EngineConfig(
        model=model,
        dtype=dtype,
        max_model_len=parse_length(max_model_len),
        kv_cache_memory_bytes=None if kv_cache_memory is None else parse_bytes(kv_cache_memory),
        memory_utilization=memory_utilization,
        block_size=block_size,
    )
    facts = model_facts(model)
    report, config = plan_model(facts, options, memory, num_users=users, context_tokens=context)
    if svg is not None:
        from girih.viz import svg as picture

        title = f"{report['model']}: KV cache in {format_bytes(report['kv_memory_bytes'])}"
        try:
            svg.write_text(picture.draw(config, title), encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"cannot write --svg {svg}: {error.strerror}") from error
    if json_output:
        print(json.dumps({**report, "plan": config.to_json()}, indent=2))
    else:
        _show(report, config, svg)


def plan_model(
    facts: ModelFacts, options: EngineConfig, memory: str | None, *, num_users: int | None, context_tokens: int | None
) -> tuple[dict[str, Any], KVCacheConfig]:
    """Plan a model's cache on one worker.

    Args:
        facts: of the model.
        options: the engine's options that matter here.
        memory: size for weights and KV cache; None takes `kv_cache_memory_bytes`, else a share of this machine's.
        num_users: requests at once to find the longest context for.
        context_tokens: request length to count requests for.

    Returns:
        The figures as JSON values, and the plan.

    Raises:
        GirihError: the model, an option, or what does not fit.
    """
    from girih import arch
    from girih.kv.plan import get_kv_cache_configs
    from girih.kv.report import plan_report

    architecture = arch.load(facts.config)
    dtype = arch.resolve_dtype(options.dtype, facts.config)
    weight_bytes = _weight_bytes(facts, dtype, arch.num_parameters(facts.config))
    memory_bytes, kv_memory_bytes = _budgets(options, memory, weight_bytes)
    model_limit = architecture.max_model_len(facts.config)
    config = get_kv_cache_configs(
        # blocks of any size, as no attention backend is asked
        [architecture.kv_cache_specs(facts.config, dtype, block_size_multiple=1)],
        [kv_memory_bytes],
        max_model_len=options.max_model_len,
        model_limit=model_limit,
        max_num_batched_tokens=options.max_num_batched_tokens,
        max_num_seqs=options.max_num_seqs,
        block_size=options.block_size,
    )[0]
    limit = config.max_model_len
    if context_tokens is not None and context_tokens > limit:
        raise ConfigError(f"--context {context_tokens} is longer than the {limit} tokens a request may have here")
    lengths = (*(length for length in TYPICAL_LENGTHS if length < limit), limit)
    report = {
        "model": facts.name,
        "model_type": facts.config["model_type"],
        "dtype": dtype,
        "memory_bytes": memory_bytes,
        "weight_bytes": weight_bytes,
        "kv_memory_bytes": kv_memory_bytes,
        "model_limit": model_limit,
    }
    lengths = (context_tokens,) if context_tokens is not None else lengths
    return report | plan_report(config, kv_memory_bytes, lengths=lengths, num_users=num_users), config


def _weight_bytes(facts: ModelFacts, dtype: str, num_parameters: int) -> int:
    """Return the bytes of the weights in memory: as stored if that is their dtype, else by their number."""
    if facts.weight_bytes is not None and facts.config.get("dtype", facts.config.get("torch_dtype")) == dtype:
        return facts.weight_bytes
    return num_parameters * dtype_bytes(dtype)


def _budgets(options: EngineConfig, memory: str | None, weight_bytes: int) -> tuple[int | None, int]:
    """Return (budget of weights and KV cache, None if only the latter was given; budget of the KV cache) in bytes."""
    if options.kv_cache_memory_bytes is not None:
        if memory is not None:
            raise ConfigError("--memory and --kv-cache-memory exclude each other; the first one counts the weights too")
        return None, options.kv_cache_memory_bytes
    if memory is not None:
        memory_bytes, how = parse_bytes(memory), f"--memory {memory}"
    else:
        device = plugins.load("girih.device", options.device, what="device")
        memory_bytes = int(device.memory_facts().total_bytes * options.memory_utilization)
        how = f"{options.memory_utilization:.0%} of this machine's memory, {format_bytes(memory_bytes)},"
    if memory_bytes <= weight_bytes:
        raise ConfigError(
            f"{how} leaves no room for a KV cache beside weights of {format_bytes(weight_bytes)}; "
            f"raise --memory or --memory-utilization"
        )
    return memory_bytes, memory_bytes - weight_bytes


def _show(report: dict[str, Any], config: KVCacheConfig, svg: Path | None) -> None:
    """Print the figures and the picture for people."""
    from rich.console import Console

    from girih.viz import terminal

    console = Console(highlight=False, soft_wrap=True)
    console.print(f"[bold]{report['model']}[/bold]: {report['model_type']}, {report['dtype']}")
    for label, text in _lines(report):
        console.print(f"  [bold]{label:<18}[/bold]{text}")
    console.print()
    terminal.draw(config, console)
    if svg is not None:
        console.print(f"The picture is in {svg}.", markup=False)


def _lines(report: dict[str, Any]) -> list[tuple[str, str]]:
    """Return (label, text) of every figure, in the order of a user's questions."""
    weights, cache = format_bytes(report["weight_bytes"]), format_bytes(report["kv_memory_bytes"])
    budget = report["memory_bytes"]
    limit = report["max_model_len"]
    lines = [
        ("memory", f"{weights} weights + {cache} KV cache" + (f" = {format_bytes(budget)}" if budget else "")),
        ("longest request", f"{limit} tokens" + (" (the model's limit)" if limit == report["model_limit"] else "")),
    ]
    if not report["groups"]:
        return [*lines, ("KV cache", "none: no layer keeps one")]
    first, last = report["kv_bytes_per_token"], report["kv_bytes_per_token_at_max_model_len"]
    more = "" if first == last else f" at first, {format_bytes(last)} at the greatest length"
    lines += [
        ("KV per token", format_bytes(first) + more),
        ("KV per request", f"{format_bytes(report['kv_bytes_per_sequence'])} for {limit} tokens"),
    ]
    for index, group in enumerate(report["groups"]):
        layers = f"{group['num_layers']} layer{'s' if group['num_layers'] > 1 else ''}"
        pages = f"{group['num_pages']} pages of {format_bytes(group['page_bytes'])}, {group['pages_per_slab']} per slab"
        about = f"{layers}, {group['description']}; blocks of {group['block_size']} tokens; {pages}"
        lines.append((f"group {index}", about))
    lines.append(("waste", f"{report['waste']:.2%} of the KV cache's memory holds no page of the worst group"))
    counts = (f"{row['requests']} x {row['tokens']} tokens" for row in report["requests_at_once"])
    lines.append(("requests at once", ", or ".join(counts)))
    if longest := report.get("longest_context"):
        lines.append((f"{longest['users']} users", f"{longest['tokens']} tokens each at most"))
    return lines
