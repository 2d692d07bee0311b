"""Runs of the default model on a real server, killed and taken up again; and, for soak, the whole suite."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from rich.console import Console

from dlite_agent.agent.run_spec import End
from dlite_agent.trace.events import Outage, ToolEnd, ToolStart, TurnEnd
from dlite_agent.trace.log import read_log
from dlite_agent.trace.phases import timelines
from examples.task_suite import suite, table, tasks, tiny

LEGAL = {str(end) for end in End} - {"failed", "cancelled"}


@contextlib.contextmanager
def serving(folder: Path) -> Iterator[tuple[subprocess.Popen[bytes], httpx.Client]]:
    """`dlite-agent serve` as a process of its own; whoever has not ended it by then kills it."""
    command = [sys.executable, "-W", "ignore", "-m", "dlite_agent.cli", "serve", "--port", "0", "--threads", "1"]
    command += ["--data-dir", str(folder / "data"), "--workspaces", str(folder), "--dtype", "fp32"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, env=os.environ | {"DLITE_API_KEY": "a-long-key"})
    assert process.stderr is not None
    try:
        port = None
        for line in process.stderr:
            record = json.loads(line)
            port = record.get("port", port)
            if record["message"] == "ready":
                break
        headers = {"authorization": "Bearer a-long-key"}
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", headers=headers, timeout=60) as client:
            yield process, client
    finally:
        process.kill()
        process.communicate()


def watched(url: str, repo: str) -> str:
    """What `dlite-agent run` prints of a run of one turn."""
    command = [sys.executable, "-W", "ignore", "-m", "dlite_agent.cli", "run", "--server", url, "--repo", repo]
    command += ["--task", "Which version is this?", "--bundle", "files", "--bundle", "submit", "--max-turns", "1"]
    environment = os.environ | {"DLITE_API_KEY": "a-long-key"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=240, check=False)
    assert done.returncode in (0, 2), done.stderr[-3000:]
    return done.stdout


def wait(client: httpx.Client, path: str, until: Any) -> dict[str, Any]:
    end = time.monotonic() + 240
    while True:
        run: dict[str, Any] = client.get(path).json()
        if until(run):
            return run
        assert time.monotonic() < end, run
        time.sleep(0.1)


def test_a_killed_server_goes_on_with_its_runs(tmp_path: Path) -> None:
    task = next(task for task in tasks() if task.name == "version")
    task.prepare(tmp_path / "work")
    body = task.spec("work", **tiny(task)).model_dump(mode="json") | {"limits": {"turns": 3, "output_bytes": 1000}}
    with serving(tmp_path) as (process, client):
        run = client.post("/v1/agents/runs", json=body, headers={"idempotency-key": "k"}).json()
        path = f"/v1/agents/runs/{run['id']}"
        wait(client, path, lambda run: run["turns"] == 1)
        process.send_signal(signal.SIGKILL)
    with serving(tmp_path) as (_, client):
        assert client.post("/v1/agents/runs", json=body, headers={"idempotency-key": "k"}).json()["id"] == run["id"]
        assert httpx.get(str(client.base_url) + path).status_code == 401
        ended = wait(client, path, lambda run: run["state"] in LEGAL)
        task.prepare(tmp_path / "shown")
        shown = watched(str(client.base_url), "shown")
    assert "turn 0: prompt " in shown
    assert "tokens/s, tau " in shown
    assert shown.splitlines()[-1].startswith(("turn_limit: 1 turns, ", "answer:")) or "submitted: 1 turns" in shown
    assert ended["restarts"] == 1
    log = read_log(tmp_path / "data" / "runs" / run["id"] / "events.jsonl")
    assert [event.session for event in log.events if isinstance(event, Outage)] == [run["id"]]
    started = [event.call_id for event in log.events if isinstance(event, ToolStart)]
    assert len(set(started)) == len(started)
    assert {event.call_id for event in log.events if isinstance(event, ToolEnd)} == set(started)
    (timeline,) = timelines(log)
    assert timeline.seconds()["outage"] > 0
    assert all(json.loads(call["function"]["arguments"]) for call in calls_of(log.events))


def calls_of(events: Any) -> Iterator[dict[str, Any]]:
    for event in events:
        if isinstance(event, TurnEnd) and event.message:
            yield from event.message.get("tool_calls", ())


@pytest.mark.soak
@pytest.mark.timeout(7200)
def test_whole_suite_on_the_default_model(tmp_path: Path) -> None:
    results = asyncio.run(suite(tasks(), tmp_path / "suite", reference=False))
    Console(width=120).print(table(results))
    for task, run, _ in results:
        assert run.state in LEGAL, (task.name, run.state, run.progress.error)
        answers = [message.content for message in run.progress.messages if message.role == "tool"]
        assert not any(answer.startswith("Invalid call") for answer in answers), task.name
