"""Replay on a tiny engine: same tokens on every side, waits kept, mismatches counted and located."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator

import pytest

from dlite_agent.bench.replay import DecodeReplay, Plan, parse_sides
from dlite_agent.decode.engine import Engine
from dlite_agent.decode.rounds import Decoder
from dlite_agent.decode.sampling import SamplingParams
from dlite_agent.decode.step_times import Probe, measure
from dlite_agent.errors import InvalidRequest
from dlite_agent.trace.comparison import RECORDING, comparisons
from dlite_agent.trace.events import AnyEvent, Event, TurnEnd
from dlite_agent.trace.log import Log, dump_lines, parse_lines
from dlite_agent.trace.phases import timelines
from dlite_agent.trace.report import to_json, to_table
from dlite_agent.trace.report_html import to_html
from dlite_agent.trace.script import NotReplayable, scripts
from dlite_agent.trace.summary import summarise
from tests.replays import record, start_engine

SIDES = parse_sides("ar,dlite,dlite:verify_window=3")


@pytest.fixture(scope="module")
def engine(make_decoder: Callable[..., Decoder]) -> Iterator[Engine]:
    engine = start_engine(make_decoder())
    yield engine
    engine.close()


def test_sides_are_read_and_checked() -> None:
    assert [(side.mode, side.verify_window) for side in SIDES] == [("ar", None), ("dlite", None), ("dlite", 3)]
    for text in ("", "fast", "dlite:window=3", "dlite:verify_window=x", "ar,ar"):
        with pytest.raises(InvalidRequest) as caught:
            parse_sides(text)
        assert caught.value.param == "compare"
    with pytest.raises(InvalidRequest, match="speed"):
        Plan(SIDES, speed=0.0)
    with pytest.raises(InvalidRequest, match="wait"):
        Plan(SIDES, wait="forever")  # type: ignore[arg-type]


def test_every_side_generates_the_recorded_tokens(engine: Engine) -> None:
    script = scripts(record(engine, tool_seconds=0.3))[0]
    said: list[str] = []
    log = DecodeReplay(engine, Plan(SIDES), progress=said.append).run([script])
    # What a replay writes is a log like any other.
    assert parse_lines(dump_lines(log.events).encode()).events == log.events
    (found,) = comparisons(timelines(log))
    assert (found.original, found.base, found.tokens) == ("s", "ar", 72)
    assert [side.mismatches for side in found.sides] == [[], [], []]
    plain, full, short = found.sides
    assert plain.measured is None
    for side in (full, short):
        assert side.measured is not None
        assert side.measured.decode is not None
        assert side.summary.means is not None
        assert side.summary.means.tau > 1.2
        # Tools are not run and not waited for, but their recorded time is part of the workflow.
        assert side.summary.seconds["tool"] == pytest.approx(0.6, abs=0.1)
        assert sum(side.summary.seconds.values()) == pytest.approx(side.summary.wall, rel=0.01)
        # Turns of a side follow each other on its own clock, whatever the other sides did in between.
        assert side.summary.seconds["client"] < 0.05 * side.summary.wall
    assert plain.summary.means is not None
    assert plain.summary.means.tau == 1.0
    assert said[0] == "session 1 of 1, turn 1 of 3, ar"
    assert len(said) == 9


def test_prediction_from_one_side_alone(make_decoder: Callable[..., Decoder]) -> None:
    decoder = make_decoder()
    points = measure(decoder, contexts=(20, 200), batches=(1,), repeats=9)
    engine = start_engine(decoder, observer=Probe(8))
    try:
        script = scripts(record(engine, turns=3, tokens=60, tool_seconds=0.2))[0]
        log = DecodeReplay(engine, Plan(parse_sides("ar,dlite")), points=points).run([script])
    finally:
        engine.close()
    (found,) = comparisons(timelines(log))
    _, dlite = found.sides
    assert dlite.mismatches == []
    assert dlite.summary.amdahl is not None
    assert dlite.predicted_to_measured is not None
    report, replays = summarise(timelines(log)), comparisons(timelines(log))
    assert "replay of s, dlite: measured against ar: workflow" in to_table(report, replays)
    assert "replay of s, dlite: measured against ar" in to_html(report, replays)
    (read,) = json.loads(to_json(report, replays))["replays"]
    assert read["sides"][1]["measured"]["workflow"] == pytest.approx(dlite.measured.workflow)  # type: ignore[union-attr]
    # A tiny model's steps are all overhead and this machine is shared: the tight bound is the soak's.
    assert 0.6 < dlite.predicted_to_measured < 1.6


def test_mismatches_are_counted_and_located(engine: Engine) -> None:
    def change(events: list[AnyEvent]) -> None:
        for number, event in enumerate(events):
            if isinstance(event, TurnEnd) and event.turn == 1 and event.output_ids is not None:
                ids = list(event.output_ids)
                ids[4], ids[9] = (ids[4] + 1) % 97, (ids[9] + 1) % 97
                events[number] = event.model_copy(update={"output_ids": ids})

    script = scripts(record(engine, change=change))[0]
    log = DecodeReplay(engine, Plan(parse_sides("ar,dlite"))).run([script])
    (found,) = comparisons(timelines(log))
    for side in found.sides:
        # Turn 2 has the changed answer in its context, on every side alike, and so may differ from the recording.
        wrong = [item for item in side.mismatches if item.turn == 1]
        assert [(item.what, item.against, item.position, item.count) for item in wrong] == [("token", RECORDING, 4, 2)]
        assert wrong[0].found == (wrong[0].expected - 1) % 97  # type: ignore[operator]
        assert all(item.against == RECORDING for item in side.mismatches)


def test_waits_are_kept_as_asked(engine: Engine) -> None:
    script = scripts(record(engine, tokens=4, tool_seconds=0.4))[0]
    took = {}
    for wait, speed in (("none", 1.0), ("scaled", 4.0), ("original", 1.0)):
        plan = Plan(parse_sides("ar,dlite"), wait=wait, speed=speed)  # type: ignore[arg-type]
        begin = time.monotonic()
        log = DecodeReplay(engine, plan).run([script])
        took[wait] = time.monotonic() - begin
        tools = 0.2 if wait == "scaled" else 0.8
        assert [view.seconds()["tool"] for view in timelines(log)] == pytest.approx([tools, tools], abs=0.1)
    assert took["original"] >= 0.8
    assert took["none"] < took["original"]
    assert took["scaled"] >= 0.2


def test_sessions_at_once_share_the_batch(engine: Engine) -> None:
    found = [scripts(record(engine, f"s{number}", tokens=40, tool_seconds=0.01))[0] for number in range(3)]
    plan = Plan(parse_sides("ar,dlite"), arrivals=(0.0, 0.0, 0.05))
    log = DecodeReplay(engine, plan).run(found)
    views = timelines(log)
    assert [view.session for view in views] == [f"s{n}@{side}" for n in range(3) for side in ("ar", "dlite")]
    assert max(row.batch for view in views for turn in view.turns for row in turn.rounds) > 1
    assert all(not side.mismatches for item in comparisons(views) for side in item.sides)


def test_a_recording_without_ids_is_refused(engine: Engine) -> None:
    bare = record(engine)
    bare = Log([event.without_content() if isinstance(event, Event) else event for event in bare.events])
    with pytest.raises(NotReplayable, match="turn 0: the recording holds no token ids") as caught:
        DecodeReplay(engine, Plan(SIDES)).run(scripts(bare))
    assert caught.value.param == "session"


def test_a_sampled_recording_is_known_as_such(engine: Engine) -> None:
    sampling = {"temperature": 0.9, "seed": 5}
    log = record(engine, params=SamplingParams(temperature=0.9, seed=5), sampling=sampling)
    script = scripts(log)[0]
    assert not script.turns[0].greedy
    again = DecodeReplay(engine, Plan(parse_sides("ar,dlite"))).run([script])
    greedy = DecodeReplay(engine, Plan(parse_sides("dlite"), sampling={"temperature": 0.0})).run([script])
    (same,), (other,) = comparisons(timelines(again)), comparisons(timelines(greedy))
    assert [side.mismatches for side in same.sides] == [[], []]
    assert other.sides[0].mismatches
    with pytest.raises(InvalidRequest, match="no sampling parameter 'heat'"):
        DecodeReplay(engine, Plan(SIDES, sampling={"heat": 1})).run([script])
