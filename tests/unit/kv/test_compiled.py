import importlib
import logging
import sys
from pathlib import Path

import pytest
from numba.core.caching import IndexDataCacheFile

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
        compiled._say_that_it_takes_long.cache_clear()
        (tmp_path / "twice_inner.py").write_text(INNER.format(factor))
        for name in ("twice_entry", "twice_inner"):
            sys.modules.pop(name, None)
        importlib.invalidate_caches()
        compiled._digest.cache_clear()
        return importlib.import_module("twice_entry").times

    yield load
    compiled._digest.cache_clear()


def test_one_line_is_said_when_something_must_be_compiled_and_none_when_all_is_kept(load, caplog):
    said = "compiling kernels, which takes up to a minute"
    times = load(factor=2)
    assert said not in caplog.text, "nothing is compiled until it is called"
    assert (times(21), times(0.5)) == (42, 1.0)
    assert caplog.text.count(said) == 1
    again = load(factor=2)
    assert (again(21), again(0.5)) == (42, 1.0)
    assert caplog.text.count(said) == 1
    assert load(factor=3)(21) == 63
    assert caplog.text.count(said) == 2


def test_a_function_is_compiled_anew_when_one_that_it_calls_in_another_file_changes(load):
    assert load(factor=2)(21) == 42
    again = load(factor=2)
    assert again(21) == 42
    assert sum(again.compiled.stats.cache_hits.values()) == 1, "an unchanged function is kept"
    changed = load(factor=100)
    assert changed(21) == 2100
    assert sum(changed.compiled.stats.cache_hits.values()) == 0


def kept_files(function):
    return sorted(Path(function.compiled._cache.cache_path).glob("twice_*.nb?"))


@pytest.mark.parametrize("part", ["_save_index", "_save_data"])
@pytest.mark.parametrize("is_killed", [True, False])
def test_a_version_that_could_not_be_kept_never_leaves_the_code_of_an_older_one(load, monkeypatch, part, is_killed):
    def _fail(*_):
        if is_killed:
            raise KeyboardInterrupt
        raise OSError(28, "No space left on device")

    assert load(factor=2)(21) == 42
    with monkeypatch.context() as broken:
        broken.setattr(IndexDataCacheFile, part, _fail)
        if is_killed:
            with pytest.raises(KeyboardInterrupt):
                load(factor=100)(21)
        else:
            assert load(factor=100)(21) == 2100
    assert load(factor=100)(21) == 2100
    again = load(factor=100)
    assert again(21) == 2100
    assert sum(again.compiled.stats.cache_hits.values()) == 1


def test_only_the_newest_version_is_kept(load):
    counts = [len(kept_files(function)) for factor in (2, 3, 4) if (function := load(factor=factor))(1)]
    assert counts == [2, 2, 2]  # the index and the code


@pytest.mark.parametrize("suffix", [".nbi", ".nbc"])
@pytest.mark.parametrize("damage", [lambda old: b"", lambda old: old[: len(old) // 2], lambda old: b"\xff" * len(old)])
def test_a_damaged_file_is_written_anew(load, suffix, damage):
    function = load(factor=2)
    assert function(21) == 42
    for path in kept_files(function):
        if path.suffix == suffix:
            path.write_bytes(damage(path.read_bytes()))
    assert load(factor=2)(21) == 42
    again = load(factor=2)
    assert again(21) == 42
    assert sum(again.compiled.stats.cache_hits.values()) == 1
