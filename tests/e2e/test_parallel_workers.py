"""Tensor and pipeline parallel workers against one process: the same plan, scheduler and requests, the same tokens."""

import dataclasses
import os
import signal
from pathlib import Path

import numpy as np
import pytest
from core_driver import run
from least_memory import least_memory
from safetensors.torch import load_file
from tiny_models import tiny_gemma3, tiny_llama
from warm_workers import WarmProcesses

from girih import arch, plugins
from girih.checkpoint.hf_config import load_config
from girih.config import EngineConfig
from girih.engine.core import EngineCore
from girih.errors import ConfigError, ExecutorError
from girih.executor import multiproc
from girih.request import SamplingParams
from girih.units import cdiv

GREEDY = SamplingParams(temperature=0, seed=0, max_tokens=12, ignore_eos=True)
PREFIX = [(13 * i * i + 5 * i) % 300 + 3 for i in range(40)]
PROMPTS = [PREFIX[:5], PREFIX, [*PREFIX[:32], 7, 8, 9], PREFIX[3:20], [*PREFIX, 99], [11]]
MODELS = {
    "llama": (tiny_llama, {"num_hidden_layers": 5}),
    "llama-odd": (  # nothing but the heads can be dealt out evenly
        tiny_llama,
        {"num_hidden_layers": 3, "vocab_size": 323, "intermediate_size": 67, "tie_word_embeddings": False,
         "attention_bias": True, "mlp_bias": True},
    ),
    "gemma3": (tiny_gemma3, {"layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2,
                             "num_hidden_layers": 6}),
    "gemma3-untied": (tiny_gemma3, {"tie_word_embeddings": False, "num_key_value_heads": 4, "vocab_size": 321}),
}  # fmt: skip
# (model, tensor ranks, stages, split)
CASES = [
    ("llama", 2, 1, None),
    ("llama", 1, 2, (1, 4)),
    ("llama", 2, 2, None),
    ("llama", 4, 1, None),  # of 2 key/value heads each is on two ranks
    ("llama", 1, 4, (1, 2, 1, 1)),
    ("llama-odd", 2, 1, None),
    ("llama-odd", 4, 1, None),
    ("llama-odd", 2, 2, (2, 1)),
    ("gemma3", 2, 1, None),  # the one key/value head is on both ranks
    ("gemma3", 1, 2, (5, 1)),  # the last stage has no sliding layer
    ("gemma3", 2, 2, None),
    ("gemma3", 1, 3, (2, 1, 3)),  # the first two stages have one group each, of different kinds
    ("gemma3-untied", 4, 1, None),
    ("gemma3-untied", 2, 2, (1, 2)),
]


@pytest.fixture(scope="module")
def processes(tmp_path_factory):
    with WarmProcesses(4, tmp_path_factory.mktemp("meet")) as processes:
        yield processes


@pytest.fixture(scope="module")
def directory_of(tmp_path_factory):
    made: dict[str, Path] = {}

    def directory(name):
        if name not in made:
            build, overrides = MODELS[name]
            made[name] = build(tmp_path_factory.mktemp(name), **overrides)
        return made[name]

    return directory


def engine_config(directory, tensor=1, stages=1, split=None, **options):
    return EngineConfig(
        model=str(directory),
        tensor_parallel_size=tensor,
        pipeline_parallel_size=stages,
        pipeline_split=split,
        **{
            "executor": "uniproc" if tensor * stages == 1 else "multiproc",
            "dtype": "float32",
            "max_model_len": 128,
            "max_num_seqs": 6,
            "max_num_batched_tokens": 24,  # prompts in chunks
            "kv_cache_memory_bytes": 1 << 20,
            "check_invariants": True,
            **options,
        },
    )


@pytest.fixture
def make_core(processes, monkeypatch):
    """Make an engine core over workers in processes, or over one in this process."""
    cores = []

    def make(*args, **options):
        with monkeypatch.context() as patch:
            patch.setattr(multiproc, "create", processes.executor)
            cores.append(EngineCore(engine_config(*args, **options)))
        return cores[-1]

    yield make
    for core in cores:
        core.shutdown()


def generate(core, params=GREEDY, prompts=PROMPTS):
    """Return the results of all prompts, in order."""
    ids = [core.add_request(prompt, params) for prompt in prompts]
    results = run(core)
    assert {error for _, _, error in results.values()} == {None}
    return [results[request_id][0] for request_id in ids]


@pytest.fixture(scope="module")
def expected_of():
    """Remember what one process gives."""
    known = {}

    def expected(make_core, name, directory):
        if name not in known:
            known[name] = generate(make_core(directory))
        return known[name]

    return expected


@pytest.mark.parametrize(("name", "tensor", "stages", "split"), CASES)
def test_tokens_are_those_of_one_process(make_core, directory_of, expected_of, name, tensor, stages, split):
    directory = directory_of(name)
    expected = expected_of(make_core, name, directory)
    core = make_core(directory, tensor, stages, split)
    assert generate(core) == expected
    assert generate(core) == expected  # from cached prefixes
    assert core.stats().cache.tokens_hit > 0
    sampling_rank = (stages - 1) * tensor
    for rank, outputs in enumerate(core.executor.ask("seen_outputs")):
        assert len(outputs) == len(core.executor.steps)
        assert any(rows for rows, _ in outputs) == (rank == sampling_rank)


@pytest.mark.parametrize(
    ("name", "tensor", "stages", "split"),
    [
        ("llama", 2, 1, None),
        ("llama", 1, 2, None),
        ("llama", 1, 2, (1, 4)),
        ("llama", 2, 2, None),
        ("gemma3", 2, 1, None),
        ("gemma3", 1, 2, None),
        ("gemma3", 1, 2, (5, 1)),
        ("gemma3", 2, 2, None),
    ],
)
def test_tokens_are_the_same_under_preemption(make_core, directory_of, name, tensor, stages, split):
    """Short prompts are let in together, and grow until two do not fit."""
    directory, params = directory_of(name), dataclasses.replace(GREEDY, max_tokens=40)
    prompts = [PREFIX[:5], [11], PREFIX[3:20], PREFIX[7:16]]
    expected = generate(make_core(directory), params, prompts)
    config = engine_config(directory, tensor, stages, split, max_model_len=64)
    core = make_core(
        directory, tensor, stages, split, kv_cache_memory_bytes=least_memory(config) * 3 // 2, max_model_len=64
    )
    assert generate(core, params, prompts) == expected
    assert core.stats().num_preemptions > 0


@pytest.mark.parametrize(("tensor", "stages"), [(2, 1), (2, 2)])
@pytest.mark.parametrize("name", ["llama-odd", "gemma3"])
def test_bfloat16_sums_are_rounded_once(make_core, directory_of, name, tensor, stages):
    directory = directory_of(name)
    expected = generate(make_core(directory, dtype="bfloat16"))
    assert generate(make_core(directory, tensor, stages, dtype="bfloat16")) == expected


def all_logprobs(core):
    """Return every report of log probabilities, of prompts and of tokens that need all those before them, in order."""
    params = dataclasses.replace(GREEDY, logprobs=3, prompt_logprobs=2, temperature=0.8, seed=5, presence_penalty=0.5)
    for prompt in PROMPTS:
        core.add_request(prompt, params)
    found = []
    while core.has_unfinished():
        for update in core.step():
            for details in update.details.values():
                found += [part for part in (details.logprobs, details.prompt_logprobs) if part is not None]
    return found


@pytest.mark.parametrize(
    ("name", "tensor", "stages", "split"),
    [("llama", 1, 2, None), ("gemma3", 1, 3, (2, 1, 3)), ("llama-odd", 2, 1, None), ("gemma3", 2, 2, None)],
)
def test_stages_change_no_bit_and_ranks_only_the_order_of_sums(make_core, directory_of, name, tensor, stages, split):
    in_step = {"async_scheduling": False}  # the same chunks in both
    ours = all_logprobs(make_core(directory_of(name), tensor, stages, split, **in_step))
    theirs = all_logprobs(make_core(directory_of(name), **in_step))
    assert len(ours) == len(theirs) > 90
    for one, two in zip(ours, theirs, strict=True):
        assert np.array_equal(one.token_ids, two.token_ids)
        assert np.array_equal(one.ranks, two.ranks)
        if tensor == 1:
            assert np.array_equal(one.logprobs, two.logprobs)
        else:  # these weights are drawn wide, and make much of a rounding
            np.testing.assert_allclose(one.logprobs, two.logprobs, atol=2e-3)


@pytest.mark.parametrize(("tensor", "stages"), [(2, 1), (2, 2)])
def test_the_memory_of_a_machine_is_shared_by_its_workers(make_core, directory_of, tensor, stages):
    core = make_core(directory_of("gemma3"), tensor, stages, kv_cache_memory_bytes=None, memory_utilization=0.2)
    reports = core.startup_report.memory
    total = plugins.load("girih.device", "cpu", what="device").memory_facts().total_bytes
    assert [report.rank for report in reports] == list(range(tensor * stages))
    assert {report.total_bytes for report in reports} == {total // (tensor * stages)}
    assert all(0 < report.available_bytes <= 0.2 * total / (tensor * stages) for report in reports)


@pytest.mark.parametrize(("name", "tensor", "stages"), [("llama", 4, 1), ("llama-odd", 2, 2), ("gemma3", 2, 2)])
def test_a_rank_holds_its_part_of_each_tensor_and_no_other(make_core, directory_of, name, tensor, stages):
    directory = directory_of(name)
    core = make_core(directory, tensor, stages)
    whole = {key: tensor.numpy() for key, tensor in load_file(directory / "model.safetensors").items()}
    parts = []
    for held, weights_bytes in core.executor.ask("weights"):
        assert weights_bytes == sum(weight.nbytes for weight in held.values())
        parts.append(held)
    config = load_config(directory)
    stage_parts = arch.stage_parts(config, arch.CacheDtypes("float32"), num_stages=stages, pipeline_split=None)
    for rank, held in enumerate(parts):
        assert held.keys() == stage_parts[rank // tensor].weight_shapes.keys()
    for stage in range(stages):
        ranks = parts[stage * tensor : (stage + 1) * tensor]
        for key, shares in ((key, [rank[key] for rank in ranks]) for key in ranks[0]):
            axis = 1 if key.endswith(("o_proj.weight", "down_proj.weight")) else 0
            if shares[0].shape == whole[key].shape:
                joined = shares[0]
                assert whole[key].ndim == 1 or "k_proj" in key or "v_proj" in key
            elif sum(share.shape[axis] for share in shares) > whole[key].shape[axis]:  # a head on several ranks
                assert "k_proj" in key or "v_proj" in key
                copies = tensor // config["num_key_value_heads"]
                joined = np.concatenate(shares[::copies], axis)
            else:
                joined = np.concatenate(shares, axis)
                most = cdiv(whole[key].shape[axis], tensor)
                assert all(share.shape[axis] <= most for share in shares)
            assert np.array_equal(joined, whole[key]), key


def test_a_worker_that_is_alone_does_not_wait_for_ever(directory_of, tmp_path):
    """Its error names it and the rank that did not come; the process is of no more use."""
    with WarmProcesses(1, tmp_path) as processes:
        config = engine_config(directory_of("llama"), tensor=2)
        processes.multiproc.collective_rpc("remake", (config, 0, f"file://{tmp_path}/meet"))
        with pytest.raises(ExecutorError, match=r"rank 0 waited for the others to start with rank 1, at most 3 s"):
            processes.multiproc.collective_rpc("load_model_within", (3.0,))


def test_a_step_that_the_others_do_not_take_ends_in_time(processes, directory_of):
    executor = processes.executor(engine_config(directory_of("llama"), tensor=2))
    executor.start()
    executor.ask("load_model_within", lambda rank: (3.0,))
    with pytest.raises(ExecutorError, match=r"rank 0 waited for a layer's share with rank 1, at most 3 s: .*[Tt]imed"):
        executor.ask("add_up_alone", lambda rank: (0,))


def test_a_stage_goes_on_while_the_next_one_stands_still(processes, make_core, directory_of):
    """Then all steps at once, each before the results of those before it are known."""
    core = make_core(directory_of("llama"), 1, 2)
    prompts = [PREFIX + PREFIX[:20], PREFIX[20:] + PREFIX, [7, *PREFIX]]
    expected = generate(core, prompts=prompts)
    steps, (_, first_outputs) = core.executor.steps, core.executor.ask("seen_outputs")
    assert not any(step.samples.any() for step in steps[:2])
    again = processes.executor(core.config, heard_rank=0)  # a step counts as done when the first stage is
    again.start()
    again.collective_rpc("load_model")
    again.collective_rpc("initialize_from_config", args_by_rank=[(config,) for config in core.kv_cache_configs])
    next_stage = processes.multiproc._processes[1].pid
    os.kill(next_stage, signal.SIGSTOP)
    try:
        for step in steps[:2]:
            assert not again.execute_model(step).result(60).rows.size
    finally:
        os.kill(next_stage, signal.SIGCONT)
    for future in [again.execute_model(step) for step in steps[2:]]:
        assert not future.result(60).rows.size
    _, outputs = again.ask("seen_outputs")
    assert outputs == first_outputs
    assert sum(len(rows) for rows, _ in outputs) == sum(map(len, expected))


@pytest.mark.parametrize("tensor", [3, 8])
def test_heads_that_cannot_be_dealt_out_are_refused_before_a_worker_starts(make_core, directory_of, tensor):
    with pytest.raises(ConfigError, match=rf"4 query heads and 2 key/value heads .* to {tensor} .*: 1, 2, 4$"):
        make_core(directory_of("llama"), tensor)


@pytest.mark.parametrize("split", [(1, 4, 1), (2, 2), (4, 2)])
def test_a_split_must_fit_the_stages_and_the_layers(make_core, directory_of, split):
    with pytest.raises(ConfigError, match=r"--pipeline-split .* (give one number|the model has 5)"):
        make_core(directory_of("llama"), 1, 2, split)
