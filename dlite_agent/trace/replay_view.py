"""Showing a recorded session as it went, turn by turn, at a chosen speed; nothing is run."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from typing import Any

from dlite_agent.trace.formats.build import text_of
from dlite_agent.trace.phases import PHASES, Turn
from dlite_agent.trace.script import RecordedCall, RecordedTurn, Script

_LINES = 12
_COLUMNS = 400


def show(
    script: Script,
    say: Callable[[str], None],
    *,
    wait: str = "none",
    speed: float = 1.0,
    sleep: Callable[[float], None] = time.sleep,
) -> None:
    """Tell what happened, line by line.

    Args:
        wait: `original` and `scaled` let each turn and wait last as long as recorded, over `speed`; `none` does not.
        sleep: how to let time pass.
    """
    pace = 0.0 if wait == "none" else 1.0 / speed
    views = {turn.turn: turn for turn in script.timeline.turns}
    for turn in script.turns:
        view = views[turn.turn]
        for message in turn.messages or []:
            say(_block(str(message.get("role")), text_of(message.get("content"))))
        sleep(pace * max(0.0, view.end - view.start))
        for line in _answer(turn, view):
            say(line)
        sleep(pace * (turn.tool_wait + turn.idle))
        for call in turn.calls:
            say(_result(call))


def _answer(turn: RecordedTurn, view: Turn) -> Iterator[str]:
    phases = ", ".join(
        f"{phase} {view.seconds[phase]:.2f} s" for phase in PHASES if view.seconds.get(phase, 0.0) >= 0.005
    )
    yield f"turn {turn.turn}: {phases or 'no time known'}; {view.output_tokens} tokens, {turn.finish_reason}"
    message: dict[str, Any] = turn.message or {}
    if message.get("reasoning_content"):
        yield _block("thinks", str(message["reasoning_content"]))
    if text_of(message.get("content")):
        yield _block("assistant", text_of(message.get("content")))
    for call in turn.calls:
        yield _block(f"calls {call.name}", json.dumps(call.arguments, ensure_ascii=False))


def _result(call: RecordedCall) -> str:
    how = "measured" if call.measured else "inferred"
    end = f"exit {call.exit_code}" if call.exit_code is not None else call.error or "done"
    output = call.output if isinstance(call.output, str) else json.dumps(call.output, default=str)
    return _block(f"{call.name}, {call.seconds:.2f} s {how}, {end}", "" if call.output is None else output)


def _block(head: str, text: str) -> str:
    lines = text.splitlines() or [""]
    more = f"\n  ... {len(lines) - _LINES} more lines" if len(lines) > _LINES else ""
    return f"[{head}] " + "\n  ".join(line[:_COLUMNS] for line in lines[:_LINES]) + more
