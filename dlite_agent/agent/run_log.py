"""The event log of a run and its watchers: every trace event is a line of a file, from which watchers read it."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from dlite_agent.trace.events import Event, KnownEvent, Outage, Segment, SessionEvent, TurnEvent, TurnStart
from dlite_agent.trace.log import EventLog, read_log
from dlite_agent.trace.redact import Redactor


class Signal(NamedTuple):
    """Something for watchers: `log` (the file has grown), or a live notice that no log keeps, such as `text`."""

    kind: str
    data: dict[str, Any]


class Line(NamedTuple):
    """One event of the file; `end` is the offset behind it, from where reading may go on."""

    end: int
    record: dict[str, Any]


class RunLog:
    """Appends the trace events of one run; secrets are redacted.

    Events come with whatever session and turn their source has counted; here they belong to the run, whose turns are
    counted by their starts: one that an outage cut keeps its number, and the next attempt has the next. Reopening the
    log of an earlier process notes the outage between the two.
    """

    def __init__(self, path: Path, run: str, *, content: bool = True) -> None:
        self.path = path
        self.run = run
        self._turn, before = _left_at(path) if path.exists() else (-1, None)
        self._log = EventLog(path, content=content, redactor=Redactor())
        self._watchers: set[asyncio.Queue[Signal | None]] = set()
        if before is not None:
            segment, wall = before
            self.write(
                Outage(
                    segment=self._log.segment,
                    t=time.monotonic(),
                    session=run,
                    previous=segment,
                    seconds=max(0.0, time.time() - wall),
                    reason="the server was restarted",
                )
            )

    @property
    def segment(self) -> str:
        return self._log.segment

    def write(self, event: KnownEvent) -> None:
        """Append an event, as one of this run and of its latest turn."""
        changes: dict[str, Any] = {"segment": self._log.segment}
        if isinstance(event, SessionEvent):
            changes["session"] = self.run
        self._turn += isinstance(event, TurnStart)
        if isinstance(event, TurnEvent):
            changes["turn"] = max(0, self._turn)
        self._log.write(event.model_copy(update=changes))
        self.signal("log")

    def lines(self, start: int = 0) -> Iterator[Line]:
        """The whole lines of the file from an offset on."""
        with self.path.open("rb") as file:
            end = file.seek(start)
            for line in file:
                if not line.endswith(b"\n"):
                    return
                end += len(line)
                yield Line(end, json.loads(line))

    def signal(self, kind: str, **data: Any) -> None:
        """Tell all watchers."""
        for watcher in self._watchers:
            watcher.put_nowait(Signal(kind, data))

    def watch(self) -> asyncio.Queue[Signal | None]:
        """A queue of coming signals; None says that no more will come."""
        watcher: asyncio.Queue[Signal | None] = asyncio.Queue()
        self._watchers.add(watcher)
        return watcher

    def leave(self, watcher: asyncio.Queue[Signal | None]) -> None:
        self._watchers.discard(watcher)

    def stop_streams(self) -> None:
        """Tell all watchers that no more will come."""
        for watcher in self._watchers:
            watcher.put_nowait(None)
        self._watchers.clear()

    def close(self) -> None:
        """End the watchers' streams and the file."""
        self.stop_streams()
        self._log.close()


def _left_at(path: Path) -> tuple[int, tuple[str, float] | None]:
    """The last turn of a log, its last segment and the wall clock of its last event."""
    segment: Segment | None = None
    last, turn = 0.0, -1
    for event in read_log(path).events:
        if isinstance(event, Segment):
            segment, last = event, event.t
        elif isinstance(event, Event):
            last = max(last, getattr(event, "end", event.t))
        if isinstance(event, TurnStart):
            turn = event.turn
    return turn, None if segment is None else (segment.segment, segment.wall + last - segment.t)
