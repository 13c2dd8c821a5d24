"""Clients that leave, never read, come too many at once, or have keys: what they hold is given back, and bounded."""

import base64
import time

import httpx
import openai
import pytest
from server_clients import connect, in_thread, post, request_bytes
from server_process import ServerProcess, poll, resident_bytes
from tiny_models import tiny_llama

pytestmark = pytest.mark.xdist_group("server-clients")

LONG = {"prompt": "the dog", "max_tokens": 32000, "temperature": 0, "ignore_eos": True}
CHAT = "/v1/chat/completions"
KEYS = ("alpha", "beta")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A model whose longest request takes longer than any test here."""
    return tiny_llama(tmp_path_factory.mktemp("model"), max_position_embeddings=32768)


@pytest.fixture(scope="module")
def server(model, tmp_path_factory):
    options = ("--kv-cache-memory", "64MiB", "--max-num-seqs", "4", "--max-waiting", "6")
    with ServerProcess(model, *options, folder=tmp_path_factory.mktemp("log")) as server:
        yield server


@pytest.fixture(autouse=True)
def nothing_is_held(server):
    yield
    server.wait_until_idle()


def running(server):
    return server.metric("vllm:num_requests_running")


def waiting(server):
    return server.metric("vllm:num_requests_waiting")


# ---- clients that leave


@pytest.mark.parametrize("is_streamed", [False, True])
@pytest.mark.parametrize(
    ("path", "fields", "num_sequences"),
    [
        ("/v1/completions", {"n": 1}, 1),
        ("/v1/completions", {"n": 3}, 3),  # case 116
        ("/v1/completions", {"prompt": ["the dog", "the fox"], "n": 2}, 4),
        ("/v1/completions", {"n": 8}, 4),  # more than run at once
        (CHAT, {"messages": [{"role": "user", "content": "the dog"}], "prompt": None}, 1),
    ],
    ids=["one", "three", "two prompts", "waiting", "chat"],
)
def test_a_client_that_leaves_frees_its_pages_within_a_few_steps(server, path, fields, num_sequences, is_streamed):
    connection = connect(server, request_bytes(path, **{**LONG, **fields}, stream=is_streamed))
    poll(lambda: running(server) == num_sequences, what="it runs")
    assert server.pages_in_use() > 0
    if is_streamed:
        assert connection.recv(1 << 16).startswith(b"HTTP/1.1 200 OK")
    connection.close()
    poll(lambda: server.pages_in_use() == 0, 2, "the pages are free")
    steps = server.metric("girih:steps_total")
    time.sleep(0.05)
    assert server.metric("girih:steps_total") == steps  # nothing goes on


def test_a_client_that_leaves_while_it_waits_is_forgotten(server):
    ahead = [connect(server, request_bytes(**LONG)) for _ in range(4)]
    poll(lambda: running(server) == 4)
    behind = [connect(server, request_bytes(**LONG, stream=True)) for _ in range(5)]
    poll(lambda: waiting(server) == 5)
    for connection in behind:
        connection.close()
    poll(lambda: waiting(server) == 0, 2, "nobody waits")
    assert running(server) == 4
    for connection in ahead:
        connection.close()


def test_a_client_that_leaves_in_the_middle_of_its_body_is_forgotten(server):
    whole = request_bytes(**LONG)
    for cut in (10, len(whole) - 1):
        connect(server, whole[:cut]).close()
    assert running(server) == 0


def test_ids_that_clients_choose_may_be_the_same(server):  # case 70
    expected = post(server, **{**LONG, "max_tokens": 1000}).json()["choices"]

    def ask():
        body = {**LONG, "max_tokens": 1000}
        answer = httpx.post(f"{server.url}/v1/completions", json=body, headers={"X-Request-Id": "7"}, timeout=60)
        return answer.json()

    leaver = connect(server, request_bytes(**LONG, headers="X-Request-Id: 7\r\n"))
    poll(lambda: running(server) == 1)
    answers = [in_thread(ask) for _ in range(3)]
    time.sleep(0.1)
    leaver.close()
    found = [answer.result(30) for answer in answers]
    assert [answer["choices"] for answer in found] == [expected] * 3
    assert len({answer["id"] for answer in found}) == 3


def test_clients_that_never_read_hold_neither_memory_nor_others(server):
    before = resident_bytes(server.pid)
    alone = post(server, **{**LONG, "max_tokens": 100}).json()["choices"]
    body = request_bytes(**LONG, stream=True, logprobs=5)
    deaf = [connect(server, body, receive_bytes=1024) for _ in range(3)]
    poll(lambda: running(server) == 3)
    assert post(server, **{**LONG, "max_tokens": 100}).json()["choices"] == alone
    time.sleep(1.0)
    assert running(server) == 3  # they go on, to their end
    assert resident_bytes(server.pid) - before < 60e6
    for connection in deaf:
        connection.close()


# ---- too many


def test_a_full_queue_is_429_with_a_time_to_come_back(server):
    held = [connect(server, request_bytes(**LONG, n=2)) for _ in range(5)]  # 4 sequences run and 6 wait
    poll(lambda: (running(server), waiting(server)) == (4, 6))
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        for is_streamed in (False, True):
            with pytest.raises(openai.RateLimitError, match="--max-waiting") as error:
                client.completions.create(model=None, prompt="x", stream=is_streamed)
            assert int(error.value.response.headers["retry-after"]) >= 1
    assert post(server, prompt="x", n=11).status_code == 400  # so many never fit
    assert server.health() == 200
    for connection in held:
        connection.close()
    poll(lambda: waiting(server) == 0)
    assert post(server, prompt="x").status_code == 200


def test_a_short_request_does_not_wait_for_a_long_prompt(server):  # case 86
    long = in_thread(post, server, prompt=[5 + i % 300 for i in range(20_000)], max_tokens=1)
    poll(lambda: running(server) == 1)
    assert post(server, prompt="x", max_tokens=1).status_code == 200
    assert not long.done()
    assert long.result(60).json()["usage"]["prompt_tokens"] == 20_000


# ---- a pool that is smaller than what is asked of it


def test_what_the_pool_cannot_hold_is_refused_at_once_and_the_rest_is_served(model, tmp_path):
    """Cases 9, 10, 78, 83, 89."""
    options = ("--kv-cache-memory", "256KiB", "--max-num-seqs", "8")
    with ServerProcess(model, *options, folder=tmp_path) as small:
        longest = httpx.get(f"{small.url}/v1/models").json()["data"][0]["max_model_len"]
        assert 256 < longest < 2048
        too_long = post(small, prompt=[5] * (longest + 400), max_tokens=1)
        assert too_long.status_code == 400
        assert str(longest) in too_long.json()["error"]["message"]
        full = {"prompt": [6] * (longest - 100), "max_tokens": 100, "temperature": 0, "ignore_eos": True}
        alone = post(small, **full).json()
        assert (alone["usage"]["total_tokens"], alone["choices"][0]["finish_reason"]) == (longest, "length")
        many = [in_thread(post, small, **full) for _ in range(6)]  # each of them fills the pool
        assert [answer.result(60).json()["choices"] for answer in many] == [alone["choices"]] * 6
        small.wait_until_idle()


# ---- keys


@pytest.fixture(scope="module")
def locked(model, tmp_path_factory):
    options = ("--api-key", KEYS[0], "--api-key", KEYS[1])
    with ServerProcess(model, *options, folder=tmp_path_factory.mktemp("log")) as server:
        yield server


@pytest.mark.parametrize(
    "authorization",
    [
        None,
        "",
        "Bearer",
        "Bearer alph",
        "Bearer alphaa",
        "bearer",
        "alpha",
        "Basic !",
        "Basic YQ==",
        "Bearer \xe4",
    ],
)
@pytest.mark.parametrize("path", ["/v1/models", "/metrics", "/v1/completions", "/nowhere"])
def test_without_a_key_nothing_is_shown(locked, path, authorization):
    headers = {} if authorization is None else {"Authorization": authorization.encode("latin-1")}
    answer = httpx.get(locked.url + path, headers=headers)
    assert answer.status_code == 401
    assert answer.json()["error"]["code"] == "invalid_api_key"
    assert answer.headers["www-authenticate"].split()[0] == ("Basic" if path == "/metrics" else "Bearer")


def test_the_client_is_told_that_its_key_is_wrong(locked):
    with (
        openai.OpenAI(base_url=f"{locked.url}/v1", api_key="wrong", max_retries=0) as client,
        pytest.raises(openai.AuthenticationError),
    ):
        client.models.list()


@pytest.mark.parametrize("key", KEYS)
def test_any_of_the_keys_opens_as_bearer_or_as_a_browsers_password(locked, key):
    basic = base64.b64encode(f"me:{key}".encode()).decode()
    for authorization in (f"Bearer {key}", f"bearer {key}", f"Basic {basic}"):
        assert httpx.get(f"{locked.url}/metrics", headers={"Authorization": authorization}).status_code == 200


@pytest.mark.parametrize("path", ["/health", "/version", "/docs", "/openapi.json"])
def test_some_paths_need_no_key(locked, path):
    assert httpx.get(locked.url + path).status_code == 200


def test_each_key_has_a_cache_of_its_own(locked):
    prompt = [5 + i % 200 for i in range(200)]

    def cached(key, **fields):
        answer = post(locked, prompt=prompt, max_tokens=1, key=key, **fields).json()
        return answer["usage"]["prompt_tokens_details"]["cached_tokens"]

    assert [cached("alpha"), cached("alpha"), cached("beta"), cached("beta")] == [0, 192, 0, 192]
    assert [cached("alpha", cache_salt="a"), cached("alpha", cache_salt="a"), cached("beta", cache_salt="a")] == [
        0,
        192,
        0,
    ]


def test_keys_are_not_in_the_log(locked):
    httpx.get(f"{locked.url}/metrics", headers={"Authorization": "Bearer alpha"})
    assert not any(key in locked.log for key in KEYS)


def test_the_dashboard_may_be_public(model, tmp_path):
    environment = {"GIRIH_API_KEY": "alpha beta"}
    with ServerProcess(model, "--public-dashboard", folder=tmp_path, environment=environment) as server:
        assert httpx.get(f"{server.url}/metrics").status_code == 200
        assert httpx.get(f"{server.url}/v1/models").status_code == 401
        assert httpx.get(f"{server.url}/v1/models", headers={"Authorization": "Bearer beta"}).status_code == 200
