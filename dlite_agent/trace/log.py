"""Append-only JSONL logs of events: a writer that loses at most its last line, a reader that survives any cut."""

from __future__ import annotations

import json
import math
import os
import threading
import time
import uuid
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from dlite_agent.errors import InvalidRequest, NotFound
from dlite_agent.trace.events import AnyEvent, Event, KnownEvent, Segment, TurnEnd, TurnStart, Unknown, dump, parse
from dlite_agent.trace.redact import Redactor


@dataclass(frozen=True)
class Log:
    """Events of one file in the order written, and what was wrong with the file.

    `cut_bytes` is the length of a half-written last line that was left out; `problems` names lines that were not
    understood (they are in `events` as `Unknown` where they were JSON objects).
    """

    events: list[AnyEvent]
    format: str = "dlite"
    cut_bytes: int = 0
    problems: list[str] = field(default_factory=list)

    def sessions(self) -> list[str]:
        """Ids of the sessions in it, in order of appearance."""
        found = (getattr(event, "session", None) for event in self.events)
        return list(dict.fromkeys(session for session in found if session))

    def of_session(self, session: str) -> Log:
        """The part that concerns one session, with the segments, calibrations and outages it needs.

        Raises NotFound when the log does not have that session.
        """
        if session not in self.sessions():
            raise NotFound(f"The log has no session {session!r}; it has {', '.join(self.sessions())}.", param="session")
        kept = [event for event in self.events if getattr(event, "session", None) in (None, session)]
        return Log(kept, self.format, self.cut_bytes, self.problems)


def parse_lines(data: bytes) -> Log:
    """Read the bytes of a log. Only the last line may be incomplete; it is cut and reported, never guessed at."""
    events: list[AnyEvent] = []
    problems = []
    cut = 0
    lines = data.split(b"\n")
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except (ValueError, RecursionError):
            if number == len(lines):
                cut = len(line)
            else:
                problems.append(f"line {number}: not JSON, kept out: {line[:80]!r}")
            continue
        event: AnyEvent = parse(record) if isinstance(record, dict) else Unknown({"value": record}, "not an object")
        if isinstance(event, Unknown):
            problems.append(f"line {number}: {event.problem}")
        events.append(event)
    return Log(events, "dlite", cut, problems)


def read_log(path: Path) -> Log:
    """Read one log. Raises NotFound when there is no such file, InvalidRequest for a later schema version."""
    try:
        return parse_lines(path.read_bytes())
    except (FileNotFoundError, IsADirectoryError) as error:
        raise NotFound(f"There is no session file {path.name!r}.", param="path") from error


def dump_lines(events: Iterable[AnyEvent]) -> str:
    """Events as the text of a log."""
    return "".join(_line(event) for event in events)


class EventLog:
    """Appends the events of this process to one file.

    Opening cuts a half-written last line (`cut_bytes` says how much) and writes the segment record with the anchor.
    Each event is one write of one line, so a crash loses at most the line being written. Safe from several threads.

    Args:
        path: file to append to; its folder must exist.
        content: whether messages, ids, arguments and outputs are kept.
        redactor: applied to all content. Token ids are kept only beside text of the same record that redaction left
            unchanged, since ids spell out what the text hides. None keeps everything as it is.
    """

    def __init__(self, path: Path, *, content: bool = True, redactor: Redactor | None = None) -> None:
        self.path = path
        self.segment = uuid.uuid4().hex[:12]
        self.content = content
        self._redactor = redactor
        self._lock = threading.Lock()
        self.cut_bytes = _repair(path)
        try:
            self._file = path.open("ab", buffering=0)
        except OSError as error:
            raise InvalidRequest(f"Cannot append to {path.name!r}: {error.strerror}.", param="path") from error
        self.write(Segment(segment=self.segment, t=time.monotonic(), wall=time.time()))

    def write(self, event: AnyEvent) -> None:
        """Append one event. Raises InvalidRequest once the log is closed."""
        data = _line(self._filtered(event) if isinstance(event, Event) else event).encode()
        with self._lock:
            if self._file.closed:
                raise InvalidRequest("The event log is closed; open it again to append.", param="path")
            view = memoryview(data)
            while view:
                view = view[self._file.write(view) :]

    def _filtered(self, event: KnownEvent) -> KnownEvent:
        if not self.content:
            event = event.without_content()
        if self._redactor is None:
            return event
        changes = {
            name: self._redactor.value(getattr(event, name))
            for name in (*event.content_fields, *_TEXT_FIELDS)
            if getattr(event, name, None) is not None
        }
        for kind, ids, text in ((TurnStart, "new_ids", "messages"), (TurnEnd, "output_ids", "message")):
            if isinstance(event, kind) and (text not in changes or changes[text] != getattr(event, text)):
                changes[ids] = None
        return event.model_copy(update=changes)

    def close(self) -> None:
        with self._lock:
            self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


_TEXT_FIELDS = ("text", "error", "reason")
_BLOCK = 1 << 16


def _line(event: AnyEvent) -> str:
    # ASCII, since tool output may hold lone surrogates, which UTF-8 cannot carry.
    return json.dumps(_plain(dump(event)), separators=(",", ":"), allow_nan=False) + "\n"


def _plain(value: Any) -> Any:
    """Content as JSON can hold it: numbers that are not finite and foreign objects become text."""
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    return value if value is None or isinstance(value, (str, int)) else str(value)


def _repair(path: Path) -> int:
    """Cut an incomplete last line, complete one that lacks only its newline; bytes cut."""
    if not path.exists():
        return 0
    with path.open("rb+") as file:
        at = file.seek(0, os.SEEK_END)
        tail = b""
        while at > 0 and b"\n" not in tail:
            step = min(_BLOCK, at)
            at = file.seek(at - step)
            tail = file.read(step) + tail
        tail = tail[tail.rfind(b"\n") + 1 :]
        end = file.seek(0, os.SEEK_END)
        if not tail:
            return 0
        try:
            json.loads(tail)
        except ValueError:
            file.truncate(end - len(tail))
            return len(tail)
        file.write(b"\n")
        return 0
