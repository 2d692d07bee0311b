"""Runs whose model says what a test wrote for it; the loop, the parser, the tools and the sandbox are the real ones."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from dlite_agent.agent.run_model import Emit, TurnReply, TurnRequest
from dlite_agent.agent.run_spec import RunSpec
from dlite_agent.agent.runs import AgentRun, Runs, RunsSettings
from dlite_agent.session.deltas import Delta
from examples.reference_model import ReferenceModel


def call(name: str, **arguments: Any) -> str:
    """One call as a model writes it."""
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def shell(command: str) -> str:
    return call("shell", command=command)


SUBMIT = call("submit", answer="done")


class Scripted(ReferenceModel):
    """As the reference model, with the requests it was sent, and a step before each piece that a test may hold up.

    `cut` lists turns that end at their token limit; a turn in `hold` is said, but not over before its event.
    """

    def __init__(
        self, turns: Sequence[str], *, cut: Sequence[int] = (), hold: Mapping[int, asyncio.Event] | None = None
    ) -> None:
        super().__init__(turns)
        self.requests: list[TurnRequest] = []
        self._cut = cut
        self._hold = hold or {}

    async def turn(self, request: TurnRequest, emit: Emit) -> AsyncGenerator[Delta | TurnReply, None]:
        self.requests.append(request)
        number = sum(message.role == "assistant" for message in request.messages)
        async for item in super().turn(request, emit):
            if isinstance(item, TurnReply) and number in self._hold:
                await self._hold[number].wait()
            yield TurnReply(item.message, number in self._cut, item.tokens) if isinstance(item, TurnReply) else item


def workspace_in(folder: Path) -> Path:
    workspace = folder / "work"
    workspace.mkdir(exist_ok=True)
    return workspace


def with_runs(folder: Path, model: ReferenceModel, work: Callable[[Runs], Awaitable[Any]], **settings: Any) -> Any:
    """Run `work` with runs whose workspaces lie in `folder` and whose records outlive it there."""

    async def main() -> Any:
        runs = Runs(RunsSettings(roots=(folder,), **settings), lambda run, owner: model, folder / "data")
        await runs.recover()
        try:
            return await work(runs)
        finally:
            await runs.close()

    return asyncio.run(main())


def spec(**fields: Any) -> RunSpec:
    usual = {"task": "Do it.", "workspace": "work", "bundles": ("shell", "submit"), "protect_git": False}
    return RunSpec.model_validate(usual | fields)


def finished(folder: Path, model: ReferenceModel, /, **fields: Any) -> AgentRun:
    """A run of these turns, at its end."""

    async def work(runs: Runs) -> AgentRun:
        run = await runs.start(spec(**fields), "")
        assert run.task is not None
        await run.task
        return run

    workspace_in(folder)
    run = with_runs(folder, model, work)
    assert isinstance(run, AgentRun)
    return run


def results(run: AgentRun) -> list[str]:
    """What the tools answered, in order."""
    return [message.content for message in run.progress.messages if message.role == "tool"]
