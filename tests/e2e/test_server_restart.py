"""`girih serve --restart-engine`: when the engine's process dies, nobody who was shown nothing is told of it."""

import os
import random
import signal
import time

import pytest
from server_clients import in_thread, post, stream, text_of
from server_process import ServerProcess, children, poll
from tiny_models import tiny_llama

pytestmark = pytest.mark.xdist_group("server-restart")

LONG = {"prompt": "the dog", "max_tokens": 16000, "temperature": 0, "ignore_eos": True}
EXACT = ("--quantization", "int8")  # a row's sums are exact in any company
OPTIONS = ("--restart-engine", "--kv-cache-memory", "64MiB", "--max-num-seqs", "8", *EXACT)


def start(directory, *options):
    model = tiny_llama(directory, max_position_embeddings=32768)
    return model, ServerProcess(model, *OPTIONS, *options, folder=directory)


def kill_engine(server):
    """Kill the engine, and wait until the server has noticed."""
    number = server.metric("girih:engine_restarts_total")
    os.kill(server.engine_pid, signal.SIGKILL)
    poll(lambda: server.health() == 503, what="health is 503")
    return number


def test_what_was_shown_to_nobody_is_computed_again(tmp_path):
    _, server = start(tmp_path)
    with server:
        bodies = [{"prompt": f"the dog {i}", "n": 1 + i % 3, "max_tokens": 1500, "seed": i} for i in range(10)]
        bodies[3] |= {"logprobs": 2, "stop": "zzz"}
        alone = [post(server, **body).json()["choices"] for body in bodies]

        shown = in_thread(lambda: read_stream(server, **LONG))
        poll(lambda: server.metric("vllm:generation_tokens_total") > 5)
        whole = [in_thread(post, server, **body) for body in bodies]
        poll(lambda: server.metric("vllm:num_requests_waiting") > 0, what="some run, some wait")
        old = server.engine_pid
        number = kill_engine(server)
        late = [in_thread(post, server, **body) for body in bodies[:3]]  # while there is no engine
        late_stream = in_thread(lambda: read_stream(server, **{**LONG, "max_tokens": 20}))

        text, last = shown.result(10)
        assert text
        assert "killed by SIGKILL" in last["error"]["message"]
        assert [answer.result(60).json()["choices"] for answer in whole] == alone
        assert [answer.result(60).json()["choices"] for answer in late] == alone[:3]
        assert late_stream.result(60)[1] == "[DONE]"
        assert server.health() == 200
        assert server.metric("girih:engine_restarts_total") == number + 1
        assert server.engine_pid != old
        server.wait_until_idle()


def read_stream(server, **body):
    with stream(server, **body) as events:
        return text_of(events)


def test_an_engine_that_cannot_start_again_ends_the_server(tmp_path):
    model, server = start(tmp_path)
    with server:
        pending = in_thread(post, server, **LONG)
        poll(lambda: server.metric("vllm:num_requests_running") == 1)
        (model / "model.safetensors").unlink()
        os.kill(server.engine_pid, signal.SIGKILL)
        answer = pending.result(60)
        assert answer.status_code == 503
        assert "model.safetensors" in answer.json()["error"]["message"]
        assert server.wait(30) == 1


def test_signals_end_a_server_that_waits_for_its_engine(tmp_path):
    _, server = start(tmp_path)
    with server:
        pending = in_thread(post, server, **LONG)
        poll(lambda: server.metric("vllm:num_requests_running") == 1)
        kill_engine(server)
        poll(lambda: children(server.pid), what="another engine's process")
        server.signal(signal.SIGTERM)
        poll(lambda: "SIGTERM" in server.log)
        server.signal(signal.SIGTERM)
        assert pending.result(10).status_code == 503
        assert server.wait(10) == 3


@pytest.mark.soak
def test_a_request_that_kills_every_engine_in_its_first_step_ends(tmp_path):
    _, server = start(tmp_path, "--max-num-batched-tokens", "32000")
    with server:
        pending = in_thread(post, server, prompt=[5 + i % 300 for i in range(31_000)], max_tokens=1)  # seconds long
        num_deaths = 0
        while not pending.done():
            poll(lambda: pending.done() or server.health() == 200, 60)
            time.sleep(0.3)  # it is in the middle of its first step
            for engine in children(server.pid):
                os.kill(engine, signal.SIGKILL)
            num_deaths += 1
            assert num_deaths < 8
            poll(lambda: pending.done() or server.health() == 503)
        assert pending.result().status_code == 503
        assert "killed by SIGKILL" in pending.result().json()["error"]["message"]
        poll(lambda: server.health() == 200, 60, "another engine is up")
        assert post(server, prompt="x").status_code == 200


@pytest.mark.parametrize("num_rounds", [2, pytest.param(20, marks=pytest.mark.soak)])
def test_rounds_of_kills_under_load_lose_nothing(tmp_path, num_rounds):
    _, server = start(tmp_path)
    rng = random.Random(num_rounds)
    with server:
        bodies = [
            {"prompt": f"the {i}", "max_tokens": 5 + 60 * (i % 8), "seed": i, "n": 1 + i % 2, "stream": False}
            for i in range(24)
        ]
        alone = [post(server, **body).json()["choices"] for body in bodies]
        for number in range(num_rounds):
            answers = [in_thread(post, server, **body) for body in bodies]
            time.sleep(rng.uniform(0.0, 0.5))
            os.kill(server.engine_pid, signal.SIGKILL)
            found = [answer.result(120) for answer in answers]
            assert [answer.status_code for answer in found] == [200] * len(bodies)
            assert [answer.json()["choices"] for answer in found] == alone
            poll(lambda: server.metric("girih:engine_restarts_total") == number + 1, 60, "another engine is up")  # noqa: B023
        server.wait_until_idle()
