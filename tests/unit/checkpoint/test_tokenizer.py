"""`Tokenizer` on a directory, and chat templates."""

import json
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from tiny_models import CHAT_TEMPLATE, byte_level_tokenizer

from girih.checkpoint.hf_config import eos_token_ids
from girih.checkpoint.tokenizer import Tokenizer
from girih.errors import CheckpointError, ConfigError, RequestError

CHAT = [{"role": "user", "content": "hi <b> & é"}, {"role": "assistant", "content": "yes"}]


def directory_with(directory: Path, *, generation: dict[str, Any] | None = None, **config: Any) -> Path:
    byte_level_tokenizer(add_bos=True).save(str(directory / "tokenizer.json"))
    settings = {"bos_token": "<bos>", "eos_token": {"__type": "AddedToken", "content": "<eos>"}, **config}
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
    if generation is not None:
        (directory / "generation_config.json").write_text(json.dumps(generation))
    return directory


@pytest.fixture
def tokenizer(tmp_path: Path) -> Tokenizer:
    return Tokenizer.from_directory(directory_with(tmp_path, chat_template=CHAT_TEMPLATE))


def render(template: str, **options: Any) -> str:
    source = Tokenizer(byte_level_tokenizer(add_bos=False), special_tokens={"bos": "<s>"}, chat_template=template)
    return source.apply_chat_template(CHAT, **options)


def test_encode_and_decode(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("the fox")
    assert ids[0] == 1
    assert tokenizer.encode("the fox", add_special_tokens=False) == ids[1:]
    assert tokenizer.decode(ids) == "the fox"
    assert tokenizer.decode(ids, skip_special_tokens=False) == "<bos>the fox"


def test_encoding_lets_other_threads_run_and_gives_the_backend_s_ids(tokenizer: Tokenizer) -> None:
    text = "the quick <eos> brown fox's é 😀 \u2028 " * 10_000
    count, done = 0, threading.Event()

    def run() -> None:
        nonlocal count
        while not done.wait(0.001):
            count += 1

    thread, interval = threading.Thread(target=run), sys.getswitchinterval()
    sys.setswitchinterval(1000)  # from here on a thread runs only when another one waits or lets go of the lock
    try:
        thread.start()
        before, ids, after = count, tokenizer.encode(text), count
    finally:
        done.set()
        sys.setswitchinterval(interval)
        thread.join()
    assert after > before
    assert ids == tokenizer.backend.encode(text).ids


def test_one_token_as_text(tokenizer: Tokenizer) -> None:
    assert tokenizer.token_to_text(1) == "<bos>"
    (first, *_) = tokenizer.encode("é", add_special_tokens=False)
    assert tokenizer.token_to_text(first) == "\ufffd"  # half a character
    assert [tokenizer.is_special(i) for i in (0, 1, 2, 3)] == [True, True, True, False]


@pytest.mark.parametrize(("generation", "expected"), [({"eos_token_id": [2, 7]}, (2, 7)), (None, (2,)), ({}, (2,))])
def test_what_ends_a_sequence_falls_back_to_the_eos_token(
    tmp_path: Path, generation: dict[str, Any] | None, expected: tuple[int, ...]
) -> None:
    assert eos_token_ids(directory_with(tmp_path, generation=generation)) == expected


@pytest.mark.parametrize("settings", [{"eos_token": None}, {"eos_token": "<unheard of>"}])
def test_a_model_without_special_tokens(tmp_path: Path, settings: dict[str, Any]) -> None:
    directory = directory_with(tmp_path, bos_token=None, **settings)
    assert "bos" not in Tokenizer.from_directory(directory).special_tokens
    assert eos_token_ids(directory) == ()


def test_a_truncation_stored_in_the_file_cuts_no_prompt(tmp_path: Path) -> None:
    backend = byte_level_tokenizer(add_bos=False)
    backend.enable_truncation(3)
    backend.enable_padding(length=64)
    backend.save(str(tmp_path / "tokenizer.json"))
    assert len(Tokenizer.from_directory(tmp_path).encode("x y z x y z x")) > 3
    assert len(Tokenizer.from_directory(tmp_path).encode("x")) == 1


def test_a_missing_or_damaged_file_is_explained(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"has no tokenizer\.json"):
        Tokenizer.from_directory(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"tokenizer\.json cannot be used"):
        Tokenizer.from_directory(tmp_path)
    directory_with(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text("[")
    with pytest.raises(CheckpointError, match=r"tokenizer_config\.json is not valid JSON"):
        Tokenizer.from_directory(tmp_path)


def test_half_a_surrogate_pair_is_refused_as_the_request_it_came_with(tokenizer: Tokenizer) -> None:
    with pytest.raises(RequestError, match="whole Unicode characters"):
        tokenizer.encode("a\ud83d")


def test_the_chat_template_gives_what_transformers_gives(tmp_path: Path, tokenizer: Tokenizer) -> None:
    from transformers import AutoTokenizer

    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    for generation_prompt in (True, False):
        text = tokenizer.apply_chat_template(CHAT, add_generation_prompt=generation_prompt)
        assert text == theirs.apply_chat_template(CHAT, tokenize=False, add_generation_prompt=generation_prompt)
        assert text.endswith("<bos>assistant: ") is generation_prompt
        assert "hi <b> & é" in text


TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]


def test_tools_and_variables_give_what_transformers_gives(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    template = "{% for t in tools %}{{ t | tojson }}{% endfor %}{{ mood }}{% if not brief %}{{ bos_token }}{% endif %}"
    ours = Tokenizer.from_directory(directory_with(tmp_path, chat_template=template))
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    variables = {"mood": "calm", "brief": True}
    expected = theirs.apply_chat_template(CHAT, tools=TOOLS, tokenize=False, **variables)
    assert ours.apply_chat_template(CHAT, tools=TOOLS, variables=variables) == expected
    assert "add" in expected
    assert "calm" in expected
    assert "<bos>" not in expected


@pytest.mark.parametrize("name", ["messages", "tools", "add_generation_prompt"])
def test_a_variable_takes_no_argument_s_place(name: str) -> None:
    with pytest.raises(RequestError, match=f"'{name}' is no variable"):
        render("{{ messages }}", variables={name: []})


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        ("{% if tools %}{{ tools | tojson }}{% endif %}", True),
        ("{% if tools is not defined %}{% set tools = none %}{% endif %}{% if tools is not none %}x{% endif %}", True),
        ("{% macro m() %}{{ tools | length }}{% endmacro %}{{ m() }}", True),
        ("{% for tools in messages %}{{ tools }}{% endfor %}", False),
        (CHAT_TEMPLATE, False),
        (None, False),
    ],
)
def test_a_template_that_shows_tools_is_told_from_one_that_does_not(template: str | None, expected: bool) -> None:
    assert (
        Tokenizer(byte_level_tokenizer(add_bos=False), special_tokens={}, chat_template=template).uses_tools is expected
    )


@pytest.mark.parametrize("sources", [["file", "list"], ["list"], ["string"], []])
def test_where_the_template_comes_from(tmp_path: Path, sources: list[str]) -> None:
    named = [{"name": "tool_use", "template": "tools"}, {"name": "default", "template": "list"}]
    config = {"list": {"chat_template": named}, "string": {"chat_template": "string"}}
    directory_with(tmp_path, **config.get(sources[-1] if sources else "", {}))
    if "file" in sources:
        (tmp_path / "chat_template.jinja").write_text("file")
    assert Tokenizer.from_directory(tmp_path).chat_template == (sources[0] if sources else None)


def test_without_a_template_the_option_is_named(tmp_path: Path) -> None:
    source = Tokenizer.from_directory(directory_with(tmp_path))
    with pytest.raises(ConfigError, match="--chat-template"):
        source.apply_chat_template(CHAT)
    assert source.apply_chat_template(CHAT, chat_template="{{ messages | length }}") == "2"


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        ("{{ bos_token }}{% if eos_token is defined %}no{% endif %}", "<s>"),
        ("{{ messages[0] | tojson }}", '{"role": "user", "content": "hi <b> & é"}'),
        ("{{ {'b': 1, 'a': [1]} | tojson(indent=1, sort_keys=True) }}", '{\n "a": [\n  1\n ],\n "b": 1\n}'),
        ("{{ strftime_now('%%') }}", "%"),
        ("{% for m in messages %}{% if loop.index0 %}{% break %}{% endif %}{{ m.role }}{% endfor %}", "user"),
        ("{% generation %}{{ messages[1].content }}{% endgeneration %}!", "yes!"),
        ("{% if tools %}t{% endif %}{% if documents is none %}d{% endif %}", "d"),
        ("a\n  {% if true %}\nb\n  {% endif %}\nc", "a\nb\nc"),
    ],
)
def test_the_helpers_that_templates_rely_on(template: str, expected: str) -> None:
    assert render(template) == expected


@pytest.mark.parametrize(
    ("template", "words"),
    [
        ("{{ raise_exception('roles must alternate') }}", "refuses these messages: roles must alternate"),
        ("{{ messages[0].content.x.y }}", "refuses these messages"),
        ("{{ messages[9].role }}", "refuses these messages"),
        ("{{ 1 / 0 }}", "refuses these messages"),
        ("{{ ''.__class__.__mro__ }}", "refuses these messages"),
        ("{{ messages.append(1) }}", "refuses these messages"),
    ],
)
def test_what_a_template_refuses_or_must_not_do_is_the_request_s_error(template: str, words: str) -> None:
    with pytest.raises(RequestError, match=words):
        render(template)


def test_a_template_with_bad_syntax_is_the_checkpoint_s_error() -> None:
    with pytest.raises(CheckpointError, match="not valid Jinja: line 2"):
        render("a\n{% if %}")
