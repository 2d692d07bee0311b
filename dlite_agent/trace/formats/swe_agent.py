"""SWE-agent `.traj`: each step's `execution_time` is the only time in it.

Tool durations are laid end to end; model time is not recorded, so a report can give neither shares nor bounds.
"""

from __future__ import annotations

from typing import Any

from dlite_agent.trace.events import AnyEvent
from dlite_agent.trace.formats.build import Builder, Conversation, Document, plausible, text_of, tool_call

NAME = "swe-agent"


def matches(document: Document) -> bool:
    whole = document.whole
    return (
        isinstance(whole, dict)
        and isinstance(whole.get("trajectory"), list)
        and ("history" in whole or "info" in whole)
    )


def load(document: Document) -> list[AnyEvent]:
    """Events of the one session of the file."""
    whole: dict[str, Any] = document.whole
    steps = [step for step in whole["trajectory"] if isinstance(step, dict)]
    timed = any(_seconds(step) is not None for step in steps)
    builder = Builder(NAME, "durations" if timed else "none")
    session = Conversation(builder, str(whole.get("environment") or "trajectory"), _model_name(whole))
    for message in whole.get("history") or []:
        if not isinstance(message, dict) or message.get("role") not in ("system", "user"):
            break
        session.incoming({"role": message["role"], "content": text_of(message.get("content"))})
    at = 0.0
    for number, step in enumerate(steps):
        call_id = f"step{number}"
        answer: dict[str, Any] = {
            "role": "assistant",
            "content": str(step.get("response") or step.get("thought") or ""),
        }
        if step.get("action"):
            answer["tool_calls"] = [tool_call(call_id, "action", {"command": step["action"]})]
        session.turn(answer, at, at, measured_tools=True)
        at += _seconds(step) or 0.0
        if step.get("action"):
            session.result(call_id, str(step.get("observation") or ""), at)
    rest = {key: value for key, value in whole.items() if key not in ("trajectory", "history")}
    builder.foreign(rest, at, session.session)
    return builder.events()


def _seconds(step: dict[str, Any]) -> float | None:
    return plausible(step.get("execution_time"))


def _model_name(whole: dict[str, Any]) -> str | None:
    config: Any = whole.get("replay_config")
    for key in ("agent", "model", "name"):
        config = config.get(key) if isinstance(config, dict) else None
    return config if isinstance(config, str) else None
