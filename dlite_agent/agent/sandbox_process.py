"""One sandboxed command: its process tree, its pipes and its limits, watched on the running event loop."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from dlite_agent.agent.sandbox_levels import Level, Limits, View, command_line
from dlite_agent.agent.sandbox_output import BoundedOutput
from dlite_agent.agent.sandbox_watch import ProcessTable
from dlite_agent.errors import DliteError, InvalidRequest

_WATCH_S = 0.1
_DRAIN_S = 2.0
_KILL_S = 5.0
_READ_BYTES = 1 << 16
_processes = ProcessTable()


class SandboxFailed(DliteError):
    """The sandbox, not the command, has failed: the command was never started."""

    code = "sandbox_failed"


class Reason(StrEnum):
    """Why a command ended: by itself, or by which limit."""

    EXIT = "exit"
    NO_OUTPUT = "no_output"
    HARD_LIMIT = "hard_limit"
    MEMORY = "memory"
    PROCESSES = "processes"
    OUTPUT = "output"


@dataclass(frozen=True, slots=True)
class SandboxResult:
    """One command's outcome.

    Args:
        level: the confinement in force.
        exit_code: the command's own; 128 + n if signal n ended it; None if we ended it (see reason).
        reason: what ended it.
        output: standard output and error as they came, UTF-8 with U+FFFD for the rest, head and tail if too long.
        elided: bytes left out of `output`; all of it, up to the spool limit, is then in `full_output`.
        started, ended: monotonic seconds of this process.
        setup_seconds: the part of that before the command began, or None if it never did.
        note: a sentence for the model if we ended the command, else empty.
    """

    level: Level
    exit_code: int | None
    reason: Reason
    output: str
    elided: int
    full_output: Path | None
    started: float
    ended: float
    setup_seconds: float | None
    note: str


class Command:
    """Use once: `await Command(...).run(...)`."""

    def __init__(
        self, level: Level, limits: Limits, output: BoundedOutput, on_output: Callable[[bytes], None] | None
    ) -> None:
        self._level = level
        self._limits = limits
        self._output = output
        self._on_output = on_output
        self._loop = asyncio.get_running_loop()
        self._watched: set[int] = set()
        self._exited = asyncio.Event()
        self._drained = asyncio.Event()
        self._unwatched = asyncio.Event()
        self._lifeline = -1
        self._reason = Reason.EXIT
        self._status = b""
        self._ready_at: float | None = None
        self._last_output = 0.0

    async def run(self, view: View, cwd: Path, argv: Sequence[str], env: Mapping[str, str]) -> SandboxResult:
        started = self._last_output = time.monotonic()
        process = self._start(view, cwd, argv, env)
        try:
            while not self._exited.is_set():
                if not await _within(_WATCH_S, self._exited):
                    self._enforce(process.pid, started)
        finally:
            await self._end(process)
        ended = time.monotonic()
        if self._ready_at is None and self._reason is Reason.EXIT:
            said = self._status.partition(b"!")[2].decode("utf-8", "replace").strip() or self._output.text().strip()
            raise SandboxFailed(f"{self._level} did not start the command: {said or 'no reason given'}.")
        code = process.returncode if process.returncode >= 0 else 128 - process.returncode
        return SandboxResult(
            level=self._level,
            exit_code=code if self._reason is Reason.EXIT else None,
            reason=self._reason,
            output=self._output.text(),
            elided=self._output.elided,
            full_output=self._output.full_path,
            started=started,
            ended=ended,
            setup_seconds=None if self._ready_at is None else self._ready_at - started,
            note=self._note(),
        )

    def _start(self, view: View, cwd: Path, argv: Sequence[str], env: Mapping[str, str]) -> subprocess.Popen[bytes]:
        out_read, out_write = os.pipe()
        status_read, status_write = os.pipe()
        lifeline_read, self._lifeline = os.pipe()
        try:
            process = subprocess.Popen(
                command_line(self._level, view, self._limits, cwd, status_write, lifeline_read, argv),
                cwd="/",
                env=dict(env),
                stdin=subprocess.DEVNULL,
                stdout=out_write,
                stderr=out_write,
                pass_fds=(status_write, lifeline_read),
                start_new_session=True,
            )
        except BaseException as error:
            for descriptor in (out_read, status_read, self._lifeline):
                os.close(descriptor)
            if isinstance(error, OSError | ValueError):
                raise InvalidRequest(f"The command cannot be started: {error}.", param="argv") from error
            raise
        finally:
            for descriptor in (out_write, status_write, lifeline_read):
                os.close(descriptor)
        os.set_blocking(out_read, False)
        os.set_blocking(status_read, False)
        self._watch(out_read, self._read_output)
        self._watch(status_read, self._read_status)
        self._watch(os.pidfd_open(process.pid), self._leave_process)
        return process

    def _watch(self, descriptor: int, callback: Callable[[int], None]) -> None:
        self._watched.add(descriptor)
        self._loop.add_reader(descriptor, callback, descriptor)

    def _forget(self, descriptor: int) -> None:
        if descriptor in self._watched:
            self._watched.discard(descriptor)
            self._loop.remove_reader(descriptor)
            os.close(descriptor)

    def _read_output(self, descriptor: int) -> None:
        try:
            chunk = os.read(descriptor, _READ_BYTES)
        except BlockingIOError:
            return
        if not chunk:
            self._forget(descriptor)
            self._drained.set()
            return
        self._last_output = time.monotonic()
        self._output.write(chunk)
        if self._on_output is not None:
            self._on_output(chunk)

    def _read_status(self, descriptor: int) -> None:
        try:
            chunk = os.read(descriptor, _READ_BYTES)
        except BlockingIOError:
            return
        if not chunk:
            self._forget(descriptor)
            self._unwatched.set()
            return
        self._status += chunk
        if self._ready_at is None and self._status.startswith(b"R"):
            self._ready_at = time.monotonic()

    def _leave_process(self, descriptor: int) -> None:
        self._exited.set()
        self._forget(descriptor)

    def _enforce(self, root: int, started: float) -> None:
        now = time.monotonic()
        usage = _processes.usage(root, self._limits.memory_bytes)
        if self._output.overflowing:
            self._stop(Reason.OUTPUT)
        elif usage.tasks > self._limits.processes:
            self._stop(Reason.PROCESSES)
        elif usage.memory_bytes > self._limits.memory_bytes:
            self._stop(Reason.MEMORY)
        elif now - started > self._limits.hard_seconds:
            self._stop(Reason.HARD_LIMIT)
        elif now - self._last_output > self._limits.no_output_seconds:
            self._stop(Reason.NO_OUTPUT)

    def _stop(self, reason: Reason) -> None:
        if self._reason is Reason.EXIT:
            self._reason = reason
            self._kill()

    def _note(self) -> str:
        limits = self._limits
        why = {
            Reason.NO_OUTPUT: f"it printed nothing for {limits.no_output_seconds:g} s",
            Reason.HARD_LIMIT: f"it ran for more than {limits.hard_seconds:g} s",
            Reason.MEMORY: f"it used more than {limits.memory_bytes} bytes of memory",
            Reason.PROCESSES: f"it ran more than {limits.processes} processes",
            Reason.OUTPUT: f"it printed more than {limits.spool_bytes} bytes",
        }.get(self._reason)
        return f"The command was ended because {why}." if why else ""

    def _kill(self) -> None:
        """What our death would do as well: whoever watches over the command sees its lifeline end."""
        if self._lifeline >= 0:
            os.close(self._lifeline)
            self._lifeline = -1

    async def _end(self, process: subprocess.Popen[bytes]) -> None:
        """Whatever happened: no process is left, the output is read to its end, every descriptor is closed."""
        try:
            self._kill()
            if not await _within(_KILL_S, self._exited):
                for pid in reversed(_processes.descendants(process.pid)):
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
                await self._exited.wait()
            await _within(_KILL_S, self._unwatched)
            await _within(_DRAIN_S, self._drained)
        finally:
            for descriptor in tuple(self._watched):
                self._forget(descriptor)
            if self._exited.is_set():
                process.wait()


async def _within(seconds: float, event: asyncio.Event) -> bool:
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await event.wait()
    return event.is_set()
