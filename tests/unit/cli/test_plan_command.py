"""`girih plan`: the memory bill from files alone, as text, JSON and picture; bad input is one clear line."""

import json
import os
import subprocess
import sys
import time
from xml.etree import ElementTree

import numpy as np
import pytest
import typer
from real_configs import GEMMA_3_27B, LLAMA_3_1_8B
from safetensors.numpy import save_file
from typer.testing import CliRunner

from girih import plugins
from girih.checkpoint.resolve import ModelFacts
from girih.cli._bill import make_bill
from girih.cli._plan_options import PlanOptions
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
    (stage,) = report["stages"]
    assert sorted(group["num_layers"] for group in stage["groups"]) == [3, 15]
    assert {group["block_size"] for group in stage["groups"]} == {16}
    assert stage["waste"] < 0.02
    assert report["num_parameters"] == 268098176
    assert stage["weight_bytes"] == 268098176 * 2
    assert report["memory_bytes"] == GIB == stage["weight_bytes"] + stage["kv_memory_bytes"]
    assert stage["kv_memory_bytes"] == stage["pool_bytes"] + stage["null_page_bytes"] + stage["spare_bytes"]
    assert report["kv_bytes_per_token"] == 18 * 1024
    assert report["kv_bytes_per_token_at_max_model_len"] == 3 * 1024
    assert sum(group["kv_bytes_per_token"] for group in stage["groups"]) == 18 * 1024
    assert sum(group["kv_bytes_per_sequence"] for group in stage["groups"]) == report["kv_bytes_per_sequence"]
    assert report["max_model_len"] == report["model_limit"] == 32768
    assert report["warnings"] == []


def test_the_json_holds_the_whole_plan():
    report = run_json("smollm2", "--kv-cache-memory", "200MiB")
    (stage,) = report["stages"]
    config = KVCacheConfig.from_json(stage["plan"])
    assert config.num_slabs == stage["num_slabs"]
    assert report["memory_bytes"] is None
    assert stage["kv_memory_bytes"] == 200 * MIB
    for row in report["requests_at_once"]:
        assert row["requests"] == num_concurrent_requests(config, row["tokens"])
        assert row["all_tokens"] == row["requests"] * row["tokens"]


@pytest.mark.parametrize(("users", "fits"), [(4, True), (500, False)])
def test_users_and_context_are_answered(users, fits):
    report = run_json("smollm2", "--kv-cache-memory", "200MiB", "--users", str(users), "--context", "500")
    config = KVCacheConfig.from_json(report["stages"][0]["plan"])
    assert [row["tokens"] for row in report["requests_at_once"]] == [500]
    longest = report["longest_context"]
    assert longest["users"] == users
    assert num_concurrent_requests(config, longest["tokens"]) >= users
    assert num_concurrent_requests(config, longest["tokens"] + 1) < users
    assert report["fits"] is fits
    text = run("smollm2", "--kv-cache-memory", "200MiB", "--users", str(users), "--context", "500")
    assert f"500 tokens each {'fit' if fits else 'do NOT fit'}; {longest['tokens']} tokens each at most" in text


def test_a_context_that_memory_alone_forbids_is_answered_with_none():
    report = run_json("smollm2", "--kv-cache-memory", "50MiB", "--context", "8000", "--users", "1")
    assert report["max_model_len"] < 8000
    assert report["requests_at_once"] == [{"tokens": 8000, "requests": 0, "all_tokens": 0}]
    assert report["fits"] is False


def test_options_reach_the_plan():
    report = run_json(
        "smollm2", "--memory", "2GB", "--dtype", "float32", "--max-model-len", "1000", "--block-size", "32"
    )
    assert report["dtype"] == report["kv_dtype"] == "float32"
    assert report["stages"][0]["weight_bytes"] == 4 * 134515008
    assert report["max_model_len"] == 1000
    assert report["stages"][0]["block_size"] == 32


@pytest.mark.parametrize(
    ("kv_dtype", "num_bytes"),
    [("auto", 2 * 64 * 2), ("float32", 2 * 64 * 4), ("int8", 2 * 64 + 2 * 4), ("float8_e4m3fn", 2 * 64)],
)
def test_the_kv_dtype_decides_the_bytes_per_token(kv_dtype, num_bytes):
    report = run_json("smollm2", "--kv-cache-memory", "200MiB", "--kv-dtype", kv_dtype)
    assert report["kv_bytes_per_token"] == 30 * 3 * num_bytes
    assert report["stages"][0]["weight_bytes"] == 2 * 134515008


def test_states_have_a_dtype_of_their_own():
    sizes = {}
    for dtype in ("float32", "bfloat16"):
        report = run_json('{"model_type": "jamba"}', "--kv-cache-memory", "8GiB", "--state-dtype", dtype)
        (state,) = [group for group in report["stages"][0]["groups"] if group["holds_state"]]
        sizes[dtype] = state["page_bytes"]
        assert state["kv_bytes_per_token"] == 0
        assert state["kv_bytes_per_sequence"] == state["page_bytes"]
    assert sizes["float32"] - sizes["bfloat16"] == 28 * 8192 * 16 * 2


def test_int8_weights_are_named_and_counted():
    arguments = ("smollm2", "--kv-cache-memory", "200MiB", "--quantization", "int8")
    report = run_json(*arguments)
    assert (report["quantization"], report["dtype"]) == ("int8", "bfloat16")
    assert 134515008 < report["stages"][0]["weight_bytes"] < 1.01 * 134515008
    assert run(*arguments).startswith("smollm2: llama, 134,515,008 parameters, bfloat16, int8 weights\n")
    assert run_json(*arguments[:3])["quantization"] is None


def test_a_draft_model_is_planned_beside_its_target():
    config = json.dumps({"model_type": "llama", "num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 4})
    alone = run_json("gemma3-270m", "--memory", "1GiB")
    report = run_json("gemma3-270m", "--memory", "1GiB", "--draft", config)
    (stage,) = report["stages"]
    names = [name for group in stage["groups"] for name in group["layer_names"]]
    assert [name for name in names if name.startswith("draft.")] == [
        f"draft.model.layers.{i}.self_attn" for i in (0, 1)
    ]
    assert len(names) == 18 + 2
    assert report["num_speculative_tokens"] == stage["plan"]["num_lookahead_tokens"] == 3
    assert report["model_limit"] == 2048  # the draft's
    assert report["warnings"][0] == "the draft's limit of 2048 tokens is below the model's 32768"
    added = report["num_parameters"] - alone["num_parameters"]
    assert stage["weight_bytes"] - alone["stages"][0]["weight_bytes"] == 4 * added  # the draft is float32
    report = run_json("gemma3-270m", "--memory", "1GiB", "--draft", config, "--num-speculative-tokens", "5")
    assert report["stages"][0]["plan"]["num_lookahead_tokens"] == 5


def test_a_draft_whose_layers_share_a_cache_keeps_that(tmp_path):
    draft = json.dumps({"model_type": "gemma3n_text", "num_hidden_layers": 10, "num_kv_shared_layers": 5})
    report = run_json("gemma3-270m", "--kv-cache-memory", "1GiB", "--draft", draft)
    layers = [layer for group in report["stages"][0]["plan"]["groups"] for layer in group["layers"]]
    owners = {layer["name"]: layer["spec"]["owner"] for layer in layers if layer["spec"]["kind"] == "shared"}
    assert len(owners) == 5
    assert owners["draft.model.layers.9.self_attn"] == "draft.model.layers.4.self_attn"


def test_ranks_share_heads_and_weights():
    one = run_json(json.dumps(LLAMA_3_1_8B), "--memory", "40GiB")
    four = run_json(json.dumps(LLAMA_3_1_8B), "--memory", "40GiB", "--tensor-parallel-size", "4")
    assert one["num_parameters"] == four["num_parameters"] == 8_030_261_248
    assert [stage["workers"] for stage in four["stages"]] == [[0, 1, 2, 3]]
    assert four["stages"][0]["kv_bytes_per_token"] == one["stages"][0]["kv_bytes_per_token"] // 4 == 32 * 1024
    assert four["kv_bytes_per_token"] == one["kv_bytes_per_token"]
    vectors = 65 * 4096
    assert four["stages"][0]["weight_bytes"] == 2 * ((8_030_261_248 - vectors) // 4 + vectors)


def test_more_ranks_than_heads_hold_them_alike():
    report = run_json("gemma3-270m", "--memory", "1GiB", "--tensor-parallel-size", "2")
    assert report["stages"][0]["kv_bytes_per_token"] == 18 * 1024  # one head, on both
    assert report["kv_bytes_per_token"] == 2 * 18 * 1024


def test_pipeline_stages_hold_their_own_layers():
    report = run_json("gemma3-270m", "--memory", "1GiB", "--pipeline-parallel-size", "3", "--tensor-parallel-size", "2")
    assert [stage["workers"] for stage in report["stages"]] == [[0, 1], [2, 3], [4, 5]]
    names = [name for stage in report["stages"] for group in stage["groups"] for name in group["layer_names"]]
    assert sorted(names) == sorted(f"model.layers.{i}.self_attn" for i in range(18))
    weights = [stage["weight_bytes"] for stage in report["stages"]]
    assert weights[0] > weights[1] < weights[2]  # the tied embedding is at both ends
    plans = [KVCacheConfig.from_json(stage["plan"]) for stage in report["stages"]]
    for row in report["requests_at_once"]:
        assert row["requests"] == min(num_concurrent_requests(plan, row["tokens"]) for plan in plans)


def test_the_layers_of_each_stage_may_be_given():
    report = run_json("gemma3-270m", "--memory", "1GiB", "--pipeline-parallel-size", "2", "--pipeline-split", "17, 1")
    layers = [[name for group in stage["groups"] for name in group["layer_names"]] for stage in report["stages"]]
    assert [len(names) for names in layers] == [17, 1]
    assert layers[1] == ["model.layers.17.self_attn"]


def test_the_text_says_what_each_stage_holds():
    text = run(json.dumps(GEMMA_3_27B), "--memory", "80GiB", "--pipeline-parallel-size", "2")
    assert "stage 0 " in text
    assert "stage 1 " in text
    assert "the weights of the image tower are not counted" in text
    assert "on all 2 workers together" in text


def test_stages_that_are_alike_are_said_once():
    config = json.dumps(LLAMA_3_1_8B)
    text = run(config, "--memory", "20GiB", "--pipeline-parallel-size", "4", "--tensor-parallel-size", "2")
    assert "stages 1-2" in text
    assert "on each of 4 workers" in text


def test_without_a_size_a_share_of_this_machine_is_planned():
    report = run_json("smollm2", "--memory-utilization", "0.9")
    assert report["memory_bytes"] > report["stages"][0]["weight_bytes"]
    halves = run_json("smollm2", "--memory-utilization", "0.9", "--pipeline-parallel-size", "2")
    assert halves["memory_bytes"] == report["memory_bytes"] // 2


CONFIG = {"model_type": "llama", "num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 4}


def test_a_directory_a_file_and_the_text_of_a_config_give_one_plan(tmp_path):
    for name in ("config.json", "other.json"):
        (tmp_path / name).write_text(json.dumps(CONFIG))
    models = [str(tmp_path), str(tmp_path / "config.json"), str(tmp_path / "other.json"), json.dumps(CONFIG)]
    reports = [run_json(model, "--memory", "1GiB") for model in models]
    assert [report.pop("model") for report in reports] == [*models[:3], "llama"]
    assert reports[0]["dtype"] == "float32"
    assert all(report == reports[0] for report in reports)


def test_weights_on_disk_are_measured(tmp_path):
    weights = {"model.embed_tokens.weight": np.zeros((50, 7), np.float16), "tower": np.zeros(9, np.uint8)}
    save_file(weights, tmp_path / "model.safetensors")
    config = CONFIG | {"quantization_config": {"quant_method": "some"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    report = run_json(str(tmp_path / "config.json"), "--memory", "1GiB")
    assert report["stages"][0]["weight_bytes"] == 709
    assert report["weights_as_stored"] is True
    assert report["warnings"] == []
    (tmp_path / "model.safetensors").unlink()
    report = run_json(str(tmp_path), "--memory", "1GiB")
    assert report["weights_as_stored"] is False
    assert report["stages"][0]["weight_bytes"] == 2 * report["num_parameters"]
    assert "is quantised; its weights are not beside its config.json" in report["warnings"][0]


def test_a_float16_checkpoint_is_planned_as_it_would_run():
    config = json.dumps(CONFIG | {"torch_dtype": "float16"})
    report = run_json(config, "--memory", "1GiB")
    assert report["dtype"] == "float32"
    assert "stored in float16, which Girih computes in float32" in report["warnings"][0]
    assert run_json(config, "--memory", "1GiB", "--dtype", "float16")["warnings"] == []


def test_the_planner_s_warnings_are_part_of_the_answer(caplog):
    config = {"model_type": "qwen3_next", "dtype": "bfloat16"}
    report = run_json(json.dumps(config), "--kv-cache-memory", "500MiB")
    assert any("KV cache" in text for text in report["warnings"])
    assert not caplog.records
    assert f"warning: {report['warnings'][0]}" in run(json.dumps(config), "--kv-cache-memory", "500MiB")


def test_text_answers_a_user_s_questions():
    text = run("gemma3-270m", "--memory", "1GiB", "--users", "8")
    for part in (
        "gemma3-270m: gemma3_text, 268,098,176 parameters, bfloat16",
        "511.36 MiB weights + 512.64 MiB KV cache = 1.00 GiB",
        "2186 slabs of 240.00 KiB, 240.00 KiB null page",
        "32768 tokens (the model's limit)",
        "18.00 KiB at first, 3.00 KiB",
        "sliding window 512: 15.00 KiB per token until that is full",
        "3 layers, full attention: 3.00 KiB per token, 96.00 MiB per request",
        "requests at once",
        "8 users",
        "page, group 1",
    ):
        assert part in text


def test_the_text_names_draft_and_cache_dtype():
    text = run("gemma3-270m", "--draft", "smollm2", "--memory", "1GiB", "--kv-dtype", "int8")
    headline = "gemma3-270m with smollm2 as its draft: gemma3_text, 402,613,184 parameters, bfloat16, KV cache int8"
    assert f"{headline}, 3 draft tokens per step" in text


def test_the_svg_is_written(tmp_path):
    file = tmp_path / "plan.svg"
    assert f"The picture is in {file}." in run("gemma3-270m", "--memory", "1GiB", "--svg", str(file)).replace("\n", "")
    title = ElementTree.parse(file).getroot()[0].text
    assert title == "gemma3-270m: KV cache in 512.64 MiB"


def test_a_file_in_png_gets_a_png(tmp_path):
    file = tmp_path / "plan.PNG"
    run("gemma3-270m", "--memory", "1GiB", "--svg", str(file))
    assert file.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("model_type", plugins.available("girih.arch"))
def test_every_architecture_is_planned_at_once(model_type):
    facts = ModelFacts(model_type, {"model_type": model_type, "dtype": "bfloat16"}, None, None)
    start = time.process_time()
    bill = make_bill(facts, None, PlanOptions(memory=2048 * GIB))
    assert time.process_time() - start < 0.5  # beside the start of Python, which the last test here measures
    assert bill.figures["requests_at_once"][-1]["requests"] > 1
    assert bill.figures["stages"][0]["waste"] < 0.03


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("nonesuch",), "nonesuch"),
        (("smollm2", "--memory", "100MiB"), r"--memory 100.00 MiB leaves no room .* weights of 256.57 MiB"),
        (("smollm2", "--memory", "200MiB"), r"\(--quantization int8\), which saves 127.47 MiB$"),
        (("smollm2", "--memory", "300MiB", "--max-model-len", "4096"), "raise --memory, or keep the weights as int8"),
        (("smollm2", "--memory", "300MiB", "--max-model-len", "8192"), "raise --memory$"),
        (("smollm2", "--memory", "100MiB", "--quantization", "int8"), r"--pipeline-parallel-size\)$"),
        (("smollm2", "--memory", "1GiB", "--kv-cache-memory", "1GiB"), "exclude each other"),
        (("smollm2", "--memory", "lots"), "'lots' is not a size"),
        (("smollm2", "--memory", "1GiB", "--max-model-len", "9000"), "limit of 8192 tokens"),
        (("smollm2", "--memory", "1GiB", "--max-model-len", "long"), "--max-model-len 'long' must be a whole number"),
        (("smollm2", "--memory", "1GiB", "--dtype", "int4"), "--dtype 'int4' is not supported; choose auto, float32"),
        (("smollm2", "--memory", "1GiB", "--kv-dtype", "int4"), "--kv-dtype 'int4' is not supported; choose auto"),
        (("smollm2", "--memory", "1GiB", "--state-dtype", "int8"), "--state-dtype 'int8' is not supported"),
        (("smollm2", "--memory", "1GiB", "--block-size", "0"), "--block-size 0"),
        (("smollm2", "--memory", "1GiB", "--users", "0"), "--users 0"),
        (("smollm2", "--memory", "1GiB", "--context", "9000"), "--context 9000"),
        (("smollm2", "--memory", "1GiB", "--num-speculative-tokens", "-1"), "--num-speculative-tokens -1"),
        (("smollm2", "--memory", "1GiB", "--memory-utilization", "2"), "--memory-utilization 2"),
        (("smollm2", "--memory", "1GiB", "--tensor-parallel-size", "2"), "3 key/value heads cannot be dealt out to 2"),
        (("smollm2", "--memory", "1GiB", "--pipeline-parallel-size", "31"), "more than the model's 30 layers"),
        (("smollm2", "--pipeline-parallel-size", "2", "--pipeline-split", "29,2"), "29,2 deals out 31 layers"),
        (("smollm2", "--pipeline-split", "15,15"), "is for 2 stages, --pipeline-parallel-size is 1"),
        (("smollm2", "--memory", "1GiB", "--svg", "/nowhere/plan.svg"), "cannot write --svg /nowhere/plan.svg"),
        (("smollm2", "--kv-cache-memory", "50MiB", "--max-model-len", "8192"), r"the longest request .* 2256 tokens"),
        (('{"model_type": "mamba"}',), "'mamba'; available: bamba, .*whisper"),
        (('{"layers": 1}',), 'the text given as MODEL has no "model_type"'),
        (('{"model_type": ',), "the text given as MODEL is not valid JSON"),
        (("smollm2", "--draft", "nonesuch"), "nonesuch"),
        (
            ('{"model_type": "gemma3n"}', "--kv-cache-memory", "1GiB", "--pipeline-parallel-size", "4"),
            "another pipeline stage; choose a --pipeline-parallel-size that keeps",
        ),
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
    assert len(json.loads(runs[1].stdout)["stages"][0]["groups"]) == 2
    loaded, seconds = runs[1].stderr.rsplit(maxsplit=1)
    assert loaded == "[]"
    assert float(seconds) < 1  # of CPU; half a second is the aim, on a machine that does nothing else
