"""One shape for client messages, and when two of them count as the same."""

from __future__ import annotations

from typing import Any

import pytest

from dlite_agent.errors import InvalidRequest
from dlite_agent.session.messages import Message, ToolCall, canonical_json, digest, normalise, tools_digest
from tests.session.talk import WEATHER, assistant, message, system, tool, user

HEADER = "x-anthropic-billing-header: cc_version=2; cch=1f3;"


def test_absent_content_is_empty_in_every_form() -> None:
    forms: list[Any] = [None, "", [], [{"type": "text", "text": ""}], [""]]
    expected = Message("assistant", "", tool_calls=(ToolCall("call_0", "f", "{}"),))
    for form in forms:
        assert normalise([assistant(form, ("f", "{}"))]) == [expected]
    bare = assistant(None, ("f", "{}"))
    del bare["content"]
    assert normalise([bare]) == [expected]


def test_parts_are_joined_by_lines_and_an_answers_directly() -> None:
    parts = [{"type": "input_text", "text": "a"}, "b", {"type": "text", "text": ""}]
    assert message({"role": "user", "content": parts}).content == "a\nb"
    said = [{"type": "output_text", "text": "a"}, {"type": "refusal", "refusal": "b"}]
    assert message({"role": "assistant", "content": said}).content == "ab"


def test_the_billing_line_never_reaches_the_prompt() -> None:
    assert normalise([system(HEADER), system("S")]) == [Message("system", "S")]
    parts = [{"type": "text", "text": HEADER}, {"type": "text", "text": "S"}]
    assert normalise([{"role": "system", "content": parts}]) == [Message("system", "S")]
    assert normalise([system(f"{HEADER}\n\nS\nT")]) == [Message("system", "S\nT")]
    assert normalise([user(HEADER)]) == [Message("user", HEADER)]
    assert normalise([system("")]) == [Message("system", "")]


def test_one_response_sent_as_several_messages_is_one_again() -> None:
    split = [assistant("Text.", reasoning="hm"), assistant(None, ("f", "{}")), assistant(None, ("g", "{}"))]
    (joined,) = normalise(split)
    assert (joined.content, joined.reasoning, [c.name for c in joined.tool_calls]) == ("Text.", "hm", ["f", "g"])
    assert len(normalise([user("a"), user("b")])) == 2


@pytest.mark.parametrize(
    ("raw", "param"),
    [
        ("text", "messages[0]"),
        ({"content": "x"}, "messages[0].role"),
        ({"role": "robot"}, "messages[0].role"),
        ({"role": ["user"]}, "messages[0].role"),
        ({"role": "user", "content": 3}, "messages[0].content"),
        ({"role": "user", "content": [3]}, "messages[0].content[0]"),
        ({"role": "user", "content": [{"type": "image_url"}]}, "messages[0].content[0]"),
        ({"role": "user", "content": [{"type": ["text"]}]}, "messages[0].content[0]"),
        ({"role": "user", "content": [{"type": "text"}]}, "messages[0].content[0].text"),
        ({"role": "user", "content": "", "tool_calls": [{}]}, "messages[0].tool_calls"),
        ({"role": "assistant", "tool_calls": {"a": 1}}, "messages[0].tool_calls"),
        ({"role": "assistant", "tool_calls": False}, "messages[0].tool_calls"),
        ({"role": "assistant", "tool_calls": ["x"]}, "messages[0].tool_calls[0]"),
        ({"role": "assistant", "tool_calls": [{"function": {"name": ""}}]}, "messages[0].tool_calls[0].function.name"),
        ({"role": "assistant", "function_call": {"name": "f"}}, "messages[0].function_call"),
        ({"role": "assistant", "content": "", "reasoning_content": 1}, "messages[0].reasoning_content"),
        ({"role": "tool", "content": "", "tool_call_id": 1}, "messages[0].tool_call_id"),
        ({"role": "assistant", "content": "Sure,", "prefix": True}, "messages[0].prefix"),
        ({"role": "assistant", "content": "", "audio": {"id": "a"}}, "messages[0].audio"),
        ({"role": "assistant", "content": "", "refusal": 1}, "messages[0].refusal"),
        ({"role": "user", "content": "", "images": ["a.png"]}, "messages[0].images"),
        ({"role": "user", "content": "", "reasoning_content": "hm"}, "messages[0].reasoning_content"),
        ({"role": "user", "content": "", "type": "function_call"}, "messages[0].type"),
        ({"role": "user", "content": [{"type": "text", "text": "", "image": 1}]}, "messages[0].content[0].image"),
        ({"role": "assistant", "tool_calls": [{"type": "custom", "function": {}}]}, "messages[0].tool_calls[0].type"),
        (
            {"role": "assistant", "tool_calls": [{"function": {"name": "f"}, "result": 1}]},
            "messages[0].tool_calls[0].result",
        ),
        (
            {"role": "assistant", "tool_calls": [{"function": {"name": "f", "input": 1}}]},
            "messages[0].tool_calls[0].function.input",
        ),
    ],
)
def test_what_cannot_be_honoured_is_named(raw: Any, param: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        normalise([raw])
    assert caught.value.param == param


def test_notes_beside_what_was_said_change_nothing() -> None:
    notes = {
        "id": "msg_1",
        "type": "message",
        "status": "completed",
        "annotations": [{"type": "url_citation"}],
        "provider_specific_fields": {"x": 1},
        "cache_control": {"type": "ephemeral"},
        "thinking_blocks": [{"type": "thinking", "thinking": "hm", "signature": "s"}],
        "refusal": None,
        "function_call": None,
        "audio": None,
        "images": [],
    }
    plain = assistant("Hi.", ("f", "{}"))
    noted = plain | notes
    noted["tool_calls"] = [plain["tool_calls"][0] | {"index": 0}]
    assert normalise([noted]) == normalise([plain])
    assert normalise([user("Hi.") | {"tool_calls": [], "reasoning_content": ""}]) == normalise([user("Hi.")])
    part = {"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}, "citations": None}
    assert message({"role": "user", "content": [part]}) == message(user("a"))


def test_a_refusal_is_what_the_assistant_said() -> None:
    assert message({"role": "assistant", "content": None, "refusal": "No."}) == Message("assistant", "No.")


def test_what_means_the_same_has_one_digest() -> None:
    call = assistant("Hi.", ("f", '{"a": 1, "b": [true, null]}'))
    same: list[dict[str, Any]] = [
        assistant(" Hi.\n", ("f", '{ "b":[true,null],\n"a":1 }')),
        assistant("Hi.", ("f", '{"b": [true, null], "a": 1}'), reasoning="long thoughts"),
        assistant("<think>\nhm\n</think>\n\nHi.", ("f", '{"a": 1, "b": [true, null]}')),
    ]
    same[0]["tool_calls"][0]["id"] = "toolu_1"
    as_object = assistant("Hi.", ("f", ""))
    as_object["tool_calls"][0]["function"]["arguments"] = {"b": [True, None], "a": 1}
    assert {digest(message(m)) for m in [call, *same, as_object]} == {digest(message(call))}
    assert digest(message(tool("r", "call_0"))) == digest(message(tool("r", "other") | {"name": "f"}))
    no_arguments = [assistant(None, ("f", text)) for text in ("", "{}", " { } ")]
    assert len({digest(message(m)) for m in no_arguments}) == 1


def test_what_means_something_else_has_another() -> None:
    different = [
        user("a"),
        user("a "),
        system("a"),
        tool("a"),
        assistant("a"),
        assistant("a", ("f", "{}")),
        assistant("a", ("g", "{}")),
        assistant("a", ("f", '{"x": 1}')),
        assistant("a", ("f", '{"x": 1')),
        assistant("a", ("f", '{"x": "1"}')),
        assistant("a", ("f", "{}"), ("f", "{}")),
    ]
    assert len({digest(message(m)) for m in different}) == len(different)


def test_tools_compare_by_order_and_content_but_not_by_key_order() -> None:
    turned = {"function": dict(reversed(WEATHER["function"].items())), "type": "function"}
    assert tools_digest([WEATHER]) == tools_digest([turned]) != tools_digest([])
    other = {"type": "function", "function": {"name": "g"}}
    assert tools_digest([WEATHER, other]) != tools_digest([other, WEATHER])
    assert tools_digest(None) == tools_digest([]) == ""


def test_text_that_is_no_json_still_compares() -> None:
    assert canonical_json(' {"a": ') == '{"a":'
    assert canonical_json('{"a": "x\ny"}') == canonical_json('{"a":"x\\ny"}')
    assert canonical_json("[" * 100_000) == "[" * 100_000
