"""Two replicas behind Ray Serve on a cluster of two nodes: the openai client cannot tell them from one server."""

import itertools
import os
import signal
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import httpx
import openai
import pytest
from prometheus_client.parser import text_string_to_metric_families
from tiny_models import tiny_llama
from toy_worker import is_running

from girih import LLM, SamplingParams

pytestmark = pytest.mark.xdist_group("ray")

NAME = "girih-replicas-test"
KEYS = ("first-key", "second-key")
MAX_SEQUENCES = 4 + 4  # running and waiting, of each replica
TIMEOUT_S = 60


class Service(NamedTuple):
    """What the tests talk to."""

    url: str
    directory: Path

    def client(self, key=KEYS[0]):
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key=key, max_retries=0, timeout=TIMEOUT_S)

    def get(self, path):
        return httpx.get(self.url + path, headers={"Authorization": f"Bearer {KEYS[0]}"}, timeout=TIMEOUT_S)

    def samples(self, name, **labels):
        """Return the values of a metric by replica."""
        return {
            sample.labels["engine"]: sample.value
            for family in text_string_to_metric_families(self.get("/metrics").text)
            for sample in family.samples
            if sample.name == name and labels.items() <= sample.labels.items()
        }

    def num_running(self):
        return sum(self.samples("vllm:num_requests_running").values())


@pytest.fixture(scope="module")
def service(ray_cluster, tmp_path_factory):
    from ray import serve

    from girih.server.replicas import build

    directory = tiny_llama(tmp_path_factory.mktemp("replicas"), max_position_embeddings=8192)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    serve.start(http_options={"host": "127.0.0.1", "port": port})
    args = {
        "model": str(directory), "served_model_name": "tiny", "num_replicas": 2, "api_key": list(KEYS),
        "dtype": "float32", "max_model_len": 8000, "kv_cache_memory": "16MiB", "max_num_seqs": 4, "max_waiting": 4,
    }  # fmt: skip
    serve.run(build(args), name=NAME)
    processes = replicas()
    it = Service(f"http://127.0.0.1:{port}", directory)
    wait_until(lambda: len(it.samples("girih:steps_total")) == 2)
    try:
        wait_until_followed(it)
        yield it
    finally:
        processes |= replicas()
        serve.shutdown()
    assert len(processes) >= 2
    wait_until(lambda: not any(is_running(pid) for pair in processes.items() for pid in pair))


def wait_until_followed(service):
    """Wait until the router hears of what both replicas have, so that two prompts find theirs again out of turn."""
    client, seeds = service.client(), itertools.count(1000)

    def find_theirs():
        first, second = next(seeds), next(seeds)
        return all([cached_tokens(complete(client, prompt_of(seed))) for seed in (first, second, second, first)][2:])

    wait_until(find_theirs)


def replicas():
    """Return the process of each replica -> that of its engine."""
    found, parents = {}, {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            command = (folder / "cmdline").read_text()
            parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
        except (OSError, ValueError):
            continue
        if command.startswith(f"ray::ServeReplica:{NAME}:Replica"):
            found[int(folder.name)] = 0
        elif "girih-engine" in command:
            parents[int(folder.name)] = parent
    return found | {parent: engine for engine, parent in parents.items() if parent in found}


def wait_until(is_so):
    deadline = time.monotonic() + TIMEOUT_S
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def prompt_of(seed, num_tokens=96):
    return [(seed * i * i + 5 * i + seed) % 300 + 3 for i in range(num_tokens)]


def complete(client, prompt, max_tokens=4, **options):
    extra = {"ignore_eos": True, **options.pop("extra_body", {})}
    return client.completions.create(
        model="tiny", prompt=prompt, max_tokens=max_tokens, temperature=0, extra_body=extra, **options
    )


def cached_tokens(completion):
    return completion.usage.prompt_tokens_details.cached_tokens


def test_answers_whole_and_streamed_are_those_of_the_engine_alone(service):
    prompts = [prompt_of(2, 20), prompt_of(3, 7), prompt_of(4, 40)]
    with LLM(str(service.directory), dtype="float32", max_model_len=256, kv_cache_memory="1MiB") as llm:
        outputs = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=12, ignore_eos=True))
    expected = [output.outputs[0].text for output in outputs]
    client = service.client()
    for prompt, text in zip(prompts, expected, strict=True):
        assert complete(client, prompt, 12).choices[0].text == text
        chunks = list(complete(client, prompt, 12, stream=True, stream_options={"include_usage": True}))
        assert "".join(chunk.choices[0].text for chunk in chunks[:-1]) == text
        assert chunks[-1].usage.completion_tokens == 12
    assert [choice.text for choice in complete(client, prompts, 12).choices] == expected
    chat = {"model": "tiny", "messages": [{"role": "user", "content": "a page"}], "max_tokens": 5, "temperature": 0}
    whole = client.chat.completions.create(**chat)
    parts = list(client.chat.completions.create(**chat, stream=True))
    assert "".join(part.choices[0].delta.content or "" for part in parts) == whole.choices[0].message.content


def test_requests_follow_their_prefix_and_take_turns_without_one(service):
    client = service.client()
    before = service.samples("vllm:prefix_cache_queries_total")
    for turn in range(4):
        for seed in (11, 12, 13, 14):  # the first turn spreads them over both
            assert cached_tokens(complete(client, [*prompt_of(seed), 5 + turn])) == (96 if turn else 0)
    looked_up = service.samples("vllm:prefix_cache_queries_total")
    assert [looked_up[engine] - before[engine] for engine in looked_up] == [8 * 97, 8 * 97]
    chat = {"model": "tiny", "max_tokens": 2}
    messages = [{"role": "user", "content": "the quick brown fox jumps over the lazy dog and so on"}]
    first = client.chat.completions.create(messages=messages, **chat)
    messages += [{"role": "assistant", "content": "yes"}, {"role": "user", "content": "and then?"}]
    for _ in range(3):
        second = client.chat.completions.create(messages=messages, **chat)
        assert cached_tokens(second) >= first.usage.prompt_tokens // 16 * 16 > 0


def test_a_key_finds_its_own_prefixes_on_the_replica_that_has_them_and_no_others(service):
    clients = [service.client(key) for key in KEYS]
    for client in clients:
        assert [cached_tokens(complete(client, [*prompt_of(21), turn])) for turn in range(3, 6)] == [0, 96, 96]
        salted = [complete(client, [*prompt_of(21), 9], extra_body={"cache_salt": "mine"}) for _ in range(2)]
        assert [cached_tokens(completion) for completion in salted] == [0, 96]
    with pytest.raises(openai.AuthenticationError):
        complete(service.client("wrong"), [5])
    assert httpx.get(f"{service.url}/metrics").status_code == 401
    assert httpx.get(f"{service.url}/health").json() == {"status": "ok"}


def test_errors_and_ids_are_those_of_one_server(service):
    client = service.client()
    with pytest.raises(openai.BadRequestError, match="nope: Girih does not support this field"):
        complete(client, [5], extra_body={"nope": 1})
    with pytest.raises(openai.NotFoundError, match="the model 'other' is not served here"):
        client.completions.create(model="other", prompt="x")
    with pytest.raises(openai.BadRequestError, match="longest request"):
        complete(client, [5] * 7990, 20)
    with pytest.raises(openai.BadRequestError, match="not valid JSON"):
        client.post("/completions", body=None, content=b"{", cast_to=object)
    assert [model.id for model in client.models.list()] == ["tiny"]
    answer = client.completions.with_raw_response.create(
        model="tiny", prompt=[5], max_tokens=1, extra_headers={"X-Request-Id": "mine-1"}
    )
    assert answer.headers["x-request-id"] == "mine-1"
    assert service.get("/").status_code == 404


def test_when_a_client_goes_its_pages_are_free(service):
    aborted = sum(service.samples("vllm:request_success_total", finished_reason="abort").values())
    stream = complete(service.client(), prompt_of(31), 7000, stream=True)
    next(iter(stream))
    assert service.num_running() == 1
    stream.close()
    wait_until(lambda: service.num_running() == 0)
    impatient = service.client().with_options(timeout=0.5)
    with pytest.raises(openai.APITimeoutError):
        complete(impatient, prompt_of(32), 7000)
    wait_until(lambda: service.num_running() == 0)
    assert sum(service.samples("vllm:request_success_total", finished_reason="abort").values()) == aborted + 2


def test_requests_that_come_together_are_spread_evenly(service):
    client = service.client()
    with ThreadPoolExecutor() as pool:
        streams = list(pool.map(lambda seed: complete(client, prompt_of(seed), 7000, stream=True), range(71, 77)))
    try:
        assert list(service.samples("vllm:num_requests_running").values()) == [3, 3]
    finally:
        for stream in streams:
            stream.close()
    wait_until(lambda: service.num_running() == 0)


def test_too_much_work_is_refused_when_all_replicas_are_full(service):
    client = service.client()
    streams = [complete(client, prompt_of(41), 7000, stream=True, n=MAX_SEQUENCES) for _ in range(2)]
    try:
        assert all(next(iter(stream)) for stream in streams)
        with pytest.raises(openai.RateLimitError) as error:
            complete(client, [5])
        assert error.value.response.headers["retry-after"] == "1"
    finally:
        for stream in streams:
            stream.close()
    wait_until(lambda: service.num_running() == 0)
    complete(client, [5])


def test_when_a_replica_is_killed_its_stream_ends_with_an_error_and_the_rest_is_done_by_others(service):
    client, prompts = service.client(), [prompt_of(51), prompt_of(52)]
    streams = [iter(complete(client, prompt, 2500, stream=True)) for prompt in prompts]
    assert all(next(stream) for stream in streams)
    with ThreadPoolExecutor() as pool:
        whole = [pool.submit(complete, client, prompt, 2000) for prompt in prompts]
        wait_until(lambda: service.num_running() == 4)
        victim = next(iter(replicas()))
        os.kill(victim, signal.SIGKILL)
        ends = [pool.submit(lambda stream=stream: len(list(stream))) for stream in streams]
        assert [it.result().usage.completion_tokens for it in whole] == [2000, 2000]
        errors = [it.exception() for it in ends]
    assert sorted(error is None for error in errors) == [False, True]
    assert "the replica that worked on the request was lost" in str(next(filter(None, errors)))
    assert service.get("/health").status_code == 200
    wait_until(lambda: len(replicas()) == 2 and 0 not in replicas().values() and victim not in replicas())


def test_when_every_engine_dies_requests_wait_for_new_replicas(service):
    wait_until(lambda: len(service.samples("girih:steps_total")) == 2)
    before = replicas()
    with ThreadPoolExecutor() as pool:
        waiting = [pool.submit(complete, service.client(), prompt_of(seed), 1500) for seed in (61, 62)]
        wait_until(lambda: service.num_running() == 2)
        for engine in before.values():
            os.kill(engine, signal.SIGKILL)
        wait_until(lambda: service.get("/health").status_code == 503)
        assert [it.result().usage.completion_tokens for it in waiting] == [1500, 1500]
    wait_until(lambda: service.get("/health").status_code == 200)
    assert not any(is_running(pid) for pair in before.items() for pid in pair)
    assert cached_tokens(complete(service.client(), [*prompt_of(61), 5])) in (0, 96)
