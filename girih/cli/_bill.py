"""The memory bill of a model: what weights and KV cache take on every worker, and what that leaves room for.

Pure numbers from config.json: no torch, no weights. `plan` prints what `make_bill` finds.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from girih import plugins
from girih.arch._int8_offer import offering_int8
from girih.cli._plan_options import PlanOptions
from girih.config import EngineConfig
from girih.errors import CapacityError, ConfigError
from girih.units import dtype_bytes, format_bytes

if TYPE_CHECKING:
    from girih.arch._stages import ModelPart
    from girih.checkpoint.resolve import ModelFacts
    from girih.kv.config import KVCacheConfig
    from girih.kv.spec import KVCacheSpec

DRAFT_TOKENS = 3  # per step, where a draft model is given and no number
TYPICAL_LENGTHS = (1_000, 8_192)  # requests in tokens, counted beside those of the greatest length


@dataclass(frozen=True)
class Bill:
    """The answer of `girih plan`.

    Args:
        figures: everything but the plans, as JSON values; sizes in bytes.
        plans: one per pipeline stage; the ranks of a stage have equal ones.
    """

    figures: dict[str, Any]
    plans: tuple[KVCacheConfig, ...]

    def to_json(self) -> dict[str, Any]:
        """Return the figures, with each stage's whole plan."""
        stages = zip(self.figures["stages"], self.plans, strict=True)
        return {**self.figures, "stages": [{**stage, "plan": plan.to_json()} for stage, plan in stages]}


def make_bill(target: ModelFacts, draft: ModelFacts | None, options: PlanOptions) -> Bill:
    """Plan a model, and a draft model beside it, on all workers.

    Args:
        target: facts of the model.
        draft: facts of the draft model, which is with the last pipeline stage.
        options: what the user asked for.

    Raises:
        GirihError: a model or option that makes no sense, or what does not fit.
    """
    models = [_Model(facts, options) for facts in (target, draft) if facts is not None]
    stages = _stages(models, options)
    model_limit = min(model.max_model_len for model in models)
    lookahead = options.num_speculative_tokens
    if lookahead is None:
        lookahead = 0 if draft is None else DRAFT_TOKENS
    _check_lengths(options.context, lookahead, model_limit)
    ranks = options.tensor_parallel_size
    with _logged_warnings() as warnings, offering_int8(lambda: _int8_savings(models, stages, options)):
        memory_bytes, kv_memory = _budgets([stage.weight_bytes for stage in stages], options)
        plans = _plans(stages, kv_memory, options, model_limit, lookahead)
    figures = {
        "model": target.name,
        "draft": None if draft is None else draft.name,
        "model_type": target.config["model_type"],
        "dtype": models[0].dtype,
        "quantization": options.quantization,
        "kv_dtype": models[0].kv_dtype,
        "state_dtype": options.state_dtype,
        "tensor_parallel_size": ranks,
        "pipeline_parallel_size": options.pipeline_parallel_size,
        "num_speculative_tokens": lookahead,
        "num_parameters": sum(model.num_parameters for model in models),
        "weights_as_stored": all(model.stored_bytes is not None for model in models),
        "memory_bytes": memory_bytes,
        "model_limit": model_limit,
        **_answers(plans, options),
        "stages": _stage_figures(stages, plans, kv_memory, ranks),
        "warnings": [*_notes(models), *warnings],
    }
    return Bill(figures, tuple(plans))


class _Model:
    """One model as the options want it: its dtypes, its caches, the bytes of its weights.

    Args:
        facts: of the model.
        options: what the user asked for.
    """

    def __init__(self, facts: ModelFacts, options: PlanOptions):
        from girih import arch

        self.config = facts.config
        self.family = arch.load(self.config)
        self.dtype = arch.resolve_dtype(options.dtype, self.config)
        self.kv_dtype = self.dtype if options.kv_dtype == "auto" else options.kv_dtype
        self.cache_dtypes = arch.CacheDtypes(self.kv_dtype, options.state_dtype, self.dtype)
        self.max_model_len: int = self.family.max_model_len(self.config)
        self.num_parameters = arch.num_parameters(self.config)
        self.vocab_size = arch.vocab_size(self.config)
        stored = arch.stored_dtype(self.config)
        quantised = arch.is_quantised(self.config)
        as_stored = quantised or stored == self.dtype
        self.stored_bytes = facts.weight_bytes if as_stored else None
        self.notes = []
        if quantised and self.stored_bytes is None:
            self.notes.append(
                f"{facts.name} is quantised; its weights are not beside its config.json, where they could be measured, "
                f"and were counted as {self.dtype}"
            )
        if self.stored_bytes is None and (uncounted := getattr(self.family, "UNCOUNTED", None)):
            self.notes.append(f"{facts.name}: the weights of {uncounted} are not counted")
        if options.dtype == "auto" and stored == "float16":
            self.notes.append(f"{facts.name} is stored in float16, which Girih computes in float32 (see --dtype)")

    def parts(self, num_stages: int, pipeline_split: Sequence[int] | None = None) -> list[ModelPart]:
        """Return what each of so many pipeline stages holds; see `girih.arch.stage_parts`."""
        from girih import arch

        # blocks of any size, as no attention backend is asked
        return arch.stage_parts(self.config, self.cache_dtypes, num_stages=num_stages, pipeline_split=pipeline_split)

    def weight_bytes(self, part: ModelPart, tensor_parallel_size: int, quantization: str | None) -> int:
        """Return the bytes of one rank's weights: by their number, or its share of what is stored."""
        if self.stored_bytes is not None and quantization is None:
            return math.ceil(self.stored_bytes * part.num_parameters(tensor_parallel_size) / self.num_parameters)
        return part.weight_bytes(dtype_bytes(self.dtype), tensor_parallel_size, quantization)


def _check_lengths(context: int | None, num_speculative_tokens: int, model_limit: int) -> None:
    """Refuse lengths in tokens that the model cannot have."""
    if context is not None and context > model_limit:
        raise ConfigError(f"--context {context} is longer than the model's own limit of {model_limit} tokens")
    if num_speculative_tokens >= model_limit:
        raise ConfigError(
            f"--num-speculative-tokens {num_speculative_tokens} must be below the model's own limit of "
            f"{model_limit} tokens"
        )


def _notes(models: list[_Model]) -> list[str]:
    """Return what a user should know of each model, and of how a draft model fits its target."""
    notes = [text for model in models for text in model.notes]
    target = models[0]
    for draft in models[1:]:
        if draft.max_model_len < target.max_model_len:
            notes.append(
                f"the draft's limit of {draft.max_model_len} tokens is below the model's {target.max_model_len}"
            )
        if draft.vocab_size != target.vocab_size:  # no error: sizes of one family differ in padding
            notes.append(
                f"the draft's vocabulary of {draft.vocab_size} tokens is not the model's {target.vocab_size}; "
                f"a draft must have the model's tokens"
            )
    return notes


@dataclass(frozen=True)
class _Stage:
    """What one worker of a pipeline stage holds.

    Args:
        weight_bytes: of the model's share, and of the draft model on the last stage.
        kv_cache_specs: layer name -> spec, in model order.
    """

    weight_bytes: int
    kv_cache_specs: dict[str, KVCacheSpec]


def _stages(models: list[_Model], options: PlanOptions) -> list[_Stage]:
    """Share out the model, and put the draft model, if there is one, with the last stage."""
    ranks, quantization = options.tensor_parallel_size, options.quantization
    stages = [
        _Stage(
            models[0].weight_bytes(part, ranks, quantization),
            {name: spec.shard(ranks) for name, spec in part.kv_cache_specs.items()},
        )
        for part in models[0].parts(options.pipeline_parallel_size, options.pipeline_split)
    ]
    for draft in models[1:]:
        (part,) = draft.parts(1)
        specs = _as_draft({name: spec.shard(ranks) for name, spec in part.kv_cache_specs.items()})
        last = stages[-1]
        stages[-1] = _Stage(
            last.weight_bytes + draft.weight_bytes(part, ranks, quantization), last.kv_cache_specs | specs
        )
    return stages


def _int8_savings(models: list[_Model], stages: list[_Stage], options: PlanOptions) -> int:
    """Return the bytes that weights as int8 would leave to each worker's KV cache."""
    if options.quantization is not None or options.kv_cache_memory is not None:
        return 0
    smaller = _stages(models, replace(options, quantization="int8"))
    return min(before.weight_bytes - after.weight_bytes for before, after in zip(stages, smaller, strict=True))


def _plans(
    stages: list[_Stage], kv_memory: list[int], options: PlanOptions, model_limit: int, lookahead: int
) -> list[KVCacheConfig]:
    """Return the plan of one worker of each stage."""
    from girih.kv.plan import get_kv_cache_configs

    ranks = options.tensor_parallel_size
    return get_kv_cache_configs(
        [stage.kv_cache_specs for stage in stages for _ in range(ranks)],
        [num_bytes for num_bytes in kv_memory for _ in range(ranks)],
        max_model_len=options.max_model_len,
        model_limit=model_limit,
        block_size=options.block_size,
        num_lookahead_tokens=lookahead,
        memory_option=options.memory_option,
    )[::ranks]


def _budgets(weight_bytes: list[int], options: PlanOptions) -> tuple[int | None, list[int]]:
    """Return (a worker's budget of weights and KV cache, None if only the latter was given; of the KV cache per stage).

    Raises:
        CapacityError: the weights leave nothing.
    """
    if options.kv_cache_memory is not None:
        return None, [options.kv_cache_memory] * len(weight_bytes)
    if options.memory is not None:
        memory_bytes, how = options.memory, f"--memory {format_bytes(options.memory)}"
    else:
        device = plugins.load("girih.device", EngineConfig.device, what="device")
        memory_bytes = int(device.memory_facts().total_bytes * options.memory_utilization) // options.num_workers
        among = f" among {options.num_workers} workers" if options.num_workers > 1 else ""
        how = f"{options.memory_utilization:.0%} of this machine's memory{among}, {format_bytes(memory_bytes)},"
    if memory_bytes <= max(weight_bytes):
        raise CapacityError(
            f"{how} leaves no room for a KV cache beside weights of {format_bytes(max(weight_bytes))}; raise "
            f"{options.memory_option} or take more workers (--tensor-parallel-size, --pipeline-parallel-size)",
            need_bytes=max(weight_bytes) + 1,
            have_bytes=memory_bytes,
            fitting_tokens=None,
        )
    return memory_bytes, [memory_bytes - num_bytes for num_bytes in weight_bytes]


def _as_draft(specs: Mapping[str, KVCacheSpec]) -> dict[str, KVCacheSpec]:
    """Return the layers of a draft model under names that no layer of the target has."""
    named = {}
    for name, spec in specs.items():
        owner = spec.cache_owner
        named[f"draft.{name}"] = spec if owner is None else replace(spec, owner=f"draft.{owner}")  # type: ignore[call-arg]
    return named


def _answers(plans: list[KVCacheConfig], options: PlanOptions) -> dict[str, Any]:
    """Return what a user asks: bytes per token and request, requests at once, the longest context for so many."""
    from girih.kv.report import bytes_per_token, longest_context, request_bytes, requests_at_once

    limit, ranks = plans[0].max_model_len, options.tensor_parallel_size
    lengths = (*(length for length in TYPICAL_LENGTHS if length < limit), limit)
    if options.context is not None:
        lengths = (options.context,)
    answers: dict[str, Any] = {
        "max_model_len": limit,
        "kv_bytes_per_token": ranks * sum(bytes_per_token(plan, 1) for plan in plans),
        "kv_bytes_per_token_at_max_model_len": ranks * sum(bytes_per_token(plan, limit) for plan in plans),
        "kv_bytes_per_sequence": ranks * sum(request_bytes(plan, limit) for plan in plans),
        "requests_at_once": requests_at_once(plans, lengths),
    }
    if options.users is not None and answers["requests_at_once"]:
        answers["longest_context"] = longest_context(plans, options.users)
        if options.context is not None:
            answers["fits"] = answers["requests_at_once"][0]["requests"] >= options.users
    return answers


def _stage_figures(
    stages: list[_Stage], plans: list[KVCacheConfig], kv_memory: list[int], ranks: int
) -> list[dict[str, Any]]:
    """Return the bill of one worker of each stage."""
    from girih.kv.report import plan_report

    return [
        {
            "workers": [*range(index * ranks, (index + 1) * ranks)],
            "stage_class": plan.stage_class,
            "weight_bytes": stage.weight_bytes,
            "kv_memory_bytes": num_bytes,
            **plan_report(plan, num_bytes),
        }
        for index, (stage, plan, num_bytes) in enumerate(zip(stages, plans, kv_memory, strict=True))
    ]


@contextmanager
def _logged_warnings() -> Iterator[list[str]]:
    """Collect what the planner warns of."""
    texts: list[str] = []

    class _Collector(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            texts.append(record.getMessage())

    logger, collector = logging.getLogger("girih.kv"), _Collector(logging.WARNING)
    propagate = logger.propagate
    logger.addHandler(collector)
    logger.propagate = False
    try:
        yield texts
    finally:
        logger.removeHandler(collector)
        logger.propagate = propagate
