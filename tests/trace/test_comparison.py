from __future__ import annotations

import json

import pytest

from dlite_agent.trace.comparison import comparisons, measured_lines
from dlite_agent.trace.events import (
    AnyEvent,
    Calibration,
    Mismatch,
    Replayed,
    Segment,
    ToolEnd,
    ToolStart,
    TurnEnd,
    TurnStart,
)
from dlite_agent.trace.log import Log
from dlite_agent.trace.phases import timelines
from dlite_agent.trace.replay_table import replay_json, replay_table
from dlite_agent.trace.report import to_json, to_table
from dlite_agent.trace.report_html import to_html
from dlite_agent.trace.summary import summarise
from tests.trace import sample


def side(name: str, seconds: float, events: list[AnyEvent], *, finish: str = "stop") -> list[AnyEvent]:
    """One turn that decodes for some seconds and then waits 6 s for a tool."""
    g, session = sample.SEGMENT, f"s@{name}"
    call = {"segment": g, "session": session, "turn": 0, "call_id": "w"}
    return [
        Replayed(segment=g, session=session, t=0.0, original="s", side=name),
        TurnStart(segment=g, session=session, turn=0, t=0.0, prompt_tokens=100),
        *events,
        TurnEnd(segment=g, session=session, turn=0, t=seconds, output_tokens=400, finish_reason=finish),
        ToolStart(**call, t=seconds, name="tools", measured=False),  # type: ignore[arg-type]
        ToolEnd(**call, t=seconds + 6.0),  # type: ignore[arg-type]
    ]


def log(t_ar: float = 0.010) -> Log:
    """400 tokens, 10 ms each one by one, 20 ms for four at once: 4 s against 2 s of decoding, beside 6 s of tools."""
    plain = sample.plain_rounds(0.0, 400, 0.010, session="s@ar")
    drafted = sample.rounds(0.0, 100, session="s@dlite")
    wrong = Mismatch(
        segment=sample.SEGMENT,
        session="s@dlite",
        turn=0,
        t=2.0,
        what="token",
        against="ar",
        position=7,
        count=3,
        expected=5,
        found=6,
    )
    return Log(
        [
            Segment(segment=sample.SEGMENT, t=0.0, wall=sample.WALL),
            Calibration(segment=sample.SEGMENT, t=0.0, points=[(0, 1, t_ar, 0.0), (4096, 1, t_ar, 0.0)]),
            *side("ar", 4.0, [plain]),
            *side("dlite", 2.0, [drafted]),
            wrong,
        ]
    )


def test_measured_and_predicted_agree_where_the_calibration_is_right() -> None:
    (found,) = comparisons(timelines(log()))
    plain, drafted = found.sides
    assert (found.original, found.base, found.tokens) == ("s", "ar", 400)
    assert plain.measured is None
    assert drafted.measured is not None
    assert (drafted.measured.workflow, drafted.measured.decode) == pytest.approx((10 / 8, 2.0))
    assert drafted.predicted is not None
    assert drafted.predicted.value == pytest.approx(10 / 8)
    assert drafted.predicted_to_measured == pytest.approx(1.0)
    assert [turn.mismatches for turn in drafted.turns] == [1]


def test_the_prediction_knows_nothing_of_the_other_side() -> None:
    # A table that says 15 ms: the ar side's own steps, which say 10, must not correct it.
    (found,) = comparisons(timelines(log(t_ar=0.015)))
    drafted = found.sides[1]
    assert drafted.predicted is not None
    assert drafted.predicted.value == pytest.approx((6 + 6) / 8)
    assert drafted.predicted_to_measured == pytest.approx(12 / 10)


def test_tables_pages_and_json_carry_it() -> None:
    views = timelines(log())
    found = comparisons(views)
    (line,) = measured_lines(found[0])
    assert line.startswith(
        "dlite: measured against ar: workflow 1.25x, S_D 2.00x; predicted from this side alone 1.25x"
    )
    table = replay_table(found)
    assert "1.25x" in table
    assert "dlite, turn 0, answer differs from ar at 7: 5 became 6 (3 places in all)" in table
    report = summarise(views)
    assert f"replay of s, {line}" in to_table(report, found, width=300)
    assert f"replay of s, {line}" in to_html(report, found)
    (read,) = json.loads(to_json(report, found))["replays"]
    assert read["sides"][1]["measured"] == pytest.approx({"against": "ar", "workflow": 1.25, "decode": 2.0})
    (whole,) = json.loads(replay_json(found))
    assert whole["sides"][1]["mismatches"][0]["position"] == 7
