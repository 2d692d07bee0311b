"""Record a session: `python examples/record_session.py TASK OUT.jsonl [options]`, as those in `sessions/` were.

The default model works on a task of `examples/repos/`, by the loop, in a process of its own. With `--kill-after N` that
process is killed with SIGKILL in its N-th turn, and another one takes the run up. The log is then written to OUT with
the workspace's path taken out.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from dlite_agent.agent.run_spec import SMALL_OUTPUT
from dlite_agent.agent.runs import RunsSettings
from dlite_agent.trace.events import AnyEvent, Event, TurnEnd, TurnStart
from dlite_agent.trace.log import dump_lines, read_log

sys.path.insert(0, str(Path(__file__).parents[1]))
from examples.task_suite import Task, model_runs, tasks


def options_of(arguments: argparse.Namespace) -> dict[str, Any]:
    model = {
        "temperature": arguments.temperature,
        "seed": arguments.seed,
        "max_tokens": 160,
        "argument_characters": arguments.argument_characters,
        "repetition_penalty": arguments.repetition_penalty,
        "parallel_tool_calls": arguments.parallel,
    }
    limits = {"turns": arguments.turns, "output_bytes": SMALL_OUTPUT, "seconds": 3600.0}
    words = {} if arguments.instructions is None else {"instructions": arguments.instructions}
    return {"model": model, "limits": limits, **words}


async def work(task: Task, folder: Path, options: dict[str, Any]) -> None:
    """Begin the run, or go on with the one that is there."""
    workspace = folder / "workspace"
    async with model_runs(RunsSettings(roots=(folder,)), folder / "data", 1) as runs:
        run = next(iter(runs.list("")), None)
        if run is None:
            task.prepare(workspace)
            run = await runs.start(task.spec(str(workspace), **options), "")
        assert run.task is not None
        await run.task
        solved = await task.solved(workspace, run.progress.answer)
        print(f"{task.name}: {run.state}, {run.progress.turns} turns, solved: {'yes' if solved else 'no'}", flush=True)


def killed_in_turn(process: subprocess.Popen[bytes], folder: Path, turns: int) -> None:
    """Kill the process once so many turns are committed and the next has begun."""
    while process.poll() is None:
        for journal in folder.glob("data/runs/*/journal.jsonl"):
            if sum(json.loads(line)["kind"] == "turn" for line in journal.read_text().splitlines()) >= turns:
                time.sleep(0.5)
                process.send_signal(signal.SIGKILL)
        time.sleep(0.02)


def without_paths(events: list[AnyEvent], folder: str) -> list[AnyEvent]:
    """The events with `folder` taken out of their text; ids that spell it go too."""
    cleaned: list[AnyEvent] = []
    for event in events:
        if isinstance(event, Event):
            text = event.model_dump_json()
            if folder in text:
                event = type(event).model_validate_json(text.replace(f"{folder}/", "").replace(folder, "."))
                gone = {TurnStart: "new_ids", TurnEnd: "output_ids"}.get(type(event))
                event = event.model_copy(update={gone: None}) if gone else event
        cleaned.append(event)
    return cleaned


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("task", choices=[task.name for task in tasks()])
    parser.add_argument("out", type=Path)
    parser.add_argument("--turns", type=int, default=8)
    parser.add_argument("--temperature", type=float, default=0.6)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--argument-characters", type=int, default=80)
    parser.add_argument("--repetition-penalty", type=float, default=1.05)
    parser.add_argument("--parallel", action="store_true")
    parser.add_argument("--instructions")
    parser.add_argument("--kill-after", type=int, help="turns after which the first process is killed")
    parser.add_argument("--inside", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    task = next(task for task in tasks() if task.name == arguments.task)
    if arguments.inside is not None:
        asyncio.run(work(task, arguments.inside, options_of(arguments)))
        return
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name).resolve()
        command = [sys.executable, *sys.argv, "--inside", str(folder)]
        if arguments.kill_after is not None:
            with subprocess.Popen(command, env=dict(os.environ)) as process:
                killed_in_turn(process, folder, arguments.kill_after)
        subprocess.run(command, check=True)
        (log,) = folder.glob("data/runs/*/events.jsonl")
        events = without_paths(read_log(log).events, str(folder / "workspace"))
        text = dump_lines(events)
        if str(folder) in text:
            raise SystemExit(f"{arguments.out} would name {folder}")
        arguments.out.write_text(text)


if __name__ == "__main__":
    main()
