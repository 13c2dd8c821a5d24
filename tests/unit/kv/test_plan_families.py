"""Real models: plans of 40 GiB hold 99 % of what exact bytes would, and as many requests as 97 % of the ideal.

Families and ideal are those of benchmarks/families.py, counted from facts without the planner.
"""

import math

import pytest
from planner_models import check_plan, families, plan

from girih.kv.capacity import num_concurrent_requests, pages_at
from girih.kv.layout import Load, score
from girih.kv.retention import NO_LIMIT
from girih.units import GIB

MEMORY = 40 * GIB
LENGTHS = (100, 1000, 8192, 32768, 131072)
BY_KEY = {family.key: family for family in families()}


def plan_family(family):
    options = {"max_model_len": family.max_model_len, "num_lookahead_tokens": family.num_lookahead_tokens}
    return plan(family.specs(), MEMORY, **options)


@pytest.mark.parametrize("key", BY_KEY)
def test_a_family_s_plan_holds_99_percent_of_the_ideal(key):
    family = BY_KEY[key]
    config = plan_family(family)
    check_plan(config, family.specs(), MEMORY)
    assert len(config.groups) == len({spec.retention_key(NO_LIMIT) for spec in family.specs().values()}) <= 3
    assert score(config, MEMORY, Load.up_to(family.max_model_len, 8)) >= 0.99
    for length in LENGTHS:
        if length > family.max_model_len:
            continue
        pages = pages_at(config.groups, length, family.num_lookahead_tokens)
        slabs = sum(count / group.pages_per_slab for count, group in zip(pages, config.groups, strict=True))
        exact = sum(count * group.page_size_bytes for count, group in zip(pages, config.groups, strict=True))
        assert config.num_slabs / slabs >= 0.99 * MEMORY / exact
        ideal = MEMORY / family.ideal_bytes(length)
        assert num_concurrent_requests(config, length) >= math.floor(0.97 * ideal)


def test_gemma_3_27b_holds_13_requests_of_32768_tokens():
    assert num_concurrent_requests(plan_family(BY_KEY["2a"]), 32768) == 13
