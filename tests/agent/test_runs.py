"""Runs of a server: where they may work, whose they are, and what becomes of them when the process dies."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from dlite_agent.agent.runs import Runs, RunsSettings
from dlite_agent.errors import Conflict, DliteError, InvalidRequest, NotFound
from dlite_agent.trace.events import Outage, ToolEnd
from dlite_agent.trace.log import read_log
from dlite_agent.trace.phases import timelines
from tests.agent.scripted import SUBMIT, Scripted, results, shell, spec, with_runs, workspace_in

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("workspace", "error"),
    [
        ("/etc", "below an allowed root"),
        ("../outside", "below an allowed root"),
        ("link", "below an allowed root"),
        ("missing", "below an allowed root"),
        ("file", "is not a folder"),
        (".", "the server's own data"),
        ("data/runs", "the server's own data"),
        ("w\0rk", "below an allowed root"),
    ],
)
def test_workspaces_lie_below_a_root(tmp_path: Path, workspace: str, error: str) -> None:
    root = tmp_path / "root"
    root.mkdir()
    (tmp_path / "outside").mkdir()
    (root / "link").symlink_to(tmp_path / "outside")
    (root / "file").touch()

    async def work(runs: Runs) -> None:
        with pytest.raises(InvalidRequest, match=error):
            await runs.start(spec(workspace=workspace), "")
        assert runs.list("") == []

    with_runs(root, Scripted([SUBMIT]), work)
    assert list((root / "data" / "runs").iterdir()) == []


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"bundles": ("shell", "nothing")}, "bundles"),
        ({"hidden_tools": ("nothing",)}, "hidden"),
        ({"sandbox": "plain"}, "sandbox"),
        ({"model": {"plan": ("shell", "nothing")}}, "model.plan"),
    ],
)
def test_what_cannot_be_had_is_refused_by_name(tmp_path: Path, fields: dict[str, Any], param: str) -> None:
    async def work(runs: Runs) -> None:
        with pytest.raises(DliteError) as refused:
            await runs.start(spec(**fields), "")
        assert refused.value.param == param
        assert runs.list("") == []

    workspace_in(tmp_path)
    with_runs(tmp_path, Scripted([SUBMIT]), work)


def test_no_root_no_run(tmp_path: Path) -> None:
    async def main() -> None:
        runs = Runs(RunsSettings(), lambda run, owner: Scripted([]), tmp_path)
        with pytest.raises(InvalidRequest, match="No folder is allowed"):
            await runs.start(spec(), "")
        await runs.close()

    asyncio.run(main())


def test_owners_do_not_see_each_other_and_keys_repeat_nothing(tmp_path: Path) -> None:
    async def work(runs: Runs) -> None:
        run = await runs.start(spec(), "ada", "key")
        assert await runs.start(spec(), "ada", "key") is run
        with pytest.raises(Conflict, match="another body"):
            await runs.start(spec(task="Else."), "ada", "key")
        with pytest.raises(Conflict, match="in this workspace"):
            await runs.start(spec(), "bob", "key")
        with pytest.raises(NotFound):
            runs.get("bob", run.id)
        assert runs.list("bob") == []
        assert runs.get("ada", run.id) is run
        await runs.cancel(run)
        with pytest.raises(Conflict, match="not at work"):
            await runs.pause(run)
        with pytest.raises(Conflict, match="has ended"):
            await runs.follow_up(run, "More.")

    workspace_in(tmp_path)
    with_runs(tmp_path, Scripted([shell("sleep 30"), SUBMIT]), work)


def test_orderly_end_of_the_server_interrupts_and_the_next_one_goes_on(tmp_path: Path) -> None:
    model = Scripted([shell("echo one >> log"), shell("echo two >> log; touch begun; sleep 60"), SUBMIT])

    async def first(runs: Runs) -> str:
        run = await runs.start(spec(), "ada", "key")
        while not (tmp_path / "work" / "begun").exists():
            await asyncio.sleep(0.02)
        return run.id

    async def second(runs: Runs) -> None:
        run = runs.get("ada", identity)
        assert await runs.start(spec(), "ada", "key") is run
        assert run.task is not None
        await run.task
        assert run.state == "submitted"
        assert run.progress.restarts == 1
        assert "did not finish" in results(run)[1]

    workspace_in(tmp_path)
    identity = with_runs(tmp_path, model, first)
    with_runs(tmp_path, model, second)
    assert (tmp_path / "work" / "log").read_text() == "one\ntwo\n"


_SERVER = """
import asyncio, json, sys
from pathlib import Path
from tests.agent.scripted import Scripted, spec, shell, SUBMIT, with_runs

folder, held = Path(sys.argv[1]), sys.argv[2] == "held"
first = [shell("echo one >> ../log"), shell("echo two >> ../log"), shell("echo three >> ../log; sleep 100")]
turns = [shell("cd sub; echo zero >> ../log"), "Now three.\\n" + "\\n".join(first), shell("pwd"), SUBMIT]

async def work(runs):
    run = next(iter(runs.list("")), None) or await runs.start(spec(limits={"silent_seconds": 100.0}), "")
    await run.task
    said = [(m.role, m.content) for m in run.progress.messages]
    print(json.dumps([run.state, run.id, said]))

with_runs(folder, Scripted(turns, hold={1: asyncio.Event()} if held else None), work)
"""


@pytest.mark.parametrize("held", [False, True], ids=["killed in a tool", "killed while decoding"])
def test_killed_server_runs_no_finished_tool_twice(tmp_path: Path, held: bool) -> None:
    """kill -9 with two of three parallel calls finished; `held`: the turn that made them was not over yet."""
    workspace = workspace_in(tmp_path)
    (workspace / "sub").mkdir()
    command = [sys.executable, "-W", "ignore", "-c", _SERVER, str(tmp_path)]
    server = subprocess.Popen([*command, "held" if held else "free"], cwd=ROOT, stdout=subprocess.PIPE)
    log = workspace / "log"
    deadline = time.monotonic() + 240
    try:
        while not (log.exists() and len(log.read_text().splitlines()) == 4 and _ended(tmp_path) == 3):
            assert time.monotonic() < deadline
            assert server.poll() is None
            time.sleep(0.05)
    finally:
        server.send_signal(signal.SIGKILL)
        server.communicate()
    done = subprocess.run([*command, "free"], cwd=ROOT, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    state, identity, said = json.loads(done.stdout.splitlines()[-1])
    assert state == "submitted"
    assert sorted(log.read_text().splitlines()) == ["one", "three", "two", "zero"]
    answers = [content for role, content in said if role == "tool"]
    assert answers[:3] == ["[no output]"] * 3
    assert "did not finish" in answers[3]
    assert answers[4].endswith("/sub")
    assert [content for role, content in said if role == "assistant"][1] == "Now three."
    trace = read_log(tmp_path / "data" / "runs" / identity / "events.jsonl")
    (outage,) = [event for event in trace.events if isinstance(event, Outage)]
    assert outage.seconds is not None
    assert outage.seconds > 0
    assert [event.error for event in trace.events if isinstance(event, ToolEnd)].count("interrupted") == 1
    (timeline,) = timelines(trace)
    assert timeline.segments == 2
    assert timeline.seconds()["outage"] > 0


def _ended(folder: Path) -> int:
    """Calls whose end is in the journal."""
    found = 0
    for journal in folder.glob("data/runs/*/journal.jsonl"):
        found += journal.read_text().count('"kind":"tool_end"')
    return found


def test_runs_of_another_process_that_cannot_go_on_do_not_keep_the_server_from_starting(tmp_path: Path) -> None:
    model = Scripted([shell("sleep 60"), SUBMIT])

    async def first(runs: Runs) -> str:
        run = await runs.start(spec(), "")
        while not run.progress.calls:
            await asyncio.sleep(0.02)
        return run.id

    async def second(runs: Runs) -> str:
        return runs.get("", identity).state

    workspace = workspace_in(tmp_path)
    identity = with_runs(tmp_path, model, first)
    workspace.rename(tmp_path / "moved")
    damaged = tmp_path / "data" / "runs" / "run_damaged"
    damaged.mkdir()
    (damaged / "journal.jsonl").write_text("{}\n{}\n")
    assert with_runs(tmp_path, model, second) == "interrupted"
