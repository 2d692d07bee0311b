"""Recorded sessions and chat logs as training data, from any format that `trace.formats` reads.

Our own logs hold token ids: those are taken as they are, answers supervised, everything else (prompts, tool outputs)
context. Logs with messages only give one prompt a turn, for the target to answer anew.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dlite_agent.errors import DliteError, InvalidRequest
from dlite_agent.trace import formats
from dlite_agent.trace.events import AnyEvent, Segment, SessionStart, TurnEnd, TurnStart

SUFFIXES = (".jsonl", ".json", ".traj")


@dataclass
class Recording:
    """One session: when it began (Unix seconds, 0 where unknown), and what there is to learn from.

    `branches` are ids with the spans (start, end) that the target generated: one, and one more for each time that the
    client went back. `prompts` are the messages before each answer that came without ids.
    """

    session: str
    began: float
    branches: list[tuple[list[int], list[tuple[int, int]]]] = field(default_factory=list)
    prompts: list[list[dict[str, Any]]] = field(default_factory=list)

    @property
    def key(self) -> str:
        """The unit of the split."""
        return f"session: {self.session}"


def read_recordings(paths: Sequence[Path], *, same_target: Callable[[str], bool]) -> list[Recording]:
    """Sessions of files, or of the logs in folders, oldest first.

    Args:
        same_target: whether a target's name, as a log has it, means the one to train for.

    Raises:
        InvalidRequest: a path is missing, unreadable or of no known format, holds no answers, or was recorded with
            another target, whose ids mean other tokens.
    """
    found: dict[str, Recording] = {}
    for path in paths:
        files = sorted(p for p in path.rglob("*") if p.suffix in SUFFIXES) if path.is_dir() else [path]
        if not files:
            raise InvalidRequest(f"{path} holds no log ({', '.join(SUFFIXES)})", param="sessions")
        before = len(found)
        for file in files:
            try:
                log = formats.load(file)
            except (DliteError, OSError) as error:
                raise InvalidRequest(f"{file} cannot be read as a session log: {error}", param="sessions") from error
            for recording in _sessions(log.events, file.stem if log.format != formats.OWN else "", same_target):
                found[recording.session] = recording
        if len(found) == before:
            raise InvalidRequest(
                f"{path} holds no recorded answers: record with content (server.log_content)", param="sessions"
            )
    return sorted(found.values(), key=lambda recording: recording.began)


def _sessions(events: Sequence[AnyEvent], prefix: str, same_target: Callable[[str], bool]) -> list[Recording]:
    walls = {event.segment: event.wall - event.t for event in events if isinstance(event, Segment)}
    readers: dict[str, _Reader] = {}
    for event in events:
        if (
            isinstance(event, SessionStart)
            and event.target is not None
            and not prefix
            and not same_target(event.target)
        ):
            raise InvalidRequest(
                f"session {event.session} was recorded with target {event.target}: its ids mean other tokens",
                param="sessions",
            )
        if isinstance(event, TurnStart | TurnEnd):
            name = f"{prefix}/{event.session}" if prefix else event.session
            if name not in readers:
                readers[name] = _Reader(Recording(name, walls.get(event.segment, 0.0) + event.t))
            readers[name].read(event)
    recordings = [reader.finish() for reader in readers.values()]
    return [recording for recording in recordings if recording.branches or recording.prompts]


class _Reader:
    """Follows one session's turns."""

    def __init__(self, recording: Recording) -> None:
        self._recording = recording
        self._ids: list[int] = []
        self._spans: list[tuple[int, int]] = []
        self._prompt: list[int] | None = None
        self._messages: list[dict[str, Any]] = []
        self._lost = False

    def read(self, event: TurnStart | TurnEnd) -> None:
        if isinstance(event, TurnStart):
            self._messages += event.messages or []
            self._start(event)
            return
        if event.error is None and event.message is not None and event.output_ids is None and self._messages:
            self._recording.prompts.append(list(self._messages))
        if event.message is not None:
            self._messages.append(event.message)
        if self._prompt is not None and event.error is None and event.output_ids:
            start = len(self._prompt)
            self._ids = self._prompt + event.output_ids
            self._spans.append((start, len(self._ids)))
        self._prompt = None

    def _start(self, event: TurnStart) -> None:
        """Put the prompt's ids together; where a part of them is not in the log, the session ends for us."""
        if event.new_ids is None or event.prompt_tokens is None:
            self._lost = self._lost or bool(self._ids)
            return
        known = event.prompt_tokens - len(event.new_ids)
        if self._lost or known > len(self._ids):
            self._lost = True
            return
        if any(end > known for _, end in self._spans):
            self._branch(known)
        self._prompt = self._ids[:known] + event.new_ids

    def _branch(self, known: int) -> None:
        """Keep what the client has gone back from; answers before that point are kept with what comes next."""
        left = [span for span in self._spans if span[1] > known]
        self._recording.branches.append((self._ids[: left[-1][1]], left))
        self._spans = [span for span in self._spans if span[1] <= known]

    def finish(self) -> Recording:
        if self._spans:
            self._branch(0)
        return self._recording
