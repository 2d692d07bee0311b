"""What a report says: figures of turns, sessions and the fleet, and which lines a log cannot give."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from dlite_agent.trace.amdahl import (
    Amdahl,
    Equivalent,
    Lever,
    RoundMeans,
    StepTimes,
    analyse,
    bound,
    equivalent,
    levers,
    round_means,
)
from dlite_agent.trace.events import Round
from dlite_agent.trace.phases import DECODE_PARTS, PHASES, Timeline, Turn

NOTHING = Equivalent(0.0, 0.0, 0, 0.0)


@dataclass(frozen=True)
class TurnSummary:
    """One turn: seconds by phase including the wait after it, tokens, and its share of the workflow."""

    turn: int
    start: float
    end: float
    seconds: dict[str, float]
    parts: dict[str, float]
    inferred: dict[str, float]
    prompt_tokens: int | None
    cached_tokens: int | None
    output_tokens: int | None
    ttft: float | None
    finish_reason: str | None
    tiers: list[str]
    means: RoundMeans | None
    amdahl: Amdahl | None
    ceiling: float | None


@dataclass(frozen=True)
class ToolSummary:
    """All calls of one tool: how many, their seconds added up, the longest, and how many were measured or failed."""

    name: str
    calls: int
    seconds: float
    longest: float
    measured: int
    failed: int


@dataclass(frozen=True)
class SessionSummary:
    """One session. `amdahl` is None where the log cannot give it; then `ceiling`, if known, bounds the bound.

    `ceiling` takes all model time as decoding. `unknown` are sentences about what the log cannot tell.
    """

    session: str
    source: str
    clock: str
    target: str | None
    drafter: str | None
    wall: float
    segments: int
    seconds: dict[str, float]
    parts: dict[str, float]
    inferred: dict[str, float]
    tool_busy: float
    tool_union: float
    turns: list[TurnSummary]
    tools: list[ToolSummary]
    means: RoundMeans | None
    amdahl: Amdahl | None
    ceiling: float | None
    levers: list[Lever]
    divergences: list[str]
    unknown: list[str]


@dataclass(frozen=True)
class Spread:
    """Tenth, half and ninetieth percentile over `n` sessions."""

    n: int
    p10: float
    p50: float
    p90: float


@dataclass(frozen=True)
class FleetSummary:
    """All sessions added up, and how the figures spread over them; the pooled figure never stands alone."""

    sessions: int
    wall: float
    seconds: dict[str, float]
    means: RoundMeans | None
    amdahl: Amdahl | None
    f: Spread | None
    bound: Spread | None
    ceiling_pooled: float | None
    ceiling: Spread | None


@dataclass(frozen=True)
class Report:
    """`t_ar_source` says where T_AR is from: given, the logs' calibration, their autoregressive rounds, or None."""

    sessions: list[SessionSummary]
    fleet: FleetSummary
    t_ar_source: str | None
    problems: list[str]


def summarise(
    timelines: Sequence[Timeline], step_times: StepTimes | None = None, problems: Iterable[str] = ()
) -> Report:
    """The report of some sessions. `step_times` takes the place of the T_AR found in the logs."""
    table, source = (step_times, "given") if step_times is not None else _step_times(timelines)
    sessions = [_session(timeline, table) for timeline in timelines]
    rounds = [row for timeline in timelines for turn in timeline.turns for row in turn.rounds]
    return Report(sessions, _fleet(sessions, rounds, table), source, list(problems))


def _step_times(timelines: Sequence[Timeline]) -> tuple[StepTimes | None, str | None]:
    points = dict.fromkeys(point for timeline in timelines for point in timeline.calibration)
    if points:
        return StepTimes(tuple(points)), "calibration in the log"
    table = StepTimes.measured(row for timeline in timelines for turn in timeline.turns for row in turn.rounds)
    return table, "autoregressive rounds in the log" if table is not None else None


def _session(timeline: Timeline, table: StepTimes | None) -> SessionSummary:
    seconds, inferred = timeline.seconds(), timeline.seconds(inferred_only=True)
    rounds = [row for turn in timeline.turns for row in turn.rounds]
    amdahl = _amdahl(timeline, timeline.turns, seconds, rounds, table)
    ceiling = _ceiling(timeline, timeline.turns, seconds)
    means = round_means(rounds)
    new, avoidable = _prefilled(timeline.turns)
    timed = not any(turn.includes_tools or _untimed(turn) for turn in timeline.turns)
    known = timeline.clock in ("monotonic", "wall") and timed
    return SessionSummary(
        session=timeline.session,
        source=timeline.source,
        clock=timeline.clock,
        target=timeline.target,
        drafter=timeline.drafter,
        wall=timeline.wall,
        segments=timeline.segments,
        seconds=seconds,
        parts=timeline.parts(),
        inferred=inferred,
        tool_busy=timeline.tool_busy(),
        tool_union=timeline.tool_union(),
        turns=[_turn(timeline, turn, table) for turn in timeline.turns],
        tools=_tools(timeline),
        means=means,
        amdahl=amdahl,
        ceiling=ceiling,
        levers=levers(seconds, tau=means.tau if means else None, new_tokens=new, avoidable_tokens=avoidable)
        if known
        else [],
        divergences=[f"turn {d.turn}: {d.reason} at {d.position}" for d in timeline.divergences],
        unknown=_unknown(timeline, seconds, inferred, table),
    )


def _turn(timeline: Timeline, turn: Turn, table: StepTimes | None) -> TurnSummary:
    seconds = dict.fromkeys(PHASES, 0.0) | turn.seconds
    return TurnSummary(
        turn=turn.turn,
        start=turn.start,
        end=turn.end,
        seconds=seconds,
        parts=dict.fromkeys(DECODE_PARTS, 0.0) | turn.parts,
        inferred=turn.inferred,
        prompt_tokens=turn.prompt_tokens,
        cached_tokens=turn.cached_tokens,
        output_tokens=turn.output_tokens,
        ttft=turn.ttft,
        finish_reason=turn.finish_reason,
        tiers=[restore.tier for restore in turn.restores],
        means=round_means(turn.rounds),
        amdahl=_amdahl(timeline, [turn], seconds, turn.rounds, table),
        ceiling=_ceiling(timeline, [turn], seconds),
    )


def _amdahl(
    timeline: Timeline,
    turns: Sequence[Turn],
    seconds: dict[str, float],
    rounds: Sequence[Round],
    table: StepTimes | None,
) -> Amdahl | None:
    """None where it cannot be known: unsplit or unrecorded model time, or rounds without T_AR."""
    if timeline.clock != "monotonic" or seconds["model"] > 0 or (rounds and table is None):
        return None
    if not rounds and any(turn.output_tokens for turn in turns):
        return None
    return analyse(seconds, equivalent(rounds, table) if table is not None else NOTHING)


def _ceiling(timeline: Timeline, turns: Sequence[Turn], seconds: dict[str, float]) -> float | None:
    """The bound if all model time were decoding; None where model time is missing or holds tools."""
    if timeline.clock not in ("monotonic", "wall") or seconds["model"] <= 0:
        return None
    if any(turn.includes_tools or _untimed(turn) for turn in turns):
        return None
    figures = analyse({**seconds, "decode": seconds["decode"] + seconds["model"], "model": 0.0}, NOTHING)
    return figures.bound_from_here


def _untimed(turn: Turn) -> bool:
    silent = turn.output_tokens == 0 or turn.error is not None
    return turn.finished and not silent and not turn.rounds and turn.seconds.get("model", 0.0) <= 0


def _prefilled(turns: Sequence[Turn]) -> tuple[int, int]:
    """Tokens prefilled, and those of them that had been in the session the turn before."""
    new = avoidable = known = 0
    for turn in turns:
        if turn.prompt_tokens is None or turn.cached_tokens is None:
            continue
        new += max(0, turn.prompt_tokens - turn.cached_tokens)
        avoidable += max(0, min(known, turn.prompt_tokens) - turn.cached_tokens)
        known = turn.prompt_tokens + (turn.output_tokens or 0)
    return new, avoidable


def _tools(timeline: Timeline) -> list[ToolSummary]:
    groups = defaultdict(list)
    for call in timeline.tools:
        groups[call.name].append(call)
    summaries = [
        ToolSummary(
            name=name,
            calls=len(calls),
            seconds=sum(call.end - call.start for call in calls),
            longest=max(call.end - call.start for call in calls),
            measured=sum(call.measured for call in calls),
            failed=sum(call.error is not None or bool(call.exit_code) for call in calls),
        )
        for name, calls in groups.items()
    ]
    return sorted(summaries, key=lambda tool: -tool.seconds)


def _unknown(
    timeline: Timeline, seconds: dict[str, float], inferred: dict[str, float], table: StepTimes | None
) -> list[str]:
    lines = []
    if timeline.clock == "none":
        return ["The log has no times: no phase, share, bound or speed-up can be known."]
    if timeline.clock == "durations":
        lines.append("The log has only some durations, laid end to end; the session's wall clock cannot be known.")
    untimed = sum(_untimed(turn) for turn in timeline.turns)
    if untimed:
        lines.append(f"{untimed} of {len(timeline.turns)} turns have no model time: no share or bound can be known.")
    if any(turn.includes_tools for turn in timeline.turns):
        lines.append("Model and tool time are not told apart: no share or bound can be known.")
    elif seconds["model"] > 0:
        lines.append(
            "Model calls are not split into queue, restore, prefill and decode: f, S_D, tau, T_AR, T_D, T_V, T_S and "
            "the predicted speed-up cannot be known; the ceiling takes all model time as decoding."
        )
    if any(turn.rounds for turn in timeline.turns) and table is None:
        lines.append("T_AR is not known (no calibration and no autoregressive rounds): f, S_D and the bound cannot be.")
    if timeline.turns and all(turn.ttft is None for turn in timeline.turns):
        lines.append("The first token's time is not recorded: time to first token cannot be known.")
    if timeline.turns and all(turn.cached_tokens is None for turn in timeline.turns):
        lines.append("Cached tokens are not recorded: what prefix hits would bring cannot be known.")
    if inferred["tool"] > 0:
        lines.append(
            f"{inferred['tool']:.1f} s of tool time are inferred from gaps and may hold a client's or a person's time."
        )
    if inferred["model"] > 0:
        lines.append(f"{inferred['model']:.1f} s of model time are inferred from the times of neighbouring records.")
    if timeline.segments > 1:
        lines.append(
            f"The session spans {timeline.segments} processes; {seconds['outage']:.1f} s of outage come from wall "
            "clocks and are an estimate."
        )
    return lines


def _fleet(sessions: Sequence[SessionSummary], rounds: Sequence[Round], table: StepTimes | None) -> FleetSummary:
    seconds = {phase: math.fsum(session.seconds[phase] for session in sessions) for phase in PHASES}
    known = [session.amdahl for session in sessions if session.amdahl is not None]
    ceilings = [session for session in sessions if session.ceiling is not None]
    whole = len(known) == len(sessions) > 0
    pooled = {phase: math.fsum(session.seconds[phase] for session in ceilings) for phase in PHASES}
    model = pooled["decode"] + pooled["model"]
    rest = sum(pooled[phase] for phase in PHASES if phase not in ("decode", "model", "client", "outage"))
    return FleetSummary(
        sessions=len(sessions),
        wall=math.fsum(session.wall for session in sessions),
        seconds=seconds,
        means=round_means(rounds),
        amdahl=analyse(seconds, equivalent(rounds, table) if table is not None else NOTHING) if whole else None,
        f=_spread([figures.f.value for figures in known]),
        bound=_spread([figures.bound.value for figures in known]),
        ceiling_pooled=bound(model / (model + rest)) if ceilings and model + rest > 0 else None,
        ceiling=_spread([session.ceiling for session in ceilings if session.ceiling is not None]),
    )


def _spread(values: list[float]) -> Spread | None:
    if not values:
        return None
    ordered = sorted(values)

    def quantile(q: float) -> float:
        return ordered[max(0, math.ceil(q * len(ordered)) - 1)]

    return Spread(len(ordered), quantile(0.1), quantile(0.5), quantile(0.9))
