"""Sessions recorded on a tiny engine, to be replayed."""

from __future__ import annotations

import queue
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from dlite_agent.config import Mode, SchedulerSettings
from dlite_agent.decode.engine import Engine
from dlite_agent.decode.jobs import Finished, Generation, Reply
from dlite_agent.decode.load import Runtime
from dlite_agent.decode.rounds import Decoder
from dlite_agent.decode.sampling import SamplingParams
from dlite_agent.trace.events import AnyEvent, Segment, SessionStart, ToolEnd, ToolStart
from dlite_agent.trace.log import Log
from dlite_agent.trace.turns import TurnFacts, turn_events
from tests.helpers import GREEDY, prompt

SEGMENT = "recorded"


class Letters:
    """A tokenizer of the tiny vocabulary: one letter a token."""

    def decode(self, ids: list[int], **options: bool) -> str:
        return "".join(chr(0x100 + token) for token in ids)


def start_engine(decoder: Decoder, **options: Any) -> Engine:
    engine = Engine(SchedulerSettings(), lambda: Runtime(decoder, Letters(), Path()), **options)
    engine.start()
    return engine


def generate(engine: Engine, key: str, ids: list[int], tokens: int, params: SamplingParams, mode: Mode) -> Finished:
    replies: queue.SimpleQueue[Reply] = queue.SimpleQueue()
    engine.submit(
        Generation(
            id=f"{key}{len(ids)}", key=key, ids=ids, params=params, max_new_tokens=tokens, reply=replies.put, mode=mode
        )
    )
    while not isinstance(reply := replies.get(timeout=60), Finished):
        pass
    return reply


def record(
    engine: Engine,
    session: str = "s",
    *,
    turns: int = 3,
    tokens: int = 24,
    tool_seconds: float = 0.05,
    params: SamplingParams = GREEDY,
    mode: Mode = "dlite",
    sampling: dict[str, Any] | None = None,
    change: Callable[[list[AnyEvent]], None] = lambda events: None,
) -> Log:
    """A session whose turns each end in a tool call; the tool's answer begins the next turn."""
    events: list[AnyEvent] = [Segment(segment=SEGMENT, t=0.0, wall=1.8e9)]
    ids: list[int] = []
    for turn in range(turns):
        new = prompt(20 + turn, seed=turn)
        ids += new
        reply = generate(engine, f"record/{session}", list(ids), tokens, params, mode)
        ids += reply.generated
        if not turn:
            events.append(SessionStart(segment=SEGMENT, t=reply.figures.queued, session=session))
        facts = TurnFacts(
            SEGMENT,
            session,
            turn,
            finish_reason="tool_calls" if turn < turns - 1 else "stop",
            output_tokens=len(reply.generated),
            new_ids=new,
            output_ids=list(reply.generated),
        )
        made = turn_events(facts, reply.figures)
        events += [
            event.model_copy(update={"sampling": sampling}) if event.kind == "turn_start" else event for event in made
        ]
        if turn < turns - 1:
            place: dict[str, Any] = {"segment": SEGMENT, "session": session, "turn": turn, "call_id": f"c{turn}"}
            end = reply.figures.finished
            events.append(ToolStart(**place, t=end, name="shell", arguments={"command": "ls"}))
            time.sleep(tool_seconds)
            events.append(ToolEnd(**place, t=time.monotonic(), output="a b", exit_code=0))
    change(events)
    return Log(events)
