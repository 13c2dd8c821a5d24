"""Memory facts from made-up /proc and /sys trees, and from this machine."""

import mmap
import os
import subprocess
import sys

import pytest
import torch

from girih.device import cpu
from girih.errors import ConfigError
from girih.units import GIB, MIB

UNLIMITED_V1 = 9223372036854771712


@pytest.fixture
def machine(tmp_path):
    """A machine of 16 GiB, 12 of them available; write(path, text) adds files."""

    def write(path: str, text: object) -> None:
        file = tmp_path / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"{text}\n")

    write("proc/meminfo", f"MemTotal: {16 * GIB // 1024} kB\nMemFree: 1 kB\nMemAvailable: {12 * GIB // 1024} kB")
    machine.write, machine.root = write, tmp_path
    return machine


def limit_v2(machine, limit, used=0, path=""):
    machine.write("proc/self/cgroup", f"0::/{path}")
    machine.write(f"sys/fs/cgroup/{path}/memory.max", limit)
    machine.write(f"sys/fs/cgroup/{path}/memory.current", used)


def facts_gib(machine):
    facts = cpu.memory_facts(machine.root)
    return facts.total_bytes / GIB, facts.free_bytes / GIB


def test_without_cgroup_files_the_machine_is_the_limit(machine):  # case 13
    assert facts_gib(machine) == (16, 12)
    assert cpu.memory_facts(machine.root).source == "this machine"


def test_version_2_limit_below_the_machine(machine):  # case 13
    limit_v2(machine, 1 * GIB, used=256 * MIB)
    assert facts_gib(machine) == (1, 0.75)
    assert cpu.memory_facts(machine.root).source.endswith("memory.max")


@pytest.mark.parametrize("limit", ["max", 64 * GIB, UNLIMITED_V1])
def test_no_limit_in_effect(machine, limit):  # case 13
    limit_v2(machine, limit, used=10 * GIB)
    assert facts_gib(machine) == (16, 12)


def test_limit_of_a_parent_cgroup_counts(machine):
    limit_v2(machine, "max", path="a/b")
    machine.write("sys/fs/cgroup/a/memory.max", 2 * GIB)
    machine.write("sys/fs/cgroup/a/memory.current", GIB)
    assert facts_gib(machine) == (2, 1)


def test_own_path_unseen_inside_a_container_falls_back_to_the_root(machine):
    limit_v2(machine, 3 * GIB)
    machine.write("proc/self/cgroup", "0::/kubepods/pod7/../../outside")
    assert facts_gib(machine) == (3, 3)


def test_file_cache_that_can_be_dropped_is_free(machine):
    limit_v2(machine, 4 * GIB, used=3 * GIB)
    machine.write("sys/fs/cgroup/memory.stat", f"anon {GIB}\ninactive_file {2 * GIB}\nactive_file 0")
    assert facts_gib(machine) == (4, 3)


@pytest.mark.parametrize(("limit", "expected"), [(2 * GIB, (2, 1.5)), (UNLIMITED_V1, (16, 12))])
def test_version_1(machine, limit, expected):  # case 13
    machine.write("proc/self/cgroup", "5:cpu,cpuacct:/x\n4:memory:/docker/abc")
    machine.write("sys/fs/cgroup/memory/docker/abc/memory.limit_in_bytes", limit)
    machine.write("sys/fs/cgroup/memory/docker/abc/memory.usage_in_bytes", GIB)
    machine.write("sys/fs/cgroup/memory/docker/abc/memory.stat", f"total_inactive_file {GIB // 2}")
    assert facts_gib(machine) == expected


def test_usage_above_the_limit_is_no_negative_free_memory(machine):
    limit_v2(machine, GIB, used=2 * GIB)
    assert facts_gib(machine) == (1, 0)


def test_a_machine_that_tells_nothing_is_refused_with_the_way_out(tmp_path):
    with pytest.raises(ConfigError, match=r"meminfo does not tell the memory.*--kv-cache-memory"):
        cpu.memory_facts(tmp_path)


def test_this_machine_and_process():
    facts = cpu.memory_facts()
    assert 0 < facts.free_bytes <= facts.total_bytes
    assert 10 * MIB < cpu.process_bytes() < facts.total_bytes


def test_the_peak_is_that_since_the_reset():
    cpu.reset_peak()
    before = cpu.peak_process_bytes()
    with mmap.mmap(-1, 64 * MIB) as fresh:  # not from memory that this process freed before and still has
        for page in range(0, len(fresh), mmap.PAGESIZE):
            fresh[page] = 1
    assert 60 * MIB < cpu.peak_process_bytes() - before < 200 * MIB


def test_a_refused_reset_only_makes_the_peak_larger(tmp_path):
    cpu.reset_peak(tmp_path / "nowhere")
    assert cpu.process_bytes(tmp_path) == 0


def test_allocation_is_aligned_and_lazy():
    before = cpu.process_bytes()
    buffer = cpu.allocate(GIB)
    assert buffer.dtype == torch.uint8
    assert buffer.numel() == GIB
    assert buffer.data_ptr() % 64 == 0
    assert cpu.process_bytes() - before < 64 * MIB


def test_a_size_that_cannot_be_had_is_refused_naming_it():
    with pytest.raises(ConfigError, match=r"cannot allocate .* for the KV cache .*--kv-cache-memory"):
        cpu.allocate(1 << 60)


def test_released_memory_leaves_the_process_and_comes_back_when_it_is_written():
    buffer = cpu.allocate(64 * MIB)
    buffer.fill_(7)
    full = cpu.process_bytes()
    cpu.release(buffer, [(MIB, 21 * MIB), (40 * MIB, 60 * MIB)])
    assert 39 * MIB < full - cpu.process_bytes() < 41 * MIB
    outside = torch.cat((buffer[:MIB], buffer[21 * MIB : 40 * MIB], buffer[60 * MIB :]))
    assert bool((outside == 7).all())
    buffer.fill_(8)
    assert bool((buffer == 8).all())
    assert cpu.process_bytes() >= full - 2 * MIB


def test_only_whole_memory_pages_within_a_range_are_released():
    buffer = cpu.allocate(8 * mmap.PAGESIZE)
    buffer.fill_(7)
    cpu.release(buffer, [(100, 100 + mmap.PAGESIZE - 1), (3, 3), (2 * mmap.PAGESIZE, 5 * mmap.PAGESIZE + 1)])
    assert bool((buffer[: 2 * mmap.PAGESIZE] == 7).all())
    assert bool((buffer[5 * mmap.PAGESIZE + 1 :] == 7).all())


def test_memory_that_the_kernel_does_not_take_back_is_an_error():
    far_off = torch.empty(0, dtype=torch.uint8)
    with pytest.raises(ConfigError, match=r"cannot give .* of idle KV cache back to the system"):
        cpu.release(far_off, [(1 << 46, (1 << 46) + GIB)])


def test_workers_share_the_cores_unless_the_user_says_how_many_threads(monkeypatch):
    threads = torch.get_num_threads()
    torch.set_num_threads(6)
    try:
        monkeypatch.setenv("OMP_NUM_THREADS", "6")
        cpu.take_cores(2)
        assert torch.get_num_threads() == 6
        monkeypatch.delenv("OMP_NUM_THREADS")
        cpu.take_cores(4)
        assert torch.get_num_threads() == 1
    finally:
        torch.set_num_threads(threads)


FEWER_THREADS = """
import sys, torch
from girih.device import cpu
torch.set_num_threads(6)
cpu.take_cores(1)
x, weight = torch.randn(200, 96), torch.randn(64, 96)
product = torch.ops.mkldnn._linear_pointwise(x, weight, None, "none", [], "")
torch.testing.assert_close(product, x @ weight.T, atol=1e-4, rtol=1e-4)
print(torch.get_num_threads())
"""


@pytest.mark.parametrize(
    ("option", "threads"), [("OMP_THREAD_LIMIT=1", 1), ("OMP_THREAD_LIMIT=3", 3), ("OMP_DYNAMIC=true", 6)]
)
def test_products_are_right_where_openmp_would_start_fewer_threads(option, threads):
    name, value = option.split("=")
    environment = {**os.environ, "OMP_NUM_THREADS": "6", name: value}
    run = subprocess.run(
        [sys.executable, "-c", FEWER_THREADS], check=False, env=environment, capture_output=True, text=True
    )
    assert run.returncode == 0, run.stderr
    assert int(run.stdout) == threads
