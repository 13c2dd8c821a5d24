"""However many people look, the engine is asked once, and never while it still answers."""

import asyncio
import gzip

import pytest
from pool_pictures import view_of

from girih.errors import EngineDiedError
from girih.server import watch
from girih.server.errors import ApiError
from girih.server.watch import Watch


class SlowEngine:
    """Answers when it is told to, and counts its calls."""

    num_restarts = 0

    def __init__(self):
        self.calls = []
        self.at_once = 0
        self.may_answer = asyncio.Event()
        self.error = None

    async def call(self, method, *args):
        self.calls.append((method, *args))
        self.at_once += 1
        assert self.at_once == 1
        try:
            await self.may_answer.wait()
        finally:
            self.at_once -= 1
        if self.error is not None:
            raise self.error
        return view_of(())


class Tokens:
    def num_output_tokens(self):
        return 12


@pytest.fixture
def engine():
    return SlowEngine()


@pytest.fixture
def watching(engine):
    return Watch(engine, Tokens())


async def settle():
    for _ in range(5):
        await asyncio.sleep(0)


def test_all_viewers_share_one_look_and_another_one_is_taken_when_it_is_old(engine, watching, monkeypatch):
    async def look():
        viewers = [asyncio.create_task(watching.snapshot()) for _ in range(10)]
        await settle()
        assert engine.calls == [("pool_map",)]
        engine.may_answer.set()
        first = await asyncio.gather(*viewers)
        assert len(set(first)) == 1
        assert b'"num_output_tokens":12' in gzip.decompress(first[0])
        monkeypatch.setattr(watch, "FRESH_S", 3600.0)
        assert await watching.snapshot() is first[0]
        monkeypatch.setattr(watch, "FRESH_S", 0.0)
        assert await watching.snapshot() is not first[0]
        assert len(engine.calls) == 2

    asyncio.run(look())


def test_pages_are_asked_for_one_after_the_other(engine, watching):
    async def look():
        engine.may_answer.set()
        await asyncio.gather(watching.snapshot(), *(watching.page(0, page) for page in range(5)))
        assert sorted(engine.calls[1:]) == [("page_info", 0, page) for page in range(5)]

    asyncio.run(look())


def test_an_engine_that_does_not_answer_is_not_asked_again_until_it_does(engine, watching, monkeypatch):
    monkeypatch.setattr(watch, "TIMEOUT_S", 0.01)

    async def look():
        for _ in range(3):
            with pytest.raises(ApiError, match="in the middle of a step") as error:
                await watching.snapshot()
            assert error.value.status == 503
        with pytest.raises(ApiError):
            await watching.page(0, 7)
        assert engine.calls == [("pool_map",)]
        engine.may_answer.set()
        await watching.snapshot()
        await watching.page(0, 8)
        assert engine.calls == [("pool_map",), ("page_info", 0, 8)]

    asyncio.run(look())


def test_viewers_learn_that_there_is_no_engine_and_see_the_next_one(engine, watching, monkeypatch):
    monkeypatch.setattr(watch, "FRESH_S", 0.0)

    async def look():
        engine.may_answer.set()
        engine.error = EngineDiedError("it was killed")
        for _ in range(2):
            with pytest.raises(EngineDiedError):
                await watching.snapshot()
        engine.error = None
        assert await watching.snapshot()

    asyncio.run(look())
