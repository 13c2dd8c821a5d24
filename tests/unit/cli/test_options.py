"""Options made from dataclasses: every field is one, and what is typed becomes the dataclass."""

import dataclasses

import pytest
import typer
from typer.testing import CliRunner

from girih.cli._options import build, with_options
from girih.cli._plan_options import PlanOptions
from girih.config import EngineConfig
from girih.errors import ConfigError, GirihError, RequestError
from girih.grammar import Grammar
from girih.request import SamplingParams
from girih.server.config import ServerConfig


def parse(*arguments, defaults=None):
    """Return what `girih x ARGUMENTS` would build."""
    built = []

    @with_options(EngineConfig, SamplingParams, defaults=defaults)
    def command(**options):
        """Do."""
        built.append((build(EngineConfig, options), build(SamplingParams, options)))

    app = typer.Typer()
    app.command()(command)
    result = CliRunner().invoke(app, ["--model", "m", *arguments])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == 0, result.output
    return built[0]


def test_nothing_typed_gives_the_defaults():
    assert parse() == (EngineConfig(model="m"), SamplingParams(seed=0))


def test_a_command_may_have_defaults_of_its_own():
    assert parse(defaults={"max_tokens": None})[1].max_tokens is None


def test_every_field_can_be_typed():
    names = {field.name for cls in (EngineConfig, SamplingParams) for field in dataclasses.fields(cls)}
    typed = {
        "dtype": "float32",
        "kv_cache_dtype": "int8",
        "quantization": "int8",
        "max_model_len": "100",
        "kv_cache_memory_bytes": "1GiB",
        "memory_utilization": "0.25",
        "stop": "END",
        "stop_token_ids": "7",
        "logit_bias": "7=-5",
        "top_p": "0.5",
        "min_p": "0.1",
        "executor": "uniproc",
        "device": "cpu",
        "attention_backend": "reference",
        "scheduling_policy": "priority",
        "tensor_parallel_size": "1",
        "pipeline_parallel_size": "1",
    }
    written = {
        "kv_cache_memory_bytes": "--kv-cache-memory",
        "kv_cache_dtype": "--kv-dtype",
        "step_timeout_s": "--step-timeout",
    }
    flags = {"enable_prefix_caching": "--no-enable-prefix-caching"}
    switches = ("check_invariants", "ignore_eos", "kv_events", "restart_workers")
    flags |= {name: f"--{name.replace('_', '-')}" for name in switches}
    flags["async_scheduling"] = "--no-async-scheduling"
    arguments = ["--no-skip-special-tokens", *flags.values()]
    for name in sorted(names - {"model", "skip_special_tokens", "grammar"} - set(flags)):
        arguments += [written.get(name, f"--{name.replace('_', '-')}"), typed.get(name, "2")]
    config, params = parse(*arguments)
    assert config.max_model_len == 100
    assert config.kv_cache_memory_bytes == 1 << 30
    assert (config.enable_prefix_caching, config.check_invariants, params.skip_special_tokens) == (False, True, False)
    assert (params.stop, params.stop_token_ids, params.n, params.logprobs) == (("END",), (7,), 2, 2)
    assert (config.seed, params.seed, params.logit_bias) == (2, 2, ((7, -5),))
    text = '{"const": "a=b"}'  # without the two options above that no grammar goes with
    assert parse("--grammar", f"json_schema={text}")[1].grammar == Grammar("json_schema", text)


@pytest.mark.parametrize(
    ("option", "text", "words"),
    [
        ("--logit-bias", "5", "must be a token id and a number, such as 42=-5"),
        ("--logit-bias", "a=1", "must be a token id and a number"),
        ("--logit-bias", "5=200", "from -100 to 100"),
        ("--grammar", "[0-9]+", "no grammar of kind '.*'; there are json_schema, regex"),
        ("--grammar", "choice=a", "not valid JSON"),
    ],
)
def test_a_bias_or_a_grammar_that_is_none_is_refused(option, text, words):
    with pytest.raises(RequestError, match=words):
        parse(option, text)


def test_several_stops_are_given_one_by_one():
    assert parse("--stop", "a b", "--stop", "c", "--stop-token-ids", "1", "--stop-token-ids", "2")[1] == SamplingParams(
        seed=0, stop=("a b", "c"), stop_token_ids=(1, 2)
    )


def test_a_length_that_is_no_number_is_refused():
    assert parse("--max-model-len", "auto")[0].max_model_len == "auto"
    with pytest.raises(ConfigError, match="--max-model-len 'long'"):
        parse("--max-model-len", "long")


@pytest.mark.parametrize(
    ("typed", "message"),
    [
        (("--kv-dtype", "int4"), "--kv-dtype 'int4' is not supported; choose auto or int8"),
        (("--kv-cache-memory", "1e19"), "size '1e19' is out of range; give between 1 byte and 4 EiB"),
        (("--step-timeout", "0"), "--step-timeout 0.0 must be a number of seconds above 0 and at most 604800 (a week)"),
        (("--max-model-len", "0"), '--max-model-len 0 must be a whole number of at least 1 or "auto"'),
        (("--top-p", "0"), "--top-p 0.0 must be above 0"),
        (("--stop", ""), "--stop ('',) must be non-empty strings"),
    ],
)
def test_an_error_names_the_option_as_it_is_typed(typed, message):
    with pytest.raises(GirihError) as error:
        parse(*typed)
    assert str(error.value) == message


def test_an_error_that_begins_with_another_name_is_left_as_it_is():
    @with_options(EngineConfig)
    def command(**options):
        """Fail."""
        raise ConfigError("hidden_size=0 in config.json, n=0")

    with pytest.raises(ConfigError, match=r"^hidden_size=0 in config.json, n=0$"):
        command()


def test_a_split_is_a_list_of_numbers():
    typed = ("--executor", "multiproc", "--pipeline-parallel-size", "2", "--pipeline-split")
    assert parse(*typed, "10,8")[0].pipeline_split == (10, 8)
    for text in ("10;8", "", "10,0", "10,", "-1,3"):
        with pytest.raises(ConfigError, match=r"--pipeline-split '.*' must be the layers of each stage"):
            parse(*typed, text)


def test_help_comes_from_the_docstrings():
    from girih.cli._options import _field_help

    for cls in (EngineConfig, SamplingParams, ServerConfig, PlanOptions):
        help_texts = _field_help(cls)
        assert all(help_texts[field.name] for field in dataclasses.fields(cls)), help_texts
        assert "None" not in " ".join(help_texts.values()), "nobody can type it"
