"""pi session JSONL. The only foreign log with exact start and end of a model call.

A message record's `timestamp` is when it was written, so the end of an assistant message; `message.timestamp` is its
start in milliseconds. Tool time is the stretch from the call to its result, so it is inferred.
"""

from __future__ import annotations

from typing import Any

from dlite_agent.trace.events import AnyEvent
from dlite_agent.trace.formats.build import (
    Builder,
    Conversation,
    Document,
    Usage,
    count,
    text_of,
    tool_call,
    unix_seconds,
)

NAME = "pi"


def matches(document: Document) -> bool:
    first = document.records[0] if document.records else {}
    return first.get("type") == "session" and "id" in first and "timestamp" in first


def load(document: Document) -> list[AnyEvent]:
    """Events of the one session of the file. Raises InvalidRequest for a time that cannot be read."""
    header = document.records[0]
    wall = min(_moments(document.records))
    builder = Builder(NAME, "wall", wall)
    session = Conversation(builder, str(header["id"]), header.get("modelId"), header.get("parentSession"))
    at = 0.0
    for record in document.records[1:]:
        message = record.get("message")
        if "timestamp" in record:
            at = max(at, unix_seconds(record["timestamp"]) - wall)
        if record.get("type") != "message" or not isinstance(message, dict):
            builder.foreign(record, at, session.session)
            continue
        role = message.get("role")
        began = unix_seconds(message["timestamp"], "message.timestamp") - wall if "timestamp" in message else at
        if role == "user":
            session.incoming({"role": "user", "content": text_of(message.get("content"))})
        elif role == "assistant":
            _answer(session, message, min(began, at), at)
        elif role == "toolResult":
            error = "tool reported an error" if message.get("isError") else None
            content = message.get("content")
            if not session.result(str(message.get("toolCallId")), text_of(content), at, error=error):
                builder.foreign(record, at, session.session)
        else:
            builder.foreign(record, at, session.session)
    return builder.events()


def _moments(records: list[dict[str, Any]]) -> list[float]:
    # A branched session's header is younger than the records it copied.
    moments = [unix_seconds(record["timestamp"]) for record in records if "timestamp" in record]
    for record in records:
        message = record.get("message")
        if isinstance(message, dict) and "timestamp" in message:
            moments.append(unix_seconds(message["timestamp"], "message.timestamp"))
    return moments


def _answer(session: Conversation, message: dict[str, Any], start: float, end: float) -> None:
    content = message.get("content")
    blocks = [block for block in content if isinstance(block, dict)] if isinstance(content, list) else []
    answer: dict[str, Any] = {"role": "assistant", "content": text_of(content)}
    thinking = "\n".join(str(block.get("thinking", "")) for block in blocks if block.get("type") == "thinking")
    if thinking:
        answer["reasoning_content"] = thinking
    calls = [block for block in blocks if block.get("type") == "toolCall"]
    if calls:
        answer["tool_calls"] = [
            tool_call(str(call.get("id")), str(call.get("name")), call.get("arguments")) for call in calls
        ]
    session.turn(
        answer,
        start,
        end,
        usage=_usage(message.get("usage")),
        finish_reason=message.get("stopReason"),
        error=message.get("errorMessage"),
        spans=[session.model(start, end)],
    )


def _usage(usage: Any) -> Usage:
    if not isinstance(usage, dict):
        return Usage()
    parts = [count(usage.get(key)) for key in ("input", "cacheRead", "cacheWrite")]
    known = [part for part in parts if part is not None]
    return Usage(sum(known) if known else None, parts[1], count(usage.get("output")))
