"""`SamplingParams`: what a list may be, and what is refused by name."""

import pytest

from girih.errors import RequestError
from girih.request import SamplingParams


def test_none_stands_for_no_stop():
    params = SamplingParams(stop=None, stop_token_ids=None)
    assert (params.stop, params.stop_token_ids) == ((), ())


def test_stops_become_tuples():
    assert SamplingParams(stop="a").stop == ("a",)
    assert SamplingParams(stop=["a", "b"], stop_token_ids=[5]).stop_token_ids == (5,)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"stop_token_ids": 5}, "stop_token_ids=5 must be a list"),
        ({"stop": 5}, "stop=5 must be a list"),
        ({"stop": [""]}, "non-empty strings"),
        ({"stop": ["a", 5]}, "non-empty strings"),
        ({"n": 0}, "n=0 must be a whole number from 1"),
        ({"seed": True}, "seed=True"),
        ({"temperature": float("nan")}, "temperature=nan"),
        ({"top_p": 0}, "above 0"),
        ({"logit_bias": {5: 101}}, "logit_bias: 101 of token id 5 must be a number from -100 to 100"),
        ({"logit_bias": {5: float("nan")}}, "logit_bias: nan of token id 5"),
        ({"logit_bias": {5: True}}, "logit_bias: True of token id 5"),
        ({"logit_bias": 5}, "logit_bias=5 must map token ids to numbers"),
        ({"logit_bias": [1, 2]}, "must map token ids to numbers"),
    ],
)
def test_a_value_out_of_range_is_refused_by_name(options, message):
    with pytest.raises(RequestError, match=message):
        SamplingParams(**options)


def test_biases_become_pairs():
    params = SamplingParams(logit_bias={7: -1, 3: 0.5})
    assert params.logit_bias == ((7, -1), (3, 0.5))
    assert params == SamplingParams(logit_bias=params.logit_bias)
    assert SamplingParams(logit_bias=None).logit_bias == ()
