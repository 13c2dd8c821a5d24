"""Forms, tools, traces and KV events of a real server, as clients and collectors see them."""

import json
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import jsonschema
import msgspec
import openai
import pytest
import zmq
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from server_process import ServerProcess, poll
from tiny_models import tiny_llama

pytestmark = pytest.mark.xdist_group("server-features")

TEMPLATE = (
    "{% if tools %}{{ tools | tojson }} write <tool_call> {% endif %}"
    "{% for m in messages %}{{ m.role }}: {{ m.content }}{{ m.tool_calls | tojson if m.tool_calls }} {% endfor %}"
)
SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 4}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
WEATHER = {"type": "function", "function": {"name": "weather", "description": "of a city", "parameters": SCHEMA}}
TIME = {"type": "function", "function": {"name": "time", "parameters": {"type": "object", "maxProperties": 0}}}
MESSAGES = [{"role": "user", "content": "the dog"}]
PROMPT = "the quick brown fox jumps over the lazy dog and then the other dog and so on until it is over at last"
CLOSING = {"95": 50}  # "}": as soon as it may stand there
TRACE_PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


class Collector:
    """An OTLP collector over HTTP that keeps the spans it is sent."""

    def __init__(self):
        self.spans = []
        collector = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self):
                body = self.rfile.read(int(self.headers["content-length"]))
                if self.headers.get("content-encoding") == "gzip":
                    import gzip

                    body = gzip.decompress(body)
                for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
                    for scope in resource.scope_spans:
                        collector.spans += scope.spans
                self.send_response(200)
                self.end_headers()

            def log_message(self, *_):
                pass

        self.server = HTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}/v1/traces"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()


@pytest.fixture(scope="module")
def collector():
    collector = Collector()
    yield collector
    collector.server.shutdown()


@pytest.fixture(scope="module")
def events_endpoint(tmp_path_factory):
    return f"ipc://{tmp_path_factory.mktemp('zmq')}/events"


@pytest.fixture(scope="module")
def server(collector, events_endpoint, tmp_path_factory):
    model = tiny_llama(tmp_path_factory.mktemp("model"), chat_template=TEMPLATE, max_position_embeddings=2048)
    options = ("--otlp-endpoint", collector.url, "--kv-events-endpoint", events_endpoint, "--served-model-name", "tiny")
    fast = {"OTEL_BSP_SCHEDULE_DELAY": "100"}
    with ServerProcess(model, *options, folder=tmp_path_factory.mktemp("log"), environment=fast) as server:
        yield server


@pytest.fixture(scope="module")
def client(server):
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def chat(client, **fields):
    return client.chat.completions.create(model="tiny", messages=MESSAGES, **{"max_tokens": 200, "seed": 3, **fields})


@pytest.mark.parametrize("seed", range(3))
def test_an_answer_follows_the_schema(client, seed):
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA, "strict": True}}
    answer = chat(client, response_format=form, seed=seed).choices[0]
    jsonschema.validate(json.loads(answer.message.content), SCHEMA)
    assert answer.finish_reason == "stop"
    streamed = "".join(
        chunk.choices[0].delta.content or "" for chunk in chat(client, response_format=form, seed=seed, stream=True)
    )
    assert streamed == answer.message.content


def test_a_completion_is_a_json_object(client):
    answer = client.completions.create(
        model="tiny",
        prompt=PROMPT,
        max_tokens=300,
        seed=1,
        extra_body={"response_format": {"type": "json_object"}},
        logit_bias=CLOSING,
    ).choices[0]
    assert answer.finish_reason == "stop"
    assert isinstance(json.loads(answer.text), dict)


def test_a_schema_that_cannot_be_is_refused(client):
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "nothing"}}}
    with pytest.raises(openai.BadRequestError, match="grammar cannot be used"):
        chat(client, response_format=form)
    with pytest.raises(openai.BadRequestError, match="needs json_schema"):
        chat(client, response_format={"type": "json_schema"})


def test_a_biased_token_is_all_that_comes(client):
    answer = client.completions.create(
        model="tiny", prompt=PROMPT, max_tokens=4, logit_bias={"65": 100}, logprobs=0, temperature=0
    ).choices[0]
    assert len(set(answer.logprobs.tokens)) == 1
    with pytest.raises(openai.BadRequestError, match="logit_bias"):
        client.completions.create(model="tiny", prompt=PROMPT, logit_bias={"999999": 1})
    for name in ("the", " 5", "1_0", "-1", "\u0665"):
        with pytest.raises(openai.BadRequestError, match="no token id"):
            client.completions.create(model="tiny", prompt=PROMPT, logit_bias={name: 1})


@pytest.mark.parametrize(
    ("choice", "names"),
    [("required", {"weather", "time"}), ({"type": "function", "function": {"name": "weather"}}, {"weather"})],
)
def test_an_answer_is_a_call_where_it_must_be_one(client, choice, names):
    for seed in range(2):
        answer = chat(client, tools=[WEATHER, TIME], tool_choice=choice, seed=seed).choices[0]
        assert answer.finish_reason == "tool_calls"
        (call,) = answer.message.tool_calls
        assert call.function.name in names
        if call.function.name == "weather":
            jsonschema.validate(json.loads(call.function.arguments), SCHEMA)
        assert not answer.message.content
        chunks = list(chat(client, tools=[WEATHER, TIME], tool_choice=choice, seed=seed, stream=True))
        calls = [call for chunk in chunks for call in chunk.choices[0].delta.tool_calls or []]
        assert [(c.function.name, c.function.arguments) for c in calls] == [
            (call.function.name, call.function.arguments)
        ]
        assert chunks[-1].choices[0].finish_reason == "tool_calls"


def test_a_call_and_its_result_go_back_to_the_model(client):
    call = {"id": "call_1", "type": "function", "function": {"name": "time", "arguments": "{}"}}
    messages = [
        *MESSAGES,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "noon"},
    ]
    answer = client.chat.completions.create(model="tiny", messages=messages, tools=[TIME], max_tokens=5)
    assert answer.usage.prompt_tokens > 0
    call["function"]["arguments"] = "[1"
    with pytest.raises(openai.BadRequestError, match="JSON object"):
        client.chat.completions.create(model="tiny", messages=messages, tools=[TIME], max_tokens=5)


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"tool_choice": "required"}, "only for tools"),
        ({"tools": [TIME], "tool_choice": {"type": "function", "function": {"name": "x"}}}, "not among tools"),
        ({"tools": [TIME], "response_format": {"type": "json_object"}}, "exclude each other"),
    ],
)
def test_tools_that_make_no_sense_are_refused(client, fields, text):
    with pytest.raises(openai.BadRequestError, match=text):
        chat(client, **fields)


def test_a_request_leaves_a_span_with_its_numbers(client, collector):
    answer = client.completions.create(
        model="tiny", prompt=PROMPT, max_tokens=7, n=2, temperature=0.5,
        extra_body={"ignore_eos": True}, extra_headers={"traceparent": TRACE_PARENT},
    )  # fmt: skip

    def found():
        return [span for span in collector.spans if span.trace_id.hex() == TRACE_PARENT.split("-")[1]]

    (span,) = poll(found)
    values = {a.key: a.value for a in span.attributes}
    assert span.parent_span_id.hex() == TRACE_PARENT.split("-")[2]
    assert values["gen_ai.response.id"].string_value == answer.id
    assert values["gen_ai.operation.name"].string_value == "text_completion"
    assert values["gen_ai.usage.input_tokens"].int_value == answer.usage.prompt_tokens
    assert values["gen_ai.usage.output_tokens"].int_value == answer.usage.completion_tokens == 14
    assert values["gen_ai.request.choice.count"].int_value == 2
    assert [v.string_value for v in values["gen_ai.response.finish_reasons"].array_value.values] == ["length"] * 2
    assert span.end_time_unix_nano > span.start_time_unix_nano


def test_a_prompt_that_becomes_cached_is_published(client, events_endpoint):
    context = zmq.Context()
    socket = context.socket(zmq.SUB)
    socket.setsockopt(zmq.SUBSCRIBE, b"")
    socket.connect(events_endpoint)
    prompt = [7 + i % 90 for i in range(64)]
    stored = []

    def sees_prompt():
        client.completions.create(model="tiny", prompt=[len(stored) % 50 + 5, *prompt], max_tokens=1)
        while socket.poll(200):
            _, _, batch = socket.recv_multipart()
            stored.extend(event for event in msgspec.msgpack.decode(batch)[1] if event["type"] == "BlockStored")
        return any(set(event["token_ids"]) <= {*prompt, *range(60)} for event in stored)

    try:
        poll(sees_prompt)  # a subscriber hears nothing of what was sent before it was there
    finally:
        context.destroy(linger=0)
    assert all(event["block_size"] == 16 for event in stored)


def test_a_model_without_tools_is_told_so_and_one_without_a_template_can_be_given_one(tmp_path):
    model = tiny_llama(tmp_path, chat_template=None, max_position_embeddings=2048)
    template = tmp_path / "template.jinja"
    template.write_text("{% for m in messages %}{{ m.role }}: {{ m.content }} {% endfor %}")
    call = {"id": "call_1", "type": "function", "function": {"name": "time", "arguments": "{}"}}
    spoken = [*MESSAGES, {"role": "assistant", "tool_calls": [call]}, {"role": "tool", "content": "noon"}]
    options = ("--chat-template", str(template), "--served-model-name", "tiny")
    with (
        ServerProcess(model, *options, folder=tmp_path) as server,
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client,
    ):
        assert chat(client, max_tokens=3).usage.completion_tokens > 0
        with pytest.raises(openai.BadRequestError, match="knows no tools"):
            chat(client, tools=[TIME])
        with pytest.raises(openai.BadRequestError, match="would leave their calls out"):
            client.chat.completions.create(model="tiny", messages=spoken, max_tokens=3)
        with pytest.raises(openai.BadRequestError, match="needs content"):
            client.chat.completions.create(model="tiny", messages=[{"role": "user"}], max_tokens=3)
        with pytest.raises(openai.BadRequestError) as too_long:
            client.completions.create(model="tiny", prompt=[5] * 3000, max_tokens=3)
        assert too_long.value.code == "context_length_exceeded"
