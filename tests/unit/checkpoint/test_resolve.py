"""What may be typed as a model, and what it becomes."""

import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from tiny_gguf import llama_gguf
from tiny_models import tiny_llama

from girih.checkpoint import cache, catalog, gguf_import
from girih.checkpoint.resolve import ModelFacts, model_facts, resolve_model
from girih.checkpoint.safetensors import open_weights
from girih.errors import CheckpointError, ConfigError


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("GIRIH_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


@pytest.fixture
def gguf_path(tmp_path: Path) -> Path:
    llama_gguf(tiny_llama(tmp_path), tmp_path / "model.gguf")
    return tmp_path / "model.gguf"


def pretend_pulled(name: str) -> Path:
    directory = cache.model_directory(name)
    directory.mkdir(parents=True)
    cache.write_marker(directory, source_sha256=catalog.entry(name).gguf_sha256)
    return directory


def test_a_directory_is_taken_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = tiny_llama(tmp_path)
    assert resolve_model(str(directory)) == directory
    monkeypatch.chdir(tmp_path)
    assert resolve_model(directory.name) == Path(directory.name)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert resolve_model(f"~/{directory.name}") == directory


def test_a_catalog_name_is_its_directory_in_the_cache_once_pulled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigError, match="run `girih pull smollm2`"):
        resolve_model("smollm2")
    directory = pretend_pulled("smollm2")
    assert resolve_model("smollm2") == directory
    (tmp_path / "smollm2").mkdir()  # a directory of that name is not meant by the name alone
    monkeypatch.chdir(tmp_path)
    assert resolve_model("smollm2") == directory


@pytest.mark.parametrize("name", ["gpt5", "org/model", "./nothing", "model.gguf"])
def test_an_unknown_name_lists_what_there_is(name: str) -> None:
    for function in (resolve_model, model_facts):
        with pytest.raises(ConfigError, match=r"no (model|file or directory) .*gemma3-270m, smollm2"):
            function(name)


@pytest.mark.parametrize("name", ["x" * 300, "~no-such-user/model"])
def test_a_name_that_no_path_can_have_is_refused(name: str) -> None:
    for function in (resolve_model, model_facts):
        with pytest.raises(ConfigError, match="cannot be a model"):
            function(name)


def test_a_misspelt_name_is_told_the_one_that_was_meant() -> None:
    with pytest.raises(ConfigError, match="did you mean smollm2"):
        resolve_model("smolm2")


def test_a_gguf_is_imported_once(gguf_path: Path, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stages: list[str] = []
    directory = resolve_model(str(gguf_path), lambda stage, done, total: stages.append(stage))
    assert stages
    assert directory.parent == home / "models"
    assert len(open_weights(directory)) == 20
    monkeypatch.setattr(gguf_import, "import_gguf", None)
    assert resolve_model(str(gguf_path)) == directory


def test_a_changed_gguf_is_imported_again(gguf_path: Path) -> None:
    first = resolve_model(str(gguf_path))
    os.utime(gguf_path, (1, 1))
    assert resolve_model(str(gguf_path)) != first


def test_a_gguf_that_is_damaged_leaves_nothing(gguf_path: Path, home: Path) -> None:
    gguf_path.write_bytes(gguf_path.read_bytes()[:-4096])
    with pytest.raises(CheckpointError, match="truncated or damaged"):
        resolve_model(str(gguf_path))
    assert not [path for path in (home / "models").iterdir() if path.is_dir()]


def test_threads_that_import_at_once_do_it_once(gguf_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real, calls = gguf_import.import_gguf, []
    monkeypatch.setattr(gguf_import, "import_gguf", lambda *args: (calls.append(1), real(*args)))
    results: list[Path] = []
    threads = [threading.Thread(target=lambda: results.append(resolve_model(str(gguf_path)))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(calls) == 1
    assert len(results) == 4
    assert len(set(results)) == 1


def test_processes_that_import_at_once_agree(gguf_path: Path) -> None:
    code = f"from girih.checkpoint.resolve import resolve_model; print(resolve_model({str(gguf_path)!r}))"
    processes = [subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) for _ in range(2)]
    outputs = {process.communicate()[0] for process in processes}
    assert [process.returncode for process in processes] == [0, 0]
    assert len(outputs) == 1
    open_weights(Path(outputs.pop().strip()))


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("pytorch_model.bin", "pickled and can run code"),
        ("x.pt", "pickled and can run code"),
        ("model.safetensors", "name its directory"),
        ("notes.txt", "is not a model"),
    ],
)
def test_a_file_that_is_no_model_is_explained(tmp_path: Path, name: str, words: str) -> None:
    (tmp_path / name).touch()
    for function in (resolve_model, model_facts):
        with pytest.raises(CheckpointError, match=words):
            function(str(tmp_path / name))


def test_a_config_alone_can_be_planned_but_not_run(tmp_path: Path) -> None:
    config = {"model_type": "llama", "vocab_size": 7}
    for name in ("config.json", "other.json"):
        (tmp_path / name).write_text(json.dumps(config))
        assert model_facts(str(tmp_path / name)).config == config
        with pytest.raises(CheckpointError, match="name its directory"):
            resolve_model(str(tmp_path / name))
    facts = model_facts(f"  {json.dumps(config)}\n")
    assert facts == ModelFacts("llama", config, None, None)


@pytest.mark.parametrize(
    ("text", "words"),
    [("[1]", "must hold a JSON object, not list"), ("{", "is not valid JSON"), ('{"a": 1}', 'has no "model_type"')],
)
def test_a_config_that_is_none_is_explained(tmp_path: Path, text: str, words: str) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(CheckpointError, match=f"config.json {words}"):
        model_facts(str(tmp_path / "config.json"))
    if text.startswith("{"):
        with pytest.raises(CheckpointError, match=f"the text given as MODEL {words}"):
            model_facts(text)


def test_the_weights_beside_a_config_are_measured(tmp_path: Path) -> None:
    directory = tiny_llama(tmp_path)
    assert model_facts(str(directory / "config.json")).weight_bytes == model_facts(str(directory)).weight_bytes > 0


def test_a_directory_that_is_no_model_is_explained(tmp_path: Path, gguf_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(CheckpointError, match=r"has no config\.json; a Hugging Face model directory is needed"):
        resolve_model(str(tmp_path / "empty"))
    with pytest.raises(CheckpointError, match=r"to use one of its GGUF files, name it: .*/model\.gguf"):
        resolve_model(str(tmp_path))


def test_facts_of_a_catalog_name_need_no_pull(home: Path) -> None:
    facts = model_facts("gemma3-270m")
    assert (facts.name, facts.weight_bytes, facts.path) == ("gemma3-270m", None, None)
    assert facts.config["model_type"] == "gemma3_text"
    assert not home.exists()


def test_facts_of_a_directory_need_no_weights(tmp_path: Path) -> None:
    directory = tiny_llama(tmp_path)
    facts = model_facts(str(directory))
    assert facts.config["model_type"] == "llama"
    assert facts.path == directory
    assert facts.weight_bytes == open_weights(directory).weight_bytes > 0
    (directory / "model.safetensors").unlink()
    assert model_facts(str(directory)).weight_bytes is None


def test_facts_of_a_gguf_need_no_import(gguf_path: Path, home: Path) -> None:
    facts = model_facts(str(gguf_path))
    assert (facts.weight_bytes, facts.path) == (None, None)
    assert facts.config["num_hidden_layers"] == 2
    assert not home.exists()


def test_facts_load_neither_numpy_nor_gguf() -> None:
    code = (
        "import sys; from girih.checkpoint.resolve import model_facts; model_facts('gemma3-270m'); print(*sys.modules)"
    )
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert not {"numpy", "gguf", "torch", "tokenizers"} & set(loaded)
