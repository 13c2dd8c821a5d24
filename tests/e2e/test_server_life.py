"""How `girih serve` begins and ends: signals, an engine that dies or hangs, a taken port. Nobody waits for ever."""

import os
import signal
import socket
import time

import httpx
import pytest
from server_clients import connect, in_thread, post, read_all, request_bytes, stream, text_of
from server_process import ServerProcess, children, poll
from tiny_models import tiny_llama
from toy_worker import is_running

pytestmark = pytest.mark.xdist_group("server-life")

LONG = {"prompt": "the dog", "max_tokens": 16000, "temperature": 0, "ignore_eos": True}
ROOM = ("--kv-cache-memory", "64MiB")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A model whose longest request takes longer than any test here."""
    return tiny_llama(tmp_path_factory.mktemp("model"), max_position_embeddings=32768)


def begin_streams(server, number, **body):
    """Start streams in threads; return futures of (text, last event) when each has brought something."""
    begun = []

    def run():
        with stream(server, **{**LONG, **body}) as events:
            first = next(events)
            begun.append(first)
            text, last = text_of(events)
            return first["choices"][0]["text"] + text, last

    futures = [in_thread(run) for _ in range(number)]
    poll(lambda: len(begun) == number, what="all streams have begun")
    return futures


def refuses_connections(server):
    with socket.socket() as connection:
        return connection.connect_ex(("127.0.0.1", server.port)) != 0


def test_sigterm_lets_requests_finish_and_takes_no_new_ones(model, tmp_path):
    with ServerProcess(model, *ROOM, folder=tmp_path) as server:
        alone = post(server, **{**LONG, "max_tokens": 1500}).json()["choices"][0]["text"]
        idle = connect(server)
        whole = in_thread(post, server, **{**LONG, "max_tokens": 1500})
        streamed = begin_streams(server, 2, max_tokens=1500)
        server.signal(signal.SIGTERM)
        poll(lambda: refuses_connections(server))
        assert [future.result(30) for future in streamed] == [(alone, "[DONE]")] * 2
        assert whole.result(30).json()["choices"][0]["text"] == alone
        assert read_all(idle) == b""
        assert server.wait() == 0


def test_a_second_signal_ends_everything_with_an_error_also_clients_that_never_read(model, tmp_path):
    with ServerProcess(model, *ROOM, folder=tmp_path) as server:
        deaf = connect(server, request_bytes(**LONG, stream=True), receive_bytes=1024)
        half = connect(server, request_bytes(**LONG)[:-5])
        streamed = begin_streams(server, 2)
        whole = in_thread(post, server, **LONG)
        poll(lambda: server.metric("vllm:num_requests_running") == 4)
        server.signal(signal.SIGTERM)
        poll(lambda: refuses_connections(server))
        server.signal(signal.SIGINT)
        start = time.monotonic()
        for future in streamed:
            _, last = future.result(10)
            assert last["error"]["message"] == "the server ends"
        assert whole.result(10).status_code == 503
        assert server.wait() == 3
        assert time.monotonic() - start < 5
        deaf.close()
        half.close()


def test_what_does_not_finish_in_time_after_sigterm_is_ended(model, tmp_path):
    with ServerProcess(model, *ROOM, "--shutdown-timeout", "0.5", folder=tmp_path) as server:
        (streamed,) = begin_streams(server, 1)
        server.signal(signal.SIGTERM)
        assert streamed.result(10)[1]["error"]["type"] == "server_error"
        assert server.wait(10) == 3


def test_kill_9_of_the_engine_answers_everybody_and_ends_the_server(model, tmp_path):
    segments = set(os.listdir("/dev/shm"))
    with ServerProcess(model, *ROOM, folder=tmp_path) as server:
        streamed = begin_streams(server, 4)
        whole = [in_thread(post, server, **LONG, n=2) for _ in range(8)]  # some of them wait
        poll(lambda: server.metric("vllm:num_requests_waiting") > 0)
        deaf = connect(server, request_bytes(**LONG, stream=True), receive_bytes=1024)
        start = time.monotonic()
        os.kill(server.engine_pid, signal.SIGKILL)
        for future in streamed:
            _, last = future.result(10)
            assert "the engine's process was killed by SIGKILL" in last["error"]["message"]
        for future in whole:
            answer = future.result(10)
            assert answer.status_code == 503
            assert "killed by SIGKILL" in answer.json()["error"]["message"]
        assert time.monotonic() - start < 5
        assert server.wait(10) == 1
        deaf.close()
    assert set(os.listdir("/dev/shm")) <= segments


def test_health_is_503_while_the_engine_hangs_and_the_engine_ends_with_the_server(model, tmp_path):
    with ServerProcess(model, *ROOM, "--health-timeout", "0.5", folder=tmp_path) as server:
        engine = server.engine_pid
        time.sleep(0.6)
        assert server.health() == 200  # idle is not hung
        os.kill(engine, signal.SIGSTOP)
        answer = in_thread(post, server, **{**LONG, "max_tokens": 5})
        poll(lambda: server.health() == 503, what="health is 503")
        hung = httpx.get(f"{server.url}/health").json()["error"]
        assert hung["code"] == "engine_stalled"
        assert post(server, **{**LONG, "max_tokens": 1}).status_code == 503  # nothing piles up before it
        os.kill(engine, signal.SIGCONT)
        assert answer.result(10).json()["usage"]["completion_tokens"] == 5
        poll(lambda: server.health() == 200, what="health is 200 again")
        begin_streams(server, 2)
        server.process.kill()
        server.wait()
        poll(lambda: not is_running(engine), 5, "the engine has ended")


def run_to_the_end(model, tmp_path, *options):
    """Start a server that cannot live; return its exit code and log."""
    with ServerProcess(model, *options, folder=tmp_path, wait=False) as server:
        return server.wait(60), server.log


def test_a_port_that_is_taken_is_one_line_at_once(model, tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        code, log = run_to_the_end(model, tmp_path, "--port", str(port))
    assert code == 2
    assert log.count("\n") == 1
    assert log.startswith(f"girih: cannot listen on 127.0.0.1 port {port}: ")


def test_a_model_that_does_not_exist_and_options_that_cannot_be_are_one_line(model, tmp_path):
    for directory, options, text in (
        (tmp_path / "nothing", (), "nothing"),
        (model, ("--max-model-len", "100000"), "32768"),
        (model, ("--api-key", ""), "API key"),
        (model, ("--health-timeout", "nan"), "--health-timeout nan must be"),
    ):
        code, log = run_to_the_end(directory, tmp_path, *options)
        assert code == 2, log
        assert text in log.splitlines()[-1]
        assert log.splitlines()[-1].startswith("girih: ")


def test_sigterm_while_the_engine_starts_ends_both(model, tmp_path):
    with ServerProcess(model, folder=tmp_path, wait=False) as server:
        engine = poll(lambda: children(server.pid), 60, "the engine's process")
        server.signal(signal.SIGTERM)
        assert server.wait(10) == 3
        poll(lambda: not any(map(is_running, engine)), 5, "the engine has ended")
