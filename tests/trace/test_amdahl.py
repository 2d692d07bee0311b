from __future__ import annotations

import math

import pytest

from dlite_agent.errors import InvalidRequest
from dlite_agent.trace.amdahl import (
    Equivalent,
    StepTimes,
    analyse,
    bound,
    decode_speedup,
    equivalent,
    levers,
    round_means,
    share_before,
    workflow_speedup,
)
from dlite_agent.trace.events import Round
from tests.trace import sample

NOTHING = Equivalent(0.0, 0.0, 0, 0.0)


def test_seed_arithmetic() -> None:
    assert workflow_speedup(0.30, 3.0) == pytest.approx(1.25, abs=1e-12)
    assert decode_speedup(t_ar=0.010, tau=4.0, round_seconds=0.020) == pytest.approx(2.0, abs=1e-12)
    assert bound(0.41) == pytest.approx(1.69, abs=0.005)
    assert workflow_speedup(0.41, 2.0) == pytest.approx(1.26, abs=0.005)


def test_limits() -> None:
    assert workflow_speedup(0.0, 7.0) == 1.0
    assert workflow_speedup(1.0, 7.0) == pytest.approx(7.0)
    assert bound(0.0) == 1.0
    assert math.isinf(bound(1.0))
    for f in (-0.1, 1.1, math.nan):
        with pytest.raises(InvalidRequest, match="between 0 and 1"):
            bound(f)
    with pytest.raises(InvalidRequest, match="positive"):
        workflow_speedup(0.5, 0.0)
    with pytest.raises(InvalidRequest):
        decode_speedup(0.01, 4.0, 0.0)


@pytest.mark.parametrize("f", [0.0, 0.05, 0.3, 0.41, 0.9, 1.0])
@pytest.mark.parametrize("s_d", [0.5, 1.0, 2.0, 3.7])
def test_share_and_bound_are_recovered_from_an_accelerated_timeline(f: float, s_d: float) -> None:
    # 100 s one by one: f of them decode; accelerated, decode takes f * 100 / s_d.
    decode, rest = 100 * f / s_d, 100 * (1 - f)
    assert share_before(decode / (decode + rest), s_d) == pytest.approx(f, abs=1e-12)
    n = 1000
    wall = decode / n
    rounds = [Round(i * wall, wall, 0, wall, 0, 4, 7, 8, 0, 1) for i in range(n)] if f else []
    t_ar = wall * s_d / 4
    ar = equivalent(rounds, StepTimes(((0, 1, t_ar, 0.0),))) if f else NOTHING
    found = analyse({"decode": decode, "tool": rest}, ar)
    assert found.f.value == pytest.approx(f, abs=1e-9)
    assert found.bound.value == pytest.approx(bound(f)) or (math.isinf(found.bound.value) and f == 1.0)
    assert found.workflow.value == pytest.approx(workflow_speedup(f, s_d))
    if f:
        assert found.s_d is not None
        assert found.s_d.value == pytest.approx(s_d)


def test_zero_decode_and_zero_tools() -> None:
    idle = analyse({"tool": 5.0, "client": 100.0}, NOTHING)
    assert (idle.f.value, idle.s_d, idle.workflow.value, idle.bound.value) == (0.0, None, 1.0, 1.0)
    ar = Equivalent(10.0, 0.0, 1000, 0.0)
    busy = analyse({"decode": 5.0, "client": 100.0, "outage": 3.0}, ar)
    assert busy.f.value == 1.0
    assert busy.workflow.value == pytest.approx(2.0)
    assert math.isinf(busy.bound.value)
    empty = analyse({}, NOTHING)
    assert (empty.workflow.value, empty.bound.value, empty.bound_from_here) == (1.0, 1.0, 1.0)


def test_the_error_of_t_ar_reaches_every_figure() -> None:
    found = analyse({"decode": 5.0, "tool": 10.0}, Equivalent(10.0, 1.0, 1000, 0.0))
    assert found.s_d == pytest.approx((2.0, 1.8, 2.2))
    assert found.f == pytest.approx((10 / 20, 9 / 19, 11 / 21))
    assert found.workflow == pytest.approx((20 / 15, 19 / 15, 21 / 15))
    assert found.bound == pytest.approx((2.0, 1.9, 2.1))
    assert found.decode_share == pytest.approx(1 / 3)
    assert found.bound_from_here == pytest.approx(1.5)


def test_step_times_between_and_beyond_the_table() -> None:
    table = StepTimes(((0, 1, 0.010, 0.001), (1000, 1, 0.020, 0.001), (0, 4, 0.016, 0.002), (1000, 4, 0.032, 0.002)))
    assert table.at(500, 1) == pytest.approx((0.015, 0.001, False))
    assert table.at(0, 2).seconds == pytest.approx(0.012)
    assert table.at(500, 2).seconds == pytest.approx(0.015 + (0.024 - 0.015) / 3)
    beyond = table.at(5000, 9)
    assert (beyond.seconds, beyond.extrapolated) == (0.032, True)
    assert not table.at(1000, 4).extrapolated


@pytest.mark.parametrize("point", [(0, 0, 0.1, 0.0), (-1, 1, 0.1, 0.0), (0, 1, 0.0, 0.0), (0, 1, 0.1, math.inf)])
def test_impossible_calibrations_are_refused(point: tuple[int, int, float, float]) -> None:
    with pytest.raises(InvalidRequest, match="Calibration point"):
        StepTimes((point,))
    with pytest.raises(InvalidRequest, match="at least one"):
        StepTimes(())


def test_a_table_from_autoregressive_rounds() -> None:
    rows = sample.plain_rounds(0.0, 50, 0.010).rows()
    table = StepTimes.measured(rows)
    assert table is not None
    step = table.at(125, 1)
    assert (step.seconds, step.error) == pytest.approx((0.010, 0.0))
    assert StepTimes.measured(sample.rounds(0.0, 5).rows()) is None
    assert StepTimes.measured([row._replace(t_d=0.004) for row in rows]) is None
    # A real clock sees some microseconds between its stamps even where nothing is drafted.
    assert StepTimes.measured([row._replace(t_d=20e-6) for row in rows]) == table
    assert equivalent(rows, table).seconds == pytest.approx(0.5)


def test_equivalent_time_follows_context_and_batch() -> None:
    table = StepTimes(((100, 1, 0.010, 0.001), (200, 1, 0.020, 0.001), (100, 2, 0.1, 0.0)))
    short = equivalent([Round(0, 0.02, 0, 0, 0, 4, 7, 8, 98, 1)], table)
    assert short.seconds == pytest.approx(0.04)
    assert short.t_ar == pytest.approx(0.010)
    wide = equivalent([Round(0, 0.02, 0, 0, 0, 4, 7, 8, 98, 2)], table)
    assert wide.seconds == pytest.approx(0.4)
    far = equivalent([Round(0, 0.02, 0, 0, 0, 4, 7, 8, 5000, 1)], table)
    assert far.extrapolated == 1.0
    both = short + far
    assert (both.tokens, both.extrapolated) == (8, 0.5)
    assert (NOTHING + NOTHING).t_ar is None


def test_round_means() -> None:
    assert round_means([]) is None
    means = round_means(sample.rounds(0.0, 100).rows())
    assert means is not None
    assert (means.tau, means.rounds, means.tokens, means.batch) == (4.0, 100, 400, 1.0)
    assert (means.t_d, means.t_v, means.t_s, means.wall) == pytest.approx((0.004, 0.012, 0.004, 0.020))
    assert means.context == pytest.approx(298.0)


def test_levers() -> None:
    seconds = {"prefill": 2.0, "decode": 4.0, "tool": 4.0, "client": 50.0}
    found = {lever.name: lever for lever in levers(seconds, tau=3.0, new_tokens=100, avoidable_tokens=50)}
    assert found["tau + 1 at the same cost of a round"].saved == pytest.approx(1.0)
    assert found["tau + 1 at the same cost of a round"].speedup == pytest.approx(10 / 9)
    assert found["every known prefix hit"].saved == pytest.approx(1.0)
    assert found["tools twice as fast"].speedup == pytest.approx(10 / 8)
    assert found["tools in no time"].speedup == pytest.approx(10 / 6)
    assert found["decoding in no time"].speedup == pytest.approx(10 / 6)
    only_tools = {lever.name: lever for lever in levers({"tool": 3.0}, tau=None)}
    assert math.isinf(only_tools["tools in no time"].speedup)
    assert "every known prefix hit" not in only_tools
    assert all(lever.speedup == 1.0 for lever in levers({}, tau=None))
