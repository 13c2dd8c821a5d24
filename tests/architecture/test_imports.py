"""The seams, enforced: which package may import which, and that the control half runs without torch."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import girih
from girih.kv.compiled import COMPILED

ROOT = Path(girih.__file__).parent

BASE = {"errors", "units", "plugins", "grammar", "request", "messages", "config", "parallel"}
# package -> packages of girih it may import (besides itself and its own parts)
ALLOWED = {
    "errors": set(),
    "units": {"errors"},
    "plugins": {"errors"},
    "grammar": {"errors"},
    "request": {"errors", "grammar"},
    "messages": {"request"},
    "config": {"errors", "plugins"},
    "parallel": {"errors", "config"},
    "kv": {"errors", "units", "plugins", "messages"},
    "arch": {"errors", "units", "plugins", "kv", "parallel"},
    "checkpoint": {"errors", "units", "plugins"},
    "sched": BASE | {"kv"},
    "executor": BASE | {"kv"},
    "engine": BASE | {"kv", "sched", "executor", "arch", "checkpoint"},
    "device": {"errors", "units", "plugins"},
    "kernels": {"errors", "units", "kv"},
    "attention": {"errors", "units", "plugins", "device", "kernels", "kv"},
    "linear": {"errors", "units", "device", "kernels", "kv"},
    "layers": BASE | {"kv", "attention", "linear", "kernels", "device"},
    "models": BASE | {"kv", "arch", "layers"},
    "worker": BASE | {"kv", "arch", "checkpoint", "models", "layers", "attention", "linear", "device"},
    "viz": BASE | {"kv"},
    "server": BASE | {"units", "kv", "checkpoint", "engine"},
    "cli": BASE | {"kv", "arch", "checkpoint", "engine", "server", "viz"},
    "__init__": BASE | {"engine"},
}
DATA_HALF = {"worker", "models", "layers", "attention", "linear", "kernels", "device"}
NUMBA_FILES = {
    "kv/compiled.py",
    "kernels/_player.py",
    "kernels/kernel.py",
    "kernels/lanes.py",
    "attention/_cpu_products.py",
    "kernels/processor.py",
    "linear/_int8_products.py",
    "linear/_int8_tiles.py",
    "linear/_products.py",
}


def source_files() -> list[Path]:
    return sorted(ROOT.rglob("*.py"))


def package_of(path: Path) -> str:
    return path.relative_to(ROOT).parts[0].removesuffix(".py")


def imported_modules(path: Path) -> set[str]:
    """Every module named in an import statement, at any depth of the file."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import; write the full name"
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


@pytest.mark.parametrize("path", source_files(), ids=lambda path: str(path.relative_to(ROOT)))
def test_a_package_imports_only_what_its_place_in_the_layout_allows(path: Path) -> None:
    package = package_of(path)
    assert package in ALLOWED, f"{package} has no place in the layout; add it to ALLOWED and docs/design.md"
    imported = {name.split(".")[1] for name in imported_modules(path) if name.startswith("girih.")}
    # `from girih import LLM` names an attribute, not a package
    imported = {name for name in imported if name in ALLOWED} - {package}
    assert imported <= ALLOWED[package], f"may not import {sorted(imported - ALLOWED[package])}"


@pytest.mark.parametrize("path", source_files(), ids=lambda path: str(path.relative_to(ROOT)))
def test_only_the_data_half_names_torch_and_few_files_name_numba(path: Path) -> None:
    roots = {name.split(".")[0] for name in imported_modules(path)}
    if package_of(path) not in DATA_HALF:
        assert "torch" not in roots
    if path.relative_to(ROOT).as_posix() not in NUMBA_FILES:
        assert "numba" not in roots


@pytest.mark.parametrize("path", source_files(), ids=lambda path: str(path.relative_to(ROOT)))
def test_what_is_compiled_is_compiled_anew_when_any_source_of_it_changes(path: Path) -> None:
    source = path.read_bytes()
    if any(decorator in source for decorator in (b"\n@inner", b"\n@entry", b"\n    @intrinsic", b"\n@intrinsic")):
        assert COMPILED.search(source), "its text would not be in the version of what is kept on disk"


def loaded_after(statement: str) -> set[str]:
    """The top-level modules that a fresh interpreter has loaded after a statement."""
    code = f"{statement}\nimport sys; print(*{{name.split('.')[0] for name in sys.modules}})"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return set(run.stdout.split())


def test_the_control_half_runs_without_torch() -> None:
    control = [
        ".".join(("girih", *path.relative_to(ROOT).with_suffix("").parts)).removesuffix(".__init__")
        for path in source_files()
        if package_of(path) not in DATA_HALF
    ]
    assert "torch" not in loaded_after("import " + ", ".join(control))


def test_planning_needs_neither_torch_nor_numba() -> None:
    loaded = loaded_after("from girih.kv import FullAttentionSpec, get_kv_cache_configs; import girih.cli.plan")
    assert not loaded & {"torch", "numba", "transformers"}


def test_an_engine_in_this_process_loads_nothing_that_only_others_need() -> None:
    loaded = loaded_after("import girih.engine.llm, girih.executor.uniproc, girih.worker.worker, girih.attention.cpu")
    assert "torch" in loaded
    assert not loaded & {"transformers", "ray", "typer", "gguf", "jinja2", "llguidance", "PIL"}


def test_no_file_but_the_device_files_names_a_device() -> None:
    for path in source_files():
        if package_of(path) in DATA_HALF - {"device"}:
            text = path.read_text()
            assert "cuda" not in text, path
            assert '"cpu"' not in text, path
