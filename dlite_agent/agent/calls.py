"""The tool calls of one turn: assembled from the stream, checked, and started the moment each is complete."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

from dlite_agent.agent import wording
from dlite_agent.agent.journal import Record
from dlite_agent.agent.toolbox import SUBMIT, Toolbox
from dlite_agent.errors import DliteError, InvalidRequest
from dlite_agent.session.deltas import ArgumentsDelta, CallEnd, CallStart, CallStatus, Delta, ReasoningDelta, TextDelta
from dlite_agent.session.messages import ToolCall
from dlite_agent.trace.events import KnownEvent, ToolEnd, ToolStart

MAX_CALLS = 64
"""Calls of one turn; more are answered as invalid."""


@dataclass
class _Growing:
    id: str
    name: str
    arguments: list[str] = field(default_factory=list)


class TurnCalls:
    """The calls of one turn. `feed` it the stream, `check` what was not streamed, then `wait`.

    Args:
        turn: the run's number of the turn.
        record: puts a record into the journal and applies it.
        emit: takes trace events.
    """

    def __init__(
        self,
        turn: int,
        tools: Toolbox,
        record: Callable[[Record], Awaitable[None]],
        emit: Callable[[KnownEvent], None],
    ) -> None:
        self.turn = turn
        self.said = ""
        self.thought = ""
        self.valid = 0
        self.problems: dict[str, str] = {}
        self._tools = tools
        self._record = record
        self._emit = emit
        self._growing: dict[int, _Growing] = {}
        self._jobs: dict[str, asyncio.Task[None]] = {}

    @property
    def running(self) -> frozenset[str]:
        """Ids of the calls that were started."""
        return frozenset(self._jobs)

    def feed(self, delta: Delta) -> None:
        """More of the stream; a call that it completes begins at once."""
        if isinstance(delta, TextDelta):
            self.said += delta.text
        elif isinstance(delta, ReasoningDelta):
            self.thought += delta.text
        elif isinstance(delta, CallStart):
            self._growing[delta.index] = _Growing(delta.id, delta.name)
        elif isinstance(delta, ArgumentsDelta):
            self._growing[delta.index].arguments.append(delta.text)
        elif isinstance(delta, CallEnd):
            call = self._growing.pop(delta.index)
            self.begin(ToolCall(call.id, call.name, "".join(call.arguments)), delta.status)

    def begin(self, call: ToolCall, status: CallStatus = "complete") -> None:
        """Start a call, or note in `problems` why it cannot be; a call that was cut is left to the caller."""
        if status == "cut":
            return
        try:
            if self.valid >= MAX_CALLS:
                raise InvalidRequest(f"a turn may hold {MAX_CALLS} calls.")
            arguments = _arguments(call.arguments)
            self._tools.check(call.name, arguments)
        except InvalidRequest as error:
            self.problems[call.id] = wording.invalid(error.message)
            return
        self.valid += 1
        self._jobs[call.id] = asyncio.create_task(self._run(call, arguments), name=f"tool:{call.name}")

    async def _run(self, call: ToolCall, arguments: dict[str, Any]) -> None:
        start = {"kind": "tool_start", "turn": self.turn, "id": call.id, "name": call.name}
        await self._record({**start, "arguments": call.arguments, "said": self.said, "thought": self.thought})
        place: dict[str, Any] = {"segment": "", "session": "", "turn": self.turn, "call_id": call.id}
        began = time.monotonic()
        where = self._tools.where(call.name)
        self._emit(ToolStart(**place, t=began, name=call.name, sandbox=where, arguments=arguments))
        end: Record = {"kind": "tool_end", "turn": self.turn, "id": call.id, "name": call.name}
        more: dict[str, Any] = {}
        error = None
        try:
            outcome = await self._tools.call(call.name, arguments)
        except asyncio.CancelledError:
            self._emit(ToolEnd(**place, t=time.monotonic(), error="stopped"))
            raise
        except DliteError as failure:
            error, ended, code = failure.code, time.monotonic(), None
            content = f"The tool could not be run: {failure.message}"
        else:
            ended, code, content = outcome.ended, outcome.exit_code, wording.result(outcome)
            error = None if outcome.reason == "exit" else outcome.reason
            end |= {"reason": outcome.reason, "level": outcome.level, "elided": outcome.elided}
            if outcome.state is not None:
                more["state_seconds"] = round(outcome.state_seconds, 6)
            if call.name == SUBMIT and code == 0 and (answer := self._tools.take_submission()) is not None:
                end["submission"] = answer
        end |= {"content": content, "exit_code": code, "error": error, "seconds": round(ended - began, 6)}
        self._emit(ToolEnd(**place, t=max(ended, began), exit_code=code, error=error, output=content, **more))
        await self._record({**end, "cwd": self._tools.cwd})

    async def wait(self, seconds: float) -> list[str]:
        """Wait for all calls, at most so long; those still running then are ended, and their ids given back."""
        if not self._jobs:
            return []
        await asyncio.wait(self._jobs.values(), timeout=max(0.0, seconds))
        late = [name for name, job in self._jobs.items() if not job.done()]
        await self.stop()
        for job in self._jobs.values():
            if not job.cancelled():
                job.result()
        return late

    async def stop(self) -> None:
        """End what still runs."""
        for job in self._jobs.values():
            job.cancel()
        await asyncio.gather(*self._jobs.values(), return_exceptions=True)


def _arguments(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text, strict=False)
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(f"the arguments are not valid JSON ({error}).") from error
    if not isinstance(value, dict):
        raise InvalidRequest("the arguments must be a JSON object.")
    return value
