"""The attention benchmark runs, and counts bytes as the cache holds them."""

import json

import pytest
from attention import QUICK_STEPS, SHAPES, Step, main, make_cache, make_step

from girih.attention import cpu, reference


def test_a_quick_run_reports_every_backend_and_dtype(capsys):
    assert main(["--quick", "--json", "--shape", "smollm2"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["read_gb_per_s"] > 0
    cases = {(r["step"], r["kv_dtype"], r["backend"]) for r in report["results"]}
    assert len(cases) == len(report["results"]) == 4 * 3 * 2
    alone = {name for name, step in QUICK_STEPS.items() if step.new == 1 and not step.shared}
    assert all((r["fraction"] is not None) == (r["step"] in alone) for r in report["results"])


@pytest.mark.parametrize(("kv_dtype", "bytes_per_head"), [("float32", 4 * 64), ("bfloat16", 2 * 64), ("int8", 64 + 4)])
def test_a_case_reads_so_many_bytes_and_attends_for_each_row(kv_dtype, bytes_per_head):
    cache = make_cache(SHAPES["smollm2"], kv_dtype, 32)
    results = [make_step(backend, SHAPES["smollm2"], cache, Step(2, 99, 1)) for backend in (cpu, reference)]
    assert {read_bytes for _, read_bytes in results} == {2 * 100 * 3 * 2 * bytes_per_head}
    assert all(case().shape == (2, 9, 64) for case, _ in results)
