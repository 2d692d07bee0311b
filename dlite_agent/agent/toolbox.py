"""The tools of one run: bundles in a sandbox, MCP servers beside it, under one set of names."""

from __future__ import annotations

import copy
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dlite_agent.agent.bundle_runtime import BundleRuntime
from dlite_agent.agent.bundles import ToolOutcome
from dlite_agent.agent.mcp_bundle import McpBundle, McpServer
from dlite_agent.agent.run_spec import ModelOptions, RunSpec
from dlite_agent.agent.sandbox import Level, Limits, Policy, Sandbox
from dlite_agent.errors import InvalidRequest

SUBMIT = "submit"
"""The tool whose success ends a run."""
_ON_FILES = ("view_file", "replace_text", "insert_text", "undo_edit")
_MOST_PATHS = 64
_LARGEST = 2**31 - 1
PATCH = "patch.diff"
"""File of a run's folder that holds the submitted patch."""


class Toolbox:
    """Everything a run may call; made by `open`, ended by `close`."""

    def __init__(self, runtime: BundleRuntime, mcp: Sequence[McpBundle], folder: Path, options: ModelOptions) -> None:
        self._runtime = runtime
        self._folder = folder
        self._mcp = {name: bundle for bundle in mcp for name in bundle.tools}
        self._servers = list(mcp)
        names = [*runtime.tools, *(name for bundle in mcp for name in bundle.tools)]
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise InvalidRequest(f"The tool {twice[0]} is declared twice.", param="bundles")
        schemas = [*runtime.schemas(), *(schema for bundle in mcp for schema in bundle.schemas())]
        for name in options.plan:
            if name not in names:
                raise InvalidRequest(
                    f"The plan names {name}; there are {', '.join(sorted(names))}.", param="model.plan"
                )
        schemas.sort(key=lambda schema: str(schema["function"]["name"]))
        paths = _files(self.root) if options.known_paths else []
        self.schemas = [_bounded(schema, options.argument_characters, paths) for schema in schemas]

    @classmethod
    async def open(
        cls, spec: RunSpec, workspace: Path, folders: Sequence[Path], folder: Path, mcp: Sequence[McpServer] = ()
    ) -> Toolbox:
        """Set up sandbox and bundles; `folder` keeps the tools' home between processes, and what they hand in.

        Raises:
            SandboxUnavailable: no permitted level works here.
            BundleError: a bundle cannot be used.
            McpError: a server does not start.
        """
        limits = Limits(
            hard_seconds=spec.limits.call_seconds,
            no_output_seconds=min(spec.limits.silent_seconds, spec.limits.call_seconds),
            output_bytes=spec.limits.output_bytes,
        )
        policy = Policy(
            workspace,
            level="auto" if spec.sandbox == "auto" else Level(spec.sandbox),
            protect_git=spec.protect_git,
            state_dir=folder / "sandbox",
            limits=limits,
        )
        sandbox = await Sandbox.open(policy)
        servers: list[McpBundle] = []
        try:
            runtime = await BundleRuntime.open(sandbox, folders, spec.hidden_tools)
            for server in mcp:
                servers.append(await McpBundle.open(server))
            return cls(runtime, servers, folder, spec.model)
        except BaseException:
            for one in servers:
                await one.close()
            sandbox.close()
            raise

    @property
    def level(self) -> str:
        """The confinement in force."""
        return str(self._runtime.sandbox.level)

    @property
    def refused(self) -> dict[str, str]:
        """Stronger levels that do not work here, and why."""
        return {str(level): reason for level, reason in self._runtime.sandbox.refused.items()}

    @property
    def root(self) -> Path:
        return self._runtime.sandbox.paths.root

    @property
    def submits(self) -> bool:
        """Whether the model can hand in an answer by a tool."""
        return SUBMIT in self._runtime.tools

    @property
    def cwd(self) -> str:
        """Working folder of the next call, below the workspace."""
        return str(self._runtime.cwd.relative_to(self.root))

    @cwd.setter
    def cwd(self, folder: str) -> None:
        found = self._runtime.sandbox.paths.resolve(folder)
        self._runtime.cwd = found if found.is_dir() else self.root

    def where(self, name: str) -> str:
        """What confines a tool: the sandbox's level, or `mcp` for one that runs in a server of its own."""
        return "mcp" if name in self._mcp else self.level

    def check(self, name: str, arguments: Mapping[str, Any]) -> None:
        """Raises InvalidRequest, worded for the model, if there is no such tool or the arguments do not fit."""
        if name in self._mcp:
            return
        tool = self._runtime.tools.get(name)
        if tool is None:
            known = ", ".join(schema["function"]["name"] for schema in self.schemas)
            raise InvalidRequest(f"There is no tool {name}; there are {known}.", param="name")
        tool.shell_line(arguments)

    async def call(self, name: str, arguments: Mapping[str, Any]) -> ToolOutcome:
        """Run one call; calls may run at the same time. Raises DliteError if it could not be run."""
        if name in self._mcp:
            return await self._mcp[name].call(name, arguments)
        return await self._runtime.call(name, arguments)

    def take_submission(self) -> str | None:
        """The answer that the submit tool left last; its patch is then in the run's folder."""
        submission = self._runtime.submission()
        if submission is None:
            return None
        part = self._folder / f"{PATCH}.part"
        part.write_text(submission.patch)
        part.replace(self._folder / PATCH)
        return submission.answer

    async def close(self) -> None:
        for server in self._servers:
            await server.close()
        self._runtime.sandbox.close()


def _bounded(schema: dict[str, Any], characters: int | None, paths: Sequence[str]) -> dict[str, Any]:
    """The schema with strings bounded to so many characters, integers to 32 bits, paths to these, by the grammar."""
    bounded = copy.deepcopy(schema)
    function = bounded["function"]
    for name, entry in function.get("parameters", {}).get("properties", {}).items():
        kind = entry.get("type") if isinstance(entry, dict) and "enum" not in entry else None
        if kind == "string" and paths and name == "path" and function["name"] in _ON_FILES:
            entry["enum"] = list(paths)
        elif kind == "string" and characters is not None:
            entry["maxLength"] = characters
        elif kind == "integer" and characters is not None:
            entry.setdefault("minimum", -_LARGEST)
            entry.setdefault("maximum", _LARGEST)
    return bounded


def _files(root: Path) -> list[str]:
    """The files of a workspace in name order, without version control and caches; the first so many."""
    found: list[str] = []
    for folder, folders, files in os.walk(root):
        folders[:] = sorted(name for name in folders if not name.startswith((".", "__")))
        found += [str((Path(folder) / name).relative_to(root)) for name in sorted(files)]
        if len(found) >= _MOST_PATHS:
            break
    return found[:_MOST_PATHS]


def bundle_folders(names: Sequence[str], known: Mapping[str, Path]) -> list[Path]:
    """Folders of bundles by name. Raises InvalidRequest naming what there is."""
    for name in names:
        if name not in known:
            raise InvalidRequest(f"There is no bundle {name!r}; there are {', '.join(sorted(known))}.", param="bundles")
    return [known[name] for name in dict.fromkeys(names)]
