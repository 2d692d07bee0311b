"""What the importers share: a document read once, and conversations turned into events."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

from dlite_agent.errors import InvalidRequest, NotFound
from dlite_agent.trace.events import (
    AnyEvent,
    Foreign,
    KnownEvent,
    Model,
    Segment,
    SessionStart,
    ToolEnd,
    ToolStart,
    TurnEnd,
    TurnStart,
)


@dataclass(frozen=True)
class Document:
    """A file's text, the JSON value it is as a whole (if it is one), and its JSON lines (if it has any)."""

    data: bytes
    text: str
    whole: Any
    records: list[dict[str, Any]]
    problems: list[str]

    @classmethod
    def of(cls, data: bytes) -> Document:
        text = data.decode("utf-8", errors="replace").removeprefix("\ufeff")
        try:
            whole = json.loads(text)
        except (ValueError, RecursionError):
            whole = None
        records: list[dict[str, Any]] = []
        problems = []
        if isinstance(whole, dict):
            records = [whole]
        elif whole is None and text.lstrip().startswith("{"):
            for number, line in enumerate(text.split("\n"), 1):
                if not line.strip():
                    continue
                try:
                    record = json.loads(line)
                except (ValueError, RecursionError):
                    problems.append(f"line {number}: not JSON, kept out")
                    continue
                if isinstance(record, dict):
                    records.append(record)
                else:
                    problems.append(f"line {number}: not an object, kept out")
        return cls(data, text, whole, records, problems)

    @classmethod
    def read(cls, path: Path) -> Document:
        """Raises NotFound when there is no such file."""
        try:
            return cls.of(path.read_bytes())
        except (FileNotFoundError, IsADirectoryError) as error:
            raise NotFound(f"There is no session file {path.name!r}.", param="path") from error


_END_OF_TIME = 1e11


def plausible(value: Any, limit: float = _END_OF_TIME) -> float | None:
    """A number of seconds between 0 and `limit`, or None for anything else."""
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return float(value) if number and 0 <= value < limit else None


def unix_seconds(value: Any, field_name: str = "timestamp") -> float:
    """Unix seconds of an ISO 8601 text or of milliseconds as a number. Raises InvalidRequest otherwise.

    A text without a zone is taken as UTC; years must lie between 1970 and 5138.
    """
    try:
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            seconds = value / 1000.0
        else:
            moment = datetime.fromisoformat(value)
            seconds = (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()
    except (TypeError, ValueError, OverflowError):
        seconds = -1.0
    if not 0.0 <= seconds < _END_OF_TIME:
        raise InvalidRequest(
            f"{field_name} {value!r} is neither an ISO 8601 time nor milliseconds; correct the file.", param=field_name
        )
    return seconds


def iso_time(seconds: float) -> str:
    """ISO 8601 text of Unix seconds, in UTC with milliseconds. Raises InvalidRequest beyond the calendar."""
    if not 0.0 <= seconds < _END_OF_TIME:
        raise InvalidRequest(f"The wall-clock time {seconds!r} is beyond the calendar; correct the log.", param="wall")
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def text_of(content: Any) -> str:
    """The text of a message content: a string, or the text parts of a list."""
    if isinstance(content, str):
        return content
    if isinstance(content, list):
        parts = (
            part if isinstance(part, str) else part.get("text") for part in content if isinstance(part, (str, dict))
        )
        return "\n".join(part for part in parts if isinstance(part, str))
    return ""


def tool_call(call_id: str, name: str, arguments: Any) -> dict[str, Any]:
    """A tool call in the shape of OpenAI's chat messages; arguments become JSON text."""
    text = arguments if isinstance(arguments, str) else json.dumps(arguments)
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": text}}


def count(value: Any) -> int | None:
    """A token count, or None for anything else."""
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else None


@dataclass(frozen=True)
class Usage:
    """Token counts of one model call; None is not recorded. `prompt` includes `cached`."""

    prompt: int | None = None
    cached: int | None = None
    output: int | None = None

    @classmethod
    def openai(cls, usage: Any) -> Usage:
        """From a usage object of the chat or responses API."""
        if not isinstance(usage, dict):
            return cls()
        details = usage.get("prompt_tokens_details") or usage.get("input_tokens_details") or {}
        return cls(
            prompt=count(usage.get("prompt_tokens", usage.get("input_tokens"))),
            cached=count(details.get("cached_tokens")) if isinstance(details, dict) else None,
            output=count(usage.get("completion_tokens", usage.get("output_tokens"))),
        )


Clock = Literal["wall", "durations", "none"]


class Builder:
    """Collects the events of one imported file; times given to it are seconds from `wall` (Unix seconds)."""

    def __init__(self, source: str, clock: Clock, wall: float = 0.0) -> None:
        self.source = source
        self.wall = wall
        self._anchor = Segment(segment=source, t=0.0, wall=wall, clock=clock, source=source)
        self._events: list[KnownEvent] = []

    def add(self, event: KnownEvent) -> None:
        self._events.append(event)

    def foreign(self, raw: Any, t: float, session: str | None = None) -> None:
        """Keep a record that has no counterpart."""
        self.add(Foreign(segment=self.source, t=t, session=session, source=self.source, raw=raw))

    def events(self) -> list[AnyEvent]:
        """All events in order of time, the anchor first."""
        return [self._anchor, *sorted(self._events, key=lambda event: event.t)]


@dataclass
class Conversation:
    """One session of an imported file: messages come in, turns answer them, tools run between.

    A tool call is opened at the end of its turn unless opened before, and closed by its result.
    """

    builder: Builder
    session: str
    target: str | None = None
    parent: str | None = None
    start: float = 0.0
    next_turn: int = 0
    _pending: list[dict[str, Any]] = field(default_factory=list)
    _calls: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.builder.add(
            SessionStart(
                segment=self.builder.source,
                t=self.start,
                session=self.session,
                target=self.target,
                parent=self.parent,
            )
        )

    def incoming(self, message: dict[str, Any]) -> None:
        """A message that the next turn answers."""
        self._pending.append(message)

    def call(self, call_id: str, name: str, arguments: Any, t: float, *, measured: bool = False) -> None:
        """A tool call of the turn that comes next or, when that has ended, of the last one."""
        if call_id in self._calls and self._calls[call_id] == self.next_turn:
            return
        self._calls[call_id] = self.next_turn
        self.builder.add(
            ToolStart(
                segment=self.builder.source,
                t=t,
                session=self.session,
                turn=self.next_turn,
                call_id=call_id,
                name=name,
                measured=measured,
                arguments=arguments,
            )
        )

    def result(
        self, call_id: str, output: Any, t: float, *, exit_code: int | None = None, error: str | None = None
    ) -> bool:
        """The result of a call; false when no such call is open, then nothing is recorded."""
        turn = self._calls.pop(call_id, None)
        if turn is None:
            return False
        self.builder.add(
            ToolEnd(
                segment=self.builder.source,
                t=t,
                session=self.session,
                turn=turn,
                call_id=call_id,
                exit_code=exit_code,
                error=error,
                output=output,
            )
        )
        self.incoming({"role": "tool", "tool_call_id": call_id, "content": text_of(output)})
        return True

    def turn(
        self,
        message: dict[str, Any],
        start: float,
        end: float,
        *,
        usage: Usage | None = None,
        finish_reason: str | None = None,
        request_id: str | None = None,
        error: str | None = None,
        spans: Iterable[Model] = (),
        measured_tools: bool = False,
    ) -> int:
        """One model call and its answer; `spans` is the model time that is known. Returns the turn's number."""
        usage = usage or Usage()
        turn = self.next_turn
        end = max(start, end)
        calls = message.get("tool_calls") or []
        fresh = usage.prompt - usage.cached if usage.prompt is not None and usage.cached is not None else None
        self.builder.add(
            TurnStart(
                segment=self.builder.source,
                t=start,
                session=self.session,
                turn=turn,
                request_id=request_id,
                trigger="tool" if any(m.get("role") == "tool" for m in self._pending) else "user",
                prompt_tokens=usage.prompt,
                cached_tokens=usage.cached,
                new_tokens=fresh if fresh is None or fresh >= 0 else None,
                messages=self._pending or None,
            )
        )
        self._pending = []
        for span in spans:
            self.builder.add(span)
        self.builder.add(
            TurnEnd(
                segment=self.builder.source,
                t=end,
                session=self.session,
                turn=turn,
                request_id=request_id,
                finish_reason=finish_reason or ("tool_calls" if calls else "stop"),
                output_tokens=usage.output,
                error=error,
                message=message,
            )
        )
        for item in calls:
            function = item.get("function") or {}
            name = str(function.get("name") or "tool")
            self.call(str(item.get("id")), name, function.get("arguments"), end, measured=measured_tools)
        self.next_turn += 1
        return turn

    def model(self, start: float, end: float, *, inferred: bool = False, includes_tools: bool = False) -> Model:
        """A span of model time of the turn that comes next."""
        return Model(
            segment=self.builder.source,
            t=start,
            end=max(start, end),
            session=self.session,
            turn=self.next_turn,
            inferred=inferred,
            includes_tools=includes_tools,
        )
