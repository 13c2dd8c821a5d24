"""The worker from load to step: weights by name and without copies, the memory bill, binding, outputs of a step."""

import dataclasses
import json
import re

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from girih import arch
from girih.checkpoint.hf_config import load_config
from girih.device import MemoryFacts
from girih.errors import BindingError, CapacityError, CheckpointError, ConfigError
from girih.kv.config import KVCacheConfig, KVCacheGroupSpec
from girih.kv.specs.full_attention import FullAttentionRetention
from girih.layers.sources import checkpoint_views
from girih.request import SamplingParams
from girih.units import GIB, MIB
from girih.worker import model_runner, sampler
from tests.step_driver import GREEDY, StepDriver, make_worker
from tests.tiny_models import EOS_TOKEN_ID, VOCAB_SIZE, reference_model, tiny_gemma3, tiny_llama

PROMPT = [(13 * i * i + 5 * i) % 300 + 3 for i in range(50)]
BUILDERS = {"llama": tiny_llama, "gemma3": tiny_gemma3}


@pytest.fixture(scope="module", params=BUILDERS)
def directory(request, tmp_path_factory):
    """A tiny model of each architecture."""
    return BUILDERS[request.param](tmp_path_factory.mktemp(request.param))


def reference_logprobs(directory, tokens):
    """Return log probabilities [len(tokens), V] of transformers."""
    with torch.inference_mode():
        return reference_model(directory)(torch.tensor([tokens])).logits[0].log_softmax(-1).numpy()


def test_specs_are_those_that_config_json_promised(directory):
    config = load_config(directory)
    worker = make_worker(directory)
    expected = arch.load(config).kv_cache_specs(config, arch.CacheDtypes("float32"), block_size_multiple=1)
    assert worker.get_kv_cache_spec() == expected
    assert list(worker.get_kv_cache_spec()) == list(expected)


def test_parameters_are_those_of_the_checkpoint(directory):
    config = load_config(directory)
    model = make_worker(directory).runner.model
    shapes = {name: tuple(p.shape) for name, p in checkpoint_views(model).items()}
    assert shapes == arch.load(config).weight_shapes(config)
    tensors = load_file(directory / "model.safetensors")
    assert all(torch.equal(p, tensors[name]) for name, p in checkpoint_views(model).items())


def test_loading_counts_bytes_and_converts_only_when_asked(directory):
    single = make_worker(directory)
    half = make_worker(directory, dtype="bfloat16")
    assert make_worker(directory, dtype="auto").weights_bytes == single.weights_bytes == 2 * half.weights_bytes
    assert all(p.dtype == torch.bfloat16 for p in half.runner.model.parameters())


def test_weights_stay_mapped_from_the_file(tmp_path):
    """A tensor in the wanted dtype is not copied: loading 128 MiB makes the process hardly larger."""
    from girih.device import cpu

    directory = tiny_llama(tmp_path, vocab_size=2**18, hidden_size=128)
    before = cpu.process_bytes()
    worker = make_worker(directory)
    assert worker.weights_bytes > 128 * MIB
    assert cpu.process_bytes() - before < 64 * MIB


@pytest.mark.parametrize("tied", [True, False])
def test_touching_the_weights_brings_all_of_them_into_memory(tmp_path, tied):
    """Also the rows of an embedding that no step has looked up."""
    from girih.device import cpu

    directory = tiny_llama(tmp_path, vocab_size=2**17, hidden_size=128, tie_word_embeddings=tied)
    worker = make_worker(directory)
    before = cpu.process_bytes()
    worker.compile_or_warm_up_model()
    assert cpu.process_bytes() - before > 0.95 * worker.weights_bytes


def test_the_profile_samples_with_every_option_in_effect(directory, monkeypatch):
    worker = make_worker(directory, max_num_seqs=2, max_model_len=100)
    seen = []
    keep = sampler._keep_top_k
    monkeypatch.setattr(
        sampler, "_keep_top_k", lambda scaled, top_k: seen.append(top_k.tolist()) or keep(scaled, top_k)
    )
    worker.runner.profile(64, 100)
    assert seen
    assert set(seen[0]) == {VOCAB_SIZE - 1}


def test_sharded_weights_are_found_by_the_index(tmp_path):
    directory = tiny_llama(tmp_path)
    tensors = load_file(directory / "model.safetensors")
    (directory / "model.safetensors").unlink()
    weight_map = {name: f"model-0000{i % 2 + 1}-of-00002.safetensors" for i, name in enumerate(tensors)}
    for file in set(weight_map.values()):
        save_file({n: t for n, t in tensors.items() if weight_map[n] == file}, directory / file)
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    model = make_worker(directory).runner.model
    assert all(torch.equal(p, tensors[name]) for name, p in checkpoint_views(model).items())


@pytest.mark.parametrize("name", ["model.norm.weight", "model.layers.1.self_attn.k_proj.weight"])
def test_a_missing_or_misshapen_tensor_is_refused_by_name(tmp_path, name):
    directory = tiny_llama(tmp_path)
    tensors = load_file(directory / "model.safetensors")
    tensor = tensors.pop(name)
    for rest, problem in (({}, "missing"), ({name: tensor[1:].clone()}, "wrong shape")):
        save_file(tensors | rest, directory / "model.safetensors")
        with pytest.raises(CheckpointError, match=rf"{problem}: {re.escape(name)}"):
            make_worker(directory)


def test_unknown_device_and_backend_are_refused_with_the_list(directory):
    with pytest.raises(ConfigError, match="unknown device 'tpu'; available: cpu"):
        make_worker(directory, device="tpu")
    with pytest.raises(ConfigError, match="unknown attention backend 'flash'; available: cpu, reference"):
        make_worker(directory, attention_backend="flash")


def test_the_memory_report_bills_this_process(directory):
    worker = make_worker(directory, max_num_batched_tokens=64, memory_utilization=0.5)
    report = worker.determine_available_memory()
    assert report.weights_bytes == worker.weights_bytes
    assert abs(report.overhead_bytes + report.weights_bytes - worker.device.process_bytes()) < 512 * MIB
    spent = report.weights_bytes + report.overhead_bytes + report.activations_bytes
    assert 0 < report.available_bytes <= report.budget_bytes - spent


@pytest.mark.parametrize("gib", [185, 2])
def test_the_cache_s_default_size_follows_the_memory_there_is(directory, monkeypatch, gib):
    """Case 12."""
    worker = make_worker(directory, max_num_batched_tokens=64)
    monkeypatch.setattr(worker.device, "memory_facts", lambda: MemoryFacts(gib * GIB, gib * GIB, "a made-up machine"))
    monkeypatch.setattr(worker.device, "process_bytes", lambda: 300 * MIB)  # other tests may have left this one large
    monkeypatch.setattr(worker.device, "peak_process_bytes", lambda: 310 * MIB)
    report = worker.determine_available_memory()
    spent = report.weights_bytes + report.overhead_bytes + report.activations_bytes
    assert report.available_bytes == gib * GIB // 2 - spent


def test_without_memory_left_start_up_names_the_rank(directory):
    worker = make_worker(directory, max_num_batched_tokens=8, memory_utilization=1e-4)
    with pytest.raises(CapacityError, match=r"worker 0 has no memory left for the KV cache: budget .* weights"):
        worker.determine_available_memory()


@pytest.mark.parametrize("max_num_batched_tokens", [1, 2, 3, 700])
@pytest.mark.parametrize("max_num_seqs", [1, 2, 9])
def test_the_profile_step_has_the_largest_steps_size(directory, max_num_batched_tokens, max_num_seqs):
    worker = make_worker(directory, max_num_seqs=max_num_seqs, max_model_len=100)
    seen = []
    worker.runner.model.register_forward_pre_hook(
        lambda module, args: seen.append((args[0].numel(), int(args[1].max())))
    )
    worker.runner.profile(max_num_batched_tokens, 100)
    assert seen == [(max_num_batched_tokens, 99)]


def test_binding_reports_the_blocks_and_zeroes_the_null_page(directory):
    driver = StepDriver(make_worker(directory))
    assert driver.num_bound == [driver.config.num_blocks(g) for g in range(len(driver.config.groups))]
    for cache in driver.caches.values():
        for tensor in cache.tensors.values():
            assert not tensor[-1].any()


def test_a_plan_for_another_model_is_refused(tmp_path):
    worker = make_worker(tiny_llama(tmp_path))
    other = StepDriver(make_worker(tiny_llama(tmp_path, name="deeper", num_hidden_layers=3))).config
    with pytest.raises(BindingError, match=r"no layer for the cache of model\.layers\.2\.self_attn"):
        worker.initialize_from_config(other)


def test_warm_up_leaves_the_pool_alone(directory):
    driver = StepDriver(make_worker(directory), poison=True)
    driver.worker.compile_or_warm_up_model()
    for cache in driver.caches.values():
        for tensor in cache.tensors.values():
            assert bool(tensor.isnan().all())


def test_a_layers_window_holds_whatever_its_group_keeps(tmp_path):
    """Case 32: sliding and full layers stored as one full group give the logits of separate groups."""
    directory = tiny_gemma3(tmp_path)
    driver = StepDriver(make_worker(directory))
    separate = driver.config
    layers, offset = [], 0
    for name, spec in driver.worker.get_kv_cache_spec().items():
        layer = next(la for group in separate.groups for la in group.layers if la.name == name)
        layers.append(dataclasses.replace(layer, offset_bytes=offset))
        offset += spec.page_size_bytes(16)
    group = KVCacheGroupSpec(FullAttentionRetention(), 16, tuple(layers), offset, offset, 1)
    together = KVCacheConfig(100, offset, (group,), separate.max_model_len)
    driver.add(0, PROMPT[:32])
    expected = driver.run(0, 20)
    merged = StepDriver(make_worker(directory), config=together, poison=True)
    merged.add(0, PROMPT[:32])
    assert merged.run(0, 20) == expected


def test_a_model_without_any_cache_binds_no_group(tmp_path):
    worker = make_worker(tiny_llama(tmp_path))
    worker.runner.context = dataclasses.replace(worker.runner.context, layers={})
    assert worker.get_kv_cache_spec() == {}
    assert worker.initialize_from_config(KVCacheConfig(0, 0, (), 64)) == []


def test_logprobs_are_the_models_own_and_ignore_sampling_options(directory):
    driver = StepDriver(make_worker(directory))
    driver.add(0, PROMPT, SamplingParams(temperature=2.5, top_k=5, repetition_penalty=1.8, seed=3, logprobs=4))
    driver.add(1, PROMPT[:9], dataclasses.replace(GREEDY, logprobs=0))
    driver.add(2, PROMPT[:9])
    output = driver.step({0: 50, 1: 9, 2: 9})
    assert set(output.logprobs) == {0, 1}
    expected = reference_logprobs(directory, PROMPT)[-1]
    report = output.logprobs[0]
    token = int(output.token_ids[0])
    assert report.token_ids.shape == (1, 5)
    assert report.token_ids[0].tolist() == [token, *np.argsort(-expected)[:4]]
    np.testing.assert_allclose(report.logprobs[0], expected[report.token_ids[0]], atol=1e-3)
    assert report.ranks.tolist() == [int((expected > expected[token]).sum()) + 1]
    assert output.logprobs[1].token_ids.tolist() == [[int(output.token_ids[1])]]


@pytest.mark.parametrize("chunk", [50, 7, 1])
def test_prompt_logprobs_cover_each_position_once(directory, chunk, monkeypatch):
    monkeypatch.setattr(model_runner, "SAMPLER_ELEMENTS", 3 * VOCAB_SIZE)  # three positions at a time
    driver = StepDriver(make_worker(directory))
    driver.add(0, [*PROMPT, 7, 8], dataclasses.replace(GREEDY, prompt_logprobs=2), num_prompt=len(PROMPT))
    driver.run(0, 2, chunk)
    parts = [output.prompt_logprobs[0] for output in driver.outputs if 0 in output.prompt_logprobs]
    tokens = np.concatenate([part.token_ids for part in parts])
    assert tokens[:, 0].tolist() == PROMPT[1:]
    expected = reference_logprobs(directory, PROMPT)[:-1]
    logprobs = np.concatenate([part.logprobs for part in parts])
    np.testing.assert_allclose(logprobs, np.take_along_axis(expected, tokens.astype(int), 1), atol=1e-3)
    ranks = np.concatenate([part.ranks for part in parts])
    assert ranks.tolist() == ((expected > expected[range(49), PROMPT[1:]][:, None]).sum(1) + 1).tolist()


def test_a_seeded_row_gives_the_same_tokens_alone_in_a_batch_and_after_a_restart(directory):
    params = SamplingParams(temperature=1.2, top_p=0.9, presence_penalty=0.4, seed=11)
    alone = StepDriver(make_worker(directory))
    alone.add(0, PROMPT, params)
    expected = alone.run(0, 12)

    driver = StepDriver(make_worker(directory), seed=5)
    driver.add(3, PROMPT, params)
    driver.add(1, PROMPT[:20], SamplingParams(seed=99))
    driver.add(6, PROMPT[5:], GREEDY)
    tokens = [driver.step({3: 50, 1: 20, 6: 45}).token_ids[0]]
    tokens += [driver.step({6: 1, 3: 1, 1: 1}).token_ids[1] for _ in range(4)]
    driver.add(2, PROMPT + [int(t) for t in tokens], params, num_prompt=len(PROMPT))  # preempted, again in another row
    assert [int(t) for t in tokens] + driver.run(2, 7, chunk=16) == expected


def test_many_rows_are_sampled_in_parts_with_the_same_result(directory, monkeypatch):
    def run():
        driver = StepDriver(make_worker(directory))
        for row in range(7):
            driver.add(row, PROMPT[row:20], SamplingParams(seed=row, logprobs=1 if row % 2 else None))
        return driver.step({row: 20 - row for row in range(7)})

    expected = run()
    monkeypatch.setattr(model_runner, "LOGITS_ELEMENTS", 5 * VOCAB_SIZE)
    monkeypatch.setattr(model_runner, "SAMPLER_ELEMENTS", 2 * VOCAB_SIZE)
    output = run()
    assert output.token_ids.tolist() == expected.token_ids.tolist()
    assert list(output.logprobs) == list(expected.logprobs) == [1, 3, 5]
    for row, report in output.logprobs.items():
        assert report.token_ids.tolist() == expected.logprobs[row].token_ids.tolist()


def test_end_tokens_are_held_back_until_min_tokens(tmp_path):
    directory = tiny_llama(tmp_path)
    driver = StepDriver(make_worker(directory))
    weight = driver.worker.runner.model.model.embed_tokens.weight
    driver.worker.runner.model.compute_logits = lambda hidden: torch.nn.functional.one_hot(
        torch.full((hidden.shape[0],), EOS_TOKEN_ID), weight.shape[0]
    ).float()
    driver.add(0, PROMPT, SamplingParams(temperature=0, seed=0, min_tokens=3))
    tokens = driver.run(0, 5)
    assert EOS_TOKEN_ID not in tokens[:3]
    assert tokens[3:] == [EOS_TOKEN_ID] * 2


def test_a_step_without_a_sampling_row_returns_no_token(directory):
    driver = StepDriver(make_worker(directory))
    driver.add(0, PROMPT)
    output = driver.step({0: 10})
    assert output.rows.size == output.token_ids.size == 0
    assert driver.run(0, 1) == [int(reference_logprobs(directory, PROMPT)[-1].argmax())]


def test_shutdown_lets_go_and_may_be_called_twice(directory):
    worker = make_worker(directory)
    worker.shutdown()
    worker.shutdown()
    assert not hasattr(worker, "runner")


def test_idle_slabs_go_back_to_the_system_and_can_be_used_again(tmp_path):
    """The pool's other slabs and the null page stay as they are."""
    worker = make_worker(tiny_llama(tmp_path))
    driver = StepDriver(worker, pool_bytes=64 * MIB)
    config, buffer = driver.config, worker.buffer
    buffer[: config.pool_bytes].fill_(7)
    full = worker.device.process_bytes()
    released = np.array([s for s in range(1, config.num_slabs) if s % 100 not in (7, 8)], np.int32)
    worker.release_slabs(np.random.default_rng(0).permutation(released))
    expected_bytes = released.size * config.slab_bytes
    assert 0.9 * expected_bytes < full - worker.device.process_bytes() < 1.05 * expected_bytes
    slabs = buffer[: config.pool_bytes].view(config.num_slabs, -1)
    assert bool((slabs[[0, 7, 8, 107, 108]] == 7).all())
    assert not buffer[config.pool_bytes :].any()
    driver.add(0, PROMPT)
    tokens = driver.run(0, 12)
    fresh = StepDriver(make_worker(tmp_path / "tiny-llama"))
    fresh.add(0, PROMPT)
    assert fresh.run(0, 12) == tokens


def test_the_last_slab_is_released_up_to_the_null_page_and_nothing_for_no_slab(directory):
    driver = StepDriver(make_worker(directory), pool_bytes=1 * MIB)
    worker, config = driver.worker, driver.config
    worker.buffer.fill_(7)
    worker.release_slabs(np.zeros(0, np.int32))
    assert bool((worker.buffer == 7).all())
    worker.release_slabs(np.arange(config.num_slabs))
    assert bool((worker.buffer[config.pool_bytes :] == 7).all())


def test_keys_and_values_are_stored_as_the_option_says(directory):
    worker = make_worker(directory, dtype="bfloat16", kv_cache_dtype="int8")
    assert {spec.dtype for spec in worker.get_kv_cache_spec().values()} == {"int8"}
    assert {p.dtype for p in worker.runner.model.parameters()} == {torch.bfloat16}
    assert worker.determine_available_memory().available_bytes > 0
    assert {spec.dtype for spec in make_worker(directory, dtype="bfloat16").get_kv_cache_spec().values()} == {
        "bfloat16"
    }
    with pytest.raises(ConfigError, match="kv_cache_dtype='fp8' is not supported; choose auto or int8"):
        make_worker(directory, kv_cache_dtype="fp8")
