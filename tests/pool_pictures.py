"""Views of a pool as an engine would show them, made by hand; and a server that shows one without an engine."""

from __future__ import annotations

import contextlib
import dataclasses
import socket
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import uvicorn
from server_process import poll

from girih.config import EngineConfig
from girih.engine.async_llm import AsyncLLM
from girih.engine.core_messages import Ready
from girih.engine.pool_view import PageHolder, PageInfo, PoolView
from girih.engine.report import EngineStats, StartupReport
from girih.kv import FullAttentionSpec, KVCacheConfig, SlidingWindowSpec, get_kv_cache_configs
from girih.kv.pool_map import CACHED, FREE, NOBODY, ClassMap, GroupMap
from girih.kv.stats import CacheStats
from girih.server.app import make_app
from girih.server.config import ServerConfig
from girih.server.metrics import Metrics
from girih.server.serving import Serving

EMPTY_STATS = EngineStats(
    num_running=0,
    num_waiting=0,
    waiting_by_reason={"capacity": 0},
    num_preemptions=0,
    num_restarts=0,
    num_steps=0,
    kv_cache_usage=0.0,
    moved_bytes=0,
    cache=CacheStats(**{field.name: 0 for field in dataclasses.fields(CacheStats)}),
)


def view_of(classes: Sequence[ClassMap], request_ids: Sequence[str] = (), rows: Sequence[int] = ()) -> PoolView:
    """Return a view in which request i has a prompt of 10 + i tokens, 4 of them cached, and 2 tokens of output."""
    count = len(request_ids)
    prompts = np.arange(10, 10 + count, dtype=np.int32)
    two = np.full(count, 2, dtype=np.int32)
    return PoolView(
        stats=EMPTY_STATS,
        classes=tuple(classes),
        request_ids=tuple(request_ids),
        rows=np.array(rows, dtype=np.int32),
        num_prompt_tokens=prompts,
        num_output_tokens=two,
        num_computed_tokens=prompts + two,
        num_cached_tokens=two * 2,
    )


def plan_of(num_slabs: int) -> KVCacheConfig:
    """Return a plan with a sliding window and full attention, and so many slabs."""
    specs: dict[str, Any] = {f"layer.{i}": SlidingWindowSpec(1, 64, "bfloat16", 512) for i in range(15)}
    specs |= {f"layer.{i}": FullAttentionSpec(1, 64, "bfloat16") for i in range(15, 18)}
    (config,) = get_kv_cache_configs([specs], [1 << 30], max_model_len=32768)
    return dataclasses.replace(config, num_slabs=num_slabs)


def busy_view(config: KVCacheConfig, num_requests: int) -> PoolView:
    """Return a view of a plan's pool in which requests hold pages here and there, others are cached, and some free."""
    random = np.random.default_rng(0)
    owners = random.choice([NOBODY, 0, 1], config.num_slabs, p=[0.2, 0.5, 0.3]).astype(np.int16)
    groups = {}
    for group, facts in enumerate(config.groups):
        shape = int((owners == group).sum()), facts.pages_per_slab
        rows = random.choice([FREE, CACHED, *range(num_requests)], shape).astype(np.int32)
        groups[group] = GroupMap(rows, (rows >= 0).astype(np.uint16))
    return view_of([ClassMap(owners, groups)], [str(100 + i) for i in range(num_requests)], range(num_requests))


class PictureEngine(AsyncLLM):
    """Shows one view for ever, and says of every page that request 100 holds it for the first tokens.

    Args:
        model: a directory, for its tokenizer.
        config: the plan.
        view: of its pool.
    """

    def __init__(self, model: Path, config: KVCacheConfig, view: PoolView):
        super().__init__(EngineConfig(model=str(model)))
        self._ready = Ready(config.max_model_len, StartupReport(), [config], prefix_secret=bytes(16))
        self._answers = {
            "pool_map": view,
            "page_info": PageInfo(True, (PageHolder("100", 0, 3, np.array([5, 6, 7], dtype=np.int32)),)),
        }

    async def call(self, method: str, *args: Any) -> Any:
        """Answer what the page asks."""
        return self._answers[method]


@contextlib.contextmanager
def shown(engine: AsyncLLM, config: ServerConfig) -> Iterator[str]:
    """Serve an engine from a thread; gives the server's URL."""
    app = make_app(Serving(engine, config, ("picture",), Metrics(engine, "picture")))
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        server = uvicorn.Server(uvicorn.Config(app, log_config=None, lifespan="off"))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
        thread.start()
        poll(lambda: server.started, what="the picture's server is up")
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            server.should_exit = True
            thread.join(20)
