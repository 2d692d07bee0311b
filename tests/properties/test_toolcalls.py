"""Any split of a response gives the same deltas, whatever the response holds."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Sequence
from typing import Any, get_args

from hypothesis import given, settings
from hypothesis import strategies as st

from dlite_agent.session.deltas import ArgumentsDelta, CallEnd, CallStart, Delta, ReasoningDelta, TextDelta
from dlite_agent.session.messages import JSON
from dlite_agent.session.reasoning import ReasoningParser, ResponseParser
from dlite_agent.session.template import Reasoning, ToolStyle
from dlite_agent.session.toolcalls import tool_parser
from tests.tokenizers import load

TOOLS: list[JSON] = [
    {
        "type": "function",
        "function": {
            "name": "f",
            "parameters": {
                "type": "object",
                "properties": {"s": {"type": "string"}, "n": {"type": "number"}, "o": {"type": "object"}},
            },
        },
    },
    {"type": "function", "function": {"name": "g"}},
]

PIECES = [
    "<tool_call>",
    "</tool_call>",
    "<think>",
    "</think>",
    "<function=f>",
    "<function=",
    "</function>",
    "<parameter=s>",
    "<parameter=n>",
    "</parameter>",
    "<|python_tag|>",
    '{"name": "f", "arguments": {"s": "x"}}',
    '{"name": "g", "parameters": {}}',
    '{"name": "f", "arguments": ',
    '{"arguments": {"n": [1, {"k": "}"}]}, "name": "f"}',
    '"arguments": "{}"',
    "{",
    "}",
    "[",
    "]",
    '"',
    "\\",
    ",",
    ":",
    ";",
    "<",
    "\n",
    " ",
    "text",
    "12",
    "é漢🙂",
]
texts = st.lists(st.sampled_from(PIECES), max_size=14).map("".join)
styles = st.sampled_from(get_args(ToolStyle))
starts = st.sampled_from(get_args(Reasoning))
values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=12) | st.sampled_from(PIECES),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)


def read(style: ToolStyle, start: Reasoning, parts: Iterable[str]) -> list[Delta]:
    """All deltas of a response, neighbours of one kind joined as a client would."""
    ids = (f"c{i}" for i in itertools.count())
    parser = ResponseParser(ReasoningParser(start), tool_parser(style, TOOLS, lambda: next(ids)))
    out: list[Delta] = []
    for delta in [d for part in parts for d in parser.feed(part)] + parser.finish():
        last = out[-1] if out else None
        if isinstance(delta, TextDelta) and isinstance(last, TextDelta):
            out[-1] = TextDelta(last.text + delta.text)
        elif isinstance(delta, ReasoningDelta) and isinstance(last, ReasoningDelta):
            out[-1] = ReasoningDelta(last.text + delta.text)
        elif isinstance(delta, ArgumentsDelta) and isinstance(last, ArgumentsDelta):
            out[-1] = ArgumentsDelta(delta.index, last.text + delta.text)
        else:
            out.append(delta)
    return out


def cut(text: str, at: Sequence[int]) -> list[str]:
    edges = [0, *sorted({min(i, len(text)) for i in at}), len(text)]
    return [text[a:b] for a, b in itertools.pairwise(edges)]


@given(styles, starts, texts, st.lists(st.integers(0, 200), max_size=12))
@settings(max_examples=200, deadline=None)
def test_any_split_gives_the_same_deltas(style: ToolStyle, start: Reasoning, text: str, at: list[int]) -> None:
    whole = read(style, start, [text])
    assert read(style, start, cut(text, at)) == whole
    assert read(style, start, text) == whole


@given(styles, st.sampled_from(["smollm2", "qwen3"]), texts, st.integers(1, 8))
@settings(max_examples=100, deadline=None)
def test_tokens_in_bursts_give_the_same_deltas(style: ToolStyle, name: str, text: str, burst: int) -> None:
    encoded = load(name)(text, add_special_tokens=False, return_offsets_mapping=True)
    ends = [end for _, end in encoded["offset_mapping"]]
    assert read(style, "optional", cut(text, ends[burst - 1 :: burst])) == read(style, "optional", [text])


@given(styles, texts)
@settings(max_examples=150, deadline=None)
def test_nothing_is_lost(style: ToolStyle, text: str) -> None:
    deltas = read(style, "never", [text])
    said = "".join(d.text for d in deltas if isinstance(d, TextDelta))
    if not any(isinstance(d, CallStart) for d in deltas):
        assert said == text
    for index, start in enumerate(d for d in deltas if isinstance(d, CallStart)):
        assert start.index == index
        kinds = [type(d) for d in deltas if not isinstance(d, TextDelta | ReasoningDelta) and d.index == index]
        assert kinds == [CallStart, ArgumentsDelta, CallEnd]


def written(style: ToolStyle, name: str, arguments: dict[str, Any]) -> str:
    if style == "xml":
        body = "".join(f"<parameter={k}>\n{v}\n</parameter>\n" for k, v in arguments.items())
        return f"<tool_call>\n<function={name}>\n{body}</function>\n</tool_call>"
    key = "parameters" if style == "llama" else "arguments"
    call = json.dumps({"name": name, key: arguments}, ensure_ascii=False)
    return call if style == "llama" else f"<tool_call>\n{call}\n</tool_call>"


@given(
    st.sampled_from(["hermes", "llama"]),
    st.lists(st.tuples(st.sampled_from("fg"), st.dictionaries(st.text(max_size=5), values, max_size=4)), max_size=4),
    st.integers(1, 9),
)
@settings(max_examples=80, deadline=None)
def test_json_calls_come_back_whole(style: ToolStyle, calls: list[tuple[str, dict[str, Any]]], size: int) -> None:
    text = "\n".join(written(style, name, arguments) for name, arguments in calls)
    deltas = read(style, "never", [text[i : i + size] for i in range(0, len(text), size)])
    names = [d.name for d in deltas if isinstance(d, CallStart)]
    arguments = [json.loads(d.text) for d in deltas if isinstance(d, ArgumentsDelta)]
    assert list(zip(names, arguments, strict=True)) == calls
    assert not any(isinstance(d, TextDelta) for d in deltas)
    assert all(d.status == "complete" for d in deltas if isinstance(d, CallEnd))


@given(st.lists(st.text(max_size=20).filter(lambda s: "</parameter>" not in s), max_size=3), st.integers(1, 9))
@settings(max_examples=80, deadline=None)
def test_xml_strings_come_back_to_the_letter(strings: list[str], size: int) -> None:
    text = "".join(written("xml", "f", {"s": value}) for value in strings)
    deltas = read("xml", "never", [text[i : i + size] for i in range(0, len(text), size)])
    assert [json.loads(d.text) for d in deltas if isinstance(d, ArgumentsDelta)] == [{"s": s} for s in strings]
