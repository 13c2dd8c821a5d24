"""Bad input over HTTP: a 4xx that says why, and the next request works. Numbers of cases are those of docs/cases.md."""

import json

import httpx
import pytest
from server_clients import connect, post, read_all, request_bytes, stream, text_of
from server_process import ServerProcess, resident_bytes
from tiny_models import tiny_llama

pytestmark = pytest.mark.xdist_group("server-inputs")

MAX_LEN = 64
LIMITS = ("--max-body-bytes", "1000000", "--max-n", "4", "--max-prompts", "3", "--max-logprobs", "5")
CHAT = "/v1/chat/completions"
GREEDY = {"temperature": 0, "ignore_eos": True}


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    model = tiny_llama(tmp_path_factory.mktemp("model"))
    options = ("--max-model-len", str(MAX_LEN), *LIMITS)
    with ServerProcess(model, *options, folder=tmp_path_factory.mktemp("log")) as server:
        yield server
        server.wait_until_idle()


@pytest.fixture(autouse=True)
def next_request_works(server):
    yield
    assert post(server, prompt="the dog", max_tokens=2).status_code == 200


def refusal(server, path="/v1/completions", **body):
    """Return the error that a body gets."""
    answer = post(server, path, **body)
    assert answer.status_code == 400, answer.text
    return answer.json()["error"]


def messages(content, **fields):
    return [{"role": "user", "content": content, **fields}]


@pytest.mark.parametrize("prompt", ["", [""], [], [[]], ["a", ""], [[5], []]], ids=lambda value: str(value)[:40])
def test_empty_prompts_are_refused(server, prompt):  # case 108
    assert "empty" in refusal(server, prompt=prompt)["message"]


def test_no_messages_are_refused(server):  # case 108
    assert refusal(server, CHAT, messages=[])["param"] == "messages"


@pytest.mark.parametrize("is_streamed", [False, True])
@pytest.mark.parametrize(
    ("num_prompt", "max_tokens", "num_output"),
    [
        (62, None, 2),
        (62, 1, 1),
        (62, 2, 2),
        (63, None, 1),
        (63, 1, 1),
        (63, 2, 0),
        (64, None, 0),
        (64, 1, 0),
        (65, 2, 0),
    ],
)
def test_prompts_at_the_longest_request(server, num_prompt, max_tokens, num_output, is_streamed):  # case 109
    """Left out, max_tokens is what fits, as in chats."""
    frame = post(server, "/tokenize", messages=messages("")).json()["count"]
    body = {
        "messages": messages("\x01" * (num_prompt - frame)),
        "max_tokens": max_tokens,
        "stream": is_streamed,
        **GREEDY,
    }
    assert post(server, "/tokenize", messages=body["messages"]).json()["count"] == num_prompt
    if num_output == 0:
        error = refusal(server, CHAT, **body)
        assert str(num_prompt) in error["message"]
        assert str(MAX_LEN) in error["message"]
    elif is_streamed:
        with stream(server, CHAT, **body) as events:
            assert list(events)[-2]["choices"][0]["finish_reason"] == "length"
    else:
        answer = post(server, CHAT, **body).json()
        assert (answer["usage"]["completion_tokens"], answer["choices"][0]["finish_reason"]) == (num_output, "length")


@pytest.mark.parametrize("token_id", [320, -1, 2**40, 2**70])
def test_token_ids_outside_the_vocabulary_are_refused(server, token_id):  # case 111
    for fields in ({"stop_token_ids": [token_id], "min_tokens": 1}, {"logit_bias": {str(token_id): 1}}):
        assert str(token_id) in refusal(server, prompt="x", **fields)["message"]
    assert str(token_id) in refusal(server, prompt=[5, token_id])["message"]
    answer = post(server, "/detokenize", tokens=[token_id])
    assert answer.status_code == 400


BAD_FIELDS = [
    ({"temperature": -1}, "temperature"),
    ({"temperature": "hot"}, "temperature"),
    ({"top_p": 0}, "top_p"),
    ({"top_p": 1.1}, "top_p"),
    ({"min_p": 2}, "min_p"),
    ({"top_k": -1}, "top_k"),
    ({"presence_penalty": 1e9}, "presence_penalty"),
    ({"n": 0}, "n=0"),
    ({"n": 5}, "n=5 must be from 1 to 4"),
    ({"n": True}, "n"),
    ({"max_tokens": 0}, "max_tokens=0"),
    ({"max_tokens": -5}, "max_tokens"),
    ({"max_tokens": 2**63}, "max_tokens"),
    ({"max_tokens": 1.5}, "max_tokens"),
    ({"logprobs": 6}, "logprobs=6 must be from 0 to 5"),
    ({"logprobs": -1}, "logprobs"),
    ({"seed": 2**64}, "seed"),
    ({"stop": ["x"] * 65}, "stop"),
    ({"stop": [""]}, "stop"),
    ({"stop": [1]}, "stop"),
    ({"stop_token_ids": [5] * 1025}, "stop_token_ids"),
    ({"stream_options": {"include_usage": True}}, "stream_options"),
    ({"stream": True, "stream_options": {"made_up": 1}}, "stream_options.made_up"),
    ({"cache_salt": "\ud800"}, "cache_salt"),
    ({"priority": "high"}, "priority"),
    ({"min_tokens": -1}, "min_tokens"),
    ({"logit_bias": {"5": 1e9}}, "logit_bias"),
    ({"logit_bias": {"x": 1}}, "logit_bias"),
]


@pytest.mark.parametrize(("fields", "message"), BAD_FIELDS, ids=lambda value: str(value)[:40])
def test_values_out_of_range_are_refused_by_name(server, fields, message):
    assert message in refusal(server, prompt="x", **fields)["message"]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"top_logprobs": 2}, "top_logprobs is only for logprobs: true"),
        ({"logprobs": True, "top_logprobs": 6}, "top_logprobs=6"),
        ({"logprobs": 1}, "logprobs"),
        ({"max_tokens": 2, "max_completion_tokens": 3}, "not both"),
        ({"messages": messages("\ud800")}, "Unicode"),
        ({"messages": [{"role": "root", "content": "x"}]}, "messages.0.role"),
        ({"messages": [*messages("x"), {"role": "user", "content": "x", "made_up": 1}]}, "messages.1.made_up"),
        ({"messages": "hello"}, "messages"),
        ({"messages": [None]}, "messages.0"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_bad_chats_are_refused_by_name(server, fields, message):
    assert message in refusal(server, CHAT, **{"messages": messages("x"), **fields})["message"]


@pytest.mark.parametrize(
    "prompt", [None, 5, True, {}, [None], [True], ["a", 5], [5, "a"], [[5], "a"], [["a"]], [[[5]]], [5.0], "\ud800"]
)
def test_prompts_of_a_wrong_kind_are_refused(server, prompt):
    assert "prompt" in refusal(server, prompt=prompt)["message"]


def test_more_prompts_than_allowed_are_refused(server):
    assert "--max-prompts" in refusal(server, prompt=["x"] * 4)["message"]


# ---- the body as bytes


def post_bytes(server, content, path="/v1/completions", content_type="application/json", **headers):
    headers = {name.replace("_", "-"): value for name, value in headers.items()}
    return httpx.post(
        server.url + path,
        content=content,
        headers={"Content-Type": content_type, **headers},
        timeout=60,
        trust_env=False,
    )


DEEP = "[" * 100_000 + "]" * 100_000
BAD_BODIES = {
    "nothing": b"",
    "null": b"null",
    "list": b"[1]",
    "half": b'{"prompt": "x"',
    "two": b'{"prompt": "x"}{}',
    "nan": b'{"prompt": "x", "temperature": NaN}',
    "infinity": b'{"prompt": "x", "temperature": -Infinity}',
    "too large a float": b'{"prompt": "x", "top_p": 1e999}',
    "digits": b'{"prompt": "x", "seed": ' + b"9" * 10_000 + b"}",
    "deep": DEEP.encode(),
    "deep field": b'{"prompt": "x", "logit_bias": ' + DEEP.encode() + b"}",
    "not utf-8": b'{"prompt": "\xff"}',
    "surrogate field": b'{"prompt": "x", "\\ud800": 1}',
}


@pytest.mark.parametrize("name", BAD_BODIES)
def test_bodies_that_are_no_good_json_are_refused(server, name):
    answer = post_bytes(server, BAD_BODIES[name])
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize("model", ["\ud800", "x" * 100_000, "\0"])
def test_names_of_models_may_be_anything(server, model):
    assert post(server, prompt="x", model=model).status_code == 404


def joined(piece, number):
    return ",".join([piece] * number)


LISTS = {
    "objects": '{"prompt": [' + joined("{}", 300_000) + "]}",
    "fields": '{"prompt": "x", ' + ",".join(f'"{i}": 1' for i in range(80_000)) + "}",
    "messages": '{"messages": [' + joined("1", 400_000) + "]}",
    "stops": '{"prompt": "x", "stop": [' + joined('"q"', 200_000) + "]}",
    "parts": '{"messages": [{"role": "user", "content": [' + joined("1", 400_000) + "]}]}",
    "biases": '{"prompt": "x", "logit_bias": {' + ",".join(f'"{i}": ""' for i in range(80_000)) + "}}",
    "letters": '{"prompt": "' + "a " * 450_000 + '"}',
}


@pytest.mark.parametrize("name", LISTS)
def test_a_million_mistakes_cost_no_more_than_one(server, name):
    assert len(LISTS[name]) < 1_000_000
    before = resident_bytes(server.pid)
    answer = post_bytes(server, LISTS[name], CHAT if name in ("messages", "parts") else "/v1/completions")
    assert answer.status_code == 400
    assert len(answer.text) < 1000
    assert resident_bytes(server.pid) - before < 100e6  # as found: 1.4 GB for a body of this size


@pytest.mark.parametrize("content_type", ["", "text/plain", "application/x-www-form-urlencoded", "multipart/form-data"])
def test_what_a_foreign_page_may_send_unasked_is_refused(server, content_type):
    answer = post_bytes(server, b'{"prompt": "x"}', content_type=content_type)
    assert answer.status_code == 415
    assert "application/json" in answer.json()["error"]["message"]
    asked = httpx.options(server.url + CHAT, headers={"Origin": "http://evil", "Access-Control-Request-Method": "POST"})
    assert asked.status_code == 405
    assert not any(name.startswith("access-control") for name in asked.headers)


def test_json_in_other_encodings_is_read(server):
    assert post_bytes(server, '{"prompt": "naïve"}'.encode("utf-16")).status_code == 200
    assert post_bytes(server, b'{"prompt": "x"}', content_type="Application/JSON; charset=utf-8").status_code == 200


def test_bodies_over_the_limit_are_refused_with_or_without_a_length(server):
    def pieces():
        for _ in range(20):
            yield b" " * 100_000

    for content in (b" " * 1_000_001, pieces()):
        answer = post_bytes(server, content)
        assert answer.status_code == 413
        assert "--max-body-bytes" in answer.json()["error"]["message"]


@pytest.mark.parametrize("method", ["HEAD", "OPTIONS", "PUT", "DELETE", "PATCH", "GET"])
def test_other_methods_are_refused(server, method):
    answer = httpx.request(method, server.url + CHAT)
    assert (answer.status_code, answer.headers["allow"]) == (405, "POST")


@pytest.mark.parametrize("path", ["/v2", "/v1", "/v1/completions/x", "/%2e%2e/etc/passwd", "//v1/models", "/%ff%00"])
def test_unknown_paths_are_not_found(server, path):
    assert httpx.get(server.url + path).status_code == 404


BAD_HEADS = {
    "garbage": b"\x16\x03\x01\x02\x00\r\n\r\n",
    "http2": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    "method": b"FOO / HTTP/1.1\r\n\r\n",
    "length": b"POST /v1/completions HTTP/1.1\r\nContent-Length: -5\r\n\r\n",
    "digits": b"POST /v1/completions HTTP/1.1\r\nContent-Length: " + b"9" * 5000 + b"\r\n\r\n",
    "lengths": b"POST /v1/completions HTTP/1.1\r\nContent-Length: 3\r\nContent-Length: 9\r\n\r\n",
    "smuggled": b"POST /v1/completions HTTP/1.1\r\nTransfer-Encoding: chunked\r\nContent-Length: 9\r\n\r\n",
    "header": b"GET /health HTTP/1.1\r\nX : y\r\n\r\n",
    "folded": b"GET /health HTTP/1.1\r\nX: y\r\n z: a\r\n\r\n",
    "nul": b"GET /health HTTP/1.1\r\nX: \0\r\n\r\n",
}


@pytest.mark.parametrize("name", BAD_HEADS)
def test_bad_heads_are_refused_and_the_connection_ends(server, name):
    with connect(server, BAD_HEADS[name]) as connection:
        assert read_all(connection).startswith(b"HTTP/1.1 400 ")
        assert connection.recv(1) == b""


@pytest.mark.parametrize("begin", [b"GET /health HTTP/1.1\r\nX: ", b"GET /"])
def test_an_endless_head_ends_the_connection(server, begin):
    before = resident_bytes(server.pid)
    with connect(server, begin) as connection:
        with pytest.raises(ConnectionError):
            connection.sendall(b"x" * 20_000_000)
        assert resident_bytes(server.pid) - before < 20e6


def test_pipelined_requests_are_answered_in_order(server):
    end = {"headers": "Connection: close\r\n"}
    requests = b"".join(request_bytes(prompt="x", max_tokens=n, **GREEDY, **(end if n == 5 else {})) for n in (9, 1, 5))
    with connect(server, requests) as connection:
        answers = read_all(connection).split(b"HTTP/1.1 200 OK")[1:]
    counts = [json.loads(answer.partition(b"\r\n\r\n")[2])["usage"]["completion_tokens"] for answer in answers]
    assert counts == [9, 1, 5]


@pytest.mark.parametrize(
    "headers",
    ["X-Request-Id: \xff\r\n", "X-Request-Id: " + "x" * 500 + "\r\n", "Expect: 100-continue\r\n", "X-A:\r\n"],
    ids=["bytes", "long", "expect", "empty"],
)
def test_odd_headers_do_no_harm(server, headers):
    data = request_bytes(prompt="x", max_tokens=1, headers=headers + "Connection: close\r\n")
    with connect(server, data) as connection:
        answer = read_all(connection).removeprefix(b"HTTP/1.1 100 Continue\r\n\r\n")
    assert answer.startswith(b"HTTP/1.1 200 ")
    assert b"xxxxx" not in answer


def test_a_request_id_comes_back(server):
    assert httpx.get(f"{server.url}/health", headers={"X-Request-Id": "mine-7"}).headers["x-request-id"] == "mine-7"
    ids = {httpx.get(f"{server.url}/health").headers["x-request-id"] for _ in range(2)}
    assert len(ids) == 2


def test_slow_and_half_open_connections_hold_nobody_up(server):
    whole = request_bytes(prompt="x", max_tokens=3, headers="Connection: close\r\n", **GREEDY)
    silent = [connect(server, whole[:cut]) for cut in (0, 5, 60, len(whole) - 1) for _ in range(25)]
    assert post(server, prompt="x", max_tokens=3, **GREEDY).status_code == 200
    slow = silent[-1]
    slow.sendall(whole[-1:])
    assert read_all(slow).startswith(b"HTTP/1.1 200 ")
    for connection in silent:
        connection.close()


# ---- text


def greedy_text(server, **body):
    answer = post(server, prompt="the dog", **{"max_tokens": 40, **GREEDY, **body}).json()
    return answer["choices"][0]["text"], answer["choices"][0]["finish_reason"]


def test_stop_strings_over_several_tokens_never_leak_into_a_stream(server):  # case 114
    text, _ = greedy_text(server)
    for stop in (text[9:14], text[9:13] + "never", text[-3:] + "never"):
        whole = greedy_text(server, stop=stop)
        assert whole[0] == text.partition(stop)[0]
        assert whole[1] == ("stop" if stop in text else "length")
        with stream(server, prompt="the dog", max_tokens=40, stop=stop, **GREEDY) as events:
            seen = list(events)
        pieces = [event["choices"][0]["text"] for event in seen[:-1]]
        assert "".join(pieces) == whole[0]
        assert all(pieces[:-1])  # no empty ones
        assert seen[-2]["choices"][0]["stop_reason"] == (stop if stop in text else None)


def test_characters_over_several_tokens_are_streamed_whole(server):  # case 115
    """The model's own bytes are mostly no UTF-8; those that it is made to write are."""
    for word in ("\u0103", "\U0001f600", "né"):
        ids = post(server, "/tokenize", prompt=word).json()["tokens"]
        assert len(ids) >= len(word.encode())
        body = {"prompt": "x", "max_tokens": 12, "logit_bias": {str(i): 100 for i in ids}, "seed": 1}
        whole = post(server, **body).json()["choices"][0]["text"]
        with stream(server, **body) as events:
            assert text_of(events) == (whole, "[DONE]")
    assert post(server, "/detokenize", tokens=post(server, "/tokenize", prompt="a\ufffdb").json()["tokens"]).json() == {
        "prompt": "a\ufffdb"
    }


def test_three_answers_of_which_one_stops_early_come_by_index(server):  # case 116
    body = {"prompt": "the dog", "n": 3, "seed": 3, "temperature": 1.0, "max_tokens": 30, "ignore_eos": True}
    texts = [choice["text"] for choice in post(server, **body).json()["choices"]]
    stop = next(t for t in texts[1][3:] if t not in texts[0] + texts[2])
    choices = post(server, **body, stop=stop).json()["choices"]
    assert [choice["index"] for choice in choices] == [0, 1, 2]
    assert [choice["finish_reason"] for choice in choices] == ["length", "stop", "length"]
    expected = [texts[0], texts[1].partition(stop)[0], texts[2]]
    assert [choice["text"] for choice in choices] == expected
    with stream(server, **body, stop=stop) as events:
        streamed = ["", "", ""]
        for event in list(events)[:-1]:
            for choice in event["choices"]:
                streamed[choice["index"]] += choice["text"]
    assert streamed == expected
