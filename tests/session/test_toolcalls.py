"""Tool calls told from text, in each style, one character at a time and all at once."""

from __future__ import annotations

import json

import pytest

from dlite_agent.session.deltas import ArgumentsDelta, CallEnd, CallStart, CallStatus, Delta, ParsedCall, TextDelta
from dlite_agent.session.messages import JSON
from dlite_agent.session.template import ToolStyle
from dlite_agent.session.toolcalls import ToolParser, finish_reason, tool_parser

TOOLS: list[JSON] = [
    {
        "type": "function",
        "function": {
            "name": "edit",
            "parameters": {
                "type": "object",
                "properties": {
                    "path": {"type": "string"},
                    "line": {"type": "integer"},
                    "force": {"type": ["boolean", "null"]},
                    "lines": {"anyOf": [{"type": "array"}, {"$ref": "#/$defs/range"}]},
                    "note": {"type": ["string", "null"]},
                },
            },
        },
    },
    {"type": "function", "function": {"name": "ls"}},
]


def parser(style: ToolStyle, tools: list[JSON] | None = None) -> ToolParser:
    ids = (f"call_{i}" for i in range(100))
    return tool_parser(style, TOOLS if tools is None else tools, lambda: next(ids))


def read(style: ToolStyle, text: str, size: int, tools: list[JSON] | None = None) -> tuple[str, list[ParsedCall]]:
    p = parser(style, tools)
    deltas: list[Delta] = []
    for i in range(0, len(text), size):
        deltas += p.feed(text[i : i + size])
    deltas += p.finish()
    check(deltas, p.calls, text)
    return "".join(d.text for d in deltas if isinstance(d, TextDelta)), p.calls


def check(deltas: list[Delta], calls: list[ParsedCall], text: str) -> None:
    """The rules every client relies on, whatever the stream held."""
    current = -1
    open_call = False
    for delta in deltas:
        if isinstance(delta, CallStart):
            assert not open_call
            assert delta.index == current + 1
            assert delta.id
            assert delta.name
            current, open_call, pieces = delta.index, True, 0
        elif isinstance(delta, ArgumentsDelta):
            assert open_call
            assert delta.index == current
            pieces += 1
        elif isinstance(delta, CallEnd):
            assert open_call
            assert delta.index == current
            assert pieces
            assert delta.status == calls[current].status
            open_call = False
        else:
            assert isinstance(delta, TextDelta)
            assert delta.text
    assert not open_call
    assert len(calls) == current + 1
    for call in calls:
        assert call.span in text
        assert (call.status == "complete") == is_object(call.arguments)
        joined = "".join(d.text for d in deltas if isinstance(d, ArgumentsDelta) and d.index == call.index)
        assert joined == call.arguments


def is_object(text: str) -> bool:
    try:
        return isinstance(json.loads(text), dict)
    except ValueError:
        return False


Expected = list[tuple[str, str, CallStatus]]

HERMES: list[tuple[str, str, Expected]] = [
    ("No call at all <b>.\n", "No call at all <b>.\n", []),
    ('<tool_call>\n{"name": "ls", "arguments": {}}\n</tool_call>', "", [("ls", "{}", "complete")]),
    (
        'Look.\n<tool_call>\n{"name": "a", "arguments": {"x": [1, {"y": "}"}]}}\n</tool_call>\n'
        '<tool_call>\n{"name": "b", "arguments": {"q": "\\"</tool_call>"}}\n</tool_call>\n',
        "Look.",
        [("a", '{"x": [1, {"y": "}"}]}', "complete"), ("b", '{"q": "\\"</tool_call>"}', "complete")],
    ),
    (
        '<tool_call>{"name":"a","arguments":{}}</tool_call> then '
        '<tool_call>{"name":"b","arguments":{}}</tool_call>\nend',
        " then\nend",
        [("a", "{}", "complete"), ("b", "{}", "complete")],
    ),
    ('<tool_call>{"arguments": {"x": 1}, "name": "a"}</tool_call>', "", [("a", '{"x": 1}', "complete")]),
    ('<tool_call>{"name": "a", "parameters": {"x": 1}}</tool_call>', "", [("a", '{"x": 1}', "complete")]),
    ('<tool_call>{"name": "a", "arguments": "{\\"x\\": 1}"}</tool_call>', "", [("a", '{"x": 1}', "complete")]),
    ('<tool_call>{"name": "a", "arguments": null}</tool_call>', "", [("a", "{}", "complete")]),
    ('<tool_call>{"name": "a"}</tool_call>', "", [("a", "{}", "complete")]),
    ('<tool_call>{"name": "a", "arguments": {"x": "1\n2"}}</tool_call>', "", [("a", '{"x": "1\\n2"}', "complete")]),
    (
        '<tool_call>[{"name": "a", "arguments": {}},\n{"name": "b", "arguments": {}}]</tool_call>',
        "",
        [("a", "{}", "complete"), ("b", "{}", "complete")],
    ),
    ('<tool_call>{"name": "a", "arguments": {}}} \n</tool_call>ok', "ok", [("a", "{}", "complete")]),
    ('<tool_call>{"name": "a", "arguments": {"x": 1}\n</tool_call>ok', "ok", [("a", '{"x": 1}', "complete")]),
    (
        '<tool_call>{"name": "a", "arguments": {}}<tool_call>{"name": "b", "arguments": {}}',
        "",
        [("a", "{}", "complete"), ("b", "{}", "complete")],
    ),
    ('<tool_call>{"name": "a", "arguments": {"x": 1,}}</tool_call>', "", [("a", '{"x": 1,}', "invalid")]),
    ('<tool_call>{"name": "a", "arguments": [1]}</tool_call>', "", [("a", "[1]", "invalid")]),
    ('<tool_call>{"name": "a", "arguments": {"x": {}\n</tool_call>.', ".", [("a", '{"x": {}\n', "invalid")]),
    ('<tool_call>{"name": "a", "arguments": {}, "arguments": {}}</tool_call>', "", [("a", "{}", "complete")]),
    ('Go <tool_call>\n{"name": "a", "arguments": {"x": "y', "Go", [("a", '{"x": "y', "cut")]),
    ('<tool_call>\n{"name": "a", "argum', "", [("a", "", "cut")]),
    ('ok\n<tool_call>\n{"na', 'ok\n<tool_call>\n{"na', []),
    ("ok <tool_c", "ok <tool_c", []),
    ("<tool_call>\nnone\n</tool_call>", "<tool_call>\nnone\n</tool_call>", []),
    ("<tool_call></tool_call>", "<tool_call></tool_call>", []),
    ('a <tool_call>{"name": 3}</tool_call>', 'a <tool_call>{"name": 3}</tool_call>', []),
    ('<tool_call>{"x": tru}</tool_call>', '<tool_call>{"x": tru}</tool_call>', []),
    ('<tool_call><tool_call>{"name": "a"}</tool_call>', "<tool_call>", [("a", "{}", "complete")]),
    ('<tool_call>{"\\q": 1}</tool_call>', '<tool_call>{"\\q": 1}</tool_call>', []),
]


@pytest.mark.parametrize(("text", "said", "calls"), HERMES)
@pytest.mark.parametrize("size", [1, 7, 1000])
def test_tagged_json(text: str, said: str, calls: Expected, size: int) -> None:
    assert_read(read("hermes", text, size), said, calls)


def assert_read(got: tuple[str, list[ParsedCall]], said: str, calls: Expected) -> None:
    assert got[0] == said
    assert [(c.name, c.arguments, c.status) for c in got[1]] == calls


def xml(name: str, *parameters: tuple[str, str]) -> str:
    body = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in parameters)
    return f"<tool_call>\n<function={name}>\n{body}</function>\n</tool_call>"


XML: list[tuple[str, str, Expected]] = [
    (xml("ls"), "", [("ls", "{}", "complete")]),
    (
        "I edit.\n\n" + xml("edit", ("path", "a <b>\n\n"), ("line", "3"), ("force", "True"), ("lines", "[1, 2]")),
        "I edit.",
        [("edit", '{"path": "a <b>\\n\\n", "line": 3, "force": true, "lines": [1, 2]}', "complete")],
    ),
    (
        xml("edit", ("path", "")) + xml("ls") + "!",
        "!",
        [("edit", '{"path": ""}', "complete"), ("ls", "{}", "complete")],
    ),
    (xml("edit", ("line", "three")), "", [("edit", '{"line": "three"}', "complete")]),
    (xml("edit", ("note", "null"), ("what", "7")), "", [("edit", '{"note": "null", "what": "7"}', "complete")]),
    (xml("other", ("n", '"1"')), "", [("other", '{"n": "\\"1\\""}', "complete")]),
    ("<function=ls>\n</function> done", " done", [("ls", "{}", "complete")]),
    ("<function=edit>junk<parameter=line>1</parameter></function>", "", [("edit", '{"line": 1}', "complete")]),
    (
        '<tool_call>\n{"name": "ls", "arguments": {"x": 1}}\n</tool_call>',
        "",
        [("ls", '{"x": 1}', "complete")],
    ),
    ("<tool_call>\n<function=edit>\n<parameter=path>\nab</param", "", [("edit", '{"path": "ab', "cut")]),
    ("<tool_call>\n<function=edit>\n<parameter=line>\n12", "", [("edit", '{"line": ', "cut")]),
    ("<tool_call>\n<function=edit>\n<para", "", [("edit", "", "cut")]),
    ("<tool_call>\n<function=ed", "<tool_call>\n<function=ed", []),
    ("<function=>", "<function=>", []),
    ("see <function=a b\nc>", "see <function=a b\nc>", []),
]


@pytest.mark.parametrize(("text", "said", "calls"), XML)
@pytest.mark.parametrize("size", [1, 7, 1000])
def test_xml(text: str, said: str, calls: Expected, size: int) -> None:
    assert_read(read("xml", text, size), said, calls)


BARE: list[tuple[str, str, Expected]] = [
    ('{"name": "ls", "parameters": {"a": 1}}', "", [("ls", '{"a": 1}', "complete")]),
    ('\n<|python_tag|>{"type": "function", "name": "ls", "parameters": {}}', "", [("ls", "{}", "complete")]),
    (
        '{"name": "ls", "parameters": {}}; {"name": "edit", "parameters": {"line": 1}}\n',
        "",
        [("ls", "{}", "complete"), ("edit", '{"line": 1}', "complete")],
    ),
    ('{"name": "ls"}', "", [("ls", "{}", "complete")]),
    ('{"name": "ls", "parameters": {}} and more; {"', ' and more; {"', [("ls", "{}", "complete")]),
    ('Sure: {"name": "ls", "parameters": {}}', 'Sure: {"name": "ls", "parameters": {}}', []),
    ('Sure.\n<|python_tag|>{"name": "ls", "parameters": {}}', "Sure.", [("ls", "{}", "complete")]),
    ('{"answer": {"name": "ls"}}', '{"answer": {"name": "ls"}}', []),
    ('{"name": "Bob", "parameters": {}}', '{"name": "Bob", "parameters": {}}', []),
    ("[1, 2]", "[1, 2]", []),
    ("<|python", "<|python", []),
    ("{}", "{}", []),
    ('{"name": "ls", "para', '{"name": "ls", "para', []),
    ('{"name": "ls", "parameters": {"a": "b', "", [("ls", '{"a": "b', "cut")]),
    ('{"name": "ls", "parameters": {"a": 1,}}', "", [("ls", '{"a": 1,}', "invalid")]),
    ('{"name": "ls", "parameters": {"a": <', "<", [("ls", '{"a": ', "invalid")]),
]


@pytest.mark.parametrize(("text", "said", "calls"), BARE)
@pytest.mark.parametrize("size", [1, 7, 1000])
def test_bare_json(text: str, said: str, calls: Expected, size: int) -> None:
    assert_read(read("llama", text, size), said, calls)


def test_without_tools_a_bare_call_needs_a_name_and_arguments() -> None:
    assert_read(read("llama", '{"name": "Bob"}', 1, []), '{"name": "Bob"}', [])
    assert_read(read("llama", '{"name": "Bob", "arguments": {}}', 1, []), "", [("Bob", "{}", "complete")])


def test_the_span_of_a_call_is_what_the_model_wrote() -> None:
    first, second = '<tool_call>\n{"name": "a",  "arguments": {"x":\t1}} \n</tool_call>', xml("ls")
    (call,) = read("hermes", f"Hi {first} there", 3)[1]
    assert call.span == first
    assert [c.span for c in read("xml", f"{first}\n{second}", 5)[1]] == [first, second]


def test_text_and_arguments_are_not_held_back_without_need() -> None:
    p = parser("hermes")
    assert p.feed("Hello <") == [TextDelta("Hello")]
    assert p.feed("b> x ") == [TextDelta(" <b> x")]
    begun = p.feed('<tool_call>{"name": "a", "arguments": {"k": "lo')
    assert begun == [CallStart(0, "call_0", "a"), ArgumentsDelta(0, '{"k": "lo')]
    assert p.feed("ng") == [ArgumentsDelta(0, "ng")]
    q = parser("xml")
    assert q.feed("<function=edit><parameter=path>\nlo")[-1] == ArgumentsDelta(0, '{"path": "lo')
    assert q.feed('ng"') == [ArgumentsDelta(0, 'ng\\"')]


def test_finish_reasons() -> None:
    def call(status: CallStatus) -> ParsedCall:
        return ParsedCall(0, "c", "f", status=status)

    assert finish_reason("stop", []) == "stop"
    assert finish_reason("length", []) == "length"
    assert finish_reason("stop", [call("complete")]) == "tool_calls"
    assert finish_reason("stop", [call("invalid")]) == "tool_calls"
    assert finish_reason("length", [call("complete")]) == "length"
    assert finish_reason("stop", [call("complete"), call("cut")]) == "length"


def test_ids_differ_by_default() -> None:
    p = tool_parser("hermes")
    p.feed('<tool_call>{"name":"a"}</tool_call><tool_call>{"name":"a"}</tool_call>')
    assert len({call.id for call in p.calls}) == 2
