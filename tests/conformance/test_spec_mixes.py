"""Every pair and every triple of examples is planned together: any kinds of layers share one pool."""

import itertools
import json

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings
from planner_models import EXAMPLES, check_plans, of_examples, plan

from girih.errors import CapacityError
from girih.kv import KVCacheConfig
from girih.kv.capacity import max_request_tokens
from girih.kv.layout import Load, score
from girih.kv.stage_plan import GOOD_SCORE
from girih.units import GIB

NAMES = list(EXAMPLES)
OPTIONS = {"max_model_len": 1000, "num_lookahead_tokens": 2}


def usable(config, memory):
    """Return the share of the memory that a full pool makes use of."""
    return score(config, memory, Load.up_to(config.max_model_len, step_tokens=8))


def check_mix(names):
    """Plan these examples in a pool that is large for them."""
    layers = of_examples(names)
    config = plan(layers, GIB, **OPTIONS)
    check_plans([config], [layers], [GIB])
    assert config.max_model_len == 1000
    assert usable(config, GIB) >= GOOD_SCORE, names
    # one group for each thing to keep, whatever the bytes: nothing is padded, and nothing is split without need
    kept = {spec.retention_key(1000) for spec in layers.values() if spec.cache_owner is None}
    assert len(config.groups) == len(kept), names


@pytest.mark.parametrize("first", NAMES)
def test_every_pair_and_triple_of_kinds_shares_a_pool_well(first, caplog):
    behind = NAMES[NAMES.index(first) + 1 :]
    for others in itertools.chain([()], itertools.combinations(behind, 1), itertools.combinations(behind, 2)):
        check_mix((first, *others))
    assert not caplog.records


@pytest.mark.parametrize("first", NAMES)
def test_a_pair_is_accepted_in_exactly_the_memory_that_the_refusal_names(first, caplog):
    for second in NAMES[NAMES.index(first) + 1 :]:
        layers = of_examples((first, second))
        with pytest.raises(CapacityError) as refusal:
            plan(layers, 1, **OPTIONS)
        need = refusal.value.need_bytes
        caplog.clear()
        config = plan(layers, need, **OPTIONS)
        check_plans([config], [layers], [need])
        assert KVCacheConfig.from_json(json.loads(json.dumps(config.to_json()))) == config
        if usable(config, need) < GOOD_SCORE - 1e-4 and len(config.groups) > 1:
            assert "more memory helps" in caplog.text
        with pytest.raises(CapacityError) as refusal:
            plan(layers, need - 1, **OPTIONS)
        assert refusal.value.need_bytes == need
        assert (refusal.value.fitting_tokens or 0) < 1000


def plan_or_refusal(layers, memory, **options):
    """Return (plan, None) or (None, the refusal)."""
    try:
        return plan(layers, memory, **options), None
    except CapacityError as error:
        return None, error


def check_any_mix(names, count, memory, max_model_len, lookahead):
    """A plan serves its length, or the refusal's need and longest length are exact; whatever the kinds."""
    layers = of_examples(names)
    layers |= {f"{name}.{i}": spec for name, spec in layers.items() for i in range(count) if spec.cache_owner is None}
    options = {"num_lookahead_tokens": lookahead}
    config, refusal = plan_or_refusal(layers, memory, max_model_len=max_model_len, **options)
    if config:
        check_plans([config], [layers], [memory])
        assert config.max_model_len == max_request_tokens(config) == max_model_len
        return
    need, fitting = refusal.need_bytes, refusal.fitting_tokens or 0
    assert refusal.have_bytes == memory < need
    assert fitting < max_model_len
    check_plans([plan(layers, need, max_model_len=max_model_len, **options)], [layers], [need])
    assert plan_or_refusal(layers, need - 1, max_model_len=max_model_len, **options)[1]
    assert plan_or_refusal(layers, memory, max_model_len=fitting + 1, **options)[1]
    if fitting:
        check_plans([plan(layers, memory, max_model_len=fitting, **options)], [layers], [memory])


any_mix = given(
    st.sets(st.sampled_from(NAMES), min_size=1, max_size=6), st.integers(0, 3), st.integers(1, 1 << 26),
    st.integers(1, 3000), st.sampled_from([0, 3]),
)  # fmt: skip
test_any_mix_is_accepted_or_refused_exactly = settings(max_examples=30, deadline=None)(any_mix(check_any_mix))
test_any_mix_is_accepted_or_refused_exactly_many_times = pytest.mark.soak(
    settings(max_examples=2000, deadline=None)(any_mix(check_any_mix))
)
