"""Events -> intervals -> phases: every moment of a session belongs to exactly one phase.

All intervals of a session are laid on one axis, seconds since its first event. Inside a process segment positions are
differences of that segment's monotonic clock; between two segments the axis continues through the wall-clock anchors,
and that stretch is an `outage`. Where intervals overlap the earlier phase of `_PRECEDENCE` owns the moment, so the
slices partition the session's wall clock. What no event covers is named and marked inferred: a tool wait where a turn
ended in tool calls nobody measured, else client idle; inside a turn `other`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import NamedTuple

from dlite_agent.trace.events import (
    AnyEvent,
    Calibration,
    ClientIdle,
    Divergence,
    Event,
    Mask,
    Mismatch,
    Model,
    Note,
    Prefill,
    Queue,
    Replayed,
    Restore,
    Round,
    Rounds,
    Segment,
    SessionStart,
    Span,
    Stream,
    ToolEnd,
    ToolStart,
    TurnEnd,
    TurnEvent,
    TurnStart,
)
from dlite_agent.trace.intervals import Slice, claim, union
from dlite_agent.trace.log import Log

PHASES = (
    "queue",
    "restore",
    "prefill",
    "decode",
    "mask",
    "stream",
    "model",
    "tool",
    "client",
    "outage",
    "other",
)
"""`model` is a foreign model call whose inside is unknown, `other` is time inside a turn that nothing explains."""

DECODE_PARTS = ("draft", "verify", "commit")
_PRECEDENCE = ("mask", "decode", "prefill", "restore", "queue", "stream", "model", "tool", "client", "outage")
_RESOLUTION = 1e-6
TOOL_FINISH = frozenset({"tool_calls", "tool_use", "toolUse", "function_call"})


class ToolCall(NamedTuple):
    """One tool call on the session's axis. `finished` is false when no end was recorded."""

    turn: int
    call_id: str
    name: str
    start: float
    end: float
    measured: bool
    finished: bool
    sandbox: str | None
    exit_code: int | None
    error: str | None


@dataclass
class Turn:
    """One request and its response, and the wait that follows it up to the next request (`window_end`)."""

    turn: int
    start: float
    end: float
    window_end: float
    request_id: str | None = None
    trigger: str | None = None
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    new_tokens: int | None = None
    output_tokens: int | None = None
    finish_reason: str | None = None
    error: str | None = None
    ttft: float | None = None
    finished: bool = False
    includes_tools: bool = False
    mode: str | None = None
    rounds: list[Round] = field(default_factory=list)
    restores: list[Restore] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=dict)
    parts: dict[str, float] = field(default_factory=dict)
    inferred: dict[str, float] = field(default_factory=dict)


@dataclass
class Timeline:
    """One session: slices that partition `wall` seconds, its turns and its tool calls."""

    session: str
    source: str
    clock: str
    start_wall: float | None
    wall: float
    slices: list[Slice]
    turns: list[Turn]
    tools: list[ToolCall]
    target: str | None = None
    drafter: str | None = None
    parent: str | None = None
    segments: int = 1
    notes: list[Note] = field(default_factory=list)
    divergences: list[Divergence] = field(default_factory=list)
    replayed: Replayed | None = None
    mismatches: list[Mismatch] = field(default_factory=list)
    calibration: list[tuple[int, int, float, float]] = field(default_factory=list)

    def seconds(self, *, inferred_only: bool = False) -> dict[str, float]:
        """Seconds of each phase, all phases named; they sum to `wall`."""
        totals = dict.fromkeys(PHASES, 0.0)
        for piece in self.slices:
            if piece.inferred or not inferred_only:
                totals[piece.phase] += piece.end - piece.start
        return totals

    def parts(self) -> dict[str, float]:
        """Seconds of draft, verify and commit inside decode."""
        totals = dict.fromkeys(DECODE_PARTS, 0.0)
        for piece in self.slices:
            if piece.part is not None:
                totals[piece.part] += piece.end - piece.start
        return totals

    def tool_busy(self) -> float:
        """Seconds of all tool calls added up; where it exceeds `tool_union()` calls overlapped."""
        return sum(call.end - call.start for call in self.tools)

    def tool_union(self) -> float:
        """Seconds in which at least one tool ran."""
        return sum(end - start for start, end in union((call.start, call.end) for call in self.tools))


def timelines(log: Log) -> list[Timeline]:
    """The timelines of all sessions of a log, in order of appearance."""
    segments = _Segments(log.events)
    points = [point for event in log.events if isinstance(event, Calibration) for point in event.points]
    by_session: dict[str, list[Event]] = defaultdict(list)
    for event in log.events:
        session = getattr(event, "session", None)
        if isinstance(event, Event) and session is not None and not isinstance(event, Calibration):
            by_session[session].append(event)
    return [_timeline(session, events, segments, points) for session, events in by_session.items()]


class _Segments:
    """Anchors of the segments of a log, and the last moment each is known to have lived."""

    def __init__(self, events: Iterable[AnyEvent]) -> None:
        self.anchors: dict[str, Segment] = {}
        self.last: dict[str, float] = {}
        for event in events:
            if not isinstance(event, Event):
                continue
            if isinstance(event, Segment):
                self.anchors.setdefault(event.segment, event)
            self.last[event.segment] = max(self.last.get(event.segment, event.t), _end(event))

    def wall(self, segment: str, t: float) -> float | None:
        """Wall clock at `t` of the segment, if its anchor is in the log."""
        anchor = self.anchors.get(segment)
        return None if anchor is None else anchor.wall + (t - anchor.t)

    def first(self, segment: str, default: float) -> float:
        anchor = self.anchors.get(segment)
        return default if anchor is None else anchor.t


class _Axis:
    """Places the clocks of a session's segments on the session's own axis."""

    def __init__(self, events: Sequence[Event], segments: _Segments) -> None:
        self.order = list(dict.fromkeys(event.segment for event in events))
        self.outages: list[tuple[float, float]] = []
        self._offset: dict[str, float] = {}
        previous: str | None = None
        for segment in self.order:
            first = min(event.t for event in events if event.segment == segment)
            if previous is None:
                self._offset[segment] = -first
            else:
                begin = min(first, segments.first(segment, first))
                died = self.at(previous, segments.last[previous])
                before = segments.wall(previous, segments.last[previous])
                after = segments.wall(segment, begin)
                gap = max(0.0, after - before) if before is not None and after is not None else 0.0
                self._offset[segment] = died + gap - begin
                self.outages.append((died, died + gap))
            previous = segment

    def at(self, segment: str, t: float) -> float:
        return t + self._offset[segment]


def _end(event: Event) -> float:
    return event.end if isinstance(event, Span) else event.t


def _timeline(
    session: str,
    events: list[Event],
    segments: _Segments,
    points: list[tuple[int, int, float, float]],
) -> Timeline:
    axis = _Axis(events, segments)
    anchor = segments.anchors.get(events[0].segment)
    timeline = Timeline(
        session=session,
        source=anchor.source if anchor else "unknown",
        clock=anchor.clock if anchor else "monotonic",
        start_wall=segments.wall(events[0].segment, min(e.t for e in events if e.segment == axis.order[0])),
        wall=max(axis.at(event.segment, _end(event)) for event in events),
        slices=[],
        turns=[],
        tools=_tools(events, axis, segments),
        segments=len(axis.order),
        notes=[event for event in events if isinstance(event, Note)],
        divergences=[event for event in events if isinstance(event, Divergence)],
        replayed=next((event for event in events if isinstance(event, Replayed)), None),
        mismatches=[event for event in events if isinstance(event, Mismatch)],
        calibration=points,
    )
    timeline.wall = max(timeline.wall, *(end for _, end in axis.outages), 0.0)
    for event in events:
        if isinstance(event, SessionStart):
            timeline.target = event.target or timeline.target
            timeline.drafter = event.drafter or timeline.drafter
            timeline.parent = event.parent or timeline.parent
    timeline.turns = _turns(events, axis, segments, timeline.wall)
    timeline.slices = _partition(events, axis, timeline)
    turns = {turn.turn: turn for turn in timeline.turns}
    for piece in timeline.slices:
        turn = turns.get(piece.turn) if piece.turn is not None else None
        if turn is not None:
            length = piece.end - piece.start
            turn.seconds[piece.phase] = turn.seconds.get(piece.phase, 0.0) + length
            if piece.part is not None:
                turn.parts[piece.part] = turn.parts.get(piece.part, 0.0) + length
            if piece.inferred:
                turn.inferred[piece.phase] = turn.inferred.get(piece.phase, 0.0) + length
    return timeline


def _tools(events: Iterable[Event], axis: _Axis, segments: _Segments) -> list[ToolCall]:
    ends = {(event.turn, event.call_id): event for event in events if isinstance(event, ToolEnd)}
    calls = []
    for event in events:
        if not isinstance(event, ToolStart):
            continue
        end = ends.get((event.turn, event.call_id))
        finished = end is not None and end.segment == event.segment
        until = end.t if end is not None and finished else segments.last[event.segment]
        start = axis.at(event.segment, event.t)
        calls.append(
            ToolCall(
                turn=event.turn,
                call_id=event.call_id,
                name=event.name,
                start=start,
                end=max(start, axis.at(event.segment, until)),
                measured=event.measured and finished,
                finished=finished,
                sandbox=event.sandbox,
                exit_code=end.exit_code if end is not None else None,
                error=end.error if end is not None else None,
            )
        )
    return calls


def _turns(events: Sequence[Event], axis: _Axis, segments: _Segments, wall: float) -> list[Turn]:
    turns: dict[int, Turn] = {}
    lived: dict[int, float] = {}
    for event in events:
        if not isinstance(event, TurnEvent):
            continue
        lived[event.turn] = axis.at(event.segment, segments.last[event.segment])
        at, end = axis.at(event.segment, event.t), axis.at(event.segment, _end(event))
        turn = turns.setdefault(event.turn, Turn(event.turn, at, at, wall))
        if not isinstance(event, (ToolStart, ToolEnd, ClientIdle)) and not turn.finished:
            turn.end = max(turn.end, end)
        if isinstance(event, TurnStart):
            turn.start = at
            turn.request_id, turn.trigger = event.request_id, event.trigger
            turn.prompt_tokens, turn.cached_tokens = event.prompt_tokens, event.cached_tokens
            turn.new_tokens = event.new_tokens
        elif isinstance(event, TurnEnd):
            turn.end, turn.finished = at, True
            turn.request_id = event.request_id or turn.request_id
            turn.output_tokens, turn.finish_reason, turn.error = event.output_tokens, event.finish_reason, event.error
            if event.first_token is not None:
                turn.ttft = axis.at(event.segment, event.first_token) - turn.start
        elif isinstance(event, Rounds):
            turn.mode = event.mode
            shift = axis.at(event.segment, 0.0)
            turn.rounds.extend(row._replace(start=row.start + shift) for row in event.rows())
        elif isinstance(event, Restore):
            turn.restores.append(event)
        elif isinstance(event, Model):
            turn.includes_tools |= event.includes_tools
    ordered = sorted(turns.values(), key=lambda turn: (turn.start, turn.turn))
    for turn, after in pairwise(ordered):
        turn.window_end = max(turn.start, after.start)
    for turn in ordered:
        turn.rounds.sort(key=lambda row: row.start)
        if not turn.finished:
            turn.end = max(turn.end, min(turn.window_end, lived.get(turn.turn, turn.end)))
    return ordered


_SPAN_PHASES: tuple[tuple[type[Span], str], ...] = (
    (Queue, "queue"),
    (Restore, "restore"),
    (Prefill, "prefill"),
    (Stream, "stream"),
    (Model, "model"),
    (ClientIdle, "client"),
)


def _partition(events: Iterable[Event], axis: _Axis, timeline: Timeline) -> list[Slice]:
    wanted: dict[str, list[Slice]] = {phase: [] for phase in _PRECEDENCE}
    for event in events:
        if isinstance(event, Mask):
            begin = axis.at(event.segment, event.t)
            for at, seconds in zip(event.at, event.seconds, strict=True):
                wanted["mask"].append(Slice("mask", None, begin + at, begin + at + seconds, event.turn, False))
            continue
        for kind, phase in _SPAN_PHASES:
            if isinstance(event, kind):
                begin, end = axis.at(event.segment, event.t), axis.at(event.segment, event.end)
                inferred = isinstance(event, (Model, ClientIdle)) and event.inferred
                wanted[phase].append(Slice(phase, None, begin, end, event.turn, inferred))
    for turn in timeline.turns:
        for row in turn.rounds:
            wanted["decode"].extend(_round_slices(row, turn.turn))
    for call in timeline.tools:
        wanted["tool"].append(Slice("tool", None, call.start, call.end, call.turn, not call.measured))
    wanted["outage"] = [Slice("outage", None, start, end, None, True) for start, end in axis.outages]

    free: list[tuple[float, float]] = [(0.0, timeline.wall)] if timeline.wall > 0 else []
    slices: list[Slice] = []
    for phase in _PRECEDENCE:
        got, free = claim(free, wanted[phase])
        slices += got
    got, free = claim(free, (Slice("other", None, turn.start, turn.end, turn.turn, True) for turn in timeline.turns))
    slices += got
    waited = {piece.turn for piece in slices if piece.phase == "tool"}
    for turn in timeline.turns:
        phase = "tool" if turn.finish_reason in TOOL_FINISH and turn.turn not in waited else "client"
        got, free = claim(free, [Slice(phase, None, turn.end, turn.window_end, turn.turn, True)])
        slices += got
    slices += [Slice("client", None, start, end, None, True) for start, end in free]
    return _without_slivers(sorted(slices, key=lambda piece: piece.start))


def _without_slivers(slices: Iterable[Slice]) -> list[Slice]:
    """What rounding left between rounds, too short to mean anything, goes to the slice before it."""
    kept: list[Slice] = []
    for piece in slices:
        measured = piece.part is not None or piece.phase == "mask"
        if kept and not measured and piece.end - piece.start < _RESOLUTION:
            kept[-1] = kept[-1]._replace(end=piece.end)
        else:
            kept.append(piece)
    return kept


def _round_slices(row: Round, turn: int) -> list[Slice]:
    """Draft, verify and the rest of one round; the parts are cut to its wall time, the rest takes what remains."""
    drafted = min(row.start + row.t_d, row.start + row.wall)
    verified = min(drafted + row.t_v, row.start + row.wall)
    return [
        Slice("decode", "draft", row.start, drafted, turn, False),
        Slice("decode", "verify", drafted, verified, turn, False),
        Slice("decode", "commit", verified, row.start + row.wall, turn, False),
    ]
