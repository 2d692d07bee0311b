"""The sessions that ship: real runs of 5 to 60 turns that report and replay can read."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from dlite_agent.agent.run_spec import End
from dlite_agent.bench.replay_commands import read_scripts
from dlite_agent.cli import app
from dlite_agent.paths import content_dir
from dlite_agent.trace.events import Outage, SessionEnd, ToolEnd, ToolStart, TurnEnd
from dlite_agent.trace.log import read_log
from dlite_agent.trace.phases import timelines

SESSIONS = sorted(content_dir("sessions").glob("*.jsonl"))


@pytest.mark.parametrize("path", SESSIONS, ids=lambda path: path.stem)
def test_a_session_is_whole_and_can_be_read(path: Path) -> None:
    log = read_log(path)
    assert log.problems == []
    turns = [event for event in log.events if isinstance(event, TurnEnd)]
    assert 5 <= len(turns) <= 60
    started = [event.call_id for event in log.events if isinstance(event, ToolStart)]
    assert len(set(started)) == len(started)
    assert {event.call_id for event in log.events if isinstance(event, ToolEnd)} == set(started)
    ends = [event.reason for event in log.events if isinstance(event, SessionEnd)]
    assert ends
    assert ends[-1] in set(End) - {End.FAILED, End.CANCELLED}
    result = CliRunner().invoke(app, ["report", str(path)])
    assert result.exit_code == 0
    # A turn that an outage cut counts for the report, and there is nothing of it to replay.
    (timeline,) = timelines(log)
    assert f"{len(timeline.turns)} turns" in result.stdout
    (script,) = read_scripts([path])
    assert len(script.turns) == len(turns)


def test_what_the_sessions_show() -> None:
    logs = {path.stem: read_log(path) for path in SESSIONS}
    assert len(logs) >= 6
    assert [name for name, log in logs.items() if any(isinstance(event, Outage) for event in log.events)] == [
        "interrupted"
    ]
    (timeline,) = timelines(logs["parallel-tools"])
    calls = [sum(tool.turn == turn for tool in timeline.tools) for turn in range(len(timeline.turns))]
    assert min(calls) > 1
