"""Logs survive any cut, formats carry any content, secrets never get through, odd files end in typed errors."""

from __future__ import annotations

import json
import string
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dlite_agent.errors import DliteError
from dlite_agent.trace.events import AnyEvent, Event, Rounds, Segment, ToolEnd, ToolStart, TurnEnd, TurnStart
from dlite_agent.trace.formats import loads
from dlite_agent.trace.formats.atif import to_atif
from dlite_agent.trace.formats.build import Document
from dlite_agent.trace.formats.chrome import to_chrome
from dlite_agent.trace.log import Log, dump_lines, parse_lines
from dlite_agent.trace.phases import timelines
from dlite_agent.trace.redact import MARK, Redactor
from dlite_agent.trace.report import to_table
from dlite_agent.trace.report_html import to_html
from dlite_agent.trace.summary import summarise
from tests.trace import sample
from tests.trace.formats.data_files import DATA, FORMATS
from tests.trace.formats.test_exporters import check_atif, check_chrome

TEXT = st.text(st.characters(codec="utf-8"), max_size=12)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 9) | st.floats(allow_nan=False, allow_infinity=False) | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=5,
)
ARGUMENTS = st.dictionaries(TEXT, JSON, max_size=2)


@st.composite
def sessions(draw: st.DrawFn) -> list[AnyEvent]:
    g, t = "g", 10.0
    events: list[AnyEvent] = [Segment(segment=g, t=10.0, wall=1.8e9)]
    pending: list[dict[str, Any]] = []
    distinct = draw(st.booleans())
    for turn in range(draw(st.integers(1, 3))):
        for role in draw(st.lists(st.sampled_from(("user", "system", "developer")), max_size=2)):
            pending.append({"role": role, "content": draw(TEXT | st.just([{"type": "text", "text": "x"}]))})
        where: dict[str, Any] = {"segment": g, "session": "s", "turn": turn}
        events.append(TurnStart(**where, t=t, messages=draw(st.sampled_from((None, pending)))))
        pending = []
        message: dict[str, Any] = {"role": "assistant", "content": draw(TEXT | st.none())}
        calls = [f"c{turn if distinct else 0}{i}" for i in range(draw(st.integers(0, 2)))]
        if calls:
            encode = draw(st.sampled_from((json.dumps, lambda value: json.dumps(value, indent=1))))
            arguments = {call: draw(ARGUMENTS) for call in calls}
            message["tool_calls"] = [
                {"id": call, "type": "function", "function": {"name": "f", "arguments": encode(arguments[call])}}
                for call in calls
            ]
            message["tool_calls"] += draw(st.sampled_from(([], [{"id": "odd"}], ["odder"])))
        t += draw(st.floats(0, 5))
        events.append(TurnEnd(**where, t=t, message=draw(st.sampled_from((None, message))), output_tokens=1))
        for call in calls:
            given_arguments = draw(st.sampled_from((None, arguments[call], "text")))
            events.append(ToolStart(**where, t=t, call_id=call, name="f", arguments=given_arguments))
        for call in calls[: draw(st.integers(0, 2))]:
            t += draw(st.floats(0, 5))
            output = draw(TEXT | JSON)
            events.append(ToolEnd(**where, t=t, call_id=call, output=output, exit_code=draw(st.integers(-1, 3))))
            pending.append({"role": "tool", "tool_call_id": call, "content": draw(st.just(output) | TEXT)})
    return events


@settings(max_examples=30, deadline=None)
@given(sessions())
def test_own_records_come_back(events: list[AnyEvent]) -> None:
    assert parse_lines(dump_lines(events).encode()).events == events


@settings(max_examples=50, deadline=None)
@given(sessions())
def test_atif_carries_any_session(events: list[AnyEvent]) -> None:
    document = to_atif(Log(events))
    check_atif(document)
    back = loads(Document.of(json.dumps(document).encode()))
    assert back.events == events


@settings(max_examples=30, deadline=None)
@given(sessions())
def test_reports_and_traces_of_any_session(events: list[AnyEvent]) -> None:
    check_chrome(to_chrome(Log(events)))
    report = summarise(timelines(Log(events)))
    assert "session s" in to_table(report)
    assert to_html(report).endswith("</html>\n")


def test_the_reader_survives_a_cut_at_any_byte() -> None:
    events = [event for event in sample.events() if isinstance(event, Event) and not isinstance(event, Rounds)]
    whole = dump_lines(events).encode()
    ends = [i for i, byte in enumerate(whole) if byte == 10]
    for size in range(len(whole) + 1):
        found = parse_lines(whole[:size])
        # A line is whole once its closing brace is there, even without its newline.
        n = sum(end <= size for end in ends)
        assert found.events == events[:n]
        assert found.problems == []
        begun = whole[:size].rfind(b"\n") + 1
        assert found.cut_bytes == (size - begun if n < len(events) and size not in ends else 0)


SECRETS = st.builds(
    lambda prefix, body: prefix + body,
    st.sampled_from(("sk-", "ghp_", "hf_", "glpat-")),
    st.text(string.ascii_letters + string.digits, min_size=20, max_size=30),
)


@settings(max_examples=50, deadline=None)
@given(SECRETS, JSON, st.sampled_from(("api_key", "PASSWORD", "clientSecret", "note")), TEXT)
def test_no_planted_secret_gets_through(secret: str, value: Any, key: str, text: str) -> None:
    planted = {
        "rest": value,
        key: secret,
        "text": f"{text} {secret} {text}",
        "nested": [json.dumps({"token": secret}), {"deep": f"KEY={secret}"}],
    }
    cleaned = Redactor().value(planted)
    assert secret not in json.dumps(cleaned)
    assert Redactor().value(cleaned) == cleaned


@settings(max_examples=50, deadline=None)
@given(st.text(string.ascii_letters + string.digits, min_size=5, max_size=20), TEXT)
def test_no_literal_gets_through(literal: str, text: str) -> None:
    assert literal not in Redactor(literals=(literal,)).text(text + literal + text) or literal in MARK


@settings(max_examples=50, deadline=None)
@given(st.binary(max_size=60) | TEXT.map(str.encode) | JSON.map(lambda value: json.dumps(value).encode()))
def test_any_bytes_end_in_events_or_a_typed_error(data: bytes) -> None:
    try:
        log = loads(Document.of(data))
    except DliteError:
        return
    timelines(log)


def _mutate(value: Any, path: list[int], into: Any) -> Any:
    """The value with the node at `path` (counted modulo) replaced."""
    if not path or not isinstance(value, (dict, list)) or not value:
        return into
    keys = list(value) if isinstance(value, dict) else list(range(len(value)))
    key = keys[path[0] % len(keys)]
    copy: Any = dict(value) if isinstance(value, dict) else list(value)
    copy[key] = _mutate(value[key], path[1:], into)
    return copy


OURS = {"own.jsonl": dump_lines(sample.events()), "own-atif.json": json.dumps(to_atif(sample.log()))}


@pytest.mark.parametrize("name", [*OURS, *(name for name in FORMATS if not name.endswith(".csv"))])
@settings(max_examples=20, deadline=None)
@given(data=st.data())
def test_damaged_files_end_in_events_or_a_typed_error(name: str, data: st.DataObject) -> None:
    text = OURS.get(name) or (DATA / name).read_text()
    path = data.draw(st.lists(st.integers(0, 9), min_size=2, max_size=6))
    into = data.draw(st.sampled_from((None, 0, -1, 1e300, "", "x", [], {}, [1], {"a": None}, True)))
    if name.endswith(".jsonl"):
        lines = [json.loads(line) for line in text.splitlines()]
        text = "\n".join(json.dumps(line) for line in _mutate(lines, path, into))
    else:
        text = json.dumps(_mutate(json.loads(text), path, into))
    try:
        log = loads(Document.of(text.encode()))
    except DliteError:
        return
    report = summarise(timelines(log))
    to_table(report)
    check_chrome(to_chrome(log))
    for session in log.sessions():
        check_atif(to_atif(log.of_session(session)))
