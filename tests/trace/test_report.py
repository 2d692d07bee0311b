from __future__ import annotations

import json
import math
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

from dlite_agent.errors import InvalidRequest, NotFound
from dlite_agent.trace.amdahl import StepTimes, workflow_speedup
from dlite_agent.trace.events import AnyEvent, Segment, ToolEnd, ToolStart, TurnEnd, TurnStart
from dlite_agent.trace.log import Log, dump_lines
from dlite_agent.trace.phases import timelines
from dlite_agent.trace.report import report_command, to_json, to_table
from dlite_agent.trace.report_html import to_html
from dlite_agent.trace.summary import Report, summarise
from dlite_agent.trace.wording import printable
from tests.trace import sample
from tests.trace.formats.data_files import DATA

HOSTILE = "<script>alert('x')</script>&\x1b[2J\x07\u202e\""


def report(events: list[AnyEvent], step_times: StepTimes | None = None) -> Report:
    return summarise(timelines(Log(events)), step_times)


def calibrated() -> Report:
    return report([*sample.events(), sample.calibration()])


def test_a_calibrated_session() -> None:
    found = calibrated()
    (session,) = found.sessions
    assert found.t_ar_source == "calibration in the log"
    amdahl = session.amdahl
    assert amdahl is not None
    # 800 tokens at 10 ms are 8 s; 4 s were decoded and 6 s were something else.
    assert amdahl.ar.seconds == pytest.approx(8.0)
    assert amdahl.f.value == pytest.approx(8 / 14)
    assert amdahl.s_d is not None
    assert amdahl.s_d == pytest.approx((2.0, 1.9, 2.1))
    assert amdahl.workflow.value == pytest.approx(14 / 10)
    assert amdahl.workflow.value == pytest.approx(workflow_speedup(amdahl.f.value, 2.0))
    assert amdahl.bound.value == pytest.approx(14 / 6)
    assert session.means is not None
    assert session.means.tau == 4.0
    first, second = session.turns
    assert first.amdahl is not None
    assert first.amdahl.f.value == pytest.approx(4 / 9)
    assert first.tiers == ["disk"]
    assert second.seconds["tool"] == 0.0
    assert session.divergences == ["turn 1: edited at 17"]
    assert session.unknown == []
    saved = {lever.name: lever.saved for lever in session.levers}
    # 80 tokens were prefilled in 1.5 s; none of them had been in the session before.
    assert saved["every known prefix hit"] == 0.0
    assert saved["tools in no time"] == pytest.approx(3.0)


def test_lost_prefix_hits_are_found() -> None:
    events = [
        event.model_copy(update={"cached_tokens": 260, "new_tokens": 260})
        if isinstance(event, TurnStart) and event.turn == 1
        else event
        for event in sample.events()
    ]
    (session,) = report(events).sessions
    saved = {lever.name: lever.saved for lever in session.levers}
    # Turn 1 could have kept the 500 tokens of turn 0: 240 of 320 prefilled tokens were known.
    assert saved["every known prefix hit"] == pytest.approx(1.5 * 240 / 320)


def test_without_t_ar_the_shares_are_not_known() -> None:
    found = report(sample.events())
    (session,) = found.sessions
    assert (session.amdahl, session.ceiling, found.fleet.amdahl) == (None, None, None)
    assert any("T_AR is not known" in line for line in session.unknown)
    assert session.means is not None


def test_t_ar_from_autoregressive_rounds_and_given() -> None:
    plain: list[AnyEvent] = [
        TurnStart(segment=sample.SEGMENT, t=200.0, session="ar", turn=0),
        sample.plain_rounds(200.0, 100, 0.010, session="ar"),
        TurnEnd(segment=sample.SEGMENT, t=201.0, session="ar", turn=0, output_tokens=100),
    ]
    found = report([*sample.events(), *plain])
    assert found.t_ar_source == "autoregressive rounds in the log"
    fast, slow = found.sessions
    assert fast.amdahl is not None
    assert slow.amdahl is not None
    assert fast.amdahl.s_d is not None
    assert slow.amdahl.s_d is not None
    assert fast.amdahl.s_d.value == pytest.approx(2.0)
    assert slow.amdahl.s_d.value == pytest.approx(1.0)
    assert math.isinf(slow.amdahl.bound.value)
    given = report([*sample.events(), sample.calibration()], StepTimes(((0, 1, 0.020, 0.0),)))
    assert given.t_ar_source == "given"
    assert given.sessions[0].amdahl is not None
    assert given.sessions[0].amdahl.f.value == pytest.approx(16 / 22)


def test_parallel_sessions_pool_and_spread() -> None:
    found = report([*sample.events("a"), *sample.events("b")[1:], sample.calibration()])
    fleet = found.fleet
    assert fleet.amdahl is not None
    assert fleet.amdahl.f.value == pytest.approx(8 / 14)
    assert fleet.sessions == 2
    assert fleet.wall == pytest.approx(20.0)
    assert fleet.bound is not None
    assert fleet.bound.n == 2
    assert fleet.bound.p50 == pytest.approx(14 / 6)


def test_zero_decode() -> None:
    g = sample.SEGMENT
    events: list[AnyEvent] = [
        Segment(segment=g, t=0.0, wall=sample.WALL),
        TurnStart(segment=g, t=0.0, session="s", turn=0, prompt_tokens=5, cached_tokens=5),
        TurnEnd(segment=g, t=0.0, session="s", turn=0, output_tokens=0, finish_reason="stop"),
        ToolStart(segment=g, t=0.0, session="s", turn=0, call_id="c", name="x"),
        ToolEnd(segment=g, t=2.0, session="s", turn=0, call_id="c"),
    ]
    (session,) = report(events).sessions
    assert session.amdahl is not None
    assert (session.amdahl.f.value, session.amdahl.s_d, session.amdahl.bound.value) == (0.0, None, 1.0)


def test_foreign_sessions_say_what_cannot_be_known() -> None:
    pi = json.loads(report_command([DATA / "pi.jsonl"], "json"))["sessions"][0]
    assert pi["amdahl"] is None
    assert pi["ceiling"] == pytest.approx(8 / 2)
    assert any("T_D" in line for line in pi["unknown"])
    atif = json.loads(report_command([DATA / "atif.json"], "json"))["sessions"][0]
    assert (atif["ceiling"], atif["levers"]) == (None, [])
    assert any("not told apart" in line for line in atif["unknown"])
    swe = json.loads(report_command([DATA / "swe_agent.traj"], "json"))["sessions"][0]
    assert swe["ceiling"] is None
    assert any("2 of 2 turns have no model time" in line for line in swe["unknown"])
    chat = json.loads(report_command([DATA / "openai_chat.jsonl"], "json"))["sessions"][0]
    assert chat["unknown"] == ["The log has no times: no phase, share, bound or speed-up can be known."]


def test_bounds_of_a_workload_are_a_spread_and_a_pooled_figure() -> None:
    fleet = json.loads(report_command([DATA / "workload.csv"], "json"))["fleet"]
    # w-1: 8 s model, 6 s tools; w-2: 2 and 9; w-3 lacks a model time and gives no bound.
    assert fleet["ceiling"] == {
        "n": 2,
        "p10": pytest.approx(11 / 9),
        "p50": pytest.approx(11 / 9),
        "p90": pytest.approx(14 / 6),
    }
    assert fleet["ceiling_pooled"] == pytest.approx(25 / 15)
    assert fleet["f"] is None


def test_tables_never_show_a_speed_up_alone() -> None:
    text = to_table(calibrated())
    (line,) = {line for line in text.split("\n") if line.startswith("tau")}
    for word in ("T_AR 10.00 ± 0.50 ms", "T_D 4.00", "T_V 12.00", "T_S 4.00", "context", "batch 1.0"):
        assert word in line
    assert "f 0.571, S_D 2.00x, workflow 1.40x (1.36x to 1.44x), bound 2.33x" in text


def test_json_has_no_infinities_and_no_gaps() -> None:
    g = sample.SEGMENT
    events: list[AnyEvent] = [
        Segment(segment=g, t=0.0, wall=sample.WALL),
        TurnStart(segment=g, t=0.0, session="s", turn=0),
        sample.rounds(0.0, 10),
        TurnEnd(segment=g, t=0.2, session="s", turn=0, output_tokens=40),
        sample.calibration(),
    ]
    text = to_json(report(events))
    found = json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    assert found["sessions"][0]["amdahl"]["bound"]["value"] == "inf"
    assert "no limit" in to_table(report(events))
    assert "no limit" in to_html(report(events))


class _Page(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs


def test_the_page_stands_alone_and_escapes_hostile_text() -> None:
    g = sample.SEGMENT
    events = sample.events(HOSTILE)
    events += [
        ToolStart(segment=g, t=104.0, session=HOSTILE, turn=0, call_id="h", name=HOSTILE),
        ToolEnd(segment=g, t=105.0, session=HOSTILE, turn=0, call_id="h", error=HOSTILE),
        sample.calibration(),
    ]
    found = summarise(timelines(Log(events)), problems=[HOSTILE])
    page = to_html(found)
    parser = _Page()
    parser.feed(page)
    assert "script" not in parser.tags
    assert parser.tags.count("svg") == 4
    assert not {name for name, _ in parser.attributes} & {"src", "href", "srcset", "onload", "onclick"}
    assert "default-src 'none'" in page
    assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f\u202e]", page)
    assert "&lt;script&gt;" in page
    table = to_table(found)
    assert "\x1b" not in table
    assert "\u202e" not in table


def test_pages_of_many_sessions_and_turns() -> None:
    g = sample.SEGMENT
    events: list[AnyEvent] = [Segment(segment=g, t=0.0, wall=sample.WALL), sample.calibration()]
    for number in range(500):
        events += [
            TurnStart(segment=g, t=float(number), session="long", turn=number),
            TurnEnd(segment=g, t=number + 0.5, session="long", turn=number, output_tokens=0),
        ]
    events += sample.events("other")[1:]
    page = to_html(report(events))
    assert "the first 400 of 500 turns" in page
    assert "bound of each session" in page


def test_command(tmp_path: Path) -> None:
    source, out = tmp_path / "s.jsonl", tmp_path / "report.html"
    source.write_text(dump_lines(sample.events()) + '{"kind": "hal')
    text = report_command([source, DATA / "pi.jsonl"], "html", out)
    assert out.read_text() == text
    assert "s.jsonl: the last line was half written; 13 bytes left out" in text
    assert "all 2 sessions" in report_command([source, DATA / "pi.jsonl"], "table")
    with pytest.raises(InvalidRequest, match="report format 'pdf'"):
        report_command([source], "pdf")
    with pytest.raises(InvalidRequest, match="at least one"):
        report_command([], "table")
    with pytest.raises(NotFound):
        report_command([tmp_path / "none"], "table")
    with pytest.raises(InvalidRequest, match="Cannot write"):
        report_command([source], "json", tmp_path / "no" / "out")


def test_printable() -> None:
    assert printable("a b\x1b[1m\n") == "a b\N{REPLACEMENT CHARACTER}[1m\N{REPLACEMENT CHARACTER}"
