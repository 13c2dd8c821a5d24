"""What OpenAI's own client gets from `girih serve`: the offline engine's outputs, and errors of the right class."""

import asyncio

import httpx
import openai
import pytest
from server_process import ServerProcess, poll
from tiny_models import tiny_llama

from girih import LLM, SamplingParams

pytestmark = pytest.mark.xdist_group("server-openai")

PROMPT = "the quick brown fox jumps over the lazy dog and then the other dog"
MESSAGES = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "the dog"}]
GREEDY = {"temperature": 0, "max_tokens": 12, "extra_body": {"ignore_eos": True}}
OFFLINE = {"dtype": "float32", "kv_cache_memory_bytes": 2 << 20}
GREEDY_OFFLINE = {"temperature": 0, "max_tokens": 12, "ignore_eos": True}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return tiny_llama(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def server(model, tmp_path_factory):
    with ServerProcess(model, "--served-model-name", "tiny", folder=tmp_path_factory.mktemp("log")) as server:
        yield server


@pytest.fixture(scope="module")
def client(server):
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture(scope="module")
def offline(model):
    with LLM(str(model), **OFFLINE) as llm:
        yield llm


def outputs_of(llm, prompt, **params):
    (output,) = llm.generate([prompt], SamplingParams(**params))
    return output.outputs


def joined(chunks, num_choices=1):
    """Return text and finish reason of each choice of a streamed completion."""
    texts, reasons = [""] * num_choices, [None] * num_choices
    for chunk in chunks:
        for choice in chunk.choices:
            assert reasons[choice.index] is None  # nothing follows the end
            texts[choice.index] += choice.text
            reasons[choice.index] = choice.finish_reason
    return list(zip(texts, reasons, strict=True))


def test_a_completion_is_the_offline_engines(client, offline):
    (expected,) = outputs_of(offline, PROMPT, temperature=0, max_tokens=12, ignore_eos=True)
    answer = client.completions.create(model="tiny", prompt=PROMPT, **GREEDY)
    assert [(choice.index, choice.text, choice.finish_reason) for choice in answer.choices] == [
        (0, expected.text, "length")
    ]
    assert (answer.object, answer.model) == ("text_completion", "tiny")
    num_prompt = len(offline.tokenizer.encode(PROMPT))
    assert answer.usage.model_dump(include={"prompt_tokens", "completion_tokens", "total_tokens"}) == {
        "prompt_tokens": num_prompt,
        "completion_tokens": 12,
        "total_tokens": num_prompt + 12,
    }
    chunks = client.completions.create(model="tiny", prompt=PROMPT, stream=True, **GREEDY)
    assert joined(chunks) == [(expected.text, "length")]


def test_a_chat_is_the_offline_engines(client, offline):
    prompt = offline.tokenizer.encode(offline.tokenizer.apply_chat_template(MESSAGES), add_special_tokens=False)
    (expected,) = outputs_of(offline, prompt, temperature=0, max_tokens=12, ignore_eos=True)
    answer = client.chat.completions.create(model="tiny", messages=MESSAGES, **GREEDY)
    (choice,) = answer.choices
    assert (choice.message.role, choice.message.content, choice.finish_reason) == ("assistant", expected.text, "length")
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (len(prompt), 12)
    text, roles, reasons = "", [], []
    for chunk in client.chat.completions.create(model="tiny", messages=MESSAGES, stream=True, **GREEDY):
        assert chunk.object == "chat.completion.chunk"
        (choice,) = chunk.choices
        text += choice.delta.content or ""
        roles.append(choice.delta.role)
        reasons.append(choice.finish_reason)
    assert text == expected.text
    assert roles == ["assistant"] + [None] * (len(roles) - 1)
    assert reasons == [None] * (len(reasons) - 1) + ["length"]


def test_pieces_of_messages_are_joined_and_developers_are_systems(client):
    parts = [{"type": "text", "text": "the "}, {"type": "text", "text": "dog"}]
    messages = [{"role": "developer", "content": "be brief"}, {"role": "user", "content": parts}]
    answers = [client.chat.completions.create(model="tiny", messages=m, **GREEDY) for m in (MESSAGES, messages)]
    assert answers[0].choices[0].message.content == answers[1].choices[0].message.content


@pytest.mark.parametrize(
    "params",
    [
        {"seed": 5, "temperature": 1.0},
        {"seed": 6, "temperature": 0.8, "top_p": 0.7, "n": 3},
        {"seed": 7, "presence_penalty": 1.5, "frequency_penalty": 0.5},
        {"temperature": 0, "stop": ["o", "zz"]},
        {"seed": 8, "stop": "e", "n": 2},
    ],
    ids=str,
)
def test_sampling_fields_mean_what_they_mean_offline(client, offline, params):
    expected = outputs_of(offline, "the dog", **params, max_tokens=24)
    answer = client.completions.create(model="tiny", prompt="the dog", max_tokens=24, **params)
    assert [(c.index, c.text, c.finish_reason) for c in answer.choices] == [
        (output.index, output.text, output.finish_reason) for output in expected
    ]
    chunks = client.completions.create(model="tiny", prompt="the dog", max_tokens=24, stream=True, **params)
    assert joined(chunks, len(expected)) == [(output.text, output.finish_reason) for output in expected]


@pytest.mark.parametrize(
    "extra",
    [
        {"top_k": 2, "seed": 1},
        {"min_p": 0.4, "seed": 1},
        {"repetition_penalty": 1.5, "temperature": 0},
        {"min_tokens": 6, "stop_token_ids": list(range(3, 320, 2)), "seed": 1},
    ],
    ids=lambda extra: next(iter(extra)),
)
def test_fields_beyond_openais_mean_what_they_mean_offline(client, offline, extra):
    (expected,) = outputs_of(offline, "the dog", **extra, max_tokens=16)
    answer = client.completions.create(model="tiny", prompt="the dog", max_tokens=16, extra_body=extra)
    assert (answer.choices[0].text, answer.choices[0].finish_reason) == (expected.text, expected.finish_reason)


def test_a_list_of_prompts_has_its_choices_in_order(client, offline):
    prompts, ids = ["the dog", "the fox", "a page"], [[5, 6, 7], [8, 9]]
    for given in (prompts, ids, [4, 5, 6]):
        answer = client.completions.create(model="tiny", prompt=given, n=2, seed=3, max_tokens=6)
        single = [given] if isinstance(given[0], int) else given
        expected = [o for p in single for o in outputs_of(offline, p, n=2, seed=3, max_tokens=6)]
        assert [choice.text for choice in answer.choices] == [output.text for output in expected]
        assert [choice.index for choice in answer.choices] == list(range(len(expected)))
        chunks = client.completions.create(model="tiny", prompt=given, n=2, seed=3, max_tokens=6, stream=True)
        assert [text for text, _ in joined(chunks, len(expected))] == [output.text for output in expected]


def test_log_probabilities_of_completions_are_the_offline_engines(client, offline):
    (output,) = outputs_of(offline, "the dog", logprobs=2, **GREEDY_OFFLINE)
    answer = client.completions.create(model="tiny", prompt="the dog", logprobs=2, **GREEDY)
    found = answer.choices[0].logprobs
    assert found.tokens == [next(iter(position.values())).decoded_token for position in output.logprobs]
    assert found.token_logprobs == pytest.approx([next(iter(p.values())).logprob for p in output.logprobs], abs=1e-4)
    assert all(1 <= len(top) <= 3 for top in found.top_logprobs)
    streamed = [
        value
        for chunk in client.completions.create(model="tiny", prompt="the dog", logprobs=2, stream=True, **GREEDY)
        for value in chunk.choices[0].logprobs.token_logprobs
    ]
    assert streamed == pytest.approx(found.token_logprobs, abs=1e-4)


def test_log_probabilities_of_chats_have_bytes_and_the_most_likely(client):
    answer = client.chat.completions.create(model="tiny", messages=MESSAGES, logprobs=True, top_logprobs=3, **GREEDY)
    content = answer.choices[0].logprobs.content
    assert len(content) == 12
    for token in content:
        assert bytes(token.bytes).decode() == token.token
        assert token.logprob == pytest.approx(max(top.logprob for top in token.top_logprobs))  # greedy
        assert len(token.top_logprobs) == 3
    plain = client.chat.completions.create(model="tiny", messages=MESSAGES, logprobs=True, **GREEDY)
    assert [t.logprob for t in plain.choices[0].logprobs.content] == pytest.approx([t.logprob for t in content])


def test_echo_begins_with_the_prompt_and_its_log_probabilities(client, offline):
    plain = client.completions.create(model="tiny", prompt=PROMPT, **GREEDY).choices[0].text
    whole = client.completions.create(model="tiny", prompt=PROMPT, echo=True, logprobs=1, **GREEDY).choices[0]
    assert whole.text == PROMPT + plain
    num_prompt = len(offline.tokenizer.encode(PROMPT))
    assert whole.logprobs.token_logprobs[0] is None
    assert len(whole.logprobs.tokens) == num_prompt + 12
    assert "".join(whole.logprobs.tokens[:num_prompt]) == PROMPT
    assert whole.logprobs.text_offset[:num_prompt] == [
        len("".join(whole.logprobs.tokens[:i])) for i in range(num_prompt)
    ]
    prompt_only = {"model": "tiny", "prompt": PROMPT, "echo": True, "logprobs": 0, "max_tokens": 0}
    score = client.completions.create(**prompt_only)
    assert score.choices[0].text == PROMPT
    assert (score.usage.completion_tokens, score.choices[0].finish_reason) == (0, "length")
    assert score.choices[0].logprobs.token_logprobs[1:] == pytest.approx(
        whole.logprobs.token_logprobs[1:num_prompt], abs=1e-4
    )
    assert joined(client.completions.create(model="tiny", prompt=PROMPT, echo=True, stream=True, **GREEDY)) == [
        (PROMPT + plain, "length")
    ]


def test_usage_says_how_much_of_a_prompt_was_cached(client):
    prompt = [7 + i % 50 for i in range(100)]
    for cached in (0, 96):
        usage = client.completions.create(model="tiny", prompt=prompt, max_tokens=1).usage
        assert (usage.prompt_tokens, usage.prompt_tokens_details.cached_tokens) == (100, cached)
    salted = client.completions.create(model="tiny", prompt=prompt, max_tokens=1, extra_body={"cache_salt": "mine"})
    assert salted.usage.prompt_tokens_details.cached_tokens == 0


@pytest.mark.parametrize("kind", ["completion", "chat"])
def test_a_stream_has_the_numbers_of_tokens_where_they_are_asked_for(client, kind):
    create = client.completions.create if kind == "completion" else client.chat.completions.create
    prompt = {"prompt": PROMPT} if kind == "completion" else {"messages": MESSAGES}
    *chunks, last = create(model="tiny", stream=True, stream_options={"include_usage": True}, **prompt, **GREEDY)
    assert [chunk.usage for chunk in chunks] == [None] * len(chunks)
    assert last.choices == []
    assert last.usage.completion_tokens == 12
    every = {"include_usage": True, "continuous_usage_stats": True}
    counts = [
        chunk.usage.completion_tokens
        for chunk in create(model="tiny", stream=True, stream_options=every, **prompt, **GREEDY)
    ]
    assert counts == sorted(counts)
    assert (counts[0] > 0, counts[-1]) == (True, 12)


def test_max_completion_tokens_is_max_tokens(client):
    for name in ("max_tokens", "max_completion_tokens"):
        answer = client.chat.completions.create(
            model="tiny", messages=MESSAGES, **{name: 3}, extra_body={"ignore_eos": True}
        )
        assert answer.usage.completion_tokens == 3


def test_without_max_tokens_a_chat_goes_on_to_the_longest_request(client):
    answer = client.chat.completions.create(model="tiny", messages=MESSAGES, extra_body={"ignore_eos": True})
    assert (answer.usage.total_tokens, answer.choices[0].finish_reason) == (512, "length")


def test_models_are_listed_and_described(client):
    (model,) = client.models.list().data
    assert (model.id, model.object, model.owned_by, model.max_model_len) == ("tiny", "model", "girih", 512)
    assert client.models.retrieve("tiny").id == "tiny"
    with pytest.raises(openai.NotFoundError, match="there is tiny"):
        client.models.retrieve("other")


def test_the_async_client_gets_the_same_from_many_at_once(server, client):
    expected = client.completions.create(model="tiny", prompt=PROMPT, **GREEDY).choices[0].text

    async def run():
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none") as client:

            async def one(stream):
                answer = await client.completions.create(model="tiny", prompt=PROMPT, stream=stream, **GREEDY)
                if not stream:
                    return answer.choices[0].text
                return "".join([chunk.choices[0].text async for chunk in answer])

            return await asyncio.gather(*(one(i % 2 == 0) for i in range(24)))

    assert asyncio.run(run()) == [expected] * 24


UNSUPPORTED = [
    ("completions", "best_of", 2),
    ("completions", "suffix", "x"),
    ("chat", "audio", {"voice": "alloy", "format": "wav"}),
    ("chat", "function_call", "auto"),
    ("chat", "functions", [{"name": "f"}]),
    ("chat", "metadata", {"a": "b"}),
    ("chat", "modalities", ["audio"]),
    ("chat", "prediction", {"type": "content", "content": "x"}),
    ("chat", "prompt_cache_key", "x"),
    ("chat", "reasoning_effort", "low"),
    ("chat", "safety_identifier", "x"),
    ("chat", "service_tier", "flex"),
    ("chat", "store", True),
    ("chat", "verbosity", "low"),
    ("chat", "web_search_options", {}),
    ("chat", "made_up", 1),
]


@pytest.mark.parametrize(("path", "name", "value"), UNSUPPORTED, ids=lambda value: str(value)[:20])
def test_what_is_not_supported_is_refused_by_name(client, path, name, value):
    create = client.completions.create if path == "completions" else client.chat.completions.create
    prompt = {"prompt": "x"} if path == "completions" else {"messages": MESSAGES}
    with pytest.raises(openai.BadRequestError, match=f"{name}: Girih does not support this field") as error:
        create(model="tiny", **prompt, extra_body={name: value})
    assert error.value.param == name


@pytest.mark.parametrize(
    ("name", "value"), [("best_of", 1), ("suffix", ""), ("suffix", None), ("user", "somebody"), ("made_up", None)]
)
def test_what_asks_for_nothing_is_let_through(client, name, value):
    client.completions.create(model="tiny", prompt="x", max_tokens=1, extra_body={name: value})


def test_images_are_refused_by_name(client):
    part = {"type": "image_url", "image_url": {"url": "http://127.0.0.1/x.png"}}
    with pytest.raises(openai.BadRequestError, match=r"messages.0.content"):
        client.chat.completions.create(model="tiny", messages=[{"role": "user", "content": [part]}])


def test_unknown_models_and_paths_are_not_found(client, server):
    with pytest.raises(openai.NotFoundError, match="there is tiny") as error:
        client.completions.create(model="gpt-4", prompt="x")
    assert error.value.code == "model_not_found"
    with pytest.raises(openai.NotFoundError):
        client.embeddings.create(model="tiny", input="x")
    assert httpx.post(f"{server.url}/v1/completions/", json={"prompt": "x"}).status_code == 404


def test_tokens_and_back(server):
    def post(path, **body):
        answer = httpx.post(server.url + path, json=body)
        assert answer.status_code == 200, answer.text
        return answer.json()

    text = "the dog, naïve \U0001f600"
    tokens = post("/tokenize", prompt=text, return_token_strs=True)
    assert (tokens["count"], tokens["max_model_len"]) == (len(tokens["tokens"]), 512)
    assert len(tokens["token_strs"]) == tokens["count"]
    assert post("/detokenize", tokens=tokens["tokens"])["prompt"] == text
    chat = post("/tokenize", messages=MESSAGES)
    assert post("/detokenize", tokens=chat["tokens"])["prompt"].endswith("<bos>user: the dog<eos>\n<bos>assistant: ")


def test_the_users_name_is_in_the_log_and_cannot_forge_lines(client, server):
    client.completions.create(model="tiny", prompt="x", max_tokens=1, user="eve\n2026-01-01 forged")
    httpx.get(f"{server.url}/nowhere%0A2026-01-01%20forged")
    for line in ("user='eve\\n2026-01-01 forged'", "/nowhere%0A2026-01-01%20forged request_id="):
        poll(lambda line=line: line in server.log, what=line)  # written after the answer
    assert not any(line.startswith("2026-01-01") for line in server.log.splitlines())
