"""What people put into `girih plan` by mistake: an answer or one line of an error, never a traceback, never a wait."""

import json
import re
from xml.etree import ElementTree

import pytest

from girih import arch, plugins
from girih.checkpoint.resolve import ModelFacts
from girih.cli import main
from girih.cli._bill import make_bill
from girih.cli._plan_options import PlanOptions
from girih.errors import GirihError

# of no field's type, or out of every field's range
WRONG = ("32", "", 0, -1, 1.5, 1 << 31, 10**30, float("inf"), [[1]], [None], {"a": 1})
# valid in some places only
ODD = (None, True, 1, 3, [], ["full_attention"] * 4)
EVERYWHERE = {"dtype", "text_config", "quantization_config", "num_hidden_layers", "layer_types", "head_dim"}
FEW_LAYERS = {"num_hidden_layers": 4, "encoder_layers": 4, "decoder_layers": 4, "num_kv_shared_layers": 0}


@pytest.mark.parametrize("model_type", plugins.available("girih.arch"))
def test_no_value_of_any_field_is_more_than_an_error(model_type):
    facts = arch.load({"model_type": model_type})
    is_nested = not hasattr(facts, "DEFAULTS")
    defaults = arch.load({"model_type": f"{model_type}_text"}).DEFAULTS if is_nested else facts.DEFAULTS
    messages = []
    for field in sorted(EVERYWHERE | defaults.keys()):
        for value in WRONG + ODD:
            fields = {"dtype": "bfloat16", **FEW_LAYERS, field: value}
            config = {"model_type": model_type} | ({"text_config": fields} if is_nested else fields)
            try:
                make_bill(ModelFacts("it", config, None, None), None, PlanOptions(memory=1 << 61))
            except GirihError as error:
                messages.append(str(error))
    assert len(messages) > len(defaults) * len(WRONG) // 2
    assert not any("\n" in message for message in messages)


@pytest.fixture
def girih(monkeypatch, tmp_path, capsys):
    """Run a whole command line in an empty folder; returns (exit code, stdout, stderr)."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GIRIH_HOME", str(tmp_path / "home"))

    def _run(*arguments):
        monkeypatch.setattr("sys.argv", ["girih", *arguments])
        with pytest.raises(SystemExit) as end:
            main.main()
        return end.value.code, *capsys.readouterr()

    return _run


def refusal(done):
    code, out, error = done
    assert (code, out) == (2, "")
    assert error.startswith("girih: ")
    assert error.count("\n") == 1
    assert error.endswith("\n")
    return error


@pytest.mark.parametrize(
    "content",
    [b"", b"[1, 2]", b"null", b'"llama"', b"{}", b'{"model_type": ["llama"]}', b'{"model_type": "../llama"}',
     b'{"model_type": "_common"}', b'{"model_type": "ll\\nama"}', b'{"model_type": "llama"', b"[" * 100_000,
     b"\xff\xfe{", b'{"model_type": "llama", "vocab_size": ' + b"9" * 10_000 + b"}",
     b'{"model_type": "gemma2", "num_hidden_layers": 1, "layer_types": ["a\\nb"]}'],
)  # fmt: skip
def test_a_file_that_is_no_config_is_refused_in_one_line(girih, tmp_path, content):
    (tmp_path / "config.json").write_bytes(content)
    (tmp_path / "other.json").write_bytes(content)
    for model in (".", "config.json", "other.json"):
        refusal(girih("plan", model, "--memory", "100GiB"))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--tensor-parallel-size", "3" + "0" * 20], "must be at most 65536 workers"),
        (["--tensor-parallel-size", "30000", "--pipeline-parallel-size", "3"], "must be at most 65536 workers"),
        (["--num-speculative-tokens", "8192"], "--num-speculative-tokens 8192 must be below .* 8192 tokens"),
        (["--num-speculative-tokens", "9" * 30], "must be below the model's own limit"),
        (["--block-size", "9" * 30], "not even one block fits"),
        (["--max-model-len", "50", "--context", "51"], "--context 51 is longer than --max-model-len 50"),
        (["--draft", ""], "has no config.json"),
        (
            ["--draft", '{"model_type": "llama", "quantization_config": "gptq"}'],
            "quantization_config='gptq' must be an",
        ),
        (["--svg", "no\nfolder/x.svg"], r"cannot write --svg no\\nfolder/x.svg"),
    ],
)
def test_an_odd_option_is_refused_in_one_line(girih, options, message):
    error = refusal(girih("plan", "smollm2", "--memory", "4GiB", *options))
    assert re.search(message, error), error


@pytest.mark.parametrize("name", ["a[/b]", "[red]", "a\nb", "\udcff", "a\x1b[31m", ":smile:"])
def test_a_model_may_have_any_name(girih, tmp_path, name):
    (tmp_path / name).mkdir(parents=True)
    (tmp_path / name / "config.json").write_text('{"model_type": "llama"}')
    code, out, _ = girih("plan", name, "--memory", "100GiB", "--svg", "plan.svg")
    shown = name.encode("unicode_escape").decode()
    assert code == 0
    assert out.startswith(f"{shown}: llama, ")
    assert shown in ElementTree.parse(tmp_path / "plan.svg").getroot()[0].text


def test_a_draft_with_another_vocabulary_is_planned_with_a_warning(girih):
    def _warnings(vocab_size):
        draft = json.dumps({"model_type": "llama", "vocab_size": vocab_size, "max_position_embeddings": 8192})
        return json.loads(girih("plan", "smollm2", "--memory", "40GiB", "--draft", draft, "--json")[1])["warnings"]

    assert _warnings(49152) == []
    assert _warnings(77) == [
        "the draft's vocabulary of 77 tokens is not the model's 49152; a draft must have the model's tokens"
    ]
