"""What the loop asks of a model: one turn at a time, streamed."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass
from typing import Protocol

from dlite_agent.agent.run_spec import ModelOptions
from dlite_agent.session.deltas import Delta
from dlite_agent.session.messages import JSON, Message
from dlite_agent.trace.events import KnownEvent

Emit = Callable[[KnownEvent], None]


@dataclass(frozen=True)
class TurnRequest:
    """One turn: the whole conversation so far, and what the answer may be.

    Attributes:
        tools: function schemas.
        tool_choice: auto, required or the name of the tool to call.
        max_tokens: of this turn.
        seconds: until the turn is given up.
    """

    messages: list[Message]
    tools: list[JSON]
    tool_choice: str
    options: ModelOptions
    max_tokens: int
    seconds: float


@dataclass(frozen=True)
class TurnReply:
    """A turn's answer; `cut` says that a token limit ended it."""

    message: Message
    cut: bool
    tokens: int


class RunModel(Protocol):
    """A source of turns."""

    def turn(self, request: TurnRequest, emit: Emit) -> AsyncGenerator[Delta | TurnReply, None]:
        """Deltas as they form, the reply last; `emit` gets the turn's trace events.

        Raises:
            ContextOverflow: the conversation does not fit.
            DliteError: the turn failed; the conversation is as before.
        """

    def observe(self, event: KnownEvent) -> None:
        """A tool of the run began or ended."""
