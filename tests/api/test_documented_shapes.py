"""What the OpenAPI document forbids in the parts of a request that are read by hand is refused, whatever it is."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from jsonschema import Draft202012Validator

from dlite_agent.api import blocks, fields, items, shapes
from dlite_agent.errors import InvalidRequest
from dlite_agent.session.messages import normalise

FUNCTION = {"name": "look", "description": "Looks.", "parameters": {"type": "object"}, "strict": True}
CALL = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": "{}"}}
TEXT = {"type": "text", "text": "Hm."}
CHAT = [
    {"role": "system", "content": "Be brief.", "name": "host"},
    {"role": "user", "content": ["Hi.", TEXT, {"type": "input_text", "text": "x", "cache_control": {"type": "e"}}]},
    {"role": "assistant", "content": [{"type": "refusal", "refusal": "No."}], "refusal": None, "reasoning": "Well."},
    {"role": "assistant", "content": None, "reasoning_content": "Hm.", "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "c1", "content": [TEXT], "type": "message"},
]
INPUT = [
    {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Hi."}]},
    {"role": "assistant", "content": "Yes?", "status": "completed"},
    {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "Hm."}], "encrypted_content": "x"},
    {"type": "function_call", "call_id": "c1", "name": "look", "arguments": "{}", "id": "f1"},
    {"type": "function_call_output", "call_id": "c1", "name": "look", "output": "Nothing."},
]
CLIENT = [
    {"role": "user", "content": [TEXT]},
    {
        "role": "assistant",
        "content": [
            {"type": "thinking", "thinking": "Hm.", "signature": "s"},
            TEXT,
            {"type": "tool_use", "id": "c1", "name": "look", "input": {"at": 1}},
        ],
    },
    {
        "role": "user",
        "content": [
            {"type": "tool_result", "tool_use_id": "c1", "content": [TEXT], "is_error": True},
            {"type": "tool_result", "tool_use_id": "c1", "content": "Nothing."},
            TEXT,
        ],
    },
]
CLIENT_TOOL = {"type": "custom", "name": "look", "description": "Looks.", "input_schema": {"type": "object"}}
HI = [{"role": "user", "content": "Hi."}]

Read = Callable[[Any], Any]
PARTS: dict[str, tuple[shapes.Schema, Any, Read]] = {
    "chat messages": (shapes.CHAT_MESSAGES, CHAT, normalise),
    "input": (shapes.INPUT, INPUT, lambda given: normalise(items.openai_messages(given))),
    "client messages": (shapes.CLIENT_MESSAGES, CLIENT, lambda given: normalise(blocks.openai_messages("", given))),
    "system": (shapes.SYSTEM, [TEXT], lambda given: normalise(blocks.openai_messages(given, HI))),
    "chat tools": (shapes.CHAT_TOOLS, [{"type": "function", "function": FUNCTION}], fields.function_tools),
    "flat tools": (shapes.FLAT_TOOLS, [{"type": "function", **FUNCTION}], items.flat_tools),
    "client tools": (shapes.CLIENT_TOOLS, [CLIENT_TOOL | {"strict": False}], blocks.client_tools),
    "client choice": (shapes.CLIENT_CHOICE, {"type": "tool", "name": "look"}, blocks.openai_choice),
    "client choice of a word": (
        shapes.CLIENT_CHOICE,
        {"type": "auto", "disable_parallel_tool_use": True},
        blocks.openai_choice,
    ),
}
OTHERS: list[Any] = [None, True, 0, 1.5, "", "x", [], ["x"], [{}], [1], {}, {"x": 1}]


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Paths to everything inside a value."""
    inside = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, part in inside:
        yield (*path, key)
        yield from places(part, (*path, key))


def changed(example: Any) -> Iterator[Any]:
    """The example with one thing in it replaced, left out or added."""

    def at(path: tuple[Any, ...]) -> tuple[Any, Any]:
        value = copy.deepcopy(example)
        holder = value
        for key in path[:-1]:
            holder = holder[key]
        return value, holder

    for path in places(example):
        for other in OTHERS:
            value, holder = at(path)
            holder[path[-1]] = other
            yield value
        value, holder = at(path)
        del holder[path[-1]]
        yield value
        value, holder = at(path)
        if isinstance(holder[path[-1]], dict):
            for other in OTHERS:
                value, holder = at(path)
                holder[path[-1]]["unheard_of"] = other
                yield value


def refusal_of(read: Read, value: Any) -> InvalidRequest | None:
    try:
        read(value)
    except InvalidRequest as error:
        return error
    return None


@pytest.mark.parametrize("part", PARTS)
def test_what_the_document_forbids_is_refused(part: str) -> None:
    schema, example, read = PARTS[part]
    forbids = Draft202012Validator(schema)
    read(example)
    assert forbids.is_valid(example)
    taken = refused = 0
    for value in changed(example):
        refusal = refusal_of(read, value)
        if forbids.is_valid(value):
            # What the schema allows may still be refused, where fields contradict each other.
            taken += refusal is None
            continue
        assert refusal is not None, f"taken, though the document forbids it: {value}"
        assert refusal.param
        refused += 1
    assert taken
    assert refused
