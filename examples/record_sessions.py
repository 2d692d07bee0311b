"""Record the sessions in `sessions/`: `python examples/record_sessions.py [--out FOLDER] [NAME ...]`.

The default model works on tasks of `examples/repos/` by the loop, with real tools in a real sandbox, and each run's log
becomes one file, the workspace's path taken out. The interrupted one works in processes of its own: the first is killed
with SIGKILL, the second takes the run up.
"""

from __future__ import annotations

import argparse
import asyncio
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dlite_agent.agent.run_spec import SMALL_MODEL, SMALL_OUTPUT
from dlite_agent.agent.runs import AgentRun, Runs, RunsSettings
from dlite_agent.trace.events import AnyEvent, Event, TurnEnd, TurnStart
from dlite_agent.trace.log import dump_lines, read_log

sys.path.insert(0, str(Path(__file__).parents[1]))
from examples.task_suite import Task, model_runs, tasks

LEAST_TURNS = 5
SEEDS = range(1, 9)
INSTRUCTIONS = (
    "You solve tasks in a folder of files by calling tools, one step a call. Look at the files first with view_file. "
    "When you have done the task, call submit with your answer."
)


@dataclass(frozen=True)
class Recipe:
    """How one session is made. The first of `SEEDS` whose run has at least `LEAST_TURNS` turns is taken.

    The model follows the task's plan, but where several calls a turn are wanted: those it chooses freely.

    kill_after: turns after which the first process is killed. hidden: tools left out; without `submit` the run goes on
    to its limit, where this model, free to choose, would hand in an answer at once.
    """

    task: str
    turns: int = 8
    temperature: float = 0.3
    parallel: bool = False
    output_bytes: int = SMALL_OUTPUT
    kill_after: int | None = None
    hidden: tuple[str, ...] = ()
    model: dict[str, Any] = field(default_factory=dict)

    def options(self, seed: int) -> dict[str, Any]:
        model: dict[str, Any] = {**SMALL_MODEL, "max_tokens": 160, "repetition_penalty": 1.1}
        model |= {"parallel_tool_calls": self.parallel}
        model |= {"temperature": self.temperature, "seed": seed, "plan": () if self.parallel else _task(self).plan}
        limits = {"turns": self.turns, "output_bytes": self.output_bytes, "seconds": 3600.0}
        words = {"instructions": INSTRUCTIONS, "hidden_tools": self.hidden}
        return {"model": model | self.model, "limits": limits, **words}


RECIPES = {
    "parallel-tools": Recipe("parallel_read", turns=6, parallel=True, hidden=("submit",), model={"max_tokens": 240}),
    "failing-test": Recipe("failing_test", model={"max_tokens": 220}),
    "log-hunt": Recipe("log_hunt"),
    "long-read": Recipe("long_read", output_bytes=3000),
    "refactor": Recipe("refactor", turns=10, model={"max_tokens": 220}),
    "interrupted": Recipe("off_by_one", kill_after=3, model={"max_tokens": 220}),
}


async def work(runs: Runs, recipe: Recipe, seed: int, folder: Path) -> AgentRun:
    """Begin the run in `folder`, or go on with the one that works there."""
    task = _task(recipe)
    run = next((run for run in runs.list("") if run.workspace == folder), None)
    if run is None:
        task.prepare(folder)
        run = await runs.start(task.spec(str(folder), **recipe.options(seed)), "")
    assert run.task is not None
    await run.task
    return run


def _task(recipe: Recipe) -> Task:
    return next(task for task in tasks() if task.name == recipe.task)


async def record(names: list[str], folder: Path, out: Path) -> None:
    """All sessions that need no process of their own."""
    async with model_runs(RunsSettings(roots=(folder,)), folder / "data", 1) as runs:
        for name in names:
            for seed in SEEDS:
                workspace = folder / f"{name}-{seed}"
                run = await work(runs, RECIPES[name], seed, workspace)
                solved = await _task(RECIPES[name]).solved(workspace, run.progress.answer)
                print(f"{name}, seed {seed}: {_became(run)}, {'solved' if solved else 'not solved'}", flush=True)
                if run.progress.turns >= LEAST_TURNS:
                    write(run.folder / "events.jsonl", workspace, out / f"{name}.jsonl")
                    break


def _became(run: AgentRun) -> str:
    return f"{run.state} after {run.progress.turns} turns and {run.progress.calls} calls"


async def one(name: str, seed: int, folder: Path) -> None:
    """One session in this process."""
    async with model_runs(RunsSettings(roots=(folder,)), folder / "data", 1) as runs:
        run = await work(runs, RECIPES[name], seed, folder / "workspace")
        print(f"{name}, seed {seed}: {_became(run)}", flush=True)


def record_killed(name: str, folder: Path, out: Path) -> None:
    """A session whose first process is killed."""
    for seed in SEEDS:
        place = folder / f"{name}-{seed}"
        place.mkdir()
        command = [sys.executable, __file__, name, "--inside", str(place), "--seed", str(seed)]
        with subprocess.Popen(command) as process:
            _kill_after(process, place, RECIPES[name].kill_after or 0)
        subprocess.run(command, check=True)
        (log,) = place.glob("data/runs/*/events.jsonl")
        starts = sum(isinstance(event, TurnStart) for event in read_log(log).events)
        if starts >= LEAST_TURNS:
            write(log, place / "workspace", out / f"{name}.jsonl")
            return


def _kill_after(process: subprocess.Popen[bytes], folder: Path, turns: int) -> None:
    """Kill the process while it works on the turn behind so many committed ones."""
    while process.poll() is None:
        for journal in folder.glob("data/runs/*/journal.jsonl"):
            if journal.read_text().count('{"kind":"turn",') >= turns:
                time.sleep(0.5)
                process.send_signal(signal.SIGKILL)
        time.sleep(0.02)


def write(log: Path, workspace: Path, out: Path) -> None:
    """The log without the workspace's path."""
    out.write_text(dump_lines(without_path(read_log(log).events, str(workspace))))


def without_path(events: list[AnyEvent], folder: str) -> list[AnyEvent]:
    """The events with a folder's path taken out of their text; ids that spell it go too."""
    cleaned: list[AnyEvent] = []
    for event in events:
        if isinstance(event, Event) and folder in (text := event.model_dump_json()):
            event = type(event).model_validate_json(text.replace(f"{folder}/", "").replace(folder, "."))
            gone = {TurnStart: "new_ids", TurnEnd: "output_ids"}.get(type(event))
            event = event.model_copy(update={gone: None}) if gone else event
        cleaned.append(event)
    return cleaned


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(RECIPES)}; all by default")
    parser.add_argument("--out", type=Path, default=Path("sessions"))
    parser.add_argument("--inside", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--seed", type=int, default=1, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    names = arguments.names or list(RECIPES)
    if unknown := [name for name in names if name not in RECIPES]:
        parser.error(f"there is no session {unknown[0]}; there are {', '.join(RECIPES)}")
    if arguments.inside is not None:
        asyncio.run(one(names[0], arguments.seed, arguments.inside))
        return
    with tempfile.TemporaryDirectory() as folder:
        plain = [name for name in names if RECIPES[name].kill_after is None]
        if plain:
            asyncio.run(record(plain, Path(folder).resolve(), arguments.out))
        for name in names:
            if name not in plain:
                record_killed(name, Path(folder).resolve(), arguments.out)


if __name__ == "__main__":
    main()
