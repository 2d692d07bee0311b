"""Reasoning told from the answer, alone and in front of tool calls."""

from __future__ import annotations

import pytest

from dlite_agent.session.deltas import CallStart, Delta, ReasoningDelta, TextDelta
from dlite_agent.session.messages import Message, ToolCall
from dlite_agent.session.reasoning import ReasoningParser, ResponseParser
from dlite_agent.session.template import Reasoning
from dlite_agent.session.toolcalls import tool_parser


def parse(start: Reasoning, text: str, size: int = 1) -> tuple[str, str]:
    parser = ReasoningParser(start)
    deltas = [d for i in range(0, len(text), size) for d in parser.feed(text[i : i + size])] + parser.finish()
    thought = "".join(d.text for d in deltas if isinstance(d, ReasoningDelta))
    return thought, "".join(d.text for d in deltas if isinstance(d, TextDelta))


@pytest.mark.parametrize(
    ("start", "text", "thought", "said"),
    [
        ("optional", "<think>\nhm\n</think>\n\nHi", "hm", "Hi"),
        ("optional", "\n<think>a</think>b", "a", "b"),
        ("optional", "<think>\n\n</think>\n\nHi", "", "Hi"),
        ("optional", "Hi <think>a</think>", "", "Hi <think>a</think>"),
        ("optional", " <thin", "", " <thin"),
        ("optional", " <thing>", "", " <thing>"),
        ("optional", "", "", ""),
        ("optional", "<think>a </thi", "a </thi", ""),
        ("optional", "<think>a\n\n", "a", ""),
        ("open", "\na < b\n\n c\n</think>\n\nHi", "a < b\n\n c", "Hi"),
        ("open", "never closed", "never closed", ""),
        ("open", "a</think>\n b</think>c", "a", "b</think>c"),
        ("closed", "\n<think>a</think>", "", "\n<think>a</think>"),
        ("never", "<think>a</think>", "", "<think>a</think>"),
    ],
)
@pytest.mark.parametrize("size", [1, 3, 100])
def test_blocks(start: Reasoning, text: str, thought: str, said: str, size: int) -> None:
    assert parse(start, text, size) == (thought, said)


def test_reasoning_streams_as_it_comes() -> None:
    parser = ReasoningParser("open")
    assert parser.feed("I wonder") == [ReasoningDelta("I wonder")]
    assert parser.feed("</th") == []
    assert parser.feed("ink>\n\nYes") == [TextDelta("Yes")]


def test_one_delta_may_hold_reasoning_text_and_a_call() -> None:
    ids = iter(["call_a"])
    parser = ResponseParser(ReasoningParser("optional"), tool_parser("hermes", new_id=lambda: next(ids)))
    call = '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'
    text = f"<think>\nUse <tool_call>?\n</think>\n\nOne moment.\n{call}"
    out: list[Delta] = parser.feed(text) + parser.finish()
    assert out[:3] == [ReasoningDelta("Use <tool_call>?"), TextDelta("One moment."), CallStart(0, "call_a", "f")]
    assert parser.message() == Message(
        "assistant",
        "One moment.",
        reasoning="Use <tool_call>?",
        tool_calls=(ToolCall("call_a", "f", '{"a": 1}'),),
    )


def test_without_tools_markers_are_text() -> None:
    parser = ResponseParser(ReasoningParser("never"), None)
    text = '<tool_call>{"name": "f"}</tool_call>'
    assert parser.feed(text) + parser.finish() == [TextDelta(text)]
    assert (parser.message().content, parser.calls) == (text, [])
