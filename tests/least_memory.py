"""`least_memory`: how little KV cache an engine can be given, which is what forces it to preempt."""

from pathlib import Path

from girih.checkpoint.hf_config import load_config
from girih.config import EngineConfig
from girih.engine.expectations import expected_specs
from girih.errors import CapacityError
from girih.kv.plan import get_kv_cache_configs


def least_memory(config: EngineConfig) -> int:
    """Return about the least bytes for each worker with which a request of `max_model_len` tokens is served."""
    specs = expected_specs(config, load_config(Path(config.model)))
    memory_bytes = 1 << 10
    while True:
        try:
            get_kv_cache_configs(specs, [memory_bytes] * len(specs), max_model_len=config.max_model_len)
        except CapacityError as refusal:  # of the first stage that has too little
            memory_bytes = refusal.need_bytes
        else:
            return memory_bytes
