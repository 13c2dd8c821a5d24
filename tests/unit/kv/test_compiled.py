import importlib
import logging
import sys

import pytest

from girih.kv import compiled

INNER = """
from girih.kv.compiled import inner
@inner
def factor():
    return {}
"""
ENTRY = """
from girih.kv.compiled import entry
from twice_inner import factor
@entry
def times(x):
    return x * factor()
"""


def test_a_function_that_cannot_be_cached_on_disk_is_compiled_all_the_same(caplog):
    names = {}
    exec("def twice(x):\n    return 2 * x\n", names)  # has no file, so numba finds nowhere to cache it
    with caplog.at_level(logging.WARNING):
        twice = compiled.entry(names["twice"])
    assert twice(21) == 42
    assert "NUMBA_CACHE_DIR" in caplog.text


@pytest.fixture
def load(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(compiled, "__file__", str(tmp_path / "compiled.py"))
    (tmp_path / "twice_entry.py").write_text(ENTRY)

    def load(factor):
        (tmp_path / "twice_inner.py").write_text(INNER.format(factor))
        for name in ("twice_entry", "twice_inner"):
            sys.modules.pop(name, None)
        importlib.invalidate_caches()
        compiled._digest.cache_clear()
        return importlib.import_module("twice_entry").times

    yield load
    compiled._digest.cache_clear()


def test_a_function_is_compiled_anew_when_one_that_it_calls_in_another_file_changes(load):
    assert load(factor=2)(21) == 42
    again = load(factor=2)
    assert again(21) == 42
    assert sum(again.compiled.stats.cache_hits.values()) == 1, "an unchanged function is kept"
    changed = load(factor=100)
    assert changed(21) == 2100
    assert sum(changed.compiled.stats.cache_hits.values()) == 0
