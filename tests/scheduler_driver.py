"""A scheduler over the real cache manager and the fake worker, with every invariant checked at every step."""

import collections
import itertools
from dataclasses import dataclass, field

import numpy as np
from fake_worker import VOCAB_SIZE, FakeWorker, expected_output

from girih.kv.config import KVCacheConfig, one_per_class
from girih.kv.manager import KVCacheManager
from girih.kv.plan import get_kv_cache_configs
from girih.kv.specs.chunked_local import ChunkedLocalAttentionSpec
from girih.kv.specs.full_attention import FullAttentionSpec
from girih.kv.specs.sliding_window import SlidingWindowSpec
from girih.kv.specs.state import StateSpec
from girih.request import SamplingParams
from girih.sched.policies import fcfs
from girih.sched.request_state import RequestState
from girih.sched.scheduler import Scheduler

BLOCK = 4


def full(num_heads=1):
    return FullAttentionSpec(num_heads, 8, "float32", block_size_multiple=1)


def sliding(window, num_heads=1):
    return SlidingWindowSpec(num_heads, 8, "float32", window, block_size_multiple=1)


def chunked(chunk, num_heads=1):
    return ChunkedLocalAttentionSpec(num_heads, 8, "float32", chunk, block_size_multiple=1)


def state(num_elements=8):
    return StateSpec(((num_elements, 4),), ("float32",), block_size_multiple=1)


def plan(*specs, num_pages, block_size=BLOCK, max_model_len="auto", model_limit=10_000):
    """Plan layers of these specs in a pool of about `num_pages` pages of one layer, and the null page."""
    page_bytes = max(spec.page_size_bytes(block_size) for spec in specs)
    layers = {f"layer.{i}": spec for i, spec in enumerate(specs)}
    (config,) = get_kv_cache_configs(
        [layers],
        [(num_pages + 1) * page_bytes],
        max_model_len=max_model_len,
        model_limit=model_limit,
        block_size=block_size,
    )
    return config


@dataclass
class Result:
    """All that the updates said of one request."""

    tokens: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: int | None = None
    error: str | None = None
    num_cached_tokens: int | None = None
    prompt_token_ids: list[int] = field(default_factory=list)  # those whose log probabilities were reported


def collect(updates, results):
    """Add what updates say to results, by request id."""
    for update in updates:
        assert len(set(update.request_ids)) == len(update.request_ids) == len(update.token_ids)
        for request_id, token_id in zip(update.request_ids, update.token_ids, strict=True):
            result = results.setdefault(request_id, Result())
            assert result.finish_reason is None
            result.tokens.append(token_id)
        for request_id, details in update.details.items():
            result = results.setdefault(request_id, Result())
            assert result.finish_reason is None
            result.finish_reason, result.stop_reason = details.finish_reason, details.stop_reason
            result.error = details.error
            if details.num_cached_tokens is not None:
                result.num_cached_tokens = details.num_cached_tokens
            if details.prompt_logprobs is not None:
                result.prompt_token_ids += details.prompt_logprobs.token_ids[:, 0].tolist()
    return results


def plan_stages(*stages, num_pages, model_limit=10_000):
    """Plan one pipeline stage per list of specs, with about `num_pages` pages of one layer each; one plan per class."""
    page_bytes = max(spec.page_size_bytes(BLOCK) for specs in stages for spec in specs)
    return one_per_class(
        get_kv_cache_configs(
            [{f"layer.{s}.{i}": spec for i, spec in enumerate(specs)} for s, specs in enumerate(stages)],
            [(num_pages + 1) * page_bytes] * len(stages),
            max_model_len="auto",
            model_limit=model_limit,
            block_size=BLOCK,
        )
    )


class Engine:
    """The engine core's loop without a model."""

    def __init__(
        self,
        config,
        *,
        max_num_seqs=8,
        max_num_batched_tokens=64,
        policy=fcfs,
        prefix_caching=True,
        max_under_way=1,
        num_micro_batches=1,
    ):
        configs = [config] if isinstance(config, KVCacheConfig) else config  # one per stage class
        self.manager = KVCacheManager(configs, max_num_seqs=max_num_seqs, enable_prefix_caching=prefix_caching)
        self.scheduler = Scheduler(
            self.manager,
            policy.order,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            num_micro_batches=num_micro_batches,
        )
        self.max_under_way = max_under_way
        self.under_way = collections.deque()
        self.worker = FakeWorker(*configs, max_num_seqs=max_num_seqs)
        self.max_num_batched_tokens = max_num_batched_tokens
        self.requests = {}
        self.results = {}
        self.ids = map(str, itertools.count())

    def add(self, prompt, max_tokens=4, *, priority=0, eos=(), salt="", **params):
        request = RequestState(
            request_id=next(self.ids),
            prompt_token_ids=np.array(prompt, dtype=np.int32),
            sampling_params=SamplingParams(seed=0, max_tokens=max_tokens, **params),
            max_output_tokens=max_tokens or 10**6,
            eos_token_ids=frozenset(eos),
            priority=priority,
            cache_salt=salt,
        )
        self.scheduler.add(request)
        self.requests[request.request_id] = request
        return request

    def step(self):
        """Hand out steps until as many are under way as may be; the worker does each at once, its result waits."""
        handed_out = None
        while len(self.under_way) < self.max_under_way:
            step = self.scheduler.schedule()
            self.manager.check()
            if step is None:
                break
            assert 0 < step.num_scheduled_tokens.sum() <= self.max_num_batched_tokens
            self.under_way.append((step, self.worker.execute_model(step)))
            handed_out = step
        if self.under_way:
            self.scheduler.update(*self.under_way.popleft())
        self.manager.check()
        collect(self.scheduler.take_updates(), self.results)
        return handed_out

    def run(self, max_steps=5000):
        for _ in range(max_steps):
            if not self.scheduler.has_unfinished():
                return self
            self.step()
        raise AssertionError("the engine does not finish")

    def result(self, request):
        return self.results.get(request.request_id, Result())

    def tokens(self, request):
        return self.result(request).tokens

    def finish(self, request):
        return self.result(request).finish_reason

    def assert_all_as_alone(self):
        for request in self.requests.values():
            output = self.tokens(request)
            assert output == expected_output(request.prompt_token_ids, len(output)), request.request_id
            assert self.finish(request) == "length", self.result(request)
            assert self.result(request).num_cached_tokens == request.num_cached_tokens
            assert len(output) == request.max_output_tokens

    def assert_nothing_held(self):
        assert self.manager.num_running == 0
        assert self.manager.usage == 0
        assert sum(self.manager.stats().referenced_pages) == 0


def prompt(length, start=0):
    return [(start + i * i) % VOCAB_SIZE for i in range(length)]
