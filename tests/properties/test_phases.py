"""Phases partition the wall clock, whatever the events say."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dlite_agent.trace.amdahl import Equivalent, analyse, share_before, workflow_speedup
from dlite_agent.trace.events import (
    AnyEvent,
    ClientIdle,
    Mask,
    Model,
    Prefill,
    Queue,
    Restore,
    Round,
    Rounds,
    Segment,
    Stream,
    ToolEnd,
    ToolStart,
    TurnEnd,
    TurnStart,
)
from dlite_agent.trace.intervals import union
from dlite_agent.trace.log import Log
from dlite_agent.trace.phases import PHASES, timelines

SEGMENTS = ("one", "two")
TIMES = st.floats(0.0, 100.0) | st.integers(0, 20).map(float)
LENGTHS = st.floats(0.0, 30.0) | st.integers(0, 5).map(float)


@st.composite
def span(draw: st.DrawFn) -> AnyEvent:
    t = draw(TIMES)
    segment, session, turn = draw(st.sampled_from(SEGMENTS)), draw(st.sampled_from("st")), draw(st.integers(0, 3))
    where: dict[str, Any] = {"segment": segment, "session": session, "turn": turn, "t": t, "end": t + draw(LENGTHS)}
    kind = draw(st.integers(0, 7))
    if kind == 0:
        return Queue(**where)
    if kind == 1:
        return Restore(**where, tier="disk", tokens=1)
    if kind == 2:
        return Prefill(**where, tokens=1)
    if kind == 3:
        return Stream(**where)
    if kind == 4:
        return Model(**where, inferred=draw(st.booleans()))
    if kind == 5:
        return ClientIdle(**where)
    if kind == 6:
        masks = draw(st.lists(st.tuples(LENGTHS, LENGTHS), max_size=3))
        return Mask(**where, at=[at for at, _ in masks], seconds=[seconds for _, seconds in masks])
    rows = []
    start, context = t, 10
    for gap, wall, part, advance in draw(
        st.lists(st.tuples(LENGTHS, LENGTHS, st.floats(0, 1.2), st.integers(0, 8)), min_size=1, max_size=4)
    ):
        rows.append(Round(start, wall, wall * part / 2, wall * part / 2, 0.0, advance, 7, 8, context, 1))
        start, context = start + wall + gap, context + advance
    return Rounds.of(segment, session, turn, rows)


@st.composite
def moment(draw: st.DrawFn) -> AnyEvent:
    where: dict[str, Any] = {"segment": draw(st.sampled_from(SEGMENTS)), "session": draw(st.sampled_from("st"))}
    where |= {"t": draw(TIMES), "turn": draw(st.integers(0, 3))}
    call = draw(st.sampled_from(("a", "b")))
    kind = draw(st.integers(0, 3))
    if kind == 0:
        return TurnStart(**where)
    if kind == 1:
        return TurnEnd(**where, finish_reason=draw(st.sampled_from(("stop", "tool_calls", None))), output_tokens=3)
    return ToolStart(**where, call_id=call, name="x") if kind == 2 else ToolEnd(**where, call_id=call)


@st.composite
def logs(draw: st.DrawFn) -> Log:
    events: list[AnyEvent] = []
    for name in draw(st.sampled_from(((), SEGMENTS[:1], SEGMENTS))):
        events.append(Segment(segment=name, t=draw(TIMES), wall=1.8e9 + draw(st.floats(-1000, 1000))))
    events += draw(st.lists(span() | moment(), max_size=14))
    return Log(events)


@settings(max_examples=100, deadline=None)
@given(logs())
def test_slices_partition_the_wall_clock(log: Log) -> None:
    for view in timelines(log):
        edges = [0.0, *(piece.end for piece in view.slices)]
        assert all(
            piece.start == pytest.approx(edge, abs=1e-9) for piece, edge in zip(view.slices, edges, strict=False)
        )
        assert edges[-1] == pytest.approx(view.wall, abs=1e-6)
        assert all(piece.end > piece.start for piece in view.slices)
        assert all(before.end <= after.start + 1e-9 for before, after in pairwise(view.slices))
        seconds = view.seconds()
        assert set(seconds) == set(PHASES)
        assert sum(seconds.values()) == pytest.approx(view.wall, abs=1e-6)
        assert sum(view.parts().values()) == pytest.approx(seconds["decode"], abs=1e-9)
        inferred = view.seconds(inferred_only=True)
        assert all(inferred[phase] <= seconds[phase] + 1e-9 for phase in PHASES)
        in_turns = sum(sum(turn.seconds.values()) for turn in view.turns)
        assert in_turns <= view.wall + 1e-6
        assert view.tool_union() <= view.tool_busy() + 1e-9


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(TIMES, LENGTHS)))
def test_union_covers_the_same_points_once(pairs: list[tuple[float, float]]) -> None:
    intervals = [(start, start + length) for start, length in pairs]
    merged = union(intervals)
    assert all(before[1] < after[0] for before, after in pairwise(merged))
    for start, end in intervals:
        if end > start:
            assert any(low <= start and end <= high for low, high in merged)
    points = {point for pair in intervals for point in pair}
    assert all(low in points and high in points for low, high in merged)


@settings(max_examples=200, deadline=None)
@given(
    decode=st.floats(1e-3, 1e4),
    rest=st.just(0.0) | st.floats(1e-3, 1e4),
    s_d=st.floats(0.1, 20),
    error=st.floats(0, 0.5),
)
def test_figures_agree_with_each_other(decode: float, rest: float, s_d: float, error: float) -> None:
    ar = Equivalent(decode * s_d, decode * s_d * error, 100, 0.0)
    found = analyse({"decode": decode, "tool": rest, "client": 5.0}, ar)
    f = found.f.value
    assert share_before(found.decode_share, s_d) == pytest.approx(f, abs=1e-9)
    assert workflow_speedup(f, s_d) == pytest.approx(found.workflow.value)
    assert found.workflow.low <= found.workflow.value <= found.workflow.high
    assert found.workflow.value <= found.bound.value * (1 + 1e-9)
    assert found.bound.value == pytest.approx(found.workflow.value * found.bound_from_here)
