"""The agent loop: decode, call, run the tools, resume, until one of the legal ends.

All that the loop decides it decides from `Progress`, the fold of the journal, so a run that is taken up after a crash
goes on as the one that crashed would have.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from typing import Any

from dlite_agent.agent import wording
from dlite_agent.agent.calls import TurnCalls
from dlite_agent.agent.journal import Journal, Record
from dlite_agent.agent.progress import Progress, message_json
from dlite_agent.agent.run_log import RunLog
from dlite_agent.agent.run_model import RunModel, TurnReply, TurnRequest
from dlite_agent.agent.run_spec import End, RunSpec
from dlite_agent.agent.toolbox import Toolbox
from dlite_agent.decode.scheduler import Overloaded
from dlite_agent.decode.schema import unenforced
from dlite_agent.errors import ContextOverflow, DliteError
from dlite_agent.session.deltas import ArgumentsDelta, CallStart, Delta, ReasoningDelta, TextDelta
from dlite_agent.session.messages import JSON, Message, ToolCall
from dlite_agent.trace.events import ClientIdle, KnownEvent, SessionEnd, SessionStart, ToolEnd, TurnStart

log = logging.getLogger("dlite_agent.runs")

MAX_INVALID = 3
"""Turns in a row without one valid call that are answered with the error; the next one ends the run."""


class Loop:
    """One run at work in this process.

    Args:
        journal: of the run; `progress` is the fold of what it holds.
        log: the run's trace.

    Attributes:
        cancelled: to be set before its task is cancelled by the user's wish.
        over: whoever ran it will not run it again.
    """

    def __init__(
        self, spec: RunSpec, model: RunModel, tools: Toolbox, journal: Journal, log: RunLog, progress: Progress
    ) -> None:
        self.spec = spec
        self.progress = progress
        self.cancelled = False
        self.over = False
        self._model = model
        self._tools = tools
        self._journal = journal
        self._log = log
        self._schemas = _for_grammar(tools.schemas, spec.model.tool_choice)
        self._go = asyncio.Event()
        if not progress.paused:
            self._go.set()
        self._spent = progress.seconds
        self._working_since: float | None = None
        self._clock = asyncio.timeout(None)
        answered = [i for i, message in enumerate(progress.messages, 1) if message.role == "assistant"]
        self._shown = answered[-1] if answered else 0
        self._started = progress.turns > 0
        tools.cwd = progress.cwd

    @property
    def resting(self) -> bool:
        """Paused, with no turn or tool at work."""
        return self._working_since is None

    # What may be asked of a run while it works.

    async def pause(self) -> None:
        """Stop before the next turn; tools that run go on."""
        self._go.clear()
        await self._record({"kind": "pause"})
        self._state()

    async def resume(self) -> None:
        await self._record({"kind": "resume"})
        self._go.set()
        self._state()

    async def follow_up(self, identity: str, content: str) -> None:
        """A further message of the user's, taken up before the next turn."""
        await self._record({"kind": "follow_up", "id": identity, "content": content})

    # The loop.

    async def run(self) -> End:
        """Work until the run ends; the end is in the journal. Cancelling the task without setting `cancelled` leaves
        the run to be taken up later."""
        error: str | None = None
        self._working_since = time.monotonic()
        try:
            async with asyncio.timeout(self._seconds_left()) as self._clock:
                end = await self._work()
        except TimeoutError:
            end = End.TIME_LIMIT
            if not self._clock.expired():
                end, error = End.FAILED, "internal_error: TimeoutError"
        except asyncio.CancelledError:
            if not self.cancelled:
                raise
            end = End.CANCELLED
        except ContextOverflow as failure:
            end, error = End.CONTEXT_FULL, failure.message
        except DliteError as failure:
            end, error = End.FAILED, f"{failure.code}: {failure.message}"
        except Exception as failure:
            log.exception("a run failed", extra={"dlite": {"run": self._log.run}})
            end, error = End.FAILED, f"internal_error: {type(failure).__name__}"
        answer = self.progress.answer
        if end is End.ANSWERED:
            answer = self.progress.messages[-1].content
        await self._record({"kind": "end", "state": str(end), "error": error, "answer": answer})
        self._rest()
        self._emit(SessionEnd(segment="", session="", t=time.monotonic(), reason=str(end)))
        self._state()
        return end

    async def _work(self) -> End:
        if not self.progress.messages:
            await self._open()
        await self._recover()
        while True:
            await self._pause_point()
            if (limit := self._limit()) is not None:
                return limit
            if not self.progress.waiting and (end := self._end()) is not None:
                return end
            for identity in list(self.progress.waiting):
                await self._record({"kind": "taken", "id": identity})
            await self._turn()

    async def _open(self) -> None:
        words = wording.INSTRUCTIONS if self._tools.submits else wording.INSTRUCTIONS_WITHOUT_SUBMIT
        for role, content in (("system", self.spec.instructions or words), ("user", self.spec.task)):
            await self._record({"kind": "message", "role": role, "content": content})

    def _limit(self) -> End | None:
        limits, at = self.spec.limits, self.progress
        if self._end() in (End.SUBMITTED, End.ANSWERED) and not at.waiting:
            return None
        if at.turns >= limits.turns:
            return End.TURN_LIMIT
        if at.tokens >= limits.tokens:
            return End.TOKEN_LIMIT
        return End.TOOL_LIMIT if at.tool_seconds >= limits.tool_seconds else None

    def _end(self) -> End | None:
        last = self.progress.messages[-1]
        if self.progress.answer is not None:
            return End.SUBMITTED
        if last.role == "assistant" and not last.tool_calls:
            return End.ANSWERED
        return End.INVALID_CALLS if self.progress.invalid > MAX_INVALID else None

    async def _pause_point(self) -> None:
        if self._go.is_set():
            return
        since = time.monotonic()
        self._rest()
        self._clock.reschedule(None)
        self._state()
        await self._go.wait()
        self._working_since = time.monotonic()
        self._clock.reschedule(asyncio.get_running_loop().time() + self._seconds_left())
        idle = ClientIdle(segment="", session="", turn=0, t=since, end=time.monotonic(), waiting="resume")
        self._emit(idle)

    async def _turn(self) -> None:
        at, limits = self.progress, self.spec.limits
        number = at.turns
        budget = min(self.spec.model.max_tokens, limits.tokens - at.tokens)
        tool_seconds = limits.tool_seconds - at.tool_seconds
        plan = self.spec.model.plan
        choice = plan[number] if number < len(plan) else self.spec.model.tool_choice
        options, seconds = self.spec.model, self._seconds_left()
        request = TurnRequest(list(at.messages), self._schemas, choice, options, budget, seconds)
        calls = self._calls(number)
        try:
            reply = await self._stream(request, calls)
            await self._commit(number, reply, calls)
            await self._settle(calls, tool_seconds)
        except BaseException:
            await calls.stop()
            raise

    async def _stream(self, request: TurnRequest, calls: TurnCalls) -> TurnReply:
        reply: TurnReply | None = None
        while reply is None:
            try:
                async with contextlib.aclosing(self._model.turn(request, self._emit)) as stream:
                    async for item in stream:
                        if isinstance(item, TurnReply):
                            reply = item
                        else:
                            calls.feed(item)
                            self._show(item, calls.turn)
            except Overloaded as error:
                # The server's queue is full of others' requests; the run waits as any client should.
                await asyncio.sleep(error.retry_after)
        return reply

    async def _commit(self, number: int, reply: TurnReply, calls: TurnCalls) -> None:
        said = reply.message
        for call in said.tool_calls:
            if call.id not in calls.problems and call.id not in calls.running:
                calls.problems[call.id] = wording.cut_call(reply.tokens)
        unfinished = reply.cut and not said.tool_calls
        await self._record(
            {
                "kind": "turn",
                "turn": number,
                "message": message_json(said),
                "tokens": reply.tokens,
                "valid": calls.valid > 0 or (not said.tool_calls and not unfinished),
                "nudge": wording.CUT_ANSWER if unfinished else None,
            }
        )

    async def _settle(self, calls: TurnCalls, tool_seconds: float) -> None:
        """Answer every call of the committed turn."""
        for identity, problem in calls.problems.items():
            await self._record(
                {"kind": "tool_end", "turn": calls.turn, "id": identity, "content": problem, "invalid": True}
            )
        for identity in await calls.wait(tool_seconds):
            end = {"kind": "tool_end", "turn": calls.turn, "id": identity, "content": wording.STOPPED}
            await self._record({**end, "seconds": tool_seconds})

    async def _recover(self) -> None:
        """Answer what an earlier process left open: calls that ran are interrupted, others are run now."""
        begun = self.progress.begun()
        if begun and not self.progress.open_turn:
            calls = tuple(ToolCall(start["id"], start["name"], start["arguments"]) for start in begun)
            said = Message("assistant", begun[-1]["said"], reasoning=begun[-1]["thought"], tool_calls=calls)
            turn = {"kind": "turn", "turn": self.progress.turns, "message": message_json(said), "tokens": 0}
            await self._record({**turn, "valid": True, "nudge": None, "outage": True})
        if not self.progress.open_turn:
            return
        again = self._calls(self.progress.turns - 1)
        for call in self.progress.unanswered:
            if call.id not in self.progress.started:
                again.begin(call)
                continue
            place: dict[str, Any] = {"segment": "", "session": "", "turn": again.turn, "call_id": call.id}
            self._emit(ToolEnd(**place, t=time.monotonic(), error="interrupted", output=wording.INTERRUPTED))
            end = {"kind": "tool_end", "turn": again.turn, "id": call.id, "content": wording.INTERRUPTED}
            await self._record({**end, "error": "interrupted"})
        await self._settle(again, self.spec.limits.tool_seconds - self.progress.tool_seconds)

    def _calls(self, number: int) -> TurnCalls:
        return TurnCalls(number, self._tools, self._record, self._tool_event)

    # Where things are written down.

    async def _record(self, record: Record) -> None:
        record["active"] = round(self._active(), 6)
        await self._journal.append(record)
        self.progress.apply(record)

    def _active(self) -> float:
        return self._spent + (0.0 if self._working_since is None else time.monotonic() - self._working_since)

    def _rest(self) -> None:
        self._spent, self._working_since = self._active(), None

    def _seconds_left(self) -> float:
        return max(0.0, self.spec.limits.seconds - self._active())

    def _tool_event(self, event: KnownEvent) -> None:
        self._log.write(event)
        self._model.observe(event)

    def _emit(self, event: KnownEvent) -> None:
        """Events of a turn, with what was said in it."""
        if isinstance(event, SessionStart):
            if self._started:
                return
            self._started = True
        elif isinstance(event, TurnStart):
            new = self.progress.messages[self._shown :]
            self._shown = len(self.progress.messages) + 1
            trigger = "tool" if new and new[-1].role == "tool" else "user"
            event = event.model_copy(update={"messages": [message_json(m) for m in new], "trigger": trigger})
        self._log.write(event)

    def _show(self, delta: Delta, turn: int) -> None:
        if isinstance(delta, TextDelta | ReasoningDelta):
            self._log.signal("text", turn=turn, text=delta.text, reasoning=isinstance(delta, ReasoningDelta))
        elif isinstance(delta, CallStart):
            self._log.signal("call", turn=turn, id=delta.id, name=delta.name)
        elif isinstance(delta, ArgumentsDelta):
            self._log.signal("arguments", turn=turn, text=delta.text)

    def _state(self) -> None:
        self._log.signal("state")


def _for_grammar(schemas: list[dict[str, Any]], choice: str) -> list[JSON]:
    """Under `auto` only strict tools are held to their schema, and only a schema that can be enforced may be strict."""
    if choice == "required":
        return list(schemas)
    return [
        {**schema, "function": {**schema["function"], "strict": True}}
        if unenforced(schema["function"].get("parameters")) is None
        else schema
        for schema in schemas
    ]
