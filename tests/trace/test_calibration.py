from __future__ import annotations

import pytest

from dlite_agent.trace.calibration import FEWEST, StepTimeKeeper
from dlite_agent.trace.events import Calibration, Segment
from dlite_agent.trace.log import Log, dump_lines, parse_lines
from dlite_agent.trace.phases import timelines
from dlite_agent.trace.summary import summarise
from tests.trace import sample

TABLE = [(0, 1, 0.010, 0.0005), (1000, 1, 0.020, 0.0005), (0, 4, 0.016, 0.001)]


def test_a_table_stands_until_steps_say_otherwise() -> None:
    keeper = StepTimeKeeper(TABLE)
    assert keeper.points() == TABLE
    for _ in range(FEWEST - 1):
        keeper.learn(500, 1, 0.030)
    assert keeper.points() == TABLE
    keeper.learn(500, 1, 0.030)
    # The table expects 15 ms there, so everything is twice as slow, the batch without steps of its own included.
    assert [seconds for _, _, seconds, _ in keeper.points()] == pytest.approx([0.020, 0.040, 0.032])


def test_a_batch_with_steps_of_its_own_follows_them() -> None:
    keeper = StepTimeKeeper(TABLE)
    for _ in range(FEWEST):
        keeper.learn(0, 1, 0.010)
        keeper.learn(0, 4, 0.048)
    assert [seconds for _, _, seconds, _ in keeper.points()] == pytest.approx([0.010, 0.020, 0.048])


def test_old_steps_are_forgotten_and_the_spread_is_in_the_error() -> None:
    keeper = StepTimeKeeper(TABLE[:1], latest=6)
    for seconds in [0.5] * 10 + [0.009, 0.010, 0.010, 0.010, 0.010, 0.011]:
        keeper.learn(0, 1, seconds)
    ((_, _, seconds, error),) = keeper.points()
    assert seconds == pytest.approx(0.010)
    assert 0.0005 < error < 0.001


def test_without_a_table_nothing_is_known() -> None:
    keeper = StepTimeKeeper()
    keeper.learn(0, 1, 0.010)
    assert keeper.points() == []
    assert keeper.event("g") is None
    keeper.start(TABLE)
    assert keeper.points() == TABLE


def test_the_event_reaches_the_report() -> None:
    event = StepTimeKeeper([(0, 1, 0.010, 0.0), (4096, 1, 0.010, 0.0)]).event(sample.SEGMENT)
    assert isinstance(event, Calibration)
    log = parse_lines(dump_lines([*sample.events(), event]).encode())
    assert isinstance(log.events[0], Segment)
    report = summarise(timelines(Log(log.events)))
    assert report.t_ar_source == "calibration in the log"
    (session,) = report.sessions
    assert session.amdahl is not None
    assert session.amdahl.s_d is not None
    # 800 tokens at 10 ms against 4 s.
    assert session.amdahl.s_d.value == pytest.approx(2.0)
