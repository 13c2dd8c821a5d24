"""`girih plan`: figures from files alone, as text, JSON and SVG; bad input is one clear line."""

import json
import os
import subprocess
import sys
from xml.etree import ElementTree

import pytest
import typer
from typer.testing import CliRunner

from girih.cli.plan import command
from girih.errors import GirihError
from girih.kv import KVCacheConfig
from girih.kv.capacity import num_concurrent_requests
from girih.units import GIB, MIB

app = typer.Typer(add_completion=False)
app.command()(command)


@pytest.fixture(autouse=True)
def empty_cache(monkeypatch, tmp_path):
    monkeypatch.setenv("GIRIH_HOME", str(tmp_path / "home"))


def run(*arguments):
    result = CliRunner().invoke(app, list(arguments), catch_exceptions=True)
    if isinstance(result.exception, GirihError):
        raise result.exception
    assert result.exit_code == 0, result.output
    return result.output


def run_json(*arguments):
    return json.loads(run(*arguments, "--json"))


def test_gemma_in_a_gibibyte_has_two_groups_of_16_tokens_and_little_waste():
    report = run_json("gemma3-270m", "--memory", "1GiB")
    assert sorted(group["num_layers"] for group in report["groups"]) == [3, 15]
    assert {group["block_size"] for group in report["groups"]} == {16}
    assert report["waste"] < 0.02
    assert report["weight_bytes"] == 268098176 * 2
    assert report["memory_bytes"] == GIB == report["weight_bytes"] + report["kv_memory_bytes"]
    assert report["kv_bytes_per_token"] == 18 * 1024
    assert report["kv_bytes_per_token_at_max_model_len"] == 3 * 1024
    assert report["max_model_len"] == report["model_limit"] == 32768


def test_the_json_holds_the_whole_plan():
    report = run_json("smollm2", "--kv-cache-memory", "200MiB")
    config = KVCacheConfig.from_json(report["plan"])
    assert config.num_slabs == report["num_slabs"]
    assert report["memory_bytes"] is None
    assert report["kv_memory_bytes"] == 200 * MIB
    for row in report["requests_at_once"]:
        assert row["requests"] == num_concurrent_requests(config, row["tokens"])
        assert row["all_tokens"] == row["requests"] * row["tokens"]


def test_users_and_context_are_answered():
    report = run_json("smollm2", "--kv-cache-memory", "200MiB", "--users", "4", "--context", "500")
    config = KVCacheConfig.from_json(report["plan"])
    assert [row["tokens"] for row in report["requests_at_once"]] == [500]
    longest = report["longest_context"]
    assert longest["users"] == 4
    assert num_concurrent_requests(config, longest["tokens"]) >= 4
    assert num_concurrent_requests(config, longest["tokens"] + 1) < 4


def test_options_reach_the_plan():
    report = run_json(
        "smollm2", "--memory", "2GB", "--dtype", "float32", "--max-model-len", "1000", "--block-size", "32"
    )
    assert report["dtype"] == "float32"
    assert report["weight_bytes"] == 4 * 134515008
    assert report["max_model_len"] == 1000
    assert report["block_size"] == 32


def test_without_a_size_a_share_of_this_machine_is_planned():
    report = run_json("smollm2", "--memory-utilization", "0.9")
    assert report["memory_bytes"] > report["weight_bytes"]


def test_a_directory_with_only_its_config_can_be_planned(tmp_path):
    config = {"model_type": "llama", "num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 4}
    (tmp_path / "config.json").write_text(json.dumps(config))
    report = run_json(str(tmp_path), "--memory", "1GiB")
    assert report["dtype"] == "float32"
    assert report["groups"][0]["num_layers"] == 2


def test_text_answers_a_user_s_questions():
    text = run("gemma3-270m", "--memory", "1GiB", "--users", "8")
    for part in (
        "gemma3-270m: gemma3_text, bfloat16",
        "511.36 MiB weights + 512.64 MiB KV cache = 1.00 GiB",
        "32768 tokens (the model's limit)",
        "18.00 KiB at first, 3.00 KiB",
        "sliding window 512",
        "requests at once",
        "8 users",
        "page, group 1",
    ):
        assert part in text


def test_the_svg_is_written(tmp_path):
    file = tmp_path / "plan.svg"
    assert f"The picture is in {file}." in run("gemma3-270m", "--memory", "1GiB", "--svg", str(file)).replace("\n", "")
    title = ElementTree.parse(file).getroot()[0].text
    assert title == "gemma3-270m: KV cache in 512.64 MiB"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("nonesuch",), "nonesuch"),
        (("smollm2", "--memory", "100MiB"), r"--memory 100MiB leaves no room .* weights of 256.57 MiB"),
        (("smollm2", "--memory", "1GiB", "--kv-cache-memory", "1GiB"), "exclude each other"),
        (("smollm2", "--memory", "lots"), "'lots' is not a size"),
        (("smollm2", "--memory", "1GiB", "--max-model-len", "9000"), "limit of 8192 tokens"),
        (("smollm2", "--memory", "1GiB", "--max-model-len", "long"), "--max-model-len 'long' must be a whole number"),
        (("smollm2", "--memory", "1GiB", "--dtype", "int4"), "dtype='int4' is not supported"),
        (("smollm2", "--memory", "1GiB", "--block-size", "0"), "block_size=0"),
        (("smollm2", "--memory", "1GiB", "--context", "9000"), "--context 9000"),
        (("smollm2", "--memory", "1GiB", "--svg", "/nowhere/plan.svg"), "cannot write --svg /nowhere/plan.svg"),
        (("smollm2", "--kv-cache-memory", "50MiB", "--max-model-len", "8192"), r"the longest request .* 2256 tokens"),
    ],
)
def test_bad_input_is_one_line_that_says_what_to_change(arguments, message):
    with pytest.raises(GirihError, match=message) as error:
        run(*arguments)
    assert "\n" not in str(error.value)


PROBE = """
import resource, sys
from girih.cli.main import main
sys.argv = ["girih", "plan", "gemma3-270m", *{options}, "--json"]
try:
    main()
except SystemExit as end:
    assert not end.code
usage = resource.getrusage(resource.RUSAGE_SELF)
loaded = [name for name in ("torch", "numba", "transformers", "tokenizers") if name in sys.modules]
print(loaded, usage.ru_utime + usage.ru_stime, file=sys.stderr)
"""


@pytest.mark.parametrize("options", [["--memory", "1GiB"], ["--memory-utilization", "0.9"]])
def test_the_command_starts_without_torch_and_takes_little_time(options):
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    probe = [sys.executable, "-c", PROBE.format(options=options)]
    runs = [subprocess.run(probe, capture_output=True, text=True, check=False, env=environment) for _ in range(2)]
    assert runs[1].returncode == 0, runs[1].stderr
    assert len(json.loads(runs[1].stdout)["groups"]) == 2
    loaded, seconds = runs[1].stderr.rsplit(maxsplit=1)
    assert loaded == "[]"
    assert float(seconds) < 1  # of CPU; half a second is the aim, on a machine that does nothing else
