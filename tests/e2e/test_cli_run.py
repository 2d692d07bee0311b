"""`dlite-agent run` in a process of its own, on a tiny random model: the grammar alone makes its calls valid."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from dlite_agent.cli import app
from dlite_agent.errors import InvalidRequest
from dlite_agent.trace.events import ToolStart, TurnEnd
from dlite_agent.trace.log import read_log
from examples.task_suite import tasks
from tests.serving import tiny


def run(*options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-W", "ignore", "-m", "dlite_agent.cli", "run", *options]
    return subprocess.run(command, capture_output=True, text=True, timeout=540, env=os.environ, check=False)


def test_run_in_this_process(tmp_path: Path) -> None:
    model = tiny(tmp_path / "model").model
    workspace, data = tmp_path / "work", tmp_path / "data"
    workspace.mkdir()
    options = ["--target", model.target, "--drafter", model.drafter, "--dtype", "fp32", "--threads", "1"]
    options += ["--task", "Hand in.", "--repo", str(workspace), "--data-dir", str(data), "--bundle", "submit"]
    options += ["--max-tokens", "60", "--argument-characters", "8", "--max-turns", "2"]
    done = run(*options)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "turn 0: prompt " in done.stdout
    assert "  calls submit " in done.stdout
    assert "  tool submit ok " in done.stdout
    (log,) = data.glob("runs/*/events.jsonl")
    events = read_log(log).events
    (call,) = [event for event in events if isinstance(event, ToolStart)]
    (turn,) = [event for event in events if isinstance(event, TurnEnd)]
    assert call.t <= turn.t
    assert turn.output_ids


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--task", "t"], "--task together with --repo"),
        ([], "--data-dir of an interrupted run"),
        (["--task", "t", "--repo", ".", "--server", "http://127.0.0.1:1", "--mcp", "x"], "runs in this process"),
        (["--task", "t", "--repo", ".", "--tool-choice", "never"], "tool_choice"),
    ],
)
def test_what_does_not_go_together_is_refused(options: list[str], words: str) -> None:
    result = CliRunner().invoke(app, ["run", *options])
    assert isinstance(result.exception, InvalidRequest)
    assert words in result.exception.message


def test_the_default_model_solves_the_demo_task(tmp_path: Path) -> None:
    """Greedy, with the command that the documents show."""
    (demo,) = [task for task in tasks() if task.name == "greeting"]
    workspace = tmp_path / "greeting"
    demo.prepare(workspace)
    options = ["--task", demo.text, "--repo", str(workspace), "--data-dir", str(tmp_path / "data"), "--threads", "1"]
    for bundle in demo.bundles:
        options += ["--bundle", bundle]
    for tool in demo.plan:
        options += ["--plan", tool]
    done = run(*options)
    assert done.returncode == 0, done.stderr[-3000:]
    assert asyncio.run(demo.solved(workspace, None)), done.stdout
