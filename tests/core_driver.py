"""An engine core over a fake worker: no model, no memory, every step checked."""

from concurrent.futures import Future

from fake_worker import FakeWorker
from scheduler_driver import collect

from girih.errors import ExecutorError
from girih.kv.specs.full_attention import FullAttentionSpec
from girih.kv.specs.sliding_window import SlidingWindowSpec
from girih.worker.memory import MemoryProfile, memory_report

CONFIG = {
    "model_type": "llama",
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "dtype": "float32",
    "eos_token_id": 96,
}
SPEC = FullAttentionSpec(2, 8, "float32", block_size_multiple=1)
PROFILE = MemoryProfile(
    total_bytes=4 << 20, free_bytes=4 << 20, weights_bytes=1 << 19, process_bytes=1 << 20, peak_process_bytes=0
)
LAYERS = [f"model.layers.{i}.self_attn" for i in range(2)]

HYBRID_CONFIG = CONFIG | {
    "model_type": "gemma3_text",
    "num_hidden_layers": 6,
    "sliding_window": 16,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2,
}
HYBRID_SPECS = {
    f"model.layers.{i}.self_attn": SPEC if i % 3 == 2 else SlidingWindowSpec(2, 8, "float32", 16, block_size_multiple=1)
    for i in range(6)
}


class FakeExecutor:
    """One fake worker; `answers` replaces what its methods return, `broken` makes them raise."""

    workers_are_local = True

    def __init__(self, answers=None, broken=None):
        self.answers, self.broken = answers or {}, broken or {}
        self.calls, self.unhealthy, self.is_shut_down = [], None, False
        self.futures = []

    def start(self):
        self.collective_rpc("start")

    def collective_rpc(self, method, args=(), timeout_s=None, *, args_by_rank=None):
        self.calls.append(method)
        if method in self.broken:
            raise self.broken[method]
        if method in self.answers:
            return self.answers[method]
        if method == "get_kv_cache_spec":
            return [{name: SPEC for name in LAYERS}]
        if method == "determine_available_memory":
            return [memory_report(PROFILE, utilization=0.5, rank=0)]
        if method == "initialize_from_config":
            (((config,),)) = args_by_rank
            self.worker = FakeWorker(config, max_num_seqs=4)
            return [[config.num_blocks(g) for g in range(len(config.groups))]]
        if method == "release_slabs":
            ((slabs,),) = args_by_rank
            self.worker.release_slabs(slabs)
        return [None]

    def execute_model(self, step):
        future = Future()
        if "execute_model" in self.broken:
            future.set_exception(self.broken["execute_model"])
        elif "execute_model" in self.answers:
            self.futures.append((future, step))
        else:
            future.set_result(self.worker.execute_model(step))
        return future

    def check_health(self):
        if self.unhealthy is not None:
            raise ExecutorError(self.unhealthy)

    def shutdown(self):
        self.is_shut_down = True


def run(core):
    """Return request id -> (tokens, finish reason, error)."""
    results = {}
    while core.has_unfinished():
        collect(core.step(), results)
    return {i: (result.tokens, result.finish_reason, result.error) for i, result in results.items()}
