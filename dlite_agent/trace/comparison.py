"""Replays against each other: what faster decoding brought to the workflow, beside what was predicted for it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from dlite_agent.trace.amdahl import EXCLUDED, Estimate, StepTimes, autoregressive
from dlite_agent.trace.calibration import Point, StepTimeKeeper
from dlite_agent.trace.events import Mismatch
from dlite_agent.trace.phases import Timeline, Turn
from dlite_agent.trace.script import Script
from dlite_agent.trace.summary import SessionSummary, summarise
from dlite_agent.trace.wording import times

RECORDING = "recording"


@dataclass(frozen=True)
class Measured:
    """A side's measured speed-ups against another; `decode` is S_D, None where one of them decoded nothing."""

    against: str
    workflow: float
    decode: float | None


@dataclass(frozen=True)
class SideTurn:
    """One turn of a side: seconds that count for the workflow, seconds of decoding, and tokens that mismatch."""

    turn: int
    seconds: float
    decode: float
    output_tokens: int | None
    mismatches: int


@dataclass(frozen=True)
class SideResult:
    """One side of a replay.

    Attributes:
        summary: its own report, its prediction made from this side alone.
        measured: against the autoregressive side, where there is one.
        predicted_to_measured: the predicted workflow speed-up over the measured one.
    """

    side: str
    session: str
    summary: SessionSummary
    turns: list[SideTurn]
    measured: Measured | None
    predicted: Estimate | None
    predicted_to_measured: float | None
    mismatches: list[Mismatch]


@dataclass(frozen=True)
class Comparison:
    """A session's replays; `tokens` is how many each side generated in all."""

    original: str
    base: str
    tokens: int
    sides: list[SideResult]


@dataclass(frozen=True)
class CallResult:
    """A tool call, recorded and run again: seconds and exit codes of both, and where the observations differ."""

    turn: int
    call_id: str
    name: str
    recorded: float
    seconds: float
    recorded_exit: int | None
    exit_code: int | None
    mismatch: Mismatch | None


@dataclass(frozen=True)
class ToolReplay:
    """A session's tools run again; `tool_wait` is the union of the calls' intervals, recorded and now."""

    original: str
    recorded_wait: float
    tool_wait: float
    calls: list[CallResult]

    @property
    def mismatches(self) -> int:
        return sum(call.mismatch is not None for call in self.calls)


def tool_replays(found: Sequence[Script], views: Sequence[Timeline]) -> list[ToolReplay]:
    """Replays of tools among some timelines, beside the recordings they are of."""
    again = {view.replayed.original: view for view in views if view.replayed is not None}
    replays = []
    for script in found:
        view = again[script.session]
        recorded = {(turn.turn, call.call_id): call for turn in script.turns for call in turn.calls}
        wrong = {(item.turn, item.call_id): item for item in view.mismatches}
        calls = []
        for call in view.tools:
            key = (call.turn, call.call_id)
            before = recorded[key]
            seconds = call.end - call.start
            calls.append(
                CallResult(*key, call.name, before.seconds, seconds, before.exit_code, call.exit_code, wrong.get(key))
            )
        replays.append(ToolReplay(script.session, script.timeline.tool_union(), view.tool_union(), calls))
    return replays


def measured_lines(item: Comparison) -> list[str]:
    """What a replay measured, beside what each side's own run predicts."""
    lines = []
    for side in item.sides:
        measured = side.measured
        if measured is None:
            continue
        decode = "" if measured.decode is None else f", S_D {times(measured.decode)}"
        line = f"{side.side}: measured against {measured.against}: workflow {times(measured.workflow)}{decode}"
        if side.predicted is not None and side.predicted_to_measured is not None:
            low_high = f"{times(side.predicted.low)} to {times(side.predicted.high)}"
            line += f"; predicted from this side alone {times(side.predicted.value)} ({low_high})"
            line += f", {side.predicted_to_measured:.3f} of the measured"
        lines.append(line)
    return lines


def step_times(view: Timeline, points: Sequence[Point]) -> StepTimes | None:
    """T_AR for one side: a table measured before, corrected by the autoregressive steps of this side alone.

    Without a table its own autoregressive steps are all there is.
    """
    rounds = [row for turn in view.turns for row in turn.rounds]
    keeper = StepTimeKeeper(points, latest=max(1, len(rounds)))
    for row in filter(autoregressive, rounds):
        keeper.learn(row.context, row.batch, row.wall)
    known = keeper.points()
    return StepTimes(tuple(known)) if known else StepTimes.measured(rounds)


def comparisons(views: Sequence[Timeline]) -> list[Comparison]:
    """All replays among some timelines, by the session they replay."""
    groups: dict[str, list[Timeline]] = defaultdict(list)
    for view in views:
        if view.replayed is not None:
            groups[view.replayed.original].append(view)
    return [_compare(original, sides) for original, sides in groups.items()]


def _compare(original: str, views: Sequence[Timeline]) -> Comparison:
    base = next((view for view in views if _plain(view)), views[0])
    summaries = {id(view): summarise([view], step_times(view, view.calibration)).sessions[0] for view in views}
    sides = []
    for view in views:
        assert view.replayed is not None
        summary = summaries[id(view)]
        measured = None if view is base or not _plain(base) else _measured(base, view)
        predicted = summary.amdahl.workflow if summary.amdahl is not None else None
        ratio = predicted.value / measured.workflow if predicted is not None and measured is not None else None
        turns = [_turn(view, turn) for turn in view.turns]
        sides.append(
            SideResult(view.replayed.side, view.session, summary, turns, measured, predicted, ratio, view.mismatches)
        )
    assert base.replayed is not None
    tokens = sum(turn.output_tokens or 0 for turn in base.turns)
    return Comparison(original, base.replayed.side, tokens, sides)


def _plain(view: Timeline) -> bool:
    """Whether a side decoded one by one."""
    return all(turn.mode in (None, "ar") for turn in view.turns)


def _measured(base: Timeline, view: Timeline) -> Measured:
    assert base.replayed is not None
    wholes = [sum(_seconds(turn.seconds) for turn in side.turns) for side in (base, view)]
    decodes = [side.seconds()["decode"] for side in (base, view)]
    workflow = wholes[0] / wholes[1] if wholes[1] > 0 else 1.0
    return Measured(base.replayed.side, workflow, decodes[0] / decodes[1] if min(decodes) > 0 else None)


def _turn(view: Timeline, turn: Turn) -> SideTurn:
    wrong = sum(mismatch.turn == turn.turn for mismatch in view.mismatches)
    return SideTurn(turn.turn, _seconds(turn.seconds), turn.seconds.get("decode", 0.0), turn.output_tokens, wrong)


def _seconds(seconds: dict[str, float]) -> float:
    return sum(value for phase, value in seconds.items() if phase not in EXCLUDED)
