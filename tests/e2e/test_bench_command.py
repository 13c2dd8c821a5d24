"""`girih bench` on a tiny model: every figure is there and adds up; bad input is one clear error. No time is judged."""

import json

import pytest
from tiny_models import tiny_llama
from typer.testing import CliRunner

from girih.cli.main import build_app
from girih.errors import ConfigError, GirihError

ENGINE = ["--kv-cache-memory", "1MiB", "--dtype", "float32"]
SMALL = ["--requests", "3", "--input", "5", "--output", "4"]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return tiny_llama(tmp_path_factory.mktemp("llama"))


def bench(name, model, *arguments):
    """Run a benchmark in this process; return (stdout, stderr)."""
    line = ["bench", name, "--model", model, *ENGINE, *arguments]
    result = CliRunner().invoke(build_app("bench"), list(map(str, line)))
    if isinstance(result.exception, GirihError):
        raise result.exception
    assert result.exit_code == 0, (result.output, result.exception)
    return result.stdout, result.stderr


def test_throughput_counts_output_and_all_tokens_of_every_round(model):
    stdout, stderr = bench("throughput", model, *SMALL, "--rounds", "2", "--json")
    answer = json.loads(stdout)
    assert (answer["benchmark"], answer["engine"]["dtype"]) == ("throughput", "float32")
    assert [answer[name] for name in ("requests", "input_tokens", "output_tokens")] == [3, 5, 4]
    assert len(answer["rounds"]) == 2
    for entry in answer["rounds"]:
        assert entry["output_tokens_per_s"] * entry["seconds"] == pytest.approx(12)
        assert entry["total_tokens_per_s"] * entry["seconds"] == pytest.approx(27)
    rate = answer["output_tokens_per_s"]
    assert rate["min"] <= rate["median"] <= rate["max"]
    assert "round 2 of 2" in stderr


def test_a_profile_says_where_the_time_of_the_steps_goes(model):
    arguments = [*SMALL, "--rounds", "1", "--profile", "--executor", "multiproc", "--pipeline-parallel-size", "2"]
    profiles = json.loads(bench("throughput", model, *arguments, "--json")[0])["profile"]
    assert len(profiles) == 2
    for entry in profiles:
        assert entry["num_steps"] >= 4  # a prompt and three tokens, at least
        assert {"linear", "attention", "sampling", "other"} <= entry["seconds"].keys()
        assert all(seconds >= 0 for seconds in entry["seconds"].values())
    text, _ = bench("throughput", model, *SMALL, "--rounds", "1", "--profile")
    assert "a step" in text
    assert "  linear" in text


@pytest.mark.parametrize("concurrency", [1, 2])
def test_latency_times_each_token_of_each_request(model, concurrency):
    answer = json.loads(bench("latency", model, *SMALL, "--concurrency", concurrency, "--json")[0])
    assert len(answer["requests_measured"]) == 3
    for one in answer["requests_measured"]:
        assert one["time_to_first_token_s"] + 3 * one["time_per_output_token_s"] == pytest.approx(one["seconds"])
    for name in ("time_to_first_token_s", "time_per_output_token_s", "time_between_tokens_s", "request_s"):
        assert 0 < answer[name]["p50"] <= answer[name]["p90"] <= answer[name]["p99"]


def test_latency_of_lone_tokens_has_nothing_between_two(model):
    answer = json.loads(bench("latency", model, "--requests", "1", "--input", "3", "--output", "1", "--json")[0])
    assert answer["time_per_output_token_s"] is None
    assert answer["time_between_tokens_s"] is None
    assert "first token" in bench("latency", model, "--requests", "1", "--input", "3", "--output", "1")[0]


def test_the_phases_of_a_start_add_up(model, tmp_path):
    picture = tmp_path / "starts.svg"
    stdout, _ = bench("startup", model, "--rounds", "1", "--json", "--plot", picture)
    answer = json.loads(stdout)
    (entry,) = answer["rounds"]
    assert sum(entry["phases_s"].values()) == pytest.approx(entry["total_s"])
    assert all(seconds >= 0 for seconds in entry["phases_s"].values())
    for phase in ("start python", "import", "load tokenizer", "load model", "bind KV cache", "warm up", "first token"):
        assert phase in answer["phases_s"]
    assert answer["first_start"] is None
    assert "the rest" in picture.read_text()


def test_text_says_the_median_and_the_picture_shows_every_round(model, tmp_path):
    picture = tmp_path / "rounds.svg"
    stdout, _ = bench("throughput", model, *SMALL, "--rounds", "2", "--plot", picture, "--quantization", "int8")
    assert "llama with int8 weights: 3 x (5 prompt + 4 output) tokens" in stdout
    assert "median" in stdout
    assert picture.read_text().count("output tokens/s</text>") == 2


@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [
        (
            "throughput",
            ["--input", "600"],
            "--input 600 and --output 64 make requests of 664 tokens; the model's own limit is 512: lower them$",
        ),
        (
            "throughput",
            ["--input", "600", "--max-model-len", "64"],
            "takes 64, the model 512: .* raise --max-model-len",
        ),
        ("latency", ["--output", "511", "--input", "2"], "requests of 513 tokens"),
        ("throughput", ["--plot", "no/such/directory/x.svg"], "there is no directory no/such/directory"),
        ("throughput", ["--plot", "x.pdf"], "choose a name in .svg or .png"),
        ("throughput", ["--executor", "nope"], "uniproc"),
        ("startup", ["--executor", "nope"], "uniproc"),
    ],
)
def test_bad_input_is_one_clear_error(model, name, arguments, message):
    with pytest.raises(ConfigError, match=message):
        bench(name, model, *arguments)
