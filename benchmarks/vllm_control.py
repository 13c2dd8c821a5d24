"""vLLM's cache manager and scheduler on the same streams. Run by `control_plane.py` with a Python that has vLLM 0.32.

Reads one JSON request per line, {"workload", "quick", "clock"}, and answers each with one line:
{"segments" (nanoseconds), "loop_s", "hit_tokens"}, or {"step_ns" (nanoseconds), "batch"} for the scheduler.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

os.environ |= {"HF_HUB_OFFLINE": "1", "VLLM_LOGGING_LEVEL": "ERROR"}
ANSWERS = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)  # whatever vLLM prints must not get between the answers

import torch  # noqa: E402
from control_workloads import KINDS, SCHED, workload  # noqa: E402
from op_streams import OpStream  # noqa: E402
from timing import CLOCKS, loop_seconds, timed_run  # noqa: E402
from vllm.config import CacheConfig, ModelConfig, SchedulerConfig, VllmConfig  # noqa: E402
from vllm.sampling_params import SamplingParams  # noqa: E402
from vllm.utils.hashing import get_hash_fn_by_name  # noqa: E402
from vllm.v1.core import kv_cache_utils  # noqa: E402
from vllm.v1.core.kv_cache_manager import KVCacheManager  # noqa: E402
from vllm.v1.core.sched.scheduler import Scheduler  # noqa: E402
from vllm.v1.kv_cache_interface import (  # noqa: E402
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    SlidingWindowSpec,
)
from vllm.v1.outputs import ModelRunnerOutput  # noqa: E402
from vllm.v1.request import Request, RequestStatus  # noqa: E402
from vllm.v1.structured_output import StructuredOutputManager  # noqa: E402

BLOCK_TOKENS = 16
SAMPLING = SamplingParams(max_tokens=1 << 20, ignore_eos=True)


def groups(kind: str) -> list[KVCacheGroupSpec]:
    """Return the groups that vLLM makes of Llama-3-8B ("plain") or Gemma-3-12B ("hybrid")."""
    if kind == "plain":
        layer = FullAttentionSpec(block_size=BLOCK_TOKENS, num_kv_heads=8, head_size=128, dtype=torch.bfloat16)
        return kv_cache_utils._get_kv_cache_groups_uniform_spec({f"layer.{i}": layer for i in range(32)})
    common = {"block_size": BLOCK_TOKENS, "num_kv_heads": 8, "head_size": 256, "dtype": torch.bfloat16}
    full, window = FullAttentionSpec(**common), SlidingWindowSpec(**common, sliding_window=1024)
    layers = {f"layer.{i}": full if i % 6 == 5 else window for i in range(48)}
    return kv_cache_utils._get_kv_cache_groups_uniform_page_size(layers)


def kv_cache_config(kind: str, pool_tokens: int) -> KVCacheConfig:
    """Return a pool that holds so many tokens of every layer, and vLLM's null block."""
    made = groups(kind)
    return KVCacheConfig(
        num_blocks=len(made) * (pool_tokens // BLOCK_TOKENS) + 1,
        kv_cache_tensors=[],
        kv_cache_groups=made,
        prefix_cache_retention_interval=0,
    )


def block_hasher() -> Any:
    """Return vLLM's default hash of a request's blocks."""
    function = get_hash_fn_by_name("sha256")
    kv_cache_utils.init_none_hash(function)
    return kv_cache_utils.get_request_block_hasher(BLOCK_TOKENS, function)


class ManagerAdapter:
    """vLLM's KVCacheManager behind the operations of `op_streams`, called as its scheduler calls it.

    Args:
        kind: "plain" or "hybrid".
        stream: the workload, for the size of the pool.
    """

    def __init__(self, kind: str, stream: OpStream):
        self.manager = KVCacheManager(
            kv_cache_config=kv_cache_config(kind, stream.pool_tokens),
            max_model_len=stream.max_model_len,
            scheduler_block_size=BLOCK_TOKENS,
            hash_block_size=BLOCK_TOKENS,
            max_in_flight_tokens=8192,
            enable_caching=True,
        )
        self.hasher = block_hasher()
        self.requests: dict[int, Request] = {}
        self.found: dict[int, tuple[Any, int]] = {}

    def tick(self) -> None:
        """Begin a step."""
        self.manager.new_step_starts()

    def admit(self, rid: int, tokens: list[int]) -> int:
        """Make the request, which hashes its prompt, and look it up."""
        request = Request(
            request_id=str(rid),
            prompt_token_ids=tokens,
            sampling_params=SAMPLING,
            pooling_params=None,
            block_hasher=self.hasher,
        )
        self.requests[rid] = request
        blocks, num_cached, request.shared_prefix_boundary = self.manager.get_computed_blocks(request)
        self.found[rid] = blocks, num_cached
        return num_cached

    def prefill(self, rid: int, n_max: int) -> None:
        """Allocate the next chunk, the first time with the cached blocks."""
        request = self.requests[rid]
        found = self.found.pop(rid, None)
        if found is not None:
            blocks, num_cached = found
            chunk = min(n_max, request.num_prompt_tokens - num_cached)
            new = self.manager.allocate_slots(
                request,
                chunk,
                num_new_computed_tokens=num_cached,
                new_computed_blocks=blocks,
                full_sequence_must_fit=True,
                has_scheduled_reqs=True,
            )
            assert new is not None, "vLLM's pool is exhausted"
            self.manager.get_blocks(request.request_id).get_block_ids()
            request.status = RequestStatus.RUNNING
            request.num_computed_tokens = num_cached + chunk
            return
        chunk = min(n_max, request.num_prompt_tokens - request.num_computed_tokens)
        if chunk > 0:
            self._allocate(request, chunk)

    def step(self, rid: int, tok: int) -> None:
        """Append a sampled token and allocate its slot."""
        request = self.requests[rid]
        request.append_output_token_ids(tok)
        self._allocate(request, 1)

    def free(self, rid: int) -> None:
        """Finish a request."""
        self.manager.free(self.requests.pop(rid))

    def _allocate(self, request: Request, count: int) -> None:
        new = self.manager.allocate_slots(request, count)
        assert new is not None, "vLLM's pool is exhausted"
        new.get_block_ids(allow_none=True)
        request.num_computed_tokens += count


def make_scheduler(kind: str) -> Scheduler:
    """Return vLLM's scheduler for SCHED's requests, with a model's config but no model."""
    with tempfile.TemporaryDirectory() as folder:
        config = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "max_position_embeddings": 1 << 17}
        sizes = {"hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8}
        Path(folder, "config.json").write_text(
            json.dumps(config | sizes | {"intermediate_size": 14336, "vocab_size": 128_256})
        )
        model = ModelConfig(
            model=folder, skip_tokenizer_init=True, dtype="bfloat16", seed=0, max_model_len=SCHED.max_model_len
        )
    cache_config = CacheConfig(block_size=BLOCK_TOKENS, enable_prefix_caching=True)
    config = VllmConfig(
        model_config=model,
        cache_config=cache_config,
        scheduler_config=SchedulerConfig(
            max_num_seqs=SCHED.num_requests,
            max_num_batched_tokens=SCHED.max_num_batched_tokens,
            max_model_len=SCHED.max_model_len,
            is_encoder_decoder=False,
            async_scheduling=False,
        ),
    )
    kv_config = kv_cache_config(kind, SCHED.pool_tokens)
    cache_config.num_gpu_blocks = kv_config.num_blocks
    return Scheduler(
        vllm_config=config,
        kv_cache_config=kv_config,
        structured_output_manager=StructuredOutputManager(config),
        block_size=BLOCK_TOKENS,
        hash_block_size=BLOCK_TOKENS,
        log_stats=False,
    )


def scheduler_run(kind: str, quick: bool, clock: str) -> dict[str, Any]:
    """Decode SCHED's requests to their end; return each step's time and batch."""
    scheduler, hasher = make_scheduler(kind), block_hasher()
    num_output = SCHED.num_output(quick)
    sampling = SamplingParams(max_tokens=num_output, ignore_eos=True)
    for rid, prompt in enumerate(SCHED.prompts()):
        scheduler.add_request(
            Request(
                request_id=str(rid),
                prompt_token_ids=prompt,
                sampling_params=sampling,
                pooling_params=None,
                block_hasher=hasher,
            )
        )
    token_ids, now = iter(SCHED.sampled()), CLOCKS[clock]
    step_ns, batch = [], []
    gc.collect()
    gc.freeze()
    while scheduler.requests:
        begin = now()
        step = scheduler.schedule()
        scheduled = now()
        ids = list(step.num_scheduled_tokens)
        known = [scheduler.requests[rid] for rid in ids]
        sampled = [[next(token_ids)] if r.num_computed_tokens >= r.num_tokens else [] for r in known]
        output = ModelRunnerOutput(
            req_ids=ids,
            req_id_to_index={rid: index for index, rid in enumerate(ids)},
            sampled_token_ids=sampled,
            logprobs=None,
            prompt_logprobs_dict={},
            pooler_output=[],
        )
        resumed = now()
        scheduler.update_from_output(step, output)
        step_ns.append(scheduled - begin + now() - resumed)
        batch.append(len(ids))
    gc.unfreeze()
    return {"step_ns": step_ns, "batch": batch}


@cache
def _stream_and_loop(name: str, quick: bool, clock: str) -> tuple[OpStream, float]:
    stream = workload(name, quick)
    return stream, loop_seconds(stream.ops, clock)


def answer(name: str, quick: bool, clock: str) -> dict[str, Any]:
    """Run a workload once."""
    kind = KINDS[name]
    if name.startswith("sched"):
        return scheduler_run(kind, quick, clock)
    stream, loop_s = _stream_and_loop(name, quick, clock)
    adapter = ManagerAdapter(kind, stream)
    segments, hit_tokens = timed_run(adapter, stream.ops, clock)
    return {"segments": segments, "loop_s": loop_s, "hit_tokens": hit_tokens}


def main() -> None:
    """Answer until the input ends."""
    for line in sys.stdin:
        request = json.loads(line)
        found = answer(request["workload"], request["quick"], request["clock"])
        print(json.dumps(found), file=ANSWERS, flush=True)


if __name__ == "__main__":
    main()
