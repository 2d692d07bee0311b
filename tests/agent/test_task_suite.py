"""Eleven small repositories: with recorded turns in the model's place, the loop and the tools solve them all."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

from dlite_agent.agent.run_spec import SMALL_MODEL, End, RunSpec
from dlite_agent.agent.runs import AgentRun, RunsSettings, known_bundles
from dlite_agent.agent.toolbox import Toolbox, bundle_folders
from dlite_agent.trace.log import read_log
from dlite_agent.trace.phases import timelines
from examples.task_suite import Task, reference_runs, tasks, work
from tests.agent.scripted import Scripted, with_runs, workspace_in


def test_reference_turns_solve_all(tmp_path: Path) -> None:
    async def one(task: Task) -> tuple[str, AgentRun, bool]:
        folder = tmp_path / task.name
        folder.mkdir()
        runs = reference_runs(task, RunsSettings(roots=(folder,)), folder / "data")
        run, solved = await work(runs, task, folder)
        await runs.close()
        return task.name, run, solved

    async def main() -> list[tuple[str, AgentRun, bool]]:
        return await asyncio.gather(*(one(task) for task in tasks()))

    results = asyncio.run(main())
    assert len(results) == 11
    assert {name: (run.state, solved) for name, run, solved in results} == {
        name: (str(End.SUBMITTED), True) for name, _, _ in results
    }
    for _, run, _ in results:
        log = read_log(run.folder / "events.jsonl")
        assert log.problems == []
        (timeline,) = timelines(log)
        assert len(timeline.tools) == run.progress.calls
        assert {tool.sandbox for tool in timeline.tools} == {run.level}


def test_checkers_are_not_content_with_an_untouched_repository(tmp_path: Path) -> None:
    async def main() -> list[str]:
        wrong = []
        for task in tasks():
            task.prepare(tmp_path / task.name)
            if await task.solved(tmp_path / task.name, ""):
                wrong.append(task.name)
        return wrong

    assert asyncio.run(main()) == []


def test_small_models_options_are_a_runs_options() -> None:
    RunSpec.model_validate({"task": "t", "workspace": "w", "model": dict(SMALL_MODEL)})


def test_no_call_of_a_small_model_outgrows_its_turn(tmp_path: Path) -> None:
    """At a token a character, far more than text takes; what is escaped or not ASCII may take more still."""

    async def schemas() -> list[dict[str, Any]]:
        spec = RunSpec.model_validate({"task": "t", "workspace": ".", "model": dict(SMALL_MODEL)})
        folders = bundle_folders(spec.bundles, known_bundles())
        toolbox = await Toolbox.open(spec, workspace_in(tmp_path), folders, tmp_path)
        await toolbox.close()
        return toolbox.schemas

    for schema in asyncio.run(schemas()):
        function = schema["function"]
        longest = {}
        for name, entry in function["parameters"]["properties"].items():
            assert entry["type"] in ("string", "integer", "boolean"), name
            sizes = {"string": entry.get("maxLength"), "integer": len(str(-(2**31))), "boolean": len("false")}
            longest[name] = "x" * (sizes[entry["type"]] or max(map(len, entry["enum"])))
        call = json.dumps({"name": function["name"], "arguments": longest})
        assert len(call) < SMALL_MODEL["max_tokens"], function["name"]


def test_strings_and_paths_in_calls_are_bounded_where_asked(tmp_path: Path) -> None:
    model = Scripted(["All is well."])

    async def start(runs: object) -> None:
        spec = RunSpec.model_validate(
            {
                "task": "t",
                "workspace": "work",
                "bundles": ["files"],
                "model": {"argument_characters": 40, "known_paths": True},
            }
        )
        run = await runs.start(spec, "")  # type: ignore[attr-defined]
        await run.task

    workspace = workspace_in(tmp_path)
    (workspace / "src").mkdir()
    (workspace / ".git").mkdir()
    for name in ("b.py", "src/a.py", ".git/HEAD"):
        (workspace / name).touch()
    with_runs(tmp_path, model, start)
    tools = {tool["function"]["name"]: tool["function"] for tool in model.requests[0].tools}
    properties = tools["view_file"]["parameters"]["properties"]
    assert properties["path"]["enum"] == ["b.py", "src/a.py"]
    assert (properties["start"]["minimum"], properties["start"]["maximum"]) == (1 - 2**31, 2**31 - 1)
    assert "maxLength" not in properties["start"]
    assert tools["grep_files"]["parameters"]["properties"]["pattern"]["maxLength"] == 40
