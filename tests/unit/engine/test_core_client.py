"""The engine's process as its front end sees it: how it ends, and that nobody is left to wait."""

import asyncio
import os
import signal

import numpy as np
import pytest
import uvloop
from server_process import poll
from tiny_models import tiny_llama
from toy_worker import is_running

from girih.config import EngineConfig
from girih.engine.core_client import CoreClient
from girih.engine.core_messages import AddRequest
from girih.errors import EngineDiedError, GirihError
from girih.request import SamplingParams


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    model = tiny_llama(tmp_path_factory.mktemp("model"))
    return EngineConfig(model=str(model), dtype="float32", kv_cache_memory_bytes=1 << 20)


async def receive_to_the_end(client):
    while True:
        await client.receive()


def test_what_is_sent_to_an_engine_that_was_killed_goes_nowhere(config):
    async def run():
        client = CoreClient(config)
        await client.start()
        os.kill(client.pid, signal.SIGKILL)
        request = AddRequest("0", np.arange(3, 9, dtype=np.int32), SamplingParams(seed=1), 0, "")
        for _ in range(20):  # nobody has noticed yet
            client.send(request)
            await asyncio.sleep(0.01)
        with pytest.raises(EngineDiedError, match="was killed by SIGKILL"):
            await receive_to_the_end(client)
        client.close()

    uvloop.run(run())


@pytest.mark.parametrize("seconds", [0.0, 0.5])
def test_an_engine_whose_start_is_given_up_ends(config, seconds):
    async def run():
        client = CoreClient(config)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(seconds):
                await client.start()
        return client.pid

    pid = uvloop.run(run())
    poll(lambda: not is_running(pid), what="the engine has ended")


def test_an_engine_that_cannot_start_says_why(tmp_path):
    async def run():
        client = CoreClient(EngineConfig(model=str(tmp_path)))
        with pytest.raises(GirihError, match=r"config\.json"):
            await client.start()

    uvloop.run(run())
