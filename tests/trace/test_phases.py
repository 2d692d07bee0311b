from __future__ import annotations

import pytest

from dlite_agent.trace.events import (
    AnyEvent,
    ClientIdle,
    Mask,
    Model,
    Outage,
    Prefill,
    Queue,
    Round,
    Rounds,
    Segment,
    ToolEnd,
    ToolStart,
    TurnEnd,
    TurnStart,
)
from dlite_agent.trace.intervals import Slice, claim, joined, union
from dlite_agent.trace.log import Log
from dlite_agent.trace.phases import Timeline, timelines
from tests.trace import sample

G = sample.SEGMENT


def one(events: list[AnyEvent]) -> Timeline:
    (view,) = timelines(Log(events))
    assert sum(view.seconds().values()) == pytest.approx(view.wall, abs=1e-9)
    return view


def turn(number: int, start: float, end: float, *, finish: str = "stop", segment: str = G) -> list[AnyEvent]:
    return [
        TurnStart(segment=segment, t=start, session="s", turn=number),
        TurnEnd(segment=segment, t=end, session="s", turn=number, finish_reason=finish),
    ]


def tool(call_id: str, start: float, end: float | None, *, turn: int = 0, measured: bool = True) -> list[AnyEvent]:
    events: list[AnyEvent] = [
        ToolStart(segment=G, t=start, session="s", turn=turn, call_id=call_id, name="bash", measured=measured)
    ]
    if end is not None:
        events.append(ToolEnd(segment=G, t=end, session="s", turn=turn, call_id=call_id, exit_code=0))
    return events


def anchor() -> list[AnyEvent]:
    return [Segment(segment=G, t=0.0, wall=sample.WALL)]


def nonzero(view: Timeline) -> dict[str, float]:
    return {phase: round(seconds, 6) for phase, seconds in view.seconds().items() if seconds > 1e-9}


def test_the_sample_session_to_the_second() -> None:
    view = one(sample.events())
    assert view.wall == pytest.approx(10.0)
    assert nonzero(view) == {"queue": 1.0, "restore": 0.5, "prefill": 1.5, "decode": 4.0, "tool": 3.0}
    assert view.parts() == pytest.approx({"draft": 0.8, "verify": 2.4, "commit": 0.8})
    assert view.start_wall == pytest.approx(sample.WALL + 50)
    assert (view.target, view.drafter, view.segments) == ("qwen", "dlite", 1)
    first, second = view.turns
    assert first.ttft == pytest.approx(2.02)
    assert (first.prompt_tokens, first.cached_tokens, first.output_tokens) == (100, 40, 400)
    assert first.seconds["tool"] == pytest.approx(3.0)
    assert second.restores == []
    assert first.restores[0].reason == "evicted"
    assert second.start == pytest.approx(7.0)
    assert view.divergences[0].position == 17
    assert not any(view.seconds(inferred_only=True).values())


def test_overlapping_tools_count_once() -> None:
    view = one([*anchor(), *turn(0, 0, 1, finish="tool_calls"), *tool("a", 1, 4), *tool("b", 2, 6), *tool("c", 5, 5.5)])
    assert nonzero(view) == {"tool": 5.0, "other": 1.0}
    assert view.tool_busy() == pytest.approx(7.5)
    assert view.tool_union() == pytest.approx(5.0)


def test_a_call_id_may_come_again_in_a_later_turn() -> None:
    events = [*turn(0, 0, 1), *tool("a", 1, 2), *turn(1, 2, 3), *tool("a", 3, 7, turn=1)]
    view = one([*anchor(), *events])
    assert [(call.turn, call.end - call.start) for call in view.tools] == [(0, 1.0), (1, 4.0)]


def test_model_work_owns_the_moment_when_a_tool_runs_beside_it() -> None:
    prefill = Prefill(segment=G, t=2, end=3, session="s", turn=0, tokens=1)
    view = one([*anchor(), *turn(0, 0, 3), prefill, *tool("a", 0, 5)])
    assert nonzero(view) == {"prefill": 1.0, "tool": 4.0}


def test_gaps_are_named_and_inferred() -> None:
    view = one([*anchor(), *turn(0, 0, 1, finish="tool_calls"), *turn(1, 4, 5), *turn(2, 9, 10)])
    assert nonzero(view) == {"other": 3.0, "tool": 3.0, "client": 4.0}
    assert all(piece.inferred for piece in view.slices)
    idle = ClientIdle(segment=G, t=5, end=9, session="s", turn=1, waiting="user")
    known = one([*anchor(), *turn(0, 0, 1, finish="tool_calls"), *turn(1, 4, 5), idle, *turn(2, 9, 10)])
    assert known.seconds(inferred_only=True)["client"] == 0
    assert known.seconds()["client"] == pytest.approx(4.0)


def test_a_measured_tool_leaves_the_rest_of_the_gap_to_the_client() -> None:
    view = one([*anchor(), *turn(0, 0, 1, finish="tool_calls"), *tool("a", 1, 2), *turn(1, 5, 6)])
    assert nonzero(view) == {"other": 2.0, "tool": 1.0, "client": 3.0}


def test_time_between_rounds_is_explained_or_other() -> None:
    rows = [Round(at, 0.5, 0.1, 0.3, 0.1, 4, 7, 8, 100 + 4 * i, 1) for i, at in enumerate((0.0, 2.0))]
    view = one([*anchor(), *turn(0, 0, 2.5), Rounds.of(G, "s", 0, rows)])
    assert nonzero(view) == {"other": 1.5, "decode": 1.0}
    assert view.seconds(inferred_only=True)["other"] == pytest.approx(1.5)
    wait = Queue(segment=G, t=0.5, end=2.0, session="s", turn=0, reason="pre-empted")
    assert nonzero(one([*anchor(), *turn(0, 0, 2.5), Rounds.of(G, "s", 0, rows), wait])) == {
        "queue": 1.5,
        "decode": 1.0,
    }


def test_masks_are_taken_out_of_decode() -> None:
    decode = sample.rounds(0.0, 10)
    mask = Mask(segment=G, t=0.0, end=0.2, session="s", turn=0, at=[0.018, 0.038], seconds=[0.002, 0.002])
    view = one([*anchor(), *turn(0, 0, 0.2), decode, mask])
    assert nonzero(view) == {"decode": 0.196, "mask": 0.004}
    assert view.parts() == pytest.approx({"draft": 0.04, "verify": 0.12, "commit": 0.036})


def test_parts_longer_than_their_round_are_cut_to_it() -> None:
    rows = [Round(0.0, 1.0, 0.6, 0.6, 0.1, 2, 7, 8, 10, 1)]
    view = one([*anchor(), *turn(0, 0, 1), Rounds.of(G, "s", 0, rows)])
    assert view.parts() == pytest.approx({"draft": 0.6, "verify": 0.4, "commit": 0.0})


def test_a_restart_becomes_an_outage_from_wall_clocks() -> None:
    # The second process started 60 s later by the wall clock; its monotonic clock began anew.
    events: list[AnyEvent] = [
        *anchor(),
        *turn(0, 10, 12, finish="tool_calls"),
        *tool("a", 12, None),
        Queue(segment=G, t=13, end=14, session="other", turn=0),
        Segment(segment="seg1", t=3.0, wall=sample.WALL + 74),
        Outage(segment="seg1", t=3.0, session="s", previous=G, seconds=60.0, reason="killed"),
        *turn(1, 5, 6, segment="seg1"),
    ]
    view = next(view for view in timelines(Log(events)) if view.session == "s")
    assert sum(view.seconds().values()) == pytest.approx(view.wall)
    assert nonzero(view) == {"other": 3.0, "tool": 2.0, "client": 2.0, "outage": 60.0}
    (call,) = view.tools
    assert (call.finished, call.measured) == (False, False)
    (outage,) = [piece for piece in view.slices if piece.phase == "outage"]
    assert outage.inferred
    assert view.segments == 2


def test_a_wall_clock_set_back_never_makes_time_negative() -> None:
    events = [
        *anchor(),
        *turn(0, 0, 2),
        Segment(segment="seg1", t=0.0, wall=sample.WALL - 500),
        *turn(1, 1, 3, segment="seg1"),
    ]
    view = one(events)
    assert view.seconds()["outage"] == 0
    assert view.wall == pytest.approx(5.0)


def test_an_unfinished_turn_lasts_as_long_as_its_process() -> None:
    events = [
        *anchor(),
        TurnStart(segment=G, t=0, session="s", turn=0),
        Prefill(segment=G, t=0, end=1, session="s", turn=0, tokens=5),
        Queue(segment=G, t=3, end=4, session="other", turn=0),
    ]
    view = next(view for view in timelines(Log(events)) if view.session == "s")
    assert view.turns[0].end == pytest.approx(view.wall)
    assert not view.turns[0].finished


def test_parallel_sessions_have_their_own_clocks() -> None:
    log = Log([*sample.events("a"), *sample.events("b")[1:]])
    first, second = timelines(log)
    assert first.seconds() == second.seconds()
    assert (first.session, second.session) == ("a", "b")


def test_unsplit_model_time_of_foreign_logs() -> None:
    model = Model(segment=G, t=0, end=2, session="s", turn=0, inferred=True, includes_tools=True)
    view = one([*anchor(), *turn(0, 0, 2), model])
    assert nonzero(view) == {"model": 2.0}
    assert view.turns[0].includes_tools


def test_zero_length_and_empty_logs() -> None:
    assert timelines(Log([])) == []
    view = one([*anchor(), *turn(0, 5, 5)])
    assert (view.wall, view.slices) == (0.0, [])


def test_union_and_claim_and_joined() -> None:
    assert union([(3, 4), (0, 1), (0.5, 2), (4, 4)]) == [(0, 2), (3, 4)]
    pieces = [Slice("tool", None, 1, 4, 0, False), Slice("tool", None, 3, 6, 0, False)]
    got, free = claim([(0, 2), (5, 9)], pieces)
    assert [(piece.start, piece.end) for piece in got] == [(1, 2), (5, 6)]
    assert free == [(0, 1), (6, 9)]
    parts = [Slice("decode", part, at, at + 1, 0, False) for at, part in enumerate(("draft", "verify", "commit"))]
    assert joined(parts) == [Slice("decode", None, 0, 3, 0, False)]
