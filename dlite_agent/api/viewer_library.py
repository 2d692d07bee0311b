"""Where the viewer's sessions come from: this server's own and its runs, files given to it, and shipped recordings."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dlite_agent.agent.runs import AgentRun, Runs
from dlite_agent.api.problems import TooLarge
from dlite_agent.api.service import Service
from dlite_agent.api.viewer_view import Shown, spark
from dlite_agent.errors import InvalidRequest, NotFound
from dlite_agent.session.registry import Session
from dlite_agent.trace.events import Event, SessionStart
from dlite_agent.trace.formats import loads
from dlite_agent.trace.formats.build import Document
from dlite_agent.trace.log import Log, parse_lines
from dlite_agent.trace.phases import timelines
from dlite_agent.trace.summary import summarise

FILE_BYTES = 16 << 20
"""Size of a file that may be given; all kept files together may hold twice as much."""
_KEPT = 32

Revision = tuple[Any, ...]


@dataclass
class _File:
    """A file somebody gave: its sessions, and whose it is."""

    owner: str
    name: str
    size: int
    shown: list[Shown]


@dataclass
class _Tail:
    """What was read so far of one session from the server's log, and up to which byte."""

    offset: int = 0
    lines: list[bytes] = field(default_factory=list)


class Library:
    """Sessions by reference: `live~ID`, `run~ID`, `file~TOKEN~N` or `shipped~FILE~N`. To be used from the event loop.

    What is computed from a session is kept until the session changes, for the latest used ones.

    Args:
        log_path: the server's event log; without one its sessions are known by their latest events only.
        shipped: folder of recorded sessions that everybody may see.
    """

    def __init__(self, service: Service, runs: Runs, *, log_path: Path | None, shipped: Path) -> None:
        self._service = service
        self._runs = runs
        self._log_path = log_path
        self._shipped = shipped
        self._kept: OrderedDict[str, tuple[Revision, Shown]] = OrderedDict()
        self._sparks: OrderedDict[str, tuple[Revision, dict[str, Any]]] = OrderedDict()
        self._tails: OrderedDict[str, _Tail] = OrderedDict()
        self._files: OrderedDict[str, _File] = OrderedDict()
        self._working = asyncio.Lock()  # one computation at a time: all the rest of the server shares these cores

    async def open(self, owner: str, ref: str) -> Shown:
        """A session with what was computed from it. Raises NotFound, also for another owner's."""
        kind, _, rest = ref.partition("~")
        if kind == "live":
            return await self._live(ref, await self._service.session(owner, rest))
        if kind == "run":
            return await self._run(ref, self._runs.get(owner, rest))
        name, _, number = rest.rpartition("~")
        if not number.isdecimal():
            raise NotFound(f"There is no session {ref!r}.", param="session")
        if kind == "shipped" and name in (files := self._shipped_files()):
            path = files[name]
            stat = path.stat()
            return await self._made(ref, (stat.st_mtime_ns, stat.st_size), lambda: _read(path, int(number)))
        if kind == "file":
            file = self._files.get(name)
            if file is None or file.owner != owner or int(number) >= len(file.shown):
                raise NotFound("This file is no longer kept by the server: open it again.", param="session")
            self._files.move_to_end(name)
            return file.shown[int(number)]
        raise NotFound(f"There is no session {ref!r}.", param="session")

    async def cards(self, owner: str, offset: int, limit: int) -> dict[str, Any]:
        """A page of all sessions the caller may see, live ones first, each with its sparkline."""
        runs = self._runs.list(owner)
        own = {run.id for run in runs}
        entries: list[dict[str, Any]] = [
            *(self._run_entry(run) for run in runs),
            *(
                self._live_entry(session)
                for session in self._service.registry.list(owner)
                if not {session.id, session.name} & own  # a run's model turns are part of the run
            ),
            *(
                {
                    "ref": f"live~{entry.session}",
                    "kind": "stored",
                    "name": entry.name or entry.session,
                    "used": None,
                    "in_flight": False,
                    "turns": entry.turn,
                    "wall": None,
                    "spark": [],
                }
                for entry in await self._service.keeper.entries(owner)
                if not {entry.session, entry.name} & own
            ),
            *(
                {"ref": f"file~{token}~{i}", "kind": "file", "name": file.name, "used": None, "in_flight": False}
                for token, file in reversed(self._files.items())
                if file.owner == owner
                for i in range(len(file.shown))
            ),
            *(
                {"ref": f"shipped~{name}~0", "kind": "shipped", "name": name, "used": None, "in_flight": False}
                for name in self._shipped_files()
            ),
        ]
        page = entries[offset : offset + limit]
        return {"sessions": [await self._card(owner, entry) for entry in page], "total": len(entries)}

    async def add(self, owner: str, name: str, text: str) -> dict[str, Any]:
        """Keep a file's sessions for a while; their references.

        Raises:
            TooLarge: the file is larger than `FILE_BYTES`.
            InvalidRequest: it is of no known format, or holds no session.
        """
        data = text.encode("utf-8", "surrogatepass")
        if len(data) > FILE_BYTES:
            raise TooLarge(f"The file is larger than {FILE_BYTES >> 20} MiB; cut it, or use `dlite-agent report`.")
        async with self._working:
            shown = await asyncio.to_thread(_shown, data)
        if not shown:
            raise InvalidRequest("The file holds no session.", param="text")
        token = secrets.token_urlsafe(9).replace("~", "-")
        self._files[token] = _File(owner, name, len(data), shown)
        while sum(file.size for file in self._files.values()) > 2 * FILE_BYTES or len(self._files) > _KEPT:
            self._files.popitem(last=False)
        return {
            "sessions": [f"file~{token}~{i}" for i in range(len(shown))],
            "names": [item.timeline.session for item in shown],
            "format": shown[0].log.format,
            "problems": shown[0].report.problems[:50],
        }

    def age(self, owner: str, ref: str, shown: Shown) -> float | None:
        """Seconds since the session's last event, where this process wrote it and its clock can tell; else None."""
        last = next((event for event in reversed(shown.log.events) if isinstance(event, Event)), None)
        kind, _, rest = ref.partition("~")
        if last is None or kind not in ("live", "run"):
            return None
        segment = self._service.recorder.segment if kind == "live" else self._runs.get(owner, rest).log.segment
        return max(0.0, time.monotonic() - last.t) if last.segment == segment else None

    def in_flight(self, owner: str, ref: str) -> bool:
        """Whether something of a session is running now."""
        kind, _, rest = ref.partition("~")
        if kind == "run":
            return not self._runs.get(owner, rest).at_rest
        return kind == "live" and self._service.registry.get(owner, rest).in_flight

    # Cards.

    def _run_entry(self, run: AgentRun) -> dict[str, Any]:
        name = " ".join(run.spec.task[:200].split())
        used = (run.progress.turns, run.progress.calls, run.state)
        return {"ref": f"run~{run.id}", "kind": "run", "name": name, "used": used, "in_flight": not run.at_rest}

    def _live_entry(self, session: Session) -> dict[str, Any]:
        return {
            "ref": f"live~{session.id}",
            "kind": "live",
            "name": session.name or session.id,
            "used": session.used,
            "in_flight": session.in_flight,
        }

    async def _card(self, owner: str, entry: dict[str, Any]) -> dict[str, Any]:
        if entry["kind"] == "stored":
            return entry
        ref = str(entry["ref"])
        revision = (entry["used"], entry["in_flight"])
        found = self._sparks.get(ref)
        if found is None or found[0] != revision:
            try:
                shown = await self.open(owner, ref)
                timeline = shown.timeline
                figures = {"turns": len(timeline.turns), "wall": timeline.wall, "spark": spark(timeline)}
                figures |= {"session": timeline.session, "format": shown.log.format}
            except (NotFound, InvalidRequest) as error:
                figures = {"turns": 0, "wall": 0.0, "spark": [], "problem": error.message}
            found = self._sparks[ref] = (revision, figures)
            while len(self._sparks) > 1024:
                self._sparks.popitem(last=False)
        return entry | found[1]

    # Sources.

    def _shipped_files(self) -> dict[str, Path]:
        return {path.stem: path for path in sorted(self._shipped.glob("*.jsonl"))}

    async def _live(self, ref: str, session: Session) -> Shown:
        recorder = self._service.recorder
        if self._log_path is not None:
            return await self._logged(ref, self._log_path, session.id, session.id)
        events = recorder.events(session)
        problems = []
        if not any(isinstance(event, SessionStart) for event in events):
            kept = f"Only the latest {len(events) - 1} events are in memory; start the server with a data folder"
            problems.append(f"{kept} to keep all.")
        log = Log(list(events), problems=problems)
        revision: Revision = (len(events), events[-1].t)
        return await self._made(ref, revision, lambda: _one(log, session.id))

    async def _run(self, ref: str, run: AgentRun) -> Shown:
        return await self._logged(ref, run.log.path, run.id, "")

    async def _logged(self, ref: str, path: Path, session: str, needle: str) -> Shown:
        tail = self._tails.setdefault(ref, _Tail())
        self._tails.move_to_end(ref)
        while len(self._tails) > _KEPT:
            self._tails.popitem(last=False)
        async with self._working:
            await asyncio.to_thread(_read_on, path, tail, needle)
        revision = (len(tail.lines),)
        return await self._made(ref, revision, lambda: _one(parse_lines(b"\n".join(tail.lines)), session))

    async def _made(self, ref: str, revision: Revision, make: Callable[[], Shown]) -> Shown:
        async with self._working:
            found = self._kept.get(ref)
            if found is None or found[0] != revision:
                found = (revision, await asyncio.to_thread(make))
                self._kept[ref] = found
            self._kept.move_to_end(ref)
            while len(self._kept) > _KEPT:
                self._kept.popitem(last=False)
            return found[1]


def _read_on(path: Path, tail: _Tail, needle: str) -> None:
    """Read what was appended to a log: the lines with `needle` in them (empty: all), and those that concern all."""
    with path.open("rb") as file:
        file.seek(tail.offset)
        fresh = file.read()
    whole = fresh[: fresh.rfind(b"\n") + 1]
    tail.offset += len(whole)
    needles = (needle.encode(), b'"kind":"segment"', b'"kind":"calibration"', b'"kind":"outage"')
    tail.lines += [line for line in whole.split(b"\n") if line and any(part in line for part in needles)]


def _one(log: Log, session: str) -> Shown:
    found = [timeline for timeline in timelines(log) if timeline.session == session]
    if not found:
        raise NotFound("Nothing of this session has been recorded yet.", param="session")
    return Shown(log, found[0], summarise(found, problems=log.problems))


def _shown(data: bytes) -> list[Shown]:
    log = loads(Document.of(data))
    problems = list(log.problems)
    if log.cut_bytes:
        problems.append(f"The last line was half written; {log.cut_bytes} bytes were left out.")
    views = timelines(log)
    report = summarise(views, problems=problems)
    return [Shown(log, timeline, report) for timeline in views]


def _read(path: Path, number: int) -> Shown:
    shown = _shown(path.read_bytes())
    if number >= len(shown):
        raise NotFound(f"{path.name} has {len(shown)} sessions.", param="session")
    return shown[number]
