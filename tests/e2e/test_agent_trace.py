"""What the log of an agent run says: phases that add up to the run's own clock, and the T_AR that a report needs."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

import pytest

from dlite_agent.agent.runs import RunsSettings
from dlite_agent.trace.events import Calibration
from dlite_agent.trace.log import read_log
from dlite_agent.trace.phases import timelines
from dlite_agent.trace.summary import summarise
from tests.serving import live, tiny

TURNS = 3


def test_an_agent_runs_log_accounts_for_its_time_and_brings_t_ar(tmp_path: Path) -> None:
    (tmp_path / "work").mkdir()
    (tmp_path / "work" / "notes.txt").write_text("a line\n" * 40)
    body = {
        "task": "Read the notes.",
        "workspace": "work",
        "bundles": ["files", "shell", "submit"],
        "protect_git": False,
        "model": {
            "max_tokens": 200,
            "argument_characters": 16,
            "parallel_tool_calls": False,
            "plan": ["find_files"] * TURNS,
        },
        "limits": {"turns": TURNS, "output_bytes": 400},
    }
    settings = replace(tiny(tmp_path, context_limit=8000), data_dir=tmp_path / "data")
    with live(settings, RunsSettings(roots=(tmp_path,))) as server:
        begun = time.monotonic()
        run = server.post("/v1/agents/runs", body).json()
        path = f"/v1/agents/runs/{run['id']}"
        server.wait_until("the end of the run", lambda: server.get(path).json()["state"] == "turn_limit")
        took = time.monotonic() - begun
    log = read_log(tmp_path / "data" / "runs" / run["id"] / "events.jsonl")
    assert log.problems == []
    (view,) = timelines(log)
    assert sum(view.seconds().values()) == pytest.approx(view.wall, rel=0.01)
    assert view.wall < took
    first, last = view.turns[0], view.turns[-1]
    assert len(view.turns) == TURNS
    assert sum(sum(turn.seconds.values()) for turn in view.turns) == pytest.approx(
        last.window_end - first.start, rel=0.01
    )
    assert [call.measured for call in view.tools] == [True] * TURNS
    for phase in ("queue", "prefill", "decode", "mask", "tool"):
        assert view.seconds()[phase] > 0, phase
    assert [event for event in log.events if isinstance(event, Calibration)]
    report = summarise([view])
    assert report.t_ar_source == "calibration in the log"
    assert report.sessions[0].amdahl is not None
