"""What happened to each turn: as trace events for logs and live viewers, as metrics, and as one log line."""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections import deque
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dlite_agent.api.metrics import Metrics
from dlite_agent.decode.jobs import TurnFigures
from dlite_agent.decode.sampling import SamplingParams
from dlite_agent.errors import DliteError
from dlite_agent.session import messages
from dlite_agent.session.deltas import ParsedCall
from dlite_agent.session.messages import Message
from dlite_agent.session.registry import Session
from dlite_agent.trace.events import (
    Calibration,
    Divergence,
    KnownEvent,
    Segment,
    SessionEnd,
    SessionStart,
    ToolEnd,
    ToolStart,
    TurnStart,
)
from dlite_agent.trace.log import EventLog
from dlite_agent.trace.redact import Redactor
from dlite_agent.trace.turns import TurnFacts, turn_events

if TYPE_CHECKING:
    from dlite_agent.api.turns import Answer, Run
    from dlite_agent.decode.grammar import Constraint
    from dlite_agent.decode.jobs import Generation

log = logging.getLogger("dlite_agent.turns")

KEPT_EVENTS = 512
"""Latest events kept in memory for each session, for `GET /v1/sessions/{id}/events`."""
CALIBRATION_SECONDS = 60.0
"""Least time between two records of T_AR; a session's first turn is always preceded by one."""


@dataclass(frozen=True)
class Asked:
    """What a turn asked the engine for: its first answer's generation, and the grammar that holds it."""

    generation: Generation
    constraint: Constraint | None


@dataclass(frozen=True)
class _Called:
    """Tool calls of an answer that the client is to run, from `at` on."""

    turn: int
    at: float
    calls: list[ParsedCall]


class Recorder:
    """Writes down turns. To be used from the event loop.

    Args:
        log_path: event log to append to; None keeps events in memory only.
        content: whether messages and ids go into events, and text into the log. Secrets are taken out of the log.
        target, drafter: names for the session's first event.
        calibration: T_AR as the engine knows it now, for a segment; None where it knows nothing.
    """

    def __init__(
        self,
        metrics: Metrics,
        *,
        log_path: Path | None,
        content: bool,
        target: str,
        drafter: str | None,
        calibration: Callable[[str], Calibration | None] = lambda _: None,
    ) -> None:
        self.metrics = metrics
        self._log = None if log_path is None else EventLog(log_path, content=content, redactor=Redactor())
        self._calibration = calibration
        self._calibrated: Calibration | None = None
        self._called: dict[str, _Called] = {}
        self.segment = uuid.uuid4().hex[:12] if self._log is None else self._log.segment
        self._head = Segment(segment=self.segment, t=time.monotonic(), wall=time.time())
        self._content = content
        self._models: dict[str, Any] = {"target": target, "drafter": drafter}
        self._events: dict[str, deque[KnownEvent]] = {}
        self._listeners: dict[str, set[asyncio.Queue[KnownEvent | None]]] = {}

    # Events.

    def events(self, session: Session) -> list[KnownEvent]:
        """The segment, T_AR, and the latest events of a session."""
        head = [self._head] if self._calibrated is None else [self._head, self._calibrated]
        return [*head, *self._events.get(session.id, ())]

    @property
    def calibrated(self) -> Calibration | None:
        """T_AR as it was last written down."""
        return self._calibrated

    def listen(self, session: Session) -> asyncio.Queue[KnownEvent | None]:
        """A queue of the session's coming events; None says that no more will come."""
        mailbox: asyncio.Queue[KnownEvent | None] = asyncio.Queue()
        self._listeners.setdefault(session.id, set()).add(mailbox)
        return mailbox

    def leave(self, session: Session, mailbox: asyncio.Queue[KnownEvent | None]) -> None:
        """End what `listen` began."""
        listeners = self._listeners.get(session.id, set())
        listeners.discard(mailbox)
        if not listeners:
            self._listeners.pop(session.id, None)

    def close(self) -> None:
        """End all live streams, and the log."""
        self.stop_streams()
        if self._log is not None:
            self._log.close()

    def stop_streams(self) -> None:
        """Tell all live streams to end."""
        for listeners in self._listeners.values():
            for mailbox in listeners:
                mailbox.put_nowait(None)

    def emit(self, session: Session, *events: KnownEvent) -> None:
        """Write down events of a session; their `segment` must be this recorder's. Content goes only where it may."""
        kept = self._events.setdefault(session.id, deque(maxlen=KEPT_EVENTS))
        for event in events if self._content else [event.without_content() for event in events]:
            kept.append(event)
            if self._log is not None:
                self._log.write(event)
            for mailbox in self._listeners.get(session.id, ()):
                mailbox.put_nowait(event)

    # Tools that the server runs itself; those that clients run are inferred from their results.

    def tool_start(
        self,
        session: Session,
        turn: int,
        call_id: str,
        name: str,
        *,
        arguments: Any = None,
        sandbox: str | None = None,
        at: float | None = None,
    ) -> None:
        """A call of a turn's answer begins to run, now or at `at` (monotonic seconds)."""
        place: dict[str, Any] = {"segment": self.segment, "session": session.id, "turn": turn, "call_id": call_id}
        began = time.monotonic() if at is None else at
        self._called.pop(session.id, None)
        self.emit(session, ToolStart(**place, t=began, name=name, sandbox=sandbox, arguments=arguments))

    def tool_end(
        self,
        session: Session,
        turn: int,
        call_id: str,
        *,
        output: Any = None,
        exit_code: int | None = None,
        error: str | None = None,
        at: float | None = None,
    ) -> None:
        """A call that `tool_start` told of has ended."""
        place: dict[str, Any] = {"segment": self.segment, "session": session.id, "turn": turn, "call_id": call_id}
        ended = time.monotonic() if at is None else at
        self.emit(session, ToolEnd(**place, t=ended, exit_code=exit_code, error=error, output=output))

    # Terminal states and what leads to them.

    def turn_start(self, run: Run, cached_tokens: int | None) -> None:
        """A request runs, with so many prompt tokens restored; None: it ended before."""
        session = run.session
        run.announced = True
        place: dict[str, Any] = {"segment": self.segment, "session": session.id}
        self._calibrate()
        if session.id not in self._events:
            self.emit(session, SessionStart(**place, t=run.arrived, parent=session.parent or None, **self._models))
        self._results(run)
        place["turn"] = run.turn
        self.emit(
            session,
            TurnStart(
                **place,
                t=run.arrived,
                request_id=run.request_id,
                prompt_tokens=len(run.prompt_ids),
                cached_tokens=cached_tokens,
                new_tokens=None if cached_tokens is None else len(run.prompt_ids) - cached_tokens,
                **prompt_content(run),
            ),
        )
        if run.divergence is not None:
            reason, position = str(run.divergence["reason"]), run.divergence["position"]
            self.metrics.divergences.labels(reason).inc()
            self.emit(session, Divergence(**place, t=run.arrived, reason=reason, position=position))

    def turn_end(self, run: Run, answer: Answer) -> None:
        """A request was answered."""
        figures, now = answer.figures, time.monotonic()
        facts = TurnFacts(
            segment=self.segment,
            session=run.session.id,
            turn=run.turn,
            request_id=run.request_id,
            finish_reason=answer.finish,
            output_tokens=answer.tokens,
            output_ids=list(answer.ids),
            message=message_json(answer),
            arrived=run.arrived,
            ended=now,
            masks=[]
            if run.asked is None or run.asked.generation.matcher is None
            else run.asked.generation.matcher.spent,
        )
        self._finish(run, facts, figures)
        if answer.calls:
            self._called[run.session.id] = _Called(run.turn, now, answer.calls)
        self.metrics.answered(figures, answer.tokens, answer.finish)
        self._line(run, figures, state="answered", finish=answer.finish, completion_tokens=answer.tokens)

    def turn_failed(self, run: Run, error: DliteError, figures: TurnFigures | None) -> None:
        """A request ended without an answer; the session is as before. Of a client that left, no figures are known."""
        place = (self.segment, run.session.id, run.turn, run.request_id)
        facts = TurnFacts(*place, error=error.code, arrived=run.arrived)
        known = figures or TurnFigures(queued=run.arrived, prompt_tokens=len(run.prompt_ids), finished=time.monotonic())
        self._finish(run, facts, known)
        self.metrics.failed.labels(error.code).inc()
        self._line(run, figures, state=error.code)

    def _finish(self, run: Run, facts: TurnFacts, figures: TurnFigures) -> None:
        """All events of a turn but its start, which was told when it happened."""
        if not run.announced:
            self.turn_start(run, None)
        self.emit(run.session, *(event for event in turn_events(facts, figures) if not isinstance(event, TurnStart)))

    def refused(self, api: str, request_id: str, error: DliteError) -> None:
        """A request was not accepted."""
        self.metrics.failed.labels(error.code).inc()
        log.info("request", extra={"dlite": {"request": request_id, "api": api, "state": error.code}})

    def session_end(self, session: Session) -> None:
        """A session was deleted or forgotten."""
        if session.id in self._events:
            event = SessionEnd(segment=self.segment, session=session.id, t=time.monotonic(), reason="dropped")
            self.emit(session, event)
            del self._events[session.id]
        self._called.pop(session.id, None)

    def _results(self, run: Run) -> None:
        """The last answer's calls that this request answers; their time is inferred, from the answer to the request."""
        called = self._called.pop(run.session.id, None)
        if called is None or run.spliced is None:
            return
        results = {message.tool_call_id: message.content for message in run.spliced.added if message.role == "tool"}
        for call in called.calls:
            if call.id in results:
                place: dict[str, Any] = {"segment": self.segment, "session": run.session.id, "turn": called.turn}
                place["call_id"] = call.id
                start = ToolStart(**place, t=called.at, name=call.name, measured=False, arguments=call.arguments)
                self.emit(run.session, start, ToolEnd(**place, t=run.arrived, output=results[call.id]))

    def _calibrate(self) -> None:
        """Write T_AR down, if it is not written yet or has been for a while."""
        last = self._calibrated
        if last is not None and time.monotonic() - last.t < CALIBRATION_SECONDS:
            return
        self._calibrated = self._calibration(self.segment)
        if self._calibrated is not None and self._log is not None:
            self._log.write(self._calibrated)

    def _line(self, run: Run, figures: TurnFigures | None, **facts: Any) -> None:
        facts |= {
            "request": run.request_id,
            "session": run.session.id,
            "api": run.api,
            "turn": run.turn,
            "prompt_tokens": len(run.prompt_ids),
        }
        if figures is not None:
            facts["cached_tokens"] = figures.cached_tokens
            facts["seconds"] = round(figures.finished - figures.queued, 4)
        if self._content:
            facts["text"] = run.choices[0].text
        log.info("turn", extra={"dlite": facts})


def prompt_content(run: Run) -> dict[str, Any]:
    """What a turn's start says of the request's content: new ids and messages, sampling, grammar."""
    found: dict[str, Any] = {"new_ids": run.prompt_ids[0 if run.spliced is None else run.spliced.shared :]}
    if run.spliced is not None:
        found["messages"] = [message_dict(message) for message in run.spliced.added]
    if run.asked is not None:
        found["sampling"] = _unusual(run.asked.generation.params)
        found["constraint"] = None if run.asked.constraint is None else run.asked.constraint.format
    return found


def _unusual(params: SamplingParams) -> dict[str, Any]:
    """The parameters that are not greedy decoding's; a seed only where something is drawn."""
    usual = asdict(SamplingParams())
    given = {name: value for name, value in asdict(params).items() if value != usual[name]}
    if not params.temperature:
        given.pop("seed", None)
    if "logit_bias" in given:
        given["logit_bias"] = {str(token): value for token, value in given["logit_bias"].items()}
    return given


def message_dict(message: Message) -> dict[str, Any]:
    """A message in OpenAI's shape."""
    found = messages.message_json(message)
    if message.role == "tool":
        found["tool_call_id"] = message.tool_call_id
    return found


def message_json(answer: Answer) -> dict[str, Any]:
    """An answer as an OpenAI message."""
    message: dict[str, Any] = {"role": "assistant", "content": answer.message.content or None}
    if answer.message.reasoning:
        message["reasoning_content"] = answer.message.reasoning
    if answer.calls:
        message["tool_calls"] = messages.calls_json(answer.calls)
    elif message["content"] is None:
        message["content"] = ""
    return message
