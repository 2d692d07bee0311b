"""Workload CSV in the manner of TraceLab: one row a model call, lengths and waits, no text.

Needed columns: `session_id, round_idx, prefix_len, input_len, output_len`; known: `tool_wait_after_ms`, or
`wait_kind` with `wait_after_ms`; `sent_at_ms`; `api_time_ms` (0: not recorded). Tool waits are gaps, so inferred.
"""

from __future__ import annotations

import csv
import io
from collections import defaultdict

from dlite_agent.errors import InvalidRequest
from dlite_agent.trace.events import AnyEvent, ClientIdle, Foreign
from dlite_agent.trace.formats.build import Builder, Conversation, Document, Usage, tool_call

NAME = "workload-csv"
_NEEDED = ("session_id", "round_idx", "prefix_len", "input_len", "output_len")
_KNOWN = frozenset({*_NEEDED, "tool_wait_after_ms", "wait_kind", "wait_after_ms", "sent_at_ms", "api_time_ms"})


def matches(document: Document) -> bool:
    header = document.text.split("\n", 1)[0].strip().split(",")
    return "session_id" in header and "output_len" in header


def load(document: Document) -> list[AnyEvent]:
    """Events of all sessions. Raises InvalidRequest that names row and column of a bad value."""
    rows = csv.DictReader(io.StringIO(document.text))
    columns = rows.fieldnames or []
    missing = [name for name in _NEEDED if name not in columns]
    if missing:
        raise InvalidRequest(f"The workload CSV lacks the columns {', '.join(missing)}.", param=missing[0])
    sessions: dict[str, list[tuple[int, dict[str, str]]]] = defaultdict(list)
    for number, row in enumerate(rows, 2):
        sessions[row["session_id"]].append((number, row))
    stamped = "sent_at_ms" in columns
    builder = Builder(NAME, "wall" if stamped else "durations")
    for name, lines in sessions.items():
        _session(builder, name, sorted(lines, key=lambda line: _number(line, "round_idx")), stamped)
    return builder.events()


def _session(builder: Builder, name: str, lines: list[tuple[int, dict[str, str]]], stamped: bool) -> None:
    at = _number(lines[0], "sent_at_ms") / 1000 if stamped else 0.0
    session = Conversation(builder, name, start=at)
    for index, line in enumerate(lines):
        row = line[1]
        start = max(at, _number(line, "sent_at_ms") / 1000) if stamped else at
        api = _number(line, "api_time_ms") / 1000
        kind, wait = row.get("wait_kind") or "", _number(line, "wait_after_ms") / 1000
        if not kind and row.get("tool_wait_after_ms"):
            kind, wait = "tool", _number(line, "tool_wait_after_ms") / 1000
        later = None
        if index + 1 < len(lines) and stamped:
            later = max(start, _number(lines[index + 1], "sent_at_ms") / 1000)
        done = start + api if later is None else min(start + api, later)
        message = {"role": "assistant", "content": ""}
        calls = [tool_call(f"round{index}", "tools", {})] if kind == "tool" and (wait or later) else []
        turn = session.turn(
            {**message, "tool_calls": calls} if calls else message,
            start,
            done,
            usage=Usage(
                int(_number(line, "prefix_len") + _number(line, "input_len")),
                int(_number(line, "prefix_len")),
                int(_number(line, "output_len")),
            ),
            spans=[session.model(start, done)] if api else [],
        )
        at = done + wait if later is None else min(done + wait, later)
        if calls:
            session.result(f"round{index}", None, at)
        elif kind and at > done:
            idle = ClientIdle(segment=NAME, t=done, end=at, session=name, turn=turn, waiting=kind, inferred=True)
            builder.add(idle)
        extra = {key: value for key, value in row.items() if key not in _KNOWN and value}
        if extra:
            builder.add(Foreign(segment=NAME, t=start, session=name, source=NAME, raw={"turn": turn, **extra}))


def _number(line: tuple[int, dict[str, str]], column: str) -> float:
    text = line[1].get(column) or "0"
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0.0 <= value < 1e13:
        raise InvalidRequest(
            f"Row {line[0]}, column {column}: {text!r} is not a number that is zero or more.", param=column
        )
    return value
