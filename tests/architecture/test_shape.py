"""Sizes, types and docstrings that keep the code readable: caps on files, classes and functions, and no type tests."""

import ast
import re
from pathlib import Path

import pytest

import girih

ROOT = Path(girih.__file__).parent
REPO = ROOT.parent
MAX_FILE_LINES, MAX_CLASS_LINES, MAX_FUNCTION_LINES = 400, 300, 60

FILES = sorted(path for folder in ("girih", "tests", "benchmarks") for path in (REPO / folder).rglob("*.py"))
SOURCES = sorted(ROOT.rglob("*.py"))


def lines_of(node: ast.stmt) -> int:
    assert node.end_lineno is not None
    return node.end_lineno - node.lineno + 1


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(REPO)))
def test_files_classes_and_functions_stay_below_their_caps(path: Path) -> None:
    text = path.read_text()
    assert text.count("\n") <= MAX_FILE_LINES, "look for the file's second reason to change"
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ClassDef):
            assert lines_of(node) <= MAX_CLASS_LINES, node.name
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            assert lines_of(node) <= MAX_FUNCTION_LINES, node.name


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_nobody_asks_a_spec_or_a_retention_for_its_type(path: Path) -> None:
    if path.is_relative_to(ROOT / "kv" / "specs"):
        return
    type_test = re.compile(
        r"(isinstance|issubclass)\([^)]*(Spec|Retention)\b|type\([^)]*\) (is|==) \w*(Spec|Retention)\b"
    )
    assert not type_test.search(path.read_text()), "ask the object, not its type"


def public_definitions(tree: ast.Module) -> list[ast.FunctionDef | ast.ClassDef]:
    """Public functions and classes of a module, and public methods of its public classes."""
    found: list[ast.FunctionDef | ast.ClassDef] = []
    for node in tree.body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and not node.name.startswith("_"):
            found.append(node)
            found += [child for child in ast.walk(node) if isinstance(child, ast.FunctionDef) and child in node.body]
    return [node for node in found if not node.name.startswith("_")]


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_file_class_and_public_function_says_what_it_does(path: Path) -> None:
    tree = ast.parse(path.read_text())
    if tree.body:
        assert ast.get_docstring(tree), "the file has no docstring"
    for node in public_definitions(tree):
        overrides = any(isinstance(mark, ast.Name) and mark.id == "override" for mark in node.decorator_list)
        assert overrides or ast.get_docstring(node), f"{node.name} has no docstring"


def test_every_dependency_is_justified_in_one_line() -> None:
    lines = (REPO / "pyproject.toml").read_text().splitlines()
    dependencies = [line for line in lines if re.match(r'\s+"[a-z0-9-]+[<>=]', line)]
    assert len(dependencies) > 10
    assert all("#" in line for line in dependencies)
