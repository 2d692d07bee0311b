"""Eleven small repositories, one task each, worked on by the server's own loop: `python examples/task_suite.py`.

`--reference` has recorded turns in place of the model, which shows that tools and loop can solve every task; without it
the default model tries, and solves what a model of 135 million parameters can.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from dlite_agent.agent.run_spec import SMALL_MODEL, SMALL_OUTPUT, RunSpec
from dlite_agent.agent.runs import AgentRun, Runs, RunsSettings
from dlite_agent.agent.sandbox import Policy, Sandbox
from dlite_agent.api.app import build_app
from dlite_agent.config import ModelSettings, Settings
from dlite_agent.trace.log import read_log
from dlite_agent.trace.phases import timelines

sys.path.insert(0, str(Path(__file__).parents[1]))
from examples.reference_model import ReferenceModel, recorded

REPOS = Path(__file__).parent / "repos"


@dataclass(frozen=True)
class Task:
    """One repository with its task."""

    name: str
    kind: str
    text: str
    bundles: tuple[str, ...]
    history: tuple[dict[str, Any], ...]
    plan: tuple[str, ...]

    def spec(self, workspace: str, **options: Any) -> RunSpec:
        return RunSpec(task=self.text, workspace=workspace, bundles=self.bundles, **options)

    def prepare(self, folder: Path) -> None:
        """Copy the repository to a new folder, with its commits."""
        shutil.copytree(REPOS / self.name / "repo", folder)
        _git(folder, "init", "-q")
        for step in ({"message": "start", "files": {}}, *self.history):
            for path, text in step["files"].items():
                (folder / path).write_text(text)
            _git(folder, "add", "-A")
            _git(folder, "commit", "-q", "-m", step["message"])

    async def solved(self, workspace: Path, answer: str | None) -> bool:
        """Whether the checker is content. It runs what the agent wrote, so it runs in the sandbox too."""
        with tempfile.TemporaryDirectory() as folder:
            given = Path(folder) / "answer.txt"
            given.write_text(answer or "")
            checker = REPOS / self.name / "check.py"
            policy = Policy(workspace, readable=(checker, given, Path(folder)))
            async with await Sandbox.open(policy) as sandbox:
                result = await sandbox.run([sys.executable, str(checker), str(workspace), str(given)])
        return result.exit_code == 0


def tiny(task: Task) -> dict[str, Any]:
    """Options for a model that cannot decide what to do next: it follows the task's plan, the arguments are its own."""
    model = {**SMALL_MODEL, "parallel_tool_calls": False, "plan": task.plan}
    return {"model": model, "limits": {"turns": 8, "output_bytes": SMALL_OUTPUT, "seconds": 600.0}}


def tasks() -> list[Task]:
    """All tasks, in name order."""
    found = []
    for folder in sorted(REPOS.iterdir()):
        about = json.loads((folder / "task.json").read_text())
        history = tuple(about.get("history", ()))
        bundles, plan = tuple(about["bundles"]), tuple(about["plan"])
        found.append(Task(folder.name, about["kind"], about["task"], bundles, history, plan))
    return found


def reference_runs(task: Task, settings: RunsSettings, data: Path) -> Runs:
    """Runs whose model says the task's recorded turns."""
    turns = recorded(REPOS / task.name / "reference.json")
    return Runs(settings, lambda run, owner: ReferenceModel(turns), data)


async def work(runs: Runs, task: Task, folder: Path, **options: Any) -> tuple[AgentRun, bool]:
    """One run of a task in a fresh copy of its repository, to its end; the run, and whether the task is solved."""
    workspace = folder / task.name
    task.prepare(workspace)
    run = await runs.start(task.spec(str(workspace), **options), "")
    assert run.task is not None
    await run.task
    return run, await task.solved(workspace, run.progress.answer)


@contextlib.asynccontextmanager
async def model_runs(settings: RunsSettings, data: Path, threads: int | None = None) -> AsyncIterator[Runs]:
    """Runs of the default model, in this process."""
    app = build_app(Settings(model=ModelSettings(threads=threads), data_dir=data), settings)
    async with app.router.lifespan_context(app):
        yield app.state.runs


async def suite(chosen: Sequence[Task], folder: Path, *, reference: bool) -> list[tuple[Task, AgentRun, bool]]:
    """All tasks one after the other."""
    workspaces = folder / "workspaces"
    workspaces.mkdir(parents=True)
    settings = RunsSettings(roots=(workspaces,))
    results = []
    if reference:
        for task in chosen:
            runs = reference_runs(task, settings, folder / "data" / task.name)
            results.append((task, *await work(runs, task, workspaces)))
            await runs.close()
        return results
    async with model_runs(settings, folder / "data") as runs:
        for task in chosen:
            results.append((task, *await work(runs, task, workspaces, **tiny(task))))
    return results


def overhead(run: AgentRun) -> float:
    """Share of a run's time that belongs neither to a turn of the model nor to a tool, from its trace."""
    (timeline,) = timelines(read_log(run.folder / "events.jsonl"))
    seconds = timeline.seconds()
    return (seconds["client"] + seconds["other"]) / timeline.wall


def table(results: Sequence[tuple[Task, AgentRun, bool]]) -> Table:
    """What became of each task."""
    columns = ("task", "kind", "end", "turns", "calls", "tokens", "tool s", "s", "loop", "solved")
    out = Table(*columns, title=f"{sum(solved for *_, solved in results)} of {len(results)} solved")
    for task, run, solved in results:
        at = run.progress
        figures = (at.turns, at.calls, at.tokens, f"{at.tool_seconds:.2f}", f"{at.seconds:.1f}", f"{overhead(run):.2%}")
        out.add_row(task.name, task.kind, run.state, *map(str, figures), "yes" if solved else "no")
    return out


def _git(folder: Path, *arguments: str) -> None:
    when = "2026-03-01T12:00:00Z"
    command = ["git", "-c", "user.name=Ada", "-c", "user.email=ada@example.org", "-c", "init.defaultBranch=main"]
    environment = os.environ | {"GIT_AUTHOR_DATE": when, "GIT_COMMITTER_DATE": when, "GIT_CONFIG_GLOBAL": os.devnull}
    subprocess.run([*command, *arguments], cwd=folder, env=environment, check=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("--reference", action="store_true", help="recorded turns in place of the model")
    parser.add_argument("--only", nargs="*", help="names of tasks")
    parser.add_argument("--keep", type=Path, help="keep workspaces, journals and event logs in this new folder")
    options = parser.parse_args()
    chosen = [task for task in tasks() if not options.only or task.name in options.only]
    with tempfile.TemporaryDirectory() as folder:
        place = options.keep or Path(folder) / "suite"
        results = asyncio.run(suite(chosen, place, reference=options.reference))
        Console().print(table(results))


if __name__ == "__main__":
    main()
