"""The benchmark of an engine's memory: what one process finds, and how three are judged."""

import pytest
from serving_memory import parse, report, serve
from tiny_models import tiny_llama

from girih.units import MIB

GIVEN = {"before_bytes": 500 * MIB, "peak_bytes": 600 * MIB, "pool_bytes": 64 * MIB, "touched_pool_bytes": 8 * MIB}
MEASURED = {**GIVEN, "peak_bytes": 620 * MIB, "weights_bytes": 200 * MIB, "predicted_bytes": 600 * MIB}


def missed(imports=300 * MIB, given=GIVEN, measured=MEASURED):
    return [line.name for line in report(imports, given, measured) if line.missed]


def test_what_an_engine_holds_is_found_in_its_process(tmp_path):
    line = ["--model", str(tiny_llama(tmp_path)), "--requests", "2", "--input", "16", "--output", "3"]
    given = serve(parse([*line, "--kv-cache-memory", "1MiB", "--given"]))
    assert 0 < given["before_bytes"] <= given["peak_bytes"]
    assert 0 < given["touched_pool_bytes"] <= given["pool_bytes"] <= MIB
    measured = serve(parse([*line, "--option", "memory_utilization=0.9", "--option", "dtype=float32"]))
    assert measured["weights_bytes"] > 0
    assert measured["predicted_bytes"] > measured["weights_bytes"] + measured["touched_pool_bytes"]


@pytest.mark.parametrize(
    ("changed", "name"),
    [
        ({}, None),
        ({"given": {**GIVEN, "peak_bytes": 701 * MIB}}, "peak while serving, above that"),
        ({"imports": 100 * MIB}, "the same / (weights + pool + imports and tokenizer)"),
        ({"measured": {**MEASURED, "predicted_bytes": 557 * MIB}}, "difference / measured peak"),
        ({"measured": {**MEASURED, "predicted_bytes": 683 * MIB}}, "difference / measured peak"),
    ],
)
def test_each_mark_is_judged(changed, name):
    assert missed(**changed) == ([] if name is None else [name])


def test_text_says_what_was_judged():
    lines = [str(line) for line in report(300 * MIB, GIVEN, MEASURED)]
    assert sum(line.endswith("pass") for line in lines) == 3
    assert any("100.00 MiB   at most 200.00 MiB: pass" in line for line in lines)
