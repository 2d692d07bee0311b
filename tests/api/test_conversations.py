"""Conversations in the shapes of Responses and Messages: what is honoured, what is let through, what is refused."""

from __future__ import annotations

from typing import Any

import pytest

from dlite_agent.api import blocks, items
from dlite_agent.errors import InvalidRequest
from dlite_agent.session.messages import normalise

TEXT = {"type": "text", "text": "Hi."}
USE = {"type": "tool_use", "id": "toolu_1", "name": "f", "input": {}}
RESULT = {"type": "tool_result", "tool_use_id": "toolu_1", "content": "42"}
CALL = {"type": "function_call", "call_id": "call_1", "name": "f", "arguments": "{}"}
OUTPUT = {"type": "function_call_output", "call_id": "call_1", "output": "42"}


def client_message(role: str, block: dict[str, Any]) -> list[dict[str, Any]]:
    said = [{"role": role, "content": [block]}]
    return said if role == "user" else [*said, {"role": "user", "content": "Go on."}]


@pytest.mark.parametrize(
    ("role", "block", "noted"),
    [
        ("user", TEXT, {"cache_control": {"type": "ephemeral"}, "citations": None}),
        ("assistant", TEXT, {"citations": [{"cited_text": "x"}], "parsed_output": {"x": 1}}),
        (
            "assistant",
            USE,
            {"cache_control": {"type": "ephemeral"}, "caller": {"type": "direct"}, "toolset_name": None},
        ),
        ("user", RESULT, {"cache_control": {"type": "ephemeral"}, "toolset_name": None}),
        ("assistant", {"type": "thinking", "thinking": "hm"}, {"signature": "abc"}),
    ],
)
def test_blocks_may_carry_notes(role: str, block: dict[str, Any], noted: dict[str, Any]) -> None:
    plain = blocks.openai_messages(None, client_message(role, block))
    assert blocks.openai_messages(None, client_message(role, block | noted)) == plain


@pytest.mark.parametrize(
    ("role", "block", "field"),
    [
        ("user", TEXT, "source"),
        ("assistant", TEXT, "image"),
        ("assistant", USE, "toolset_name"),
        ("user", RESULT, "tool_reference"),
        ("assistant", {"type": "thinking", "thinking": "hm"}, "budget"),
    ],
)
def test_blocks_are_refused_by_what_they_say_more(role: str, block: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        blocks.openai_messages(None, client_message(role, block | {field: "x"}))
    assert refused.value.param == f"messages[0].content[0].{field}"


@pytest.mark.parametrize("value", [{}, 1, "true", []])
def test_an_error_flag_is_a_boolean(value: Any) -> None:
    with pytest.raises(InvalidRequest) as refused:
        blocks.openai_messages(None, client_message("user", RESULT | {"is_error": value}))
    assert refused.value.param == "messages[0].content[0].is_error"


def test_a_call_without_its_output_is_refused() -> None:
    with pytest.raises(InvalidRequest) as refused:
        items.openai_messages([{key: value for key, value in OUTPUT.items() if key != "output"}])
    assert refused.value.param == "input[0].output"


def test_client_messages_and_systems_are_refused_by_what_they_say_more() -> None:
    with pytest.raises(InvalidRequest) as refused:
        blocks.openai_messages(None, [{"role": "user", "content": "x", "stop_reason": "end_turn"}])
    assert refused.value.param == "messages[0].stop_reason"
    with pytest.raises(InvalidRequest) as refused:
        blocks.openai_messages([TEXT | {"title": "x"}], [{"role": "user", "content": "x"}])
    assert refused.value.param == "system[0].title"


@pytest.mark.parametrize(
    ("item", "noted"),
    [
        ({"role": "user", "content": "x"}, {"type": None, "id": "msg_1", "status": "completed", "phase": None}),
        (CALL, {"id": "fc_1", "status": "completed", "caller": None, "namespace": None, "async": None}),
        (OUTPUT, {"id": "fco_1", "status": "completed"}),
        ({"type": "reasoning", "content": None}, {"id": "rs_1", "summary": [], "encrypted_content": "gAAA"}),
    ],
)
def test_items_may_carry_notes(item: dict[str, Any], noted: dict[str, Any]) -> None:
    assert normalise(items.openai_messages([item | noted])) == normalise(items.openai_messages([item]))


@pytest.mark.parametrize(
    ("item", "field"),
    [
        ({"role": "user", "content": "x"}, "name"),
        (CALL, "namespace"),
        (OUTPUT, "error"),
        ({"type": "reasoning", "content": []}, "effort"),
        ({"type": "item_reference", "id": "msg_1"}, "type"),
        ({"type": ["message"], "role": "user", "content": "x"}, "type"),
    ],
)
def test_items_are_refused_by_what_they_say_more(item: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        items.openai_messages([{field: "x"} | item])
    assert refused.value.param == f"input[0].{field}"


def test_parts_of_reasoning_are_refused_by_what_they_say_more() -> None:
    part = {"type": "reasoning_text", "text": "hm"}
    with pytest.raises(InvalidRequest) as refused:
        items.openai_messages([{"type": "reasoning", "content": [part, part | {"tokens": [1]}]}])
    assert refused.value.param == "input[0].content[1].tokens"


def test_results_and_reasoning_say_what_they_are() -> None:
    with pytest.raises(InvalidRequest) as refused:
        blocks.openai_messages(None, client_message("user", {"type": "tool_result", "content": "42"}))
    assert refused.value.param == "messages[0].content[0].tool_use_id"
    with pytest.raises(InvalidRequest) as refused:
        items.openai_messages([{"type": "reasoning", "content": [{"text": "hm"}]}])
    assert refused.value.param == "input[0].content"


def test_a_tool_may_say_its_name() -> None:
    (said,) = normalise(items.openai_messages([OUTPUT | {"name": "f"}]))
    assert said.name == "f"
