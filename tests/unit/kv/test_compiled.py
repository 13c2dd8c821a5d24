import logging

from girih.kv.compiled import entry


def test_a_function_that_cannot_be_cached_on_disk_is_compiled_all_the_same(caplog):
    names = {}
    exec("def twice(x):\n    return 2 * x\n", names)  # has no file, so numba finds nowhere to cache it
    with caplog.at_level(logging.WARNING):
        twice = entry(names["twice"])
    assert twice(21) == 42
    assert "NUMBA_CACHE_DIR" in caplog.text
