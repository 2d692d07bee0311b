"""What the sandbox tests share: one sandbox per test and level, and a look at the processes of the machine."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Callable, Coroutine
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dlite_agent.agent.sandbox import Level, Limits, Policy, Sandbox, SandboxResult, probe

QUICK = Limits(no_output_seconds=20, hard_seconds=30, processes=256, memory_bytes=1 << 30)


def levels(*wanted: Level) -> list[Any]:
    """The rungs among `wanted` as parameters; one that does not work here is skipped with its reason."""
    parameters = []
    for level in wanted:
        failure = asyncio.run(probe(level))
        marks = [pytest.mark.skip(reason=f"{level}: {failure}")] if failure else []
        parameters.append(pytest.param(level, id=str(level), marks=marks))
    return parameters


CONFINED = levels(Level.BUBBLEWRAP, Level.UNSHARE, Level.LANDLOCK)
PRIVATE = levels(Level.BUBBLEWRAP, Level.UNSHARE)
ALL = levels(*Level)
STRONGEST = "auto"


def workspace_in(folder: Path) -> Path:
    workspace = folder / "workspace"
    workspace.mkdir(exist_ok=True)
    return workspace


def with_sandbox(
    folder: Path, level: Level | str, work: Callable[[Sandbox], Coroutine[Any, Any, Any]], **policy: Any
) -> Any:
    """Run `work` with a sandbox on `folder/workspace`."""

    async def main() -> Any:
        chosen: Any = level if level == "auto" else Level(level)
        settings = {"limits": QUICK} | policy
        async with await Sandbox.open(Policy(workspace_in(folder), level=chosen, **settings)) as sandbox:
            return await work(sandbox)

    return asyncio.run(main())


def bash(
    folder: Path, level: Level | str, script: str, limits: dict[str, Any] | None = None, **policy: Any
) -> SandboxResult:
    """One bash script in a sandbox of its own."""

    async def work(sandbox: Sandbox) -> SandboxResult:
        return await sandbox.run(["bash", "-c", script], limits=replace(QUICK, **(limits or {})))

    result = with_sandbox(folder, level, work, **policy)
    assert isinstance(result, SandboxResult)
    return result


def marker() -> str:
    return f"dlite-test-{uuid.uuid4().hex}"


def processes_with(mark: str) -> list[int]:
    """Processes whose command line holds `mark`."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                if mark.encode() in (entry / "cmdline").read_bytes():
                    found.append(int(entry.name))
            except OSError:
                continue
    return found


def wait_until(condition: Callable[[], bool], seconds: float = 10.0) -> bool:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if condition():
            return True
        time.sleep(0.02)
    return condition()
