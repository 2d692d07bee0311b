"""What `tool_choice` and `strict` allow, checked with the parser that will read the calls."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest

from dlite_agent.decode.grammar import Grammars
from dlite_agent.errors import InvalidRequest
from dlite_agent.session.messages import JSON
from dlite_agent.session.template import ToolStyle
from dlite_agent.session.toolcalls import tool_parser
from dlite_agent.session.toolchoice import tool_constraint
from tests.session.talk import WEATHER
from tests.tokenizers import load

STRICT: JSON = {**WEATHER, "function": {**WEATHER["function"], "strict": True}}
LOOSE: JSON = {"type": "function", "function": {"name": "ping"}}
GOOD: dict[ToolStyle, str] = {
    "hermes": '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome", "days": 1}}\n</tool_call>',
    "llama": '{"name": "weather", "parameters": {"city": "Rome", "days": 1}}',
    "xml": "<tool_call>\n<function=weather>\n<parameter=city>\nRome\n</parameter>\n<parameter=days>\n1\n</parameter>\n"
    "</function>\n</tool_call>",
}
PING: dict[ToolStyle, str] = {
    "hermes": '<tool_call>\n{"name": "ping", "arguments": {}}\n</tool_call>',
    "llama": '{"name": "ping", "parameters": {}}',
    "xml": "<tool_call>\n<function=ping>\n</function>\n</tool_call>",
}
BETWEEN: dict[ToolStyle, str] = {"hermes": "\n", "llama": "; ", "xml": "\n"}
STYLES: list[ToolStyle] = ["hermes", "llama", "xml"]


@cache
def grammars() -> Grammars:
    return Grammars(load("smollm2"), vocab_size=49152, stop_ids=[load("smollm2").eos_token_id])


def passes(style: ToolStyle, choice: Any, text: str, tools: list[JSON], parallel: bool = True) -> bool:
    constraint = tool_constraint(style, tools, choice, parallel=parallel)
    assert constraint is not None
    matcher = grammars().matcher(constraint)
    ids = load("smollm2").encode(text, add_special_tokens=False)
    return all(matcher.push(token) for token in [*ids, load("smollm2").eos_token_id])


@pytest.mark.parametrize("style", STYLES)
def test_required_calls_are_ones_that_the_parser_reads(style: ToolStyle) -> None:
    tools = [STRICT, LOOSE]
    both = GOOD[style] + BETWEEN[style] + PING[style]
    for text, count in [(GOOD[style], 1), (PING[style], 1), (both, 2)]:
        assert passes(style, "required", text, tools)
        parser = tool_parser(style, tools)
        assert not any(hasattr(d, "text") and not hasattr(d, "index") for d in parser.feed(text) + parser.finish())
        assert [call.status for call in parser.calls] == ["complete"] * count
    assert not passes(style, "required", both, tools, parallel=False)
    assert not passes(style, "required", f"Sure. {GOOD[style]}", tools)
    assert not passes(style, "required", "", tools)
    assert not passes(style, "required", GOOD[style].replace("Rome", "Ro\x00me").replace("1", "one"), tools)


@pytest.mark.parametrize("style", STYLES)
def test_a_named_tool_is_called_once(style: ToolStyle) -> None:
    choice = {"type": "function", "function": {"name": "ping"}}
    assert passes(style, choice, PING[style], [STRICT, LOOSE])
    assert not passes(style, choice, GOOD[style], [STRICT, LOOSE])
    assert not passes(style, choice, PING[style] + BETWEEN[style] + PING[style], [STRICT, LOOSE])


@pytest.mark.parametrize("style", ["hermes", "xml"])
def test_under_auto_text_is_free_and_strict_calls_are_held(style: ToolStyle) -> None:
    tools = [STRICT, LOOSE]
    assert passes(style, "auto", "Just text.", tools)
    assert passes(style, None, f"See:\n{GOOD[style]}\n{PING[style]}", tools)
    assert not passes(style, "auto", GOOD[style].replace("days", "nights"), tools)


@pytest.mark.parametrize(
    ("style", "tools", "choice"),
    [
        ("hermes", [STRICT], "none"),
        ("hermes", [WEATHER], "auto"),
        ("llama", [STRICT], "auto"),
        ("hermes", [], None),
    ],
)
def test_nothing_is_asked(style: ToolStyle, tools: list[JSON], choice: str | None) -> None:
    assert tool_constraint(style, tools, choice) is None


def test_reasoning_comes_first_where_the_model_reasons() -> None:
    constraint = tool_constraint("hermes", [LOOSE], "required", reasoning="open")
    assert constraint is not None
    matcher = grammars().matcher(constraint)
    ids = load("smollm2").encode(f"hm, hm</think>\n\n{PING['hermes']}", add_special_tokens=False)
    assert all(matcher.push(token) for token in ids)


def test_a_schema_that_cannot_be_held_is_refused_only_for_strict_tools() -> None:
    odd = {"type": "object", "properties": {"a": {"not": {}}}}
    loose: JSON = {"type": "function", "function": {"name": "ping", "parameters": odd}}
    strict: JSON = {"type": "function", "function": {"name": "ping", "parameters": odd, "strict": True}}
    assert passes("hermes", "required", PING["hermes"].replace("{}", '{"b": 1}'), [loose])
    with pytest.raises(InvalidRequest, match="cannot be enforced"):
        tool_constraint("hermes", [strict], "auto")


@pytest.mark.parametrize(
    ("choice", "reason"),
    [
        ({"type": "function", "function": {"name": "nope"}}, "not among the tools"),
        ({"type": "function"}, "must be auto"),
        ("always", "must be auto"),
        (3, "must be auto"),
    ],
)
def test_bad_choices_are_refused(choice: Any, reason: str) -> None:
    with pytest.raises(InvalidRequest, match=reason) as caught:
        tool_constraint("hermes", [WEATHER], choice)
    assert caught.value.param == "tool_choice"


def test_a_forced_call_needs_tools() -> None:
    with pytest.raises(InvalidRequest, match="no tools"):
        tool_constraint("hermes", [], "required")
    bad: JSON = {"type": "function", "function": {"name": "f", "parameters": "x"}}
    with pytest.raises(InvalidRequest, match="JSON schema"):
        tool_constraint("hermes", [bad], "required")
