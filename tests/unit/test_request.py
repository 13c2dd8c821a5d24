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
    ],
)
def test_a_value_out_of_range_is_refused_by_name(options, message):
    with pytest.raises(RequestError, match=message):
        SamplingParams(**options)
