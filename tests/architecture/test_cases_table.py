"""docs/cases.md names tests that exist."""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]


def names_in(path: Path) -> set[str]:
    """Return the functions, classes and constants at the top of a file."""
    names: set[str] = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            names.add(node.name)
        elif isinstance(node, ast.Assign):
            names |= {target.id for target in node.targets if isinstance(target, ast.Name)}
    return names


def test_every_test_in_the_table_exists():
    table = (ROOT / "docs" / "cases.md").read_text()
    named = re.findall(r"`([\w/]+\.py)::(\w+)`", table)
    assert len(named) > 80
    missing = [f"{path}::{name}" for path, name in named if name not in names_in(ROOT / "tests" / path)]
    assert not missing, f"docs/cases.md names {missing}; rename them there too"
