"""SmolLM2 behind `girih serve`: OpenAI's client gets what the offline engine says, whole and streamed."""

import openai
import pytest
from server_process import ServerProcess

from girih import LLM, SamplingParams

pytestmark = [pytest.mark.real_weights, pytest.mark.xdist_group("smollm2")]

PROMPT = "Once upon a time, in a small village by the sea,"
MESSAGES = [{"role": "user", "content": "What is a tile? Answer in one sentence."}]
GREEDY = {"model": "smollm2", "temperature": 0, "max_tokens": 24}


def test_smollm2_says_the_same_through_the_client_as_offline(real_model, tmp_path):
    directory = real_model("smollm2")
    options = ("--kv-cache-memory", "128MiB", "--max-model-len", "1024", "--served-model-name", "smollm2")
    with (
        ServerProcess(directory, *options, folder=tmp_path) as server,
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="none") as client,
    ):
        complete, chat = client.completions.create, client.chat.completions.create
        texts = [
            complete(prompt=PROMPT, **GREEDY).choices[0].text,
            "".join(chunk.choices[0].text for chunk in complete(prompt=PROMPT, stream=True, **GREEDY)),
            chat(messages=MESSAGES, **GREEDY).choices[0].message.content,
            "".join(chunk.choices[0].delta.content or "" for chunk in chat(messages=MESSAGES, stream=True, **GREEDY)),
        ]
    with LLM(str(directory), dtype="float32", kv_cache_memory="128MiB", max_model_len=1024) as llm:
        text = llm.tokenizer.apply_chat_template(MESSAGES)
        prompts = [PROMPT, llm.tokenizer.encode(text, add_special_tokens=False)]
        outputs = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=24))
    expected = [output.outputs[0].text for output in outputs]
    assert texts == [expected[0], expected[0], expected[1], expected[1]]
