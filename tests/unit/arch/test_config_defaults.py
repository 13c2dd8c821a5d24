"""What config.json leaves out has the default of transformers' configuration class, in every family."""

import dataclasses

import pytest
from cache_oracle import CONFIGS, DTYPES
from transformers import AutoConfig

from girih import arch

FAMILIES = tuple(CONFIGS)
NESTED = tuple(name for name in FAMILIES if "text_config" in CONFIGS[name])


def facts(config):
    module = arch.load(config)
    return module.weight_shapes(config), module.kv_cache_specs(config, DTYPES), module.max_model_len(config)


@pytest.mark.parametrize("model_type", FAMILIES)
def test_a_config_with_only_a_model_type_is_that_of_the_class(model_type):
    assert facts({"model_type": model_type}) == facts(AutoConfig.for_model(model_type).to_dict())


@pytest.mark.parametrize("model_type", NESTED)
def test_an_empty_text_config_is_that_of_the_class(model_type):
    written = AutoConfig.for_model(f"{model_type}_text").to_dict()
    assert facts({"model_type": model_type, "text_config": {}}) == facts(written)


@pytest.mark.parametrize("model_type", FAMILIES)
def test_each_default_is_that_of_the_class(model_type):
    text_type = f"{model_type}_text" if model_type in NESTED else model_type
    # also of fields that only count where another one is set
    theirs = {field.name: field.default for field in dataclasses.fields(AutoConfig.for_model(text_type))}
    ours = arch.load({"model_type": text_type}).DEFAULTS
    assert {name: ours[name] for name in ours if name in theirs} == {
        name: theirs[name] for name in ours if name in theirs
    }
