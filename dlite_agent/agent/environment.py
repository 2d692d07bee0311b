"""Our sandbox as an environment of mini-swe-agent, so that a harness of others may run its commands in it.

mini-swe-agent's own protocol: `execute` blocks, each action is a fresh shell, and a first output line with the sentinel
ends the run by an exception of that package, which is only needed for that.
"""

from __future__ import annotations

import asyncio
import importlib
import os
import platform
from collections.abc import Coroutine
from pathlib import Path
from typing import Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict

from dlite_agent.agent.sandbox import Level, Limits, Policy, Sandbox, SandboxResult
from dlite_agent.errors import DliteError, InvalidRequest

SUBMIT_SENTINEL = "COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"
_Result = TypeVar("_Result")


class DliteEnvironmentConfig(BaseModel):
    """Settings of one environment; seconds and bytes. Unknown ones are refused."""

    model_config = ConfigDict(extra="forbid")

    cwd: str = ""
    """Workspace; the process's working folder if empty."""
    env: dict[str, str] = {}
    """Variables added to the scrubbed environment."""
    timeout: float = 120.0
    """Longest run of an action that names none itself."""
    no_output_timeout: float = 30.0
    """Longest silence of an action."""
    level: Literal["auto", "bubblewrap", "unshare", "landlock", "plain"] = "auto"
    """Confinement to insist on; `auto` takes the strongest that works, never `plain`."""
    network: bool = False
    protect_git: bool = True
    readable: list[str] = []
    """More paths that actions may read."""
    output_bytes: int = 20_000
    memory_bytes: int = 4 << 30


class DliteEnvironment:
    """Runs actions in a `Sandbox`, synchronously: not to be called from inside a running event loop."""

    def __init__(self, **settings: Any) -> None:
        self.config = DliteEnvironmentConfig(**settings)
        self._sandbox = _wait(Sandbox.open(self._policy()))

    @property
    def level(self) -> Level:
        """The confinement in force."""
        return self._sandbox.level

    def execute(self, action: dict[str, Any], cwd: str = "", *, timeout: float | None = None) -> dict[str, Any]:
        """Run `action["command"]`; the answer has `output`, `returncode` (-1 if it was ended or refused),
        `exception_info` and `extra`. Raises minisweagent's Submitted when the output says so."""
        seconds = self.config.timeout if timeout is None else timeout
        try:
            limits = self._limits(seconds)
            command = ["bash", "-c", str(action.get("command", ""))]
            result = _wait(self._sandbox.run(command, cwd=cwd or ".", env=self.config.env, limits=limits))
        except DliteError as error:
            return {
                "output": "",
                "returncode": -1,
                "exception_info": error.message,
                "extra": {"exception_type": type(error).__name__, "exception": error.message},
            }
        answer = _answer(result)
        self._check_submitted(answer)
        return answer

    def get_template_vars(self, **extra: Any) -> dict[str, Any]:
        """What prompt templates may use: settings, facts of the system, the level; nothing of the environment's."""
        return self.config.model_dump() | platform.uname()._asdict() | {"sandbox_level": str(self.level)} | extra

    def serialize(self) -> dict[str, Any]:
        kind = f"{type(self).__module__}.{type(self).__name__}"
        settings = self.config.model_dump(mode="json")
        return {
            "info": {
                "config": {"environment": settings, "environment_type": kind},
                "sandbox": {
                    "level": str(self.level),
                    "refused": {str(level): reason for level, reason in self._sandbox.refused.items()},
                },
            }
        }

    def close(self) -> None:
        """Remove the sandbox's private folders."""
        self._sandbox.close()

    def _policy(self) -> Policy:
        return Policy(
            workspace=Path(self.config.cwd or os.getcwd()),  # noqa: PTH109 - the protocol speaks of strings
            level="auto" if self.config.level == "auto" else Level(self.config.level),
            network=self.config.network,
            protect_git=self.config.protect_git,
            readable=tuple(Path(path) for path in self.config.readable),
            limits=self._limits(self.config.timeout),
        )

    def _limits(self, seconds: float) -> Limits:
        return Limits(
            hard_seconds=seconds,
            no_output_seconds=self.config.no_output_timeout,
            output_bytes=self.config.output_bytes,
            memory_bytes=self.config.memory_bytes,
        )

    def _check_submitted(self, answer: dict[str, Any]) -> None:
        first, _, rest = answer["output"].lstrip().partition("\n")
        if first.strip() != SUBMIT_SENTINEL or answer["returncode"] != 0:
            return
        try:
            exceptions = importlib.import_module("minisweagent.exceptions")
        except ImportError as error:
            message = "Only mini-swe-agent understands the submit sentinel; install it to use this environment with it."
            raise InvalidRequest(message, param="command") from error
        extra = {"exit_status": "Submitted", "submission": rest}
        raise exceptions.Submitted({"role": "exit", "content": rest, "extra": extra})


def _answer(result: SandboxResult) -> dict[str, Any]:
    return {
        "output": result.output,
        "returncode": -1 if result.exit_code is None else result.exit_code,
        "exception_info": result.note,
        "extra": {
            "level": str(result.level),
            "reason": str(result.reason),
            "elided": result.elided,
            "full_output": str(result.full_output) if result.full_output else None,
            "seconds": result.ended - result.started,
        },
    }


def _wait(work: Coroutine[Any, Any, _Result]) -> _Result:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(work)
    work.close()
    raise InvalidRequest("DliteEnvironment blocks; inside an event loop use Sandbox itself.", param="environment")
