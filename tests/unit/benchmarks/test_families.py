"""The facts about model families agree with what the planner is told, and with figures that were counted elsewhere."""

import csv

import numpy as np
import pytest
from families import FAMILIES, choose
from filling import ideal_requests
from memory import POOL_BYTES, VLLM_FILE, loads

BY_KEY = {family.key: family for family in FAMILIES}


def by_name(family):
    return family.name


@pytest.mark.parametrize("family", FAMILIES, ids=by_name)
def test_the_spec_of_a_layer_asks_for_its_bytes(family):
    for layer in family.layers:
        assert layer.spec.page_size_bytes(16) == 16 * layer.token_bytes + layer.state_bytes


@pytest.mark.parametrize("family", FAMILIES, ids=by_name)
def test_the_ideal_is_what_is_live_rounded_up_to_blocks(family):
    for length in (1, 15, 16, 17, 100, 1000, 8192, 8200):
        (live,) = family.live_bytes(np.array([length - 1]))
        least = 16 * sum(layer.token_bytes for layer in family.layers)
        assert 0 <= family.ideal_bytes(length) - live < least + 1


@pytest.mark.parametrize(
    ("key", "length", "megabytes"),
    [
        ("1", 1000, 131.07),
        ("2a", 8192, 1107.30),
        ("2b", 131_072, 410.52),
        ("4", 32_768, 2818.57),
        ("5", 100, 41.98),
        ("5''", 8192, 278.59),
        ("6", 1000, 37.22),
        ("6b", 100, 30.67),
        ("6c", 100, 10.35),
        ("7b", 100, 7.83),
        ("7c", 1000, 48.07),
        ("9", 100, 1.27),
    ],
)
def test_live_bytes_are_those_counted_by_hand(key, length, megabytes):
    (live,) = BY_KEY[key].live_bytes(np.array([length - 1]))
    assert round(live / 1e6, 2) == megabytes


@pytest.mark.parametrize("family", [family for family in FAMILIES if not family.num_lookahead_tokens], ids=by_name)
def test_the_ideal_pool_holds_what_the_table_says(family):
    with VLLM_FILE.open() as file:
        rows = list(csv.DictReader(line for line in file if not line.startswith("#")))
    expected = {row["load"]: int(row["ideal_requests"]) for row in rows if row["family"] == family.key}
    for load, lengths in loads(family.max_model_len).items():
        if load.isdigit():
            assert ideal_requests(family, POOL_BYTES, lengths) == expected[load]


def test_drafts_add_lookahead_tokens_and_states():
    family = BY_KEY["8c"]
    (live,) = family.live_bytes(np.array([99]))
    states = sum(layer.state_bytes for layer in family.layers)
    tokens = sum(layer.token_bytes for layer in family.layers)
    assert live == 3 * states + 102 * tokens


def test_a_family_is_chosen_by_its_key():
    assert [family.name for family in choose(["2b"])] == ["Gemma-3-270m"]
    assert choose([]) == list(FAMILIES)
    with pytest.raises(SystemExit, match="unknown family zz; there are 1, 2a"):
        choose(["1", "zz"])
