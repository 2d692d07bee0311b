"""Claude Code JSONL, as observed (the vendor documents no schema).

One model message is split over several records that share `message.id` and repeat `usage`, which is counted once. Model
time is the gap that ends in an assistant record, tool time the stretch from a call to its result: both are inferred.
Side chains are sessions of their own.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from dlite_agent.trace.events import AnyEvent, Model
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

NAME = "claude-code"


def matches(document: Document) -> bool:
    return any(
        record.get("type") in ("user", "assistant") and "sessionId" in record and "timestamp" in record
        for record in document.records[:200]
    )


def load(document: Document) -> list[AnyEvent]:
    """Events of all sessions in the file. Raises InvalidRequest for a time that cannot be read."""
    wall = min(unix_seconds(record["timestamp"]) for record in document.records if "timestamp" in record)
    builder = Builder(NAME, "wall", wall)
    chains: dict[str, _Chain] = {}
    at = 0.0
    for record in document.records:
        message = record.get("message")
        if "timestamp" in record:
            at = unix_seconds(record["timestamp"]) - wall
        if record.get("type") not in ("user", "assistant") or not isinstance(message, dict):
            builder.foreign(record, at, record.get("sessionId") if record.get("sessionId") in chains else None)
            continue
        root = str(record.get("sessionId"))
        name = f"{root}/{record.get('agentId', 'sidechain')}" if record.get("isSidechain") else root
        if name not in chains:
            parent = root if name != root else None
            chains[name] = _Chain(Conversation(builder, name, message.get("model"), parent, at), at)
        chains[name].record(record, message, at)
    for chain in chains.values():
        chain.close()
    return builder.events()


@dataclass
class _Chain:
    """One session while its records come in; an assistant message stays open until the next one starts."""

    session: Conversation
    last: float
    message_id: str | None = None
    start: float = 0.0
    end: float = 0.0
    blocks: list[dict[str, Any]] = field(default_factory=list)
    spans: list[Model] = field(default_factory=list)
    head: dict[str, Any] = field(default_factory=dict)
    request_id: str | None = None
    _early: list[tuple[dict[str, Any], dict[str, Any], float]] = field(default_factory=list)

    def record(self, record: dict[str, Any], message: dict[str, Any], at: float) -> None:
        at = max(at, self.last)
        if record["type"] == "assistant":
            self._assistant(record, message, at)
        elif self.message_id is not None and _results(message):
            # Results may arrive while later records of the same message are still to come.
            self._early.append((record, message, at))
        else:
            self.close()
            self._user(record, message, at)
        self.last = at

    def _assistant(self, record: dict[str, Any], message: dict[str, Any], at: float) -> None:
        identity = str(message.get("id") or record.get("uuid"))
        if identity != self.message_id:
            self.close()
            self.message_id, self.start, self.request_id = identity, self.last, record.get("requestId")
        self.spans.append(self.session.model(self.last, at, inferred=True))
        content = message.get("content")
        blocks = [b for b in content if isinstance(b, dict)] if isinstance(content, list) else []
        self.blocks += blocks or [{"type": "text", "text": text_of(content)}]
        self.end = at
        self.head = message
        for block in blocks:
            if block.get("type") == "tool_use":
                self.session.call(str(block.get("id")), str(block.get("name")), block.get("input"), at)

    def _user(self, record: dict[str, Any], message: dict[str, Any], at: float) -> None:
        content = message.get("content")
        for block in _results(message):
            error = "tool reported an error" if block.get("is_error") else None
            if not self.session.result(str(block.get("tool_use_id")), text_of(block.get("content")), at, error=error):
                self.session.builder.foreign(record, at, self.session.session)
        rest = [b for b in content if not _is_result(b)] if isinstance(content, list) else content
        if text_of(rest):
            self.session.incoming({"role": "user", "content": text_of(rest)})

    def close(self) -> None:
        """End the open assistant message and hand over the results that came in meanwhile."""
        if self.message_id is not None:
            answer: dict[str, Any] = {"role": "assistant", "content": text_of(self.blocks)}
            thinking = "\n".join(str(b.get("thinking", "")) for b in self.blocks if b.get("type") == "thinking")
            if thinking:
                answer["reasoning_content"] = thinking
            calls = [b for b in self.blocks if b.get("type") == "tool_use"]
            if calls:
                answer["tool_calls"] = [tool_call(str(b.get("id")), str(b.get("name")), b.get("input")) for b in calls]
            self.session.turn(
                answer,
                self.start,
                self.end,
                usage=_usage(self.head.get("usage")),
                finish_reason=self.head.get("stop_reason"),
                request_id=self.request_id,
                spans=self.spans,
            )
            self.message_id, self.blocks, self.spans = None, [], []
        early, self._early = self._early, []
        for record, message, at in early:
            self._user(record, message, at)


def _is_result(block: Any) -> bool:
    return isinstance(block, dict) and block.get("type") == "tool_result"


def _results(message: dict[str, Any]) -> list[dict[str, Any]]:
    content = message.get("content")
    return [block for block in content if _is_result(block)] if isinstance(content, list) else []


def _usage(usage: Any) -> Usage:
    if not isinstance(usage, dict):
        return Usage()
    cached = count(usage.get("cache_read_input_tokens"))
    parts = [count(usage.get("input_tokens")), count(usage.get("cache_creation_input_tokens")), cached]
    known = [part for part in parts if part is not None]
    return Usage(sum(known) if known else None, cached, count(usage.get("output_tokens")))
