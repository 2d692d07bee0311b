"""Replay of recorded sessions through the engine: tool outputs as recorded, the model for real, sides compared.

Stands on this floor since it drives the engine; what it plays comes from `trace/script.py`, and what it finds goes into
an event log that `trace/comparison.py` reads.
"""

from __future__ import annotations

import itertools
import queue
import threading
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Literal, get_args

from dlite_agent.config import Mode
from dlite_agent.decode.engine import Engine
from dlite_agent.decode.grammar import Constraint, Grammars
from dlite_agent.decode.jobs import Failed, Finished, Generation, Reply
from dlite_agent.decode.sampling import SamplingParams
from dlite_agent.errors import InvalidRequest
from dlite_agent.trace.calibration import Point
from dlite_agent.trace.comparison import RECORDING
from dlite_agent.trace.events import (
    AnyEvent,
    Calibration,
    ClientIdle,
    KnownEvent,
    Mismatch,
    Replayed,
    Segment,
    SessionStart,
    Span,
    ToolEnd,
    ToolStart,
    TurnEnd,
)
from dlite_agent.trace.log import Log
from dlite_agent.trace.script import RecordedTurn, Script
from dlite_agent.trace.turns import TurnFacts, turn_events

Wait = Literal["original", "scaled", "none"]
Progress = Callable[[str], None]


@dataclass(frozen=True)
class Side:
    """One way to decode; its name as the user wrote it."""

    name: str
    mode: Mode
    verify_window: int | None = None


def parse_sides(text: str) -> list[Side]:
    """Sides from `ar,dlite,dlite:verify_window=4`. Raises InvalidRequest for one that does not exist."""
    sides = []
    for name in filter(None, (part.strip() for part in text.split(","))):
        mode, _, option = name.partition(":")
        key, _, value = option.partition("=")
        if mode not in get_args(Mode) or (option and (key != "verify_window" or not value.isdigit())):
            raise InvalidRequest(
                f"There is no side {name!r}; a side is one of {', '.join(get_args(Mode))}, or dlite:verify_window=N.",
                param="compare",
            )
        sides.append(Side(name, mode, int(value) if option else None))  # type: ignore[arg-type]  # checked above
    if not sides or len({side.name for side in sides}) < len(sides):
        raise InvalidRequest("Name at least one side, and none twice.", param="compare")
    return sides


@dataclass(frozen=True)
class Plan:
    """How to replay.

    Attributes:
        sampling: parameters that take the place of the recorded ones; what neither says is greedy decoding's.
        wait: how waits between turns are kept: as recorded, divided by `speed`, or not at all. Even then tools stand on
            the session's own clock with their recorded length, since they are not run.
        arrivals: None plays one session after the other, the sides of each turn one behind the other. Else all
            sessions of a side run at once, each beginning so many seconds after the first.
    """

    sides: Sequence[Side]
    sampling: Mapping[str, Any] = field(default_factory=dict)
    wait: Wait = "none"
    speed: float = 1.0
    arrivals: Sequence[float] | None = None

    def __post_init__(self) -> None:
        if self.wait not in ("original", "scaled", "none"):
            raise InvalidRequest(f"wait is original, scaled or none, not {self.wait!r}.", param="wait")
        if not 0 < self.speed < 1e6:
            raise InvalidRequest("speed must be above 0.", param="speed")

    def params(self, turn: RecordedTurn) -> SamplingParams:
        """How a turn is sampled. Raises InvalidRequest for a parameter that does not exist."""
        given = {**turn.sampling, **self.sampling}
        if unknown := given.keys() - {item.name for item in fields(SamplingParams)}:
            name = min(unknown)
            raise InvalidRequest(f"There is no sampling parameter {name!r}.", param=name)
        if "logit_bias" in given:
            given["logit_bias"] = {int(token): value for token, value in given["logit_bias"].items()}
        return SamplingParams(**given)

    def lasts(self, seconds: float) -> float:
        """Seconds that a recorded wait takes on the session's clock."""
        return seconds / self.speed if self.wait == "scaled" else seconds


class _Track:
    """One session on one side: a clock of its own, which stands still while other sides run, and what was found."""

    def __init__(self, script: Script, side: Side, segment: str, number: int) -> None:
        self.script = script
        self.side = side
        self.session = f"{script.session}@{side.name}"
        self.owner = f"replay{number}"
        self.segment = segment
        self.clock = 0.0
        self.events: list[KnownEvent] = []
        self.outputs: dict[int, tuple[int, ...]] = {}

    def place(self, turn: RecordedTurn) -> dict[str, Any]:
        return {"segment": self.segment, "session": self.session, "turn": turn.turn}


class DecodeReplay:
    """Replays sessions on an engine.

    Args:
        points: T_AR by context and batch, as measured before; goes into the log.
        grammars: compiles recorded constraints; only asked where a turn has one.
        progress: told in words how far it is.
    """

    def __init__(
        self,
        engine: Engine,
        plan: Plan,
        *,
        points: Sequence[Point] = (),
        grammars: Callable[[], Grammars] | None = None,
        progress: Progress = lambda _: None,
    ) -> None:
        self._engine = engine
        self._plan = plan
        self._points = list(points)
        self._grammars = grammars
        self._progress = progress
        self._segment = uuid.uuid4().hex[:12]
        self._names = itertools.count()

    def run(self, scripts: Sequence[Script]) -> Log:
        """Play the sessions; a log with one session for each of them and each side.

        Raises:
            NotReplayable: a recording lacks ids.
            DliteError: the engine refused or failed a turn.
        """
        for script in scripts:
            script.need_ids()
        numbers = itertools.count()
        tracks = [
            [_Track(script, side, self._segment, next(numbers)) for side in self._plan.sides] for script in scripts
        ]
        head: list[AnyEvent] = [Segment(segment=self._segment, t=0.0, wall=time.time())]
        if self._points:
            head.append(Calibration(segment=self._segment, t=0.0, points=self._points))
        self._warm(tracks[0])
        if self._plan.arrivals is None:
            for number, sides in enumerate(tracks, 1):
                self._in_turns(sides, f"session {number} of {len(tracks)}")
        else:
            for index, side in enumerate(self._plan.sides):
                self._at_once([sides[index] for sides in tracks], side.name)
        events = list(head)
        for sides in tracks:
            for track in sides:
                events += self._finished(track, sides[0])
        return Log(events)

    def _warm(self, sides: Sequence[_Track]) -> None:
        """A few tokens on each side, unmeasured: first calls of kernels take longer."""
        for track in sides:
            turn = track.script.turns[0]
            assert turn.prompt_ids is not None
            ids = turn.prompt_ids[:64]
            self._generate(track, f"{track.owner}/warm", ids, 8, SamplingParams(), keep=False)

    def _in_turns(self, sides: Sequence[_Track], what: str) -> None:
        """One session: each turn on each side, the order turning from turn to turn, then one wait for all."""
        turns = sides[0].script.turns
        for number, turn in enumerate(turns):
            first = number % len(sides)
            for track in (*sides[first:], *sides[:first]):
                self._progress(f"{what}, turn {number + 1} of {len(turns)}, {track.side.name}")
                self._turn(track, turn)
            last = number == len(turns) - 1
            self._sleep(turn, last)
            for track in sides:
                self._wait(track, turn, last)
        for track in sides:
            self._engine.release(f"{track.owner}/s")

    def _at_once(self, tracks: Sequence[_Track], side: str) -> None:
        """All sessions of one side, each on a thread of its own."""
        assert self._plan.arrivals is not None
        failures: list[BaseException] = []
        done = itertools.count(1)
        total = sum(len(track.script.turns) for track in tracks)

        def play(track: _Track, arrival: float) -> None:
            try:
                time.sleep(arrival)
                track.clock = arrival
                for number, turn in enumerate(track.script.turns):
                    if failures:
                        return
                    self._turn(track, turn)
                    self._progress(f"{side}, turn {next(done)} of {total}")
                    last = number == len(track.script.turns) - 1
                    self._sleep(turn, last)
                    self._wait(track, turn, last)
            except BaseException as error:
                failures.append(error)

        pairs = zip(tracks, self._plan.arrivals, strict=True)
        threads = [threading.Thread(target=play, args=pair, daemon=True) for pair in pairs]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for track in tracks:
            self._engine.release(f"{track.owner}/s")
        if failures:
            raise failures[0]

    def _turn(self, track: _Track, turn: RecordedTurn) -> None:
        assert turn.prompt_ids is not None
        assert turn.output_ids is not None
        if not turn.output_ids:
            return
        params, tokens = self._plan.params(turn), len(turn.output_ids)
        reply, masks = self._generate(
            track, f"{track.owner}/s", turn.prompt_ids, tokens, params, constraint=turn.constraint
        )
        facts = TurnFacts(
            **track.place(turn),
            finish_reason=turn.finish_reason,
            output_tokens=len(reply.generated),
            output_ids=list(reply.generated),
            masks=masks,
        )
        shift = track.clock - reply.figures.queued
        track.events += [_moved(event, shift) for event in turn_events(facts, reply.figures)]
        track.clock = reply.figures.finished + shift
        track.outputs[turn.turn] = reply.generated
        track.events += _mismatches(track, turn, turn.output_ids, reply.generated, RECORDING)

    def _generate(
        self,
        track: _Track,
        key: str,
        ids: Sequence[int],
        tokens: int,
        params: SamplingParams,
        *,
        constraint: str | None = None,
        keep: bool = True,
    ) -> tuple[Finished, list[tuple[float, float]]]:
        matcher = None
        if constraint is not None:
            if self._grammars is None:
                raise InvalidRequest("The recording has a grammar, which needs the target's tokenizer.", param="target")
            matcher = self._grammars().matcher(Constraint(constraint))
        replies: queue.SimpleQueue[Reply] = queue.SimpleQueue()
        self._engine.submit(
            Generation(
                id=f"{track.owner}-{next(self._names)}",
                key=key,
                ids=ids,
                params=params,
                max_new_tokens=tokens,
                reply=replies.put,
                owner=track.owner,
                mode=track.side.mode,
                verify_window=track.side.verify_window,
                matcher=matcher,
                # Equal work on every side, also behind a mismatch; a grammar has no way on behind its end.
                ignore_eos=matcher is None,
                keep=keep,
            )
        )
        while True:
            reply = replies.get()
            if isinstance(reply, Failed):
                raise reply.error
            if isinstance(reply, Finished):
                return reply, ([] if matcher is None else list(matcher.spent))

    def _sleep(self, turn: RecordedTurn, last: bool) -> None:
        if self._plan.wait != "none" and not last:
            time.sleep(self._plan.lasts(turn.tool_wait + turn.idle))

    def _wait(self, track: _Track, turn: RecordedTurn, last: bool) -> None:
        """The wait behind a turn, on the track's clock."""
        tools = self._plan.lasts(turn.tool_wait)
        place = track.place(turn)
        if tools > 0:
            name = turn.calls[0].name if len(turn.calls) == 1 else "tools"
            call: dict[str, Any] = {**place, "call_id": f"wait{turn.turn}"}
            track.events.append(ToolStart(**call, t=track.clock, name=name, measured=False))
            track.clock += tools
            track.events.append(ToolEnd(**call, t=track.clock))
        idle = 0.0 if self._plan.wait == "none" or last else self._plan.lasts(turn.idle)
        if idle > 0:
            track.events.append(ClientIdle(**place, t=track.clock, end=track.clock + idle, inferred=True))
            track.clock += idle

    def _finished(self, track: _Track, base: _Track) -> list[KnownEvent]:
        """A track's events, headed by what it replays, with its mismatches against the first side."""
        place: dict[str, Any] = {"segment": self._segment, "session": track.session}
        begin = min((event.t for event in track.events), default=0.0)
        view = track.script.timeline
        events: list[KnownEvent] = [
            SessionStart(**place, t=begin, target=view.target, drafter=view.drafter),
            Replayed(**place, t=begin, original=track.script.session, side=track.side.name, wait=self._plan.wait),
            *track.events,
        ]
        if track is not base:
            for turn in track.script.turns:
                if turn.turn in track.outputs:
                    name = base.side.name
                    events += _mismatches(track, turn, base.outputs[turn.turn], track.outputs[turn.turn], name)
        return events


def _moved(event: KnownEvent, seconds: float) -> KnownEvent:
    """The event, later by so many seconds."""
    changes: dict[str, float] = {"t": event.t + seconds}
    if isinstance(event, Span):
        changes["end"] = event.end + seconds
    if isinstance(event, TurnEnd) and event.first_token is not None:
        changes["first_token"] = event.first_token + seconds
    return event.model_copy(update=changes)


def _mismatches(
    track: _Track, turn: RecordedTurn, expected: Sequence[int], found: Sequence[int], against: str
) -> list[KnownEvent]:
    """Where two answers begin to differ, if they do."""
    places = [i for i in range(max(len(expected), len(found))) if list(expected[i : i + 1]) != list(found[i : i + 1])]
    if not places:
        return []
    first = places[0]
    return [
        Mismatch(
            **track.place(turn),
            t=track.clock,
            what="token",
            against=against,
            position=first,
            count=len(places),
            expected=expected[first] if first < len(expected) else None,
            found=found[first] if first < len(found) else None,
        )
    ]
