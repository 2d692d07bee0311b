"""From the engine's figures of one turn to the events of the log."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from dlite_agent.trace.events import (
    KnownEvent,
    Mask,
    Prefill,
    Queue,
    Restore,
    Round,
    Rounds,
    Stream,
    TurnEnd,
    TurnStart,
)

if TYPE_CHECKING:
    # The engine's module loads the tensor library, which reading and reporting logs should not need.
    from dlite_agent.decode.jobs import TurnFigures

PREPARE = "prepare"
"""Why a request waits before it is in the engine's queue: its prompt and its grammar are being made."""


@dataclass(frozen=True)
class TurnFacts:
    """What the figures of the engine do not say about a turn; content is optional as everywhere.

    `arrived` is when the request came, in front of the engine's queue: its session was looked up, its prompt rendered,
    its grammar compiled. `ended` is when the response could end, behind the last token: the turn was parsed and
    committed to the session store by then. `masks` are begin and seconds of each token mask of a constrained answer.
    All are on the figures' clock.
    """

    segment: str
    session: str
    turn: int
    request_id: str | None = None
    trigger: Literal["user", "tool", "agent"] | None = None
    finish_reason: str | None = None
    error: str | None = None
    output_tokens: int | None = None
    messages: list[dict[str, Any]] | None = None
    new_ids: list[int] | None = None
    message: dict[str, Any] | None = None
    output_ids: list[int] | None = None
    masks: Sequence[tuple[float, float]] = ()
    arrived: float | None = None
    ended: float | None = None


def turn_events(facts: TurnFacts, figures: TurnFigures) -> list[KnownEvent]:
    """The events of a turn the engine has finished or failed, in order of time.

    The figures' times are on the process's monotonic clock, so `facts.segment` must be the segment this process
    writes. A turn that never left the queue has a queue and an end, nothing between.
    """
    where: dict[str, Any] = {"segment": facts.segment, "session": facts.session, "turn": facts.turn}
    arrived = figures.queued if facts.arrived is None else min(facts.arrived, figures.queued)
    end = max(figures.finished, figures.queued)
    admitted = figures.admitted or end
    started = figures.restored > 0
    events: list[KnownEvent] = [
        TurnStart(
            **where,
            t=arrived,
            request_id=facts.request_id,
            trigger=facts.trigger,
            prompt_tokens=figures.prompt_tokens,
            cached_tokens=figures.cached_tokens if started else None,
            new_tokens=max(0, figures.prompt_tokens - figures.cached_tokens) if started else None,
            messages=facts.messages,
            new_ids=facts.new_ids,
        ),
        Queue(**where, t=figures.queued, end=max(admitted, figures.queued)),
    ]
    if arrived < figures.queued:
        events.append(Queue(**where, t=arrived, end=figures.queued, reason=PREPARE))
    if started:
        restore = Restore(
            **where,
            t=admitted,
            end=max(figures.restored, admitted),
            tier=figures.tier,
            tokens=figures.cached_tokens,
            wanted=figures.prompt_tokens,
            reason=figures.reason,
        )
        events.append(restore)
    events += [Queue(**where, t=begin, end=until, reason="pre-empted") for begin, until in figures.waits]
    for chunk in figures.prefills:
        span = {**where, "t": chunk.start, "end": chunk.start + chunk.wall}
        events.append(Prefill(**span, tokens=chunk.tokens, context=chunk.context, batch=chunk.batch))
    rounds = (Round(*fact) for fact in figures.rounds)
    events += [
        Rounds.of(facts.segment, facts.session, facts.turn, run, mode=figures.mode) for run in _contiguous(rounds)
    ]
    if facts.masks:
        begin = facts.masks[0][0]
        at, seconds = zip(*((round(start - begin, 7), round(length, 7)) for start, length in facts.masks), strict=True)
        until = max(start + length for start, length in facts.masks)
        events.append(Mask(**where, t=begin, end=until, at=list(at), seconds=list(seconds)))
    if facts.ended is not None and facts.ended > end:
        events.append(Stream(**where, t=end, end=facts.ended))
        end = facts.ended
    events.append(
        TurnEnd(
            **where,
            t=end,
            request_id=facts.request_id,
            finish_reason=facts.finish_reason,
            output_tokens=facts.output_tokens,
            first_token=figures.first_token,
            error=facts.error,
            message=facts.message,
            output_ids=facts.output_ids,
        )
    )
    return sorted(events, key=lambda event: (event.t, isinstance(event, TurnEnd)))


def _contiguous(rounds: Iterable[Round]) -> list[list[Round]]:
    """Runs in which each round starts at the context the one before left."""
    runs: list[list[Round]] = []
    for row in rounds:
        last = runs[-1][-1] if runs else None
        if last is not None and row.context == last.context + last.advance:
            runs[-1].append(row)
        else:
            runs.append([row])
    return runs
