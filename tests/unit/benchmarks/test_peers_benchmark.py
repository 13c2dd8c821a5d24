"""The benchmark of peers: engines in processes of their own take turns; ratios compare figures of one alternation."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from peer_process import PeerProcess, Variant
from peers import VARIANTS, ratios
from tiny_models import tiny_llama

PEERS = Path(__file__).parents[3] / "benchmarks" / "peers.py"
SMALL = ["--requests", "2", "--input", "5", "--output", "3", "--alternations", "2", "--rounds", "1"]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return tiny_llama(tmp_path_factory.mktemp("llama"))


def run_peers(*arguments):
    command = [sys.executable, str(PEERS), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def stands_still(process):
    """Wait until the kernel has stopped the process."""
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        if Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] == "T":
            return True
        time.sleep(0.01)
    return False


def test_girih_and_transformers_take_turns_on_the_same_work(model):
    variants = ["girih-float32", "transformers-float32"]
    done = run_peers("--model", model, *SMALL, "--threads", 1, "--variants", *variants, "--json")
    assert done.returncode == 0, done.stderr
    turns = [line.split()[2] for line in done.stderr.splitlines() if line.startswith("alternation")]
    assert turns == [*variants, *reversed(variants)]
    found = json.loads(done.stdout)
    assert [len(found["engines"][name]["tokens_per_s"]) for name in variants] == [2, 2]
    ratio = found["ratios"]["girih-float32"]["transformers-float32"]
    pairs = zip(*(found["engines"][name]["tokens_per_s"] for name in variants), strict=True)
    expected = sorted(mine / theirs for mine, theirs in pairs)
    assert [ratio["min"], ratio["max"]] == pytest.approx(expected)


def test_prompts_may_have_their_first_tokens_in_common(model):
    done = run_peers("--model", model, *SMALL, "--shared", 4, "--threads", 1, "--variants", "girih-float32", "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["work"]["shared"] == 4


def test_an_engine_stands_still_while_it_is_not_its_turn_and_is_gone_in_the_end(model):
    work = {"model": str(model), "requests": 1, "input": 3, "output": 2, "shared": 0, "kv_cache_gib": 1}
    peer = PeerProcess("ours", Variant("girih", {}, {"OMP_NUM_THREADS": "1"}), sys.executable, work)
    number = peer._process.pid
    try:
        assert stands_still(number)
        assert len(peer.seconds([[[5, 6, 7]]] * 3, num_output_tokens=2, warm_up_tokens=1)) == 2
        assert stands_still(number)
    finally:
        peer.close()
    with pytest.raises(ProcessLookupError):
        os.kill(number, 0)


def test_an_engine_that_ends_early_is_an_error_with_its_last_words():
    variant = Variant("girih", {"dtype": "float128"})
    work = {"model": "smollm2", "requests": 1, "input": 1, "output": 1, "shared": 0, "kv_cache_gib": 1}
    with pytest.raises(SystemExit, match=r"(?s)ours ended with exit code 1.*float128"):
        PeerProcess("ours", variant, sys.executable, work)


def test_ratios_are_those_of_one_alternation_and_the_best_peer_may_change():
    rates = {
        "girih-int8": [30.0, 60.0],
        "transformers-float32": [10.0, 20.0],
        "vllm-float32": [15.0, 10.0],
        "llamacpp": [20.0, 40.0],
    }
    found = ratios(rates)["girih-int8"]
    assert found["transformers-float32"] == {"median": 3.0, "min": 3.0, "max": 3.0}
    assert found["best float32 peer"] == {"median": 2.5, "min": 2.0, "max": 3.0}
    assert found["best peer"] == {"median": 1.5, "min": 1.5, "max": 1.5}


def test_every_variant_has_a_file_that_runs_it():
    for variant in VARIANTS.values():
        assert (PEERS.parent / "peer_engines" / f"run_{variant.engine}.py").is_file()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--variants", "vllm-float32"], "vllm-float32: give --vllm-python"),
        (["--llamacpp-python", "x"], "--llamacpp-python needs --gguf FILE"),
        (["--rounds", "0"], "--rounds 0 must be at least 1"),
        (["--kv-cache-gib", "0"], "--kv-cache-gib 0 must be at least 1"),
        (["--input", "8", "--shared", "8"], "--shared 8 must be less than --input 8"),
    ],
)
def test_bad_input_is_one_clear_error(arguments, message):
    done = run_peers(*arguments)
    assert done.returncode != 0
    assert message in done.stderr
