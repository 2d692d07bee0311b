"""A model that says what was recorded: its turns go through the parser, the loop and the tools like any other's."""

from __future__ import annotations

import json
import time
from collections.abc import AsyncGenerator, Sequence
from pathlib import Path
from typing import Any

from dlite_agent.agent.run_model import Emit, TurnReply, TurnRequest
from dlite_agent.session.deltas import Delta
from dlite_agent.session.reasoning import ReasoningParser, ResponseParser
from dlite_agent.session.toolcalls import tool_parser
from dlite_agent.trace.events import KnownEvent, SessionStart, TurnEnd, TurnStart

PIECE = 7
"""Characters that come at once, as a window of drafts would bring them."""


class ReferenceModel:
    """Says one recorded turn after the other; a run that was taken up again goes on where the conversation stands."""

    def __init__(self, turns: Sequence[str]) -> None:
        self._turns = turns

    async def turn(self, request: TurnRequest, emit: Emit) -> AsyncGenerator[Delta | TurnReply, None]:
        """As `RunModel.turn`."""
        place: dict[str, Any] = {"segment": "", "session": ""}
        start = time.monotonic()
        emit(SessionStart(**place, t=start, target="reference"))
        emit(TurnStart(**place, turn=0, t=start))
        parser = ResponseParser(ReasoningParser("never"), tool_parser("hermes", request.tools))
        text = self._turns[sum(message.role == "assistant" for message in request.messages)]
        for at in range(0, len(text), PIECE):
            for delta in parser.feed(text[at : at + PIECE]):
                yield delta
        for delta in parser.finish():
            yield delta
        finish = "tool_calls" if parser.calls else "stop"
        emit(TurnEnd(**place, turn=0, t=time.monotonic(), finish_reason=finish, output_tokens=len(text) // 4))
        yield TurnReply(parser.message(), cut=False, tokens=len(text) // 4)

    def observe(self, event: KnownEvent) -> None:
        """Nothing is kept."""


def recorded(path: Path) -> list[str]:
    """The turns of a `reference.json` as a model writes them."""
    turns = []
    for turn in json.loads(path.read_text()):
        calls = [f"<tool_call>\n{json.dumps(call)}\n</tool_call>" for call in turn["calls"]]
        turns.append("\n".join([*([turn["text"]] if turn["text"] else []), *calls]))
    return turns
