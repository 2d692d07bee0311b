"""Bundles at work: installed once into a sandbox's home, then one fresh shell per call.

What persists between calls is kept by us: the working folder, and the variables and functions that `install.sh` left.
After each call the bundles' state commands run; their time is reported apart from the tool's.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import shlex
import shutil
import stat
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from dlite_agent.agent.bundles import Bundle, BundleError, Tool, ToolOutcome, load_bundles
from dlite_agent.agent.sandbox import Sandbox, SandboxResult
from dlite_agent.agent.sandbox_paths import Contained
from dlite_agent.errors import DliteError, InvalidRequest, NotFound

INSTALL_SECONDS = 300.0
_SUBMISSION_BYTES = 64 << 20
_STATE_BYTES = 1 << 20
_PATH_BYTES = 4096
_KEPT = ".dlite"
_SWE_AGENT_MARK = "<<SWE_AGENT_SUBMISSION>>\n"
_SHELL_OWN = {"PWD", "OLDPWD", "SHLVL", "_", "BASH_ENV"}
_SNAPSHOT = "env -0 > {kept}/env && declare -f > {kept}/functions"


@dataclass(frozen=True, slots=True)
class Submission:
    """What the `submit` tool left: the final answer and the patch of the workspace against its last commit."""

    answer: str
    patch: str


class BundleRuntime:
    """The tools of some bundles, ready to be called in one sandbox; made by `open`."""

    def __init__(self, sandbox: Sandbox, bundles: Sequence[Bundle], tools: Mapping[str, Tool]) -> None:
        self.sandbox = sandbox
        self.tools = dict(tools)
        self.cwd = sandbox.paths.root
        self._bundles = list(bundles)
        self._numbers = itertools.count()
        # Commands can write there too, so it is only reached through a contained walk.
        self._home = Contained(sandbox.scratch / "home")
        self._inside = sandbox.home / _KEPT
        self._env: dict[str, str] = {}
        self._functions = ""
        self._printed: Submission | None = None

    @classmethod
    async def open(cls, sandbox: Sandbox, folders: Sequence[Path], hidden: Collection[str] = ()) -> BundleRuntime:
        """Load, copy and install bundles.

        Raises:
            BundleError: a bundle is malformed, its install.sh fails, or a tool is not found after it.
        """
        bundles, tools = load_bundles(folders, hidden)
        runtime = cls(sandbox, bundles, tools)
        await asyncio.to_thread(runtime._copy)
        await runtime._install()
        return runtime

    def schemas(self) -> list[dict[str, Any]]:
        """Function schemas in name order."""
        return [tool.schema() for tool in self.tools.values()]

    async def call(
        self, name: str, arguments: Mapping[str, Any], on_output: Callable[[bytes], None] | None = None
    ) -> ToolOutcome:
        """Run one tool call; calls may run at the same time.

        Raises:
            NotFound: no bundle has the tool.
            InvalidRequest: the arguments do not fit; `param` names the one at fault.
            SandboxFailed: the call could not be started confined.
        """
        tool = self.tools.get(name)
        if tool is None:
            raise NotFound(f"There is no tool {name}; there are {', '.join(self.tools)}.", param="name")
        line = tool.shell_line(arguments)
        kept = f"cwd-{next(self._numbers)}"
        result = await self._shell(line, {"DLITE_CWD_FILE": str(self._inside / kept)}, on_output=on_output)
        self._follow(kept)
        started = time.monotonic()
        state = await self._state()
        outcome = _outcome(name, result)
        if outcome.exit_code == 0 and _SWE_AGENT_MARK in outcome.output:
            self._printed = await asyncio.to_thread(_printed_submission, outcome) or self._printed
        return replace(outcome, state=state, state_seconds=time.monotonic() - started)

    def submission(self) -> Submission | None:
        """The last submission of this sandbox, if any: what our `submit` left in files, or SWE-agent's printed."""
        try:
            answer, patch = (
                self._home.read_bytes(f"{_KEPT}/submission/{name}", _SUBMISSION_BYTES) for name in ("answer", "patch")
            )
        except NotFound:
            return self._printed
        return Submission(answer.decode("utf-8", "replace"), patch.decode("utf-8", "replace"))

    def _copy(self) -> None:
        kept, tools = self._home.root / _KEPT, self._home.root / "tools"
        for folder in (kept, tools):
            if folder.is_symlink():
                folder.unlink()
        shutil.rmtree(tools, ignore_errors=True)
        kept.mkdir(exist_ok=True)
        (kept / "functions").unlink(missing_ok=True)
        for bundle in self._bundles:
            target = tools / bundle.name
            shutil.copytree(bundle.folder, target, symlinks=True)
            for program in (target / "bin").glob("*"):
                if not program.is_symlink():
                    program.chmod(program.stat().st_mode | stat.S_IXUSR | stat.S_IXGRP | stat.S_IXOTH)

    async def _install(self) -> None:
        base = self.sandbox.environment()
        folders = [self.sandbox.home / "tools" / bundle.name for bundle in self._bundles]
        self._env = {"PATH": ":".join([*(str(folder / "bin") for folder in folders), base["PATH"]])}
        installers = [bundle for bundle in self._bundles if (bundle.folder / "install.sh").is_file()]
        if not installers:
            await self._check_programs()
            return
        limits = replace(self.sandbox.policy.limits, hard_seconds=INSTALL_SECONDS, no_output_seconds=INSTALL_SECONDS)
        # One shell for all, as one installer may use what an earlier one has exported.
        steps = []
        for bundle in installers:
            folder = shlex.quote(str(self.sandbox.home / "tools" / bundle.name))
            steps.append(f"cd {folder} && . ./install.sh || {{ echo 'install.sh of {bundle.name} failed'; exit 1; }}")
        steps.append(_SNAPSHOT.format(kept=shlex.quote(str(self._inside))))
        result = await self.sandbox.run(["bash", "-c", "\n".join(steps)], env=self._env | self._places(), limits=limits)
        if result.exit_code != 0:
            file = installers[-1].folder / "install.sh"
            raise BundleError(file, "", f"installing failed ({result.reason}): {result.output[-2000:].strip()}")
        self._env = _exported(self._home.read_bytes(f"{_KEPT}/env", _STATE_BYTES), base)
        self._functions = f". {shlex.quote(str(self._inside / 'functions'))}\n"
        await self._check_programs()

    async def _check_programs(self) -> None:
        wanted = sorted({tool.executable for tool in self.tools.values()})
        checks = [f"type -t {shlex.quote(name)} > /dev/null || echo {shlex.quote(name)}" for name in wanted]
        result = await self._shell("\n".join(checks), {})
        missing = result.output.split()
        for tool in self.tools.values():
            if tool.executable in missing:
                raise BundleError(tool.bundle / "config.yaml", f"tools.{tool.name}", f"{tool.executable} is not found")

    async def _shell(
        self, line: str, extra: Mapping[str, str], on_output: Callable[[bytes], None] | None = None
    ) -> SandboxResult:
        name = f"call-{next(self._numbers)}"
        # In a file, as a line may be longer than one argument of a program can be.
        script = f"{self._functions}{line}\n".encode("utf-8", "surrogateescape")
        self._home.remove(f"{_KEPT}/{name}")
        self._home.write_bytes(f"{_KEPT}/{name}", script)
        env = self._env | self._places() | dict(extra)
        try:
            return await self.sandbox.run(
                ["bash", str(self._inside / name)], cwd=self.cwd, env=env, on_output=on_output
            )
        finally:
            self._home.remove(f"{_KEPT}/{name}")

    def _places(self) -> dict[str, str]:
        """Where tools find workspace and home; the last two are SWE-agent's names for them."""
        root, home = str(self.sandbox.paths.root), str(self.sandbox.home)
        return {"DLITE_WORKSPACE": root, "ROOT": root, "ENV_DIR": home}

    def _follow(self, name: str) -> None:
        """Keep the folder a call ended in, if it is one of the workspace."""
        folder = self.cwd
        with contextlib.suppress(NotFound, InvalidRequest):
            written = self._home.read_bytes(f"{_KEPT}/{name}", _PATH_BYTES)
            folder = self.sandbox.paths.resolve(os.fsdecode(written).rstrip("\n"))
        self._home.remove(f"{_KEPT}/{name}")
        self.cwd = folder if folder.is_dir() else self.sandbox.paths.root

    async def _state(self) -> dict[str, Any]:
        """What the state commands say: the object they print, or the one in ~/state.json if they print none."""
        state: dict[str, Any] = {}
        for bundle in self._bundles:
            if bundle.config.state_command is None:
                continue
            try:
                result = await self._shell(bundle.config.state_command, {})
                printed = _json_object(result.output)
                state |= printed if printed is not None else self._state_file()
            except DliteError as error:
                state["state_error"] = f"{bundle.name}: {error.message}"
        return state

    def _state_file(self) -> dict[str, Any]:
        try:
            content = self._home.read_bytes("state.json", _STATE_BYTES)
        except NotFound:
            return {}
        return _json_object(content.decode("utf-8", "replace")) or {}


def _outcome(name: str, result: SandboxResult) -> ToolOutcome:
    return ToolOutcome(
        tool=name,
        output=result.output,
        exit_code=result.exit_code,
        reason=str(result.reason),
        level=str(result.level),
        started=result.started,
        ended=result.ended,
        note=result.note,
        elided=result.elided,
        full_output=result.full_output,
    )


def _printed_submission(outcome: ToolOutcome) -> Submission | None:
    """The patch that a submit tool of SWE-agent prints between two marks."""
    text = outcome.output
    if outcome.full_output is not None:
        with outcome.full_output.open("rb") as file:
            text = file.read(_SUBMISSION_BYTES).decode("utf-8", "replace")
    parts = text.split(_SWE_AGENT_MARK)
    return Submission("", _SWE_AGENT_MARK.join(parts[1:-1])) if len(parts) > 2 else None


def _exported(snapshot: bytes, base: Mapping[str, str]) -> dict[str, str]:
    pairs = (entry.partition("=") for entry in snapshot.decode("utf-8", "replace").split("\0") if entry)
    return {
        name: value
        for name, _, value in pairs
        if base.get(name) != value and name not in _SHELL_OWN and not name.startswith(("DLITE_", "BASH_FUNC_"))
    }


def _json_object(text: str) -> dict[str, Any] | None:
    try:
        value = json.loads(text)
    except ValueError:
        return None
    return value if isinstance(value, dict) else None
