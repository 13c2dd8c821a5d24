"""A request on its way: how long it waits, and how often it may be given to another engine."""

import asyncio

import pytest

from girih.engine.input_processing import TokenizedPrompt
from girih.engine.live_request import LiveRequest
from girih.engine.timings import Timings
from girih.request import CompletionOutput, SamplingParams


def make_request():
    params = SamplingParams()
    live = LiveRequest(
        "0", TokenizedPrompt("x", [5]), params, [params], priority=0, cache_salt="", news=asyncio.Event()
    )
    live.begin(["0"])
    return live


def deaths_until_it_ends(live, *, engine_has_stepped, before_death=lambda live: None, most=20):
    for number in range(1, most):
        live.begin([str(number)])
        before_death(live)
        if not live.may_run_again(5, engine_has_stepped=engine_has_stepped):
            return number
    return None


def test_a_request_that_was_let_in_and_brought_nothing_is_taken_for_the_reason_after_five_deaths():
    let_in = {"engine_has_stepped": True, "before_death": lambda live: live.note(0, 0.5, 1.0, None)}
    assert deaths_until_it_ends(make_request(), **let_in) == 5


def test_so_is_one_that_kills_engines_in_their_first_step():
    assert deaths_until_it_ends(make_request(), engine_has_stepped=False) == 5


def test_one_that_waits_while_others_are_computed_is_not():
    assert deaths_until_it_ends(make_request(), engine_has_stepped=True) is None


def test_one_that_brings_tokens_is_not():
    brings = {"engine_has_stepped": True, "before_death": lambda live: live.note(0, 0.5, 1.0, Timings())}
    assert deaths_until_it_ends(make_request(), **brings) is None


def test_a_request_waits_until_the_step_begins_that_brings_its_first_news():
    live = make_request()
    live.output.outputs.append(CompletionOutput(0))
    start_s = live.arrived_s
    live.note(0, start_s + 2, start_s + 5, None)  # a chunk of its prompt
    live.note(0, start_s + 5, start_s + 9, Timings())
    times = live.times(start_s + 10)
    assert [times.queue_s, times.prefill_s, times.decode_s] == pytest.approx([2, 7, 1])


def test_a_request_that_comes_while_a_step_is_under_way_has_not_waited_before_it_came():
    live = make_request()
    live.output.outputs.append(CompletionOutput(0))
    live.note(0, live.arrived_s - 3, live.arrived_s + 1, Timings())
    assert live.times(live.arrived_s + 1).queue_s == 0
