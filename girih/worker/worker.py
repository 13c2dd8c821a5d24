"""`Worker`: owns one device and one model; the engine core calls its methods in the order in which they stand here."""

from __future__ import annotations

import numpy as np

from girih import arch, plugins
from girih.attention import AttentionBackend
from girih.checkpoint.hf_config import eos_token_ids, load_config
from girih.checkpoint.resolve import resolve_model
from girih.config import EngineConfig
from girih.device import Device
from girih.errors import ConfigError
from girih.kv.config import KVCacheConfig
from girih.kv.spec import KVCacheSpec
from girih.layers.dtypes import torch_dtype
from girih.layers.module import settle
from girih.layers.operations import Operations
from girih.layers.parallel import TIMEOUT_S, connect
from girih.messages import StepInput, StepOutput
from girih.models import build_model
from girih.parallel import place_of
from girih.worker.grammar import GrammarRows
from girih.worker.kv_cache import PagePool, byte_ranges, make_views
from girih.worker.loader import load_weights
from girih.worker.memory import MemoryProfile, MemoryReport, memory_report
from girih.worker.model_runner import ModelRunner
from girih.worker.step_profile import StepProfile, StepTimes


class Worker:
    """One process' share of the engine.

    Args:
        config: the engine's options.
        rank: of this worker, 0 .. number of workers - 1.
        rendezvous: where the workers meet, an init_method of torch.distributed; None for a lone one.
    """

    def __init__(self, config: EngineConfig, rank: int, rendezvous: str | None = None):
        self.config = config
        self.rank = rank
        self.rendezvous = rendezvous
        self.device: Device = plugins.load("girih.device", config.device, what="device")
        backend = config.attention_backend
        if backend == "auto":
            backend = self.device.attention_backend()
        self.backend: AttentionBackend = plugins.load("girih.attention", backend, what="attention backend")
        self.operations: Operations = plugins.load(
            "girih.layers.operations", self.device.layer_operations(), what="kind of layer operations"
        )

    def load_model(self) -> int:
        """Meet the other workers, build this one's part of the model and map its weights; returns their bytes.

        Raises:
            ConfigError: an architecture or a field of config.json that is not supported, or a number of workers.
            CheckpointError: weights that are damaged or do not match config.json.
            ExecutorError: the other workers did not come in time.
        """
        directory = resolve_model(self.config.model)
        model_config = load_config(directory)
        arch.check_tensor_parallel(model_config, self.config.tensor_parallel_size)
        place = place_of(self.config, self.rank, arch.num_layers(model_config))
        # longer than a step may take: the executor, which knows more, tells first who is late
        timeout_s = max(TIMEOUT_S, 2 * self.config.step_timeout_s)
        self.ranks = connect(place, self.rendezvous, backend=self.device.collective_backend(), timeout_s=timeout_s)
        self.device.take_cores(self.ranks.num_local)
        dtype = torch_dtype(arch.resolve_dtype(self.config.dtype, model_config))
        kv_dtype = arch.resolve_dtype(self.config.cache_dtype, model_config)
        model, context = build_model(model_config, dtype, self.backend, kv_dtype, self.ranks, self.operations)
        form = self.config.quantization or self.device.linear_form()
        matrix = plugins.load("girih.linear", form, what="form of weights").MATRIX
        self.weights_bytes = load_weights(model, directory, model_config, dtype, matrix)
        settle(model)
        facts = arch.load(model_config)
        self.model_limit = facts.max_model_len(model_config)
        ends = eos_token_ids(directory)
        self.runner = ModelRunner(
            model,
            context,
            vocab_size=facts.parse_config(model_config).vocab_size,
            max_num_seqs=self.config.max_num_seqs,
            eos_token_ids=ends,
            grammars=GrammarRows(directory, ends),
            ranks=self.ranks,
        )
        return self.weights_bytes

    def get_kv_cache_spec(self) -> dict[str, KVCacheSpec]:
        """Ask every layer of the model that has a cache what it needs; by layer name, in model order."""
        return {name: layer.get_kv_cache_spec() for name, layer in self.runner.context.layers.items()}

    def determine_available_memory(self) -> MemoryReport:
        """Measure the largest step and say what is left for the KV cache.

        The workers of a machine share its memory; all of them measure together. The engine core does not ask when the
        size is given by `kv_cache_memory_bytes`.

        Raises:
            CapacityError: nothing is left; names this worker and its bill.
        """
        facts = self.device.memory_facts()
        asked = self.config.max_model_len
        longest = min(asked, self.model_limit) if isinstance(asked, int) else self.model_limit
        self.runner.warm_up()  # what is compiled stays, and is no part of a step
        process_bytes = self.device.process_bytes()
        self.device.reset_peak()
        self.runner.profile(self.config.max_num_batched_tokens, longest)
        profile = MemoryProfile(
            total_bytes=facts.total_bytes // self.ranks.num_local,
            free_bytes=self.device.memory_facts().free_bytes // self.ranks.num_local,
            weights_bytes=self.weights_bytes,
            process_bytes=process_bytes,
            peak_process_bytes=self.device.peak_process_bytes(),
        )
        report = memory_report(profile, utilization=self.config.memory_utilization, rank=self.rank)
        report.check()
        return report

    def initialize_from_config(self, kv_cache_config: KVCacheConfig) -> list[int]:
        """Allocate the pool and give every layer its view of it.

        Args:
            kv_cache_config: the plan of this worker.

        Returns:
            The blocks really bound, per group.

        Raises:
            BindingError: plan and layers do not match.
            ConfigError: the system does not give that much memory; names this worker.
        """
        try:
            buffer = self.device.allocate(kv_cache_config.total_bytes)
        except ConfigError as error:
            raise ConfigError(f"worker of rank {self.rank} {error}") from error
        buffer[kv_cache_config.pool_bytes :].zero_()  # the null page
        self.buffer, self.kv_cache_config = buffer, kv_cache_config
        self.runner.bind(make_views(buffer, kv_cache_config), PagePool(buffer, kv_cache_config), kv_cache_config)
        return [kv_cache_config.num_blocks(group) for group in range(len(kv_cache_config.groups))]

    def release_slabs(self, slabs: np.ndarray) -> None:
        """Give the memory of idle slabs back to the system, as far as it can take it; it comes back when they are used.

        Args:
            slabs: int [n]; places in the pool from 0, of slabs that no group has borrowed. What they hold is lost.
        """
        self.device.release(self.buffer, byte_ranges(slabs, self.kv_cache_config.slab_bytes))

    def compile_or_warm_up_model(self) -> None:
        """Touch the weights and compute a small step, so that the first request waits for neither disk nor compiler."""
        self.runner.warm_up()

    def execute_model(self, step: StepInput) -> StepOutput:
        """Compute one step; steps come strictly in order."""
        return self.runner.execute_model(step)

    def start_profile(self) -> None:
        """Measure where the time of steps goes, from now on; anew where that is measured already."""
        self.stop_profile()
        self.step_profile = StepProfile(self.runner)

    def stop_profile(self) -> StepTimes:
        """Measure no more; returns what was measured."""
        profile = vars(self).pop("step_profile", None)
        return StepTimes() if profile is None else profile.stop()

    def shutdown(self) -> None:
        """Let go of the model, the pool and the other workers."""
        if "ranks" in vars(self):
            self.ranks.close()
        for name in ("step_profile", "runner", "buffer"):
            vars(self).pop(name, None)
