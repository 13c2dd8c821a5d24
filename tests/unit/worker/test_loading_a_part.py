"""A worker reads its own part of the checkpoint: the rest takes none of its memory. Nothing is exchanged for that."""

import pytest
import torch
from safetensors.torch import load_file
from tiny_models import tiny_llama

from girih.attention import reference
from girih.checkpoint.hf_config import load_config
from girih.device import cpu
from girih.errors import ConfigError
from girih.layers.parallel import Ranks
from girih.models import build_model
from girih.parallel import ParallelPlace
from girih.units import MIB
from girih.worker.loader import load_weights
from tests.toy_recurrent import installed
from tests.toy_recurrent.checkpoint import save

WIDE = {"hidden_size": 512, "intermediate_size": 8192, "num_hidden_layers": 4, "vocab_size": 2**15}
FIRST_OF_TWO = ParallelPlace(0, tensor_rank=0, tensor_size=2, stage=0, num_stages=1, layers=range(4))
MLP = ("gate_proj", "up_proj")
LAST_STAGE = ParallelPlace(1, tensor_rank=0, tensor_size=1, stage=1, num_stages=2, layers=range(3, 4))


def part_of(directory, place):
    config = load_config(directory)
    model, context = build_model(config, torch.float32, reference, ranks=Ranks(place))
    return model, context, load_weights(model, directory, config, torch.float32)


@pytest.fixture(scope="module")
def wide_directory(tmp_path_factory):
    return tiny_llama(tmp_path_factory.mktemp("wide"), **WIDE)


@pytest.mark.xdist_group("wide")
@pytest.mark.parametrize(
    ("place", "share"), [(FIRST_OF_TWO, 0.5), (LAST_STAGE, 0.4)], ids=["tensor rank", "pipeline stage"]
)
def test_what_others_have_takes_no_memory(wide_directory, place, share):
    whole_bytes = (wide_directory / "model.safetensors").stat().st_size
    assert whole_bytes > 240 * MIB
    before = cpu.process_bytes()
    model, _, weights_bytes = part_of(wide_directory, place)
    for parameter in model.parameters():
        parameter.sum()
    assert weights_bytes == pytest.approx(share * whole_bytes, rel=0.1)
    assert cpu.process_bytes() - before < weights_bytes + 40 * MIB


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [1, 2, 4])
def test_a_rank_merges_its_own_rows_of_each_projection(tmp_path, size, dtype):
    directory = tiny_llama(tmp_path, intermediate_size=46, num_key_value_heads=2, attention_bias=True, mlp_bias=True)
    stored = load_file(directory / "model.safetensors")
    config = load_config(directory)
    for rank in range(size):
        ranks = Ranks(ParallelPlace(rank, rank, size, stage=0, num_stages=1, layers=range(2)))
        model, _ = build_model(config, dtype, reference, ranks=ranks)
        load_weights(model, directory, config, dtype)
        layer, prefix = model.model.layers[1], "model.layers.1"
        heads, kv_heads, inside = ranks.share_heads(4), ranks.share_heads(2), ranks.share(46)
        for kind in ("weight", "bias"):
            merged = getattr(layer.self_attn.qkv_proj, kind)
            parts = [
                stored[f"{prefix}.self_attn.{name}.{kind}"][8 * part.start : 8 * part.stop]
                for name, part in (("q_proj", heads), ("k_proj", kv_heads), ("v_proj", kv_heads))
            ]
            assert torch.equal(merged, torch.cat(parts).to(dtype))
            parts = [stored[f"{prefix}.mlp.{name}.{kind}"][slice(inside.start, inside.stop)] for name in MLP]
            assert torch.equal(getattr(layer.mlp.gate_up_proj, kind), torch.cat(parts).to(dtype))


@pytest.mark.parametrize("tied", [True, False])
def test_a_stage_has_its_layers_and_the_ends_what_is_outside_of_them(tmp_path, tied):
    directory = tiny_llama(tmp_path, num_hidden_layers=3, tie_word_embeddings=tied)

    def names(stage, layers):
        model, context, _ = part_of(directory, ParallelPlace(stage, 0, 1, stage, 3, layers))
        assert list(context.layers) == [f"model.layers.{i}.self_attn" for i in layers]
        return {name for name, _ in model.named_parameters() if ".layers." not in name}

    assert names(0, range(1)) == {"model.embed_tokens.weight"}
    assert names(1, range(1, 2)) == set()
    head = "model.embed_tokens.weight" if tied else "lm_head.weight"
    assert names(2, range(2, 3)) == {"model.norm.weight", head}


def test_a_model_that_is_not_written_for_ranks_is_refused(tmp_path):
    with installed():
        directory = save(tmp_path)
        with pytest.raises(ConfigError, match=r"'toy_recurrent' cannot be shared by 2 tensor-parallel ranks"):
            part_of(directory, FIRST_OF_TWO)
