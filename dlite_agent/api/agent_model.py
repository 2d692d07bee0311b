"""The served model as a run's model: its turns are turns of a session, by the same path as any client's."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncGenerator
from typing import Any

from dlite_agent.agent.run_model import Emit, TurnReply, TurnRequest
from dlite_agent.api.recorder import message_json, prompt_content
from dlite_agent.api.service import Ask, Caller, Service
from dlite_agent.api.turns import Answer, Chunk, Run
from dlite_agent.decode.sampling import SamplingParams
from dlite_agent.session.deltas import Delta
from dlite_agent.session.identity import SessionName
from dlite_agent.session.registry import BINDING, Session
from dlite_agent.trace.events import Calibration, KnownEvent, ToolEnd, ToolStart, TurnEnd, TurnStart


class EngineModel:
    """One run's conversation with the engine. The session bears the run's id as its name."""

    def __init__(self, service: Service, run: str, owner: str) -> None:
        self._service = service
        self._run = run
        self._owner = owner
        self._session: Session | None = None
        self._turn = 0
        self._calibrated: Calibration | None = None

    async def turn(self, request: TurnRequest, emit: Emit) -> AsyncGenerator[Delta | TurnReply, None]:
        """As `RunModel.turn`; token ids go into the events, for replay, and T_AR whenever it was written down anew."""
        options = request.options
        choice: Any = request.tool_choice
        if choice not in ("auto", "required"):
            choice = {"type": "function", "function": {"name": choice}}
        ask = Ask(
            api="agent",
            messages=request.messages,
            tools=request.tools,
            tool_choice=choice,
            parallel=options.parallel_tool_calls,
            params=SamplingParams(
                temperature=options.temperature,
                top_p=options.top_p,
                repetition_penalty=options.repetition_penalty,
                seed=options.seed,
            ),
            max_tokens=request.max_tokens,
            clamp=True,
            thinking=options.thinking,
            name=SessionName(self._run, BINDING),
            on_conflict="wait",
            mode=options.mode,
            seconds=request.seconds,
            stream=True,
        )
        run = await self._service.open(ask, Caller(self._owner, f"req_{uuid.uuid4().hex}"))
        self._session, self._turn = run.session, run.turn
        recorder = self._service.recorder
        mailbox = recorder.listen(run.session)
        answer: Answer | None = None
        try:
            async for event in run.events(self._service.settings.server.keepalive_seconds):
                if isinstance(event, Chunk):
                    for delta in event.deltas:
                        yield delta
                elif isinstance(event, Answer):
                    answer = event
                _forward(mailbox, emit, run, answer)
        finally:
            run.close()
            self._calibrate(emit)
            _forward(mailbox, emit, run, answer)
            recorder.leave(run.session, mailbox)
        assert answer is not None
        yield TurnReply(answer.message, answer.finish == "length", answer.tokens)

    def _calibrate(self, emit: Emit) -> None:
        """T_AR belongs to the server, not to a session, so it comes by no mailbox."""
        latest = self._service.recorder.calibrated
        if latest is not None and latest is not self._calibrated:
            self._calibrated = latest
            emit(latest)

    def observe(self, event: KnownEvent) -> None:
        """Tool events belong to the session too, for its log and its live stream."""
        if self._session is not None:
            recorder = self._service.recorder
            place = {"segment": recorder.segment, "session": self._session.id, "turn": self._turn}
            recorder.emit(self._session, event.model_copy(update=place))


def _forward(mailbox: asyncio.Queue[KnownEvent | None], emit: Emit, run: Run, answer: Answer | None) -> None:
    while not mailbox.empty():
        event = mailbox.get_nowait()
        changes: dict[str, Any] = {}
        if isinstance(event, TurnStart):
            changes = prompt_content(run)
        elif isinstance(event, TurnEnd) and answer is not None:
            changes = {"message": message_json(answer), "output_ids": list(answer.ids)}
        if event is not None and not isinstance(event, ToolStart | ToolEnd):
            emit(event.model_copy(update=changes))
