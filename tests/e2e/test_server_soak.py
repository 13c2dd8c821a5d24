"""Many requests of all kinds from many clients, some of which leave; and whatever the OpenAPI document allows."""

import asyncio
import json
import random
import time

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, seed, settings
from schemathesis import GenerationMode
from server_clients import post
from server_process import ServerProcess, resident_bytes
from tiny_models import tiny_llama

pytestmark = pytest.mark.xdist_group("server-soak")

NUM_CLIENTS = 64

EXACT = ("--quantization", "int8")
"""With int8 weights a row's sums are exact in any company. In float32 few rows and many are rounded in other orders, so
that of a thousand sampled answers some go another way than alone."""
CHAT = "/v1/chat/completions"


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return tiny_llama(tmp_path_factory.mktemp("model"))


def in_soak(value):
    return pytest.param(value, marks=pytest.mark.soak)


# ---- many requests


def random_body(rng):
    """Return path and body of one request, sampled with a seed, so that it has one right answer."""
    body = {
        "max_tokens": rng.choice((1, 5, 20, 60, 120)),
        "temperature": rng.choice((0, 0.7, 1.0)),
        "seed": rng.randrange(1000),
        "n": rng.choice((1, 1, 1, 2, 4)),
        **rng.choice(({}, {"top_p": 0.8}, {"top_k": 5}, {"presence_penalty": 1}, {"repetition_penalty": 1.2})),
        **rng.choice(({}, {"stop": ["e", "zz"]}, {"ignore_eos": True}, {"logit_bias": {"40": 3}})),
    }
    shared = [40 + i % 30 for i in range(rng.choice((0, 48, 160)))]  # a prefix that many have
    ids = shared + [rng.randrange(3, 300) for _ in range(rng.choice((1, 9, 40, 150)))]
    if rng.random() < 0.4:
        text = "".join(rng.choice("the dog and fox ") for _ in range(rng.choice((3, 30, 90))))
        return CHAT, {**body, "messages": [{"role": "user", "content": text}]}
    return "/v1/completions", {**body, "prompt": rng.choice((ids, [ids, ids[:7]]))}


def texts_of(answer):
    """Return index -> (text, finish reason) of a whole answer."""
    return {
        choice["index"]: (choice["text"] if "text" in choice else choice["message"]["content"], choice["finish_reason"])
        for choice in answer["choices"]
    }


async def read_stream(answer, leaves_after):
    """Read a streamed answer into what `texts_of` returns; None if the client leaves before the end."""
    texts, reasons, num_lines, line = {}, {}, 0, ""
    async for line in answer.aiter_lines():
        num_lines += 1
        if num_lines == leaves_after:
            return None
        if line.startswith("data: {"):
            event = json.loads(line.removeprefix("data: "))
            assert "choices" in event, event
            for choice in event["choices"]:
                piece = choice["text"] if "text" in choice else choice["delta"].get("content", "")
                texts[choice["index"]] = texts.get(choice["index"], "") + piece
                reasons[choice["index"]] = choice["finish_reason"]
        elif line:
            assert line == "data: [DONE]"
    return {index: (text, reasons[index]) for index, text in texts.items()}


async def ask(client, rng, path, body):
    """Send one request and return its answer; None if the client left."""
    leaves = rng.random() < 0.2
    if rng.random() < 0.5:
        async with client.stream("POST", path, json={**body, "stream": True}) as answer:
            assert answer.status_code == 200, await answer.aread()
            return await read_stream(answer, rng.randrange(1, 30) if leaves else None)
    try:
        async with asyncio.timeout(rng.uniform(0.0, 0.3) if leaves else None):
            answer = await client.post(path, json=body)
    except TimeoutError:
        return None
    assert answer.status_code == 200, answer.text
    return texts_of(answer.json())


async def ask_all(url, number, requests, expected, rng):
    """Send so many requests from all clients; return how many were answered, each of them right."""
    numbers, num_answered = iter(range(number)), 0

    async def one_client():
        nonlocal num_answered
        async with httpx.AsyncClient(base_url=url, timeout=120, trust_env=False) as client:
            for _ in numbers:
                index = rng.randrange(len(requests))
                answer = await ask(client, rng, *requests[index])
                if answer is not None:
                    assert answer == expected[index], requests[index]
                    num_answered += 1

    await asyncio.gather(*(one_client() for _ in range(NUM_CLIENTS)))
    return num_answered


@pytest.mark.parametrize("number", [200, in_soak(2000)])
def test_every_answer_is_its_answer_alone_and_nothing_is_left(model, tmp_path, number):
    rng = random.Random(number)
    requests = [random_body(rng) for _ in range(number // 5)]
    # a pool of a few requests, so that many wait, lose their pages and are computed again
    with ServerProcess(model, "--kv-cache-memory", "256KiB", *EXACT, folder=tmp_path) as server:
        expected = [texts_of(post(server, path, **body).json()) for path, body in requests]
        num_answered = asyncio.run(ask_all(server.url, number, requests, expected, rng))
        server.wait_until_idle()
        before = resident_bytes(server.pid), resident_bytes(server.engine_pid)
        num_answered += asyncio.run(ask_all(server.url, number, requests, expected, rng))
        server.wait_until_idle()
        after = resident_bytes(server.pid), resident_bytes(server.engine_pid)
        assert num_answered > number
        assert server.metric("vllm:num_preemptions_total") > 0
        for old, new in zip(before, after, strict=True):
            assert new - old < 20e6, (before, after)


# ---- anything


def try_anything(operation, mode, num_examples, number):
    """Send requests that the document allows, or just does not; none may be an error of the server."""

    @seed(number)
    @settings(
        max_examples=num_examples,
        deadline=None,
        database=None,
        phases=[Phase.generate, Phase.shrink],
        suppress_health_check=list(HealthCheck),
    )
    @given(case=operation.as_strategy(generation_mode=mode))
    def answers(case):
        if isinstance(case.body, dict) and isinstance(case.body.get("model"), str):
            case.body["model"] = "tiny"  # else most end with 404
        answer = case.call(timeout=30)
        assert answer.status_code < 500, answer.text

    answers()


@pytest.mark.parametrize("seconds", [60, in_soak(600)])
def test_whatever_the_document_allows_is_no_error_of_the_server(model, tmp_path, seconds):
    end, number = time.monotonic() + seconds, 0
    with ServerProcess(model, "--served-model-name", "tiny", folder=tmp_path) as server:
        schema = schemathesis.openapi.from_url(f"{server.url}/openapi.json")
        operations = [result.ok() for result in schema.get_all_operations()]
        assert {operation.path for operation in operations} >= {"/v1/completions", CHAT, "/tokenize", "/health"}
        while number == 0 or time.monotonic() < end:
            for operation in operations:
                try_anything(operation, GenerationMode.POSITIVE, 40, number)
                if operation.method == "post":
                    try_anything(operation, GenerationMode.NEGATIVE, 20, number)
            number += 1
        server.wait_until_idle()
