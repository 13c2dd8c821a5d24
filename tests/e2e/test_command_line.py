"""`girih generate` and `girih chat` on tiny models: text, JSON, streams, piped input, one clear line on bad input."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest
from tiny_gguf import llama_gguf
from tiny_models import reference_greedy, reference_model, tiny_gemma3, tiny_llama
from typer.testing import CliRunner

from girih.cli.main import build_app
from girih.errors import ConfigError, GirihError, RequestError

ENGINE = ["--kv-cache-memory", "1MiB", "--dtype", "float32"]
GREEDY = ["--temperature", "0", "--ignore-eos", "--max-tokens", "12"]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return tiny_llama(tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def gemma(tmp_path_factory):
    return tiny_gemma3(tmp_path_factory.mktemp("gemma"))


def girih(*arguments, stdin=None):
    """Run a command in this process; return (stdout, stderr)."""
    result = CliRunner().invoke(build_app(arguments[0]), list(map(str, arguments)), input=stdin)
    if isinstance(result.exception, GirihError):
        raise result.exception
    assert result.exit_code == 0, (result.output, result.exception)
    return result.stdout, result.stderr


def generate(model, *arguments, stdin=None):
    return girih("generate", "--model", model, *ENGINE, *arguments, stdin=stdin)


@pytest.mark.parametrize("name", ["model", "gemma"])
def test_json_holds_transformers_greedy_tokens(request, name):
    directory = request.getfixturevalue(name)
    stdout, _ = generate(directory, *GREEDY, "--json", "the quick brown", "def step")
    answer = json.loads(stdout)
    reference = reference_model(directory)
    assert len(answer["outputs"]) == 2
    for output in answer["outputs"]:
        (completion,) = output["outputs"]
        assert completion["token_ids"] == reference_greedy(reference, output["prompt_token_ids"], 12)
        assert (completion["finish_reason"], output["error"]) == ("length", None)
    assert answer["max_model_len"] == 512


def test_a_lone_prompt_is_shown_with_its_text_and_the_plan_goes_to_stderr(model):
    stdout, stderr = generate(model, *GREEDY, "--stats", "the quick brown")
    (output,) = json.loads(generate(model, *GREEDY, "--json", "the quick brown")[0])["outputs"]
    assert stdout == f"the quick brown{output['outputs'][0]['text']}\n"
    assert "KV cache: " in stderr
    assert "2 layers full attention in blocks of 16" in stderr
    assert "12 output tokens" in stderr
    assert "load model: " in stderr


def test_int8_weights_are_named(model):
    stdout, stderr = generate(model, *GREEDY, "--quantization", "int8", "--json", "the quick brown")
    assert json.loads(stdout)["quantization"] == "int8"
    assert "int8 weights; KV cache: " in stderr


def test_several_prompts_and_completions_are_shown_in_order(model):
    stdout, _ = generate(model, *GREEDY, "--n", "2", "the fox", "a dog")
    starts = [line[:5] for line in stdout.splitlines() if line.startswith(("the fox", "a dog"))]
    assert starts == ["the f", "the f", "a dog", "a dog"]


def test_prompts_come_from_standard_input_and_from_a_file(model, tmp_path):
    file = tmp_path / "prompt.txt"
    file.write_text("the lazy dog\n")
    stdout, _ = generate(model, *GREEDY, "--json", "-", "--prompt-file", file, stdin="a block\nof tokens\n")
    assert [output["prompt"] for output in json.loads(stdout)["outputs"]] == ["a block\nof tokens", "the lazy dog"]


def test_log_probabilities_are_in_the_json(model):
    stdout, _ = generate(model, *GREEDY, "--logprobs", "2", "--prompt-logprobs", "0", "--json", "the fox")
    (output,) = json.loads(stdout)["outputs"]
    assert output["prompt_logprobs"][0] is None
    assert all(len(entries) == 1 for entries in output["prompt_logprobs"][1:])
    first = output["outputs"][0]["logprobs"][0]
    assert [entry["rank"] for entry in first] == [1, 2]
    assert first[0]["token_id"] == output["outputs"][0]["token_ids"][0]


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ([], RequestError, "no prompt"),
        (["--max-tokens", "0", "x"], RequestError, "^--max-tokens 0 must be a whole number from 1"),
        (["--max-model-len", "100000", "x"], ConfigError, "^--max-model-len 100000 is longer than .* 512 tokens"),
        (["--model", "nonesuch", "--executor", "nope", "x"], ConfigError, "unknown executor 'nope'; .* uniproc"),
        (["--model", "nonesuch", "--scheduling-policy", "nope", "x"], ConfigError, "fcfs, priority"),
        (["--model", "nonesuch", "--device", "nope", "x"], ConfigError, "unknown device 'nope'; available: cpu"),
        (["--model", "nonesuch", "--attention-backend", "nope", "x"], ConfigError, "available: cpu, reference"),
        (["word " * 600], RequestError, "512 tokens"),
    ],
)
def test_bad_input_is_one_clear_error(model, arguments, error, message):
    with pytest.raises(error, match=message):
        generate(model, *arguments)


@pytest.mark.parametrize("command", ["generate", "chat"])
def test_the_import_of_a_gguf_is_shown_while_it_happens(model, tmp_path, monkeypatch, command):
    monkeypatch.setenv("GIRIH_HOME", str(tmp_path / "home"))
    file = tmp_path / "model.gguf"
    llama_gguf(model, file)
    arguments = [command, "--model", file, *ENGINE, *GREEDY, *(["the dog"] if command == "generate" else [])]
    shown = [girih(*arguments, stdin="the dog\n")[1].count("converting weights") for _ in range(2)]
    assert shown == [1, 0]  # once, not once per tensor, and not again


def run_process(*arguments, stdin=""):
    command = [sys.executable, "-m", "girih.cli.main", *map(str, arguments)]
    return subprocess.run(command, input=stdin, capture_output=True, text=True, timeout=120, check=False)


def test_bad_input_is_one_line_and_exit_code_2(tmp_path):
    done = run_process("generate", "--model", tmp_path, "x")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("girih: ")
    assert done.stderr.count("\n") == 1


def test_input_that_is_not_utf_8_is_refused(model, tmp_path):
    file = tmp_path / "prompt.txt"
    file.write_bytes(b"a\xff")
    with pytest.raises(GirihError, match=r"cannot read .*prompt\.txt"):
        generate(model, "--prompt-file", file)
    with pytest.raises(GirihError, match="cannot read standard input"):
        generate(model, "-", stdin=b"a\xff")


# ---- chat


def chat(model, stdin, *arguments):
    return girih("chat", "--model", model, *ENGINE, *GREEDY, *arguments, stdin=stdin)[0]


def test_chat_answers_each_line_of_piped_input_and_remembers_the_conversation(model):
    both = chat(model, "the dog\n\nthe fox\n")
    only_first, only_second = chat(model, "the dog\n"), chat(model, "the fox\n/bye\nnever read\n")
    assert both.startswith(only_first)
    assert both != only_first + only_second  # the second answer knows of the first question
    assert chat(model, "the dog\n/new\nthe fox\n") == only_first + only_second


def test_chat_takes_a_system_message_and_a_template(model, tmp_path):
    assert chat(model, "the dog\n", "--system", "be brief") != chat(model, "the dog\n")
    file = tmp_path / "template.jinja"
    file.write_text("{% for m in messages %}{{ m.content }} {% endfor %}")
    (output,) = json.loads(generate(model, *GREEDY, "--json", "the dog ")[0])["outputs"]
    assert chat(model, "the dog\n", "--chat-template", file).rstrip("\n") == output["outputs"][0]["text"].rstrip("\n")


def test_chat_refuses_a_model_without_a_template_before_loading_it(tmp_path):
    directory = tiny_llama(tmp_path, chat_template=None)
    (directory / "model.safetensors").unlink()
    with pytest.raises(GirihError, match="--chat-template"):
        chat(directory, "hi\n")


def test_a_message_that_does_not_fit_is_refused_and_the_chat_goes_on(model):
    long = "word " * 600
    stdout, stderr = girih("chat", "--model", model, *ENGINE, *GREEDY, stdin=f"{long}\nthe dog\n")
    assert "girih: " in stderr
    assert stdout == chat(model, "the dog\n")


def test_ctrl_c_ends_an_answer_and_the_chat_goes_on(model):
    command = [sys.executable, "-m", "girih.cli.main", "chat", "--model", str(model), *ENGINE, "--ignore-eos"]
    environment = {**os.environ, "PYTHONUNBUFFERED": "1", "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(
        [*command, "--temperature", "0", "--max-num-batched-tokens", "1", "--seed", "3"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=environment,
    ) as process:
        process.stdin.write(b"the quick brown fox\n")
        process.stdin.flush()
        assert process.stdout.read(5)  # the answer has begun
        process.send_signal(signal.SIGINT)
        time.sleep(0.1)
        process.stdin.write(b"/bye\n")
        process.stdin.close()
        rest = process.stdout.read()
        error = process.stderr.read()
        assert process.wait(60) == 0, error
    assert rest.endswith(b"\n")
    assert b"Traceback" not in error
