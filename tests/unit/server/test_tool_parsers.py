"""Calls of tools are taken out of text however it comes, and text that is no call is never lost."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from girih.server import tool_parsers
from girih.server.tool_parsers.hermes import HermesParser
from girih.server.tool_parsers.llama3_json import Llama3Parser

WEATHER = '<tool_call>\n{"name": "weather", "arguments": {"city": "Bern", "days": 2}}\n</tool_call>'
TIME = '<tool_call>{"name": "time", "arguments": {}}</tool_call>'


def read(parser, pieces):
    """Return the text shown and the calls as (name, arguments)."""
    shown, calls = "", []
    for piece in pieces:
        text, new = parser.append(piece)
        shown, calls = shown + text, calls + new
    text, new = parser.finish()
    return shown + text, [(call.name, json.loads(call.arguments)) for call in calls + new]


def cut(text, places):
    ends = sorted({min(place, len(text)) for place in places} | {len(text)})
    return [text[start:end] for start, end in zip([0, *ends], ends, strict=False)]


@pytest.mark.parametrize(
    ("text", "shown", "calls"),
    [
        ("No tool is needed.", "No tool is needed.", []),
        (WEATHER, "", [("weather", {"city": "Bern", "days": 2})]),
        (WEATHER + TIME, "", [("weather", {"city": "Bern", "days": 2}), ("time", {})]),
        (WEATHER.removesuffix("</tool_call>"), "", [("weather", {"city": "Bern", "days": 2})]),
        ("<tool_call>no JSON</tool_call>", "<tool_call>no JSON</tool_call>", []),
        ('<tool_call>{"name": 3}</tool_call>', '<tool_call>{"name": 3}</tool_call>', []),
        ("a < b <tool", "a < b <tool", []),
        ("cut off <tool_call>{", "cut off <tool_call>{", []),
    ],
)
@given(places=st.lists(st.integers(0, 150), max_size=20))
def test_hermes_calls_are_found_wherever_the_text_is_cut(text, shown, calls, places):
    assert read(HermesParser(), cut(text, places)) == (shown, calls)


def test_text_beside_a_call_is_shown():
    shown, calls = read(HermesParser(), ["I look it up. ", WEATHER])
    assert shown.strip() == "I look it up."
    assert calls == [("weather", {"city": "Bern", "days": 2})]


@pytest.mark.parametrize(
    ("text", "shown", "calls"),
    [
        ('{"name": "time", "parameters": {"zone": "CET"}}', "", [("time", {"zone": "CET"})]),
        (' {"name": "time", "parameters": {}}\n', "", [("time", {})]),
        ('{"answer": 42}', '{"answer": 42}', []),
        ("It is {late}.", "It is {late}.", []),
        ('{"name": "time", "para', '{"name": "time", "para', []),
        ("", "", []),
    ],
)
@given(places=st.lists(st.integers(0, 60), max_size=20))
def test_llama_calls_are_whole_answers(text, shown, calls, places):
    assert read(Llama3Parser(), cut(text, places)) == (shown, calls)


def test_the_way_is_found_by_the_chat_template():
    assert tool_parsers.find("... return <tool_call> tags ...") is HermesParser
    assert tool_parsers.find('{"name": function name, "parameters": dictionary of argument name}') is Llama3Parser
    assert tool_parsers.find("{% for message in messages %}") is None
