"""How a request gets to a replica and its answer back: options, the exchange, what happens to an answer, metrics."""

import asyncio

import pytest
from prometheus_client.parser import text_string_to_metric_families

from girih.errors import ConfigError
from girih.server.errors import ApiError
from girih.server.replicas.answer import Answer
from girih.server.replicas.join_metrics import join_metrics
from girih.server.replicas.options import Options
from girih.server.replicas.replica import Exchange

# ---- options


def test_options_may_be_text_as_on_a_command_line():
    options = Options.parse(
        {"model": "m", "num_replicas": "3", "num_cpus": "2", "max_model_len": "512", "kv_cache_memory": "1MiB",
         "served_model_name": "a,b", "restart_engine": "true", "health_timeout_s": "5", "pipeline_split": "1,2",
         "pipeline_parallel_size": "2", "executor": "multiproc"}
    )  # fmt: skip
    engine, server = options.engine, options.server
    assert (options.num_replicas, options.num_cpus, options.model_name) == (3, 2.0, "m")
    assert (engine.max_model_len, engine.kv_cache_memory_bytes, engine.pipeline_split) == (512, 1 << 20, (1, 2))
    assert (server.served_model_name, server.restart_engine, server.health_timeout_s) == (("a", "b"), True, 5.0)


def test_events_are_there_wherever_prefixes_are_cached():
    assert Options.parse({"model": "m"}).engine.kv_events
    assert not Options.parse({"model": "m", "enable_prefix_caching": False}).engine.kv_events
    assert Options.parse({"model": "m"}).engine.max_model_len == "auto"


def test_keys_may_come_from_the_environment(monkeypatch):
    monkeypatch.setenv("GIRIH_API_KEY", "one two")
    assert Options.parse({"model": "m"}).server.api_key == ("one", "two")
    assert Options.parse({"model": "m", "api_key": ["three"]}).server.api_key == ("three",)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ({}, "give model"),
        ({"model": "m", "num_replica": 2}, "no option 'num_replica'; did you mean num_replicas"),
        ({"model": "m", "num_replicas": 0}, "num_replicas=0 must be at least 1"),
        ({"model": "m", "num_replicas": "two"}, "num_replicas='two' cannot be used"),
        ({"model": "m", "port": 1}, "port is no option of replicas: Ray Serve listens"),
        ({"model": "m", "max_waiting": -1}, "max_waiting=-1"),
    ],
)
def test_what_cannot_be_used_is_named(args, message):
    with pytest.raises(ConfigError, match=message):
        Options.parse(args)


# ---- an application's view of a request


def test_an_application_gets_the_body_and_then_the_end_of_the_connection():
    async def scenario():
        exchange = Exchange(b"body")
        assert await exchange.receive() == {"type": "http.request", "body": b"body", "more_body": False}
        waiting = asyncio.create_task(exchange.receive())
        await asyncio.sleep(0)
        assert not waiting.done()
        exchange.is_gone.set()
        assert await waiting == {"type": "http.disconnect"}

    asyncio.run(scenario())


def test_messages_come_together_where_there_are_several_and_end_with_the_application():
    async def scenario():
        exchange = Exchange(b"")

        async def application():
            await exchange.send({"n": 1})
            await exchange.send({"n": 2})
            await asyncio.sleep(0.01)
            await exchange.send({"n": 3})

        task = asyncio.create_task(application())
        task.add_done_callback(exchange.end)
        found = []
        while messages := await exchange.sent():
            found += messages
        assert found == [{"n": 1}, {"n": 2}, {"n": 3}]

    asyncio.run(scenario())


# ---- an answer, and the loss of who gives it

START = {"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"text/event-stream")]}
PLAIN = {"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"application/json")]}
PART = {"type": "http.response.body", "body": b"data: x\n\n", "more_body": True}


def answered(batches, fail=True):
    sent = []

    async def send(message):
        sent.append(message)

    async def scenario():
        answer = Answer(send)
        for messages in batches:
            await answer.pass_on(messages)
        if fail:
            await answer.fail()
        return answer

    return asyncio.run(scenario()), sent


def test_an_answer_goes_through_as_it_is():
    answer, sent = answered([[START], [PART], [PART, PART]], fail=False)
    assert sent == [START, PART, PART, PART]
    assert answer.has_begun


@pytest.mark.parametrize("batches", [[], [[START]]], ids=["nothing", "its head"])
def test_of_an_answer_that_was_lost_before_its_body_the_client_has_seen_nothing(batches):
    assert answered(batches, fail=False)[1] == []
    with pytest.raises(ApiError, match="was lost") as error:
        answered(batches)
    assert error.value.status == 503


def test_a_lost_stream_ends_with_an_error_event_and_is_not_done():
    _, sent = answered([[START, PART]])
    assert sent[:2] == [START, PART]
    assert b'data: {"error":' in sent[2]["body"]
    assert b"DONE" not in sent[2]["body"]
    assert not sent[2]["more_body"]


def test_another_answer_is_broken_off_when_it_is_lost():
    with pytest.raises(ConnectionError, match="was lost"):
        answered([[PLAIN, PART]])


# ---- metrics


def test_metrics_of_all_replicas_are_one_text_with_the_samples_of_a_metric_together():
    gauge = '# HELP a A\n# TYPE a gauge\na{{engine="{0}"}} 1.0\n'
    text = gauge + '# HELP b_total B\n# TYPE b_total counter\nb_total{{engine="{0}"}} 2.0\n'
    joined = join_metrics([text.format("x"), text.format("y")])
    families = list(text_string_to_metric_families(joined))
    assert [family.name for family in families] == ["a", "b"]
    assert [[sample.labels["engine"] for sample in family.samples] for family in families] == [["x", "y"]] * 2
    assert join_metrics([]) == ""
