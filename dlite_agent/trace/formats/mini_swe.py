"""mini-swe-agent `.traj.json`.

Version 2 stamps each message with Unix seconds when it is complete, so both model and tool time are inferred from
neighbouring stamps; answers in the shape of the responses API carry their own start. Version 1 holds at most the whole
second a response was created, which cannot tell model time from tool time. Without stamps only the order is known.
"""

from __future__ import annotations

from typing import Any

from dlite_agent.trace.events import AnyEvent
from dlite_agent.trace.formats.build import Builder, Conversation, Document, Usage, plausible, text_of, tool_call

NAME = "mini-swe-agent"


def matches(document: Document) -> bool:
    whole = document.whole
    if not isinstance(whole, dict) or not isinstance(whole.get("messages"), list):
        return False
    info = whole.get("info")
    return str(whole.get("trajectory_format", "")).startswith("mini-swe-agent") or (
        isinstance(info, dict) and "mini_version" in info
    )


def load(document: Document) -> list[AnyEvent]:
    """Events of the one session of the file."""
    whole: dict[str, Any] = document.whole
    messages = [message for message in whole["messages"] if isinstance(message, dict)]
    stamps = [_stamp(message) for message in messages]
    known = [stamp for stamp in stamps if stamp is not None]
    begun = (plausible(message.get("created_at")) for message in messages)
    wall = min([*known, *(at for at in begun if at is not None)], default=0.0)
    builder = Builder(NAME, "wall" if known else "none", wall)
    session = Conversation(builder, str(whole.get("instance_id") or "trajectory"), _model_name(whole))
    coarse = not any("timestamp" in _extra(message) for message in messages)
    at = 0.0
    calls: list[str] = []
    for number, message in enumerate(messages):
        stamp = stamps[number]
        before, at = at, at if stamp is None else max(at, stamp - wall)
        role = "assistant" if message.get("object") == "response" else message.get("role")
        if role == "assistant":
            began = plausible(message.get("created_at"))
            start = before
            if began is not None and before <= began - wall <= at and "completed_at" in message:
                start = began - wall
                spans = [session.model(start, at)]
            elif coarse:
                # Stamps of version 1 are starts: the stretch to the next one holds the answer and its commands.
                start = at
                later = next((s - wall for s in stamps[number + 1 :] if s is not None), at)
                spans = [session.model(start, later, inferred=True, includes_tools=True)]
            else:
                spans = [session.model(start, at, inferred=True)]
            answer = _answer(message, session.next_turn)
            calls = [call["id"] for call in answer.get("tool_calls", [])]
            usage = Usage.openai(message.get("usage") or _response(message).get("usage"))
            session.turn(answer, start, at, usage=usage, spans=spans if known else ())
        elif role in ("system", "user", "tool") or message.get("type") == "function_call_output":
            content = text_of(message.get("content", message.get("output")))
            call_id = message.get("tool_call_id") or message.get("call_id") or (calls.pop(0) if calls else None)
            if call_id in calls:
                calls.remove(call_id)
            code = _extra(message).get("returncode")
            exit_code = code if isinstance(code, int) else None
            if call_id is None or not session.result(str(call_id), content, at, exit_code=exit_code):
                session.incoming({"role": "system" if role == "system" else "user", "content": content})
        else:
            builder.foreign(message, at, session.session)
    builder.foreign({key: value for key, value in whole.items() if key != "messages"}, at, session.session)
    return builder.events()


def _extra(message: dict[str, Any]) -> dict[str, Any]:
    extra = message.get("extra")
    return extra if isinstance(extra, dict) else {}


def _response(message: dict[str, Any]) -> dict[str, Any]:
    response = _extra(message).get("response")
    return response if isinstance(response, dict) else {}


def _stamp(message: dict[str, Any]) -> float | None:
    found = (
        _extra(message).get("timestamp"),
        message.get("completed_at"),
        message.get("created_at"),
        _response(message).get("created"),
    )
    return next((stamp for stamp in map(plausible, found) if stamp), None)


def _model_name(whole: dict[str, Any]) -> str | None:
    name: Any = whole.get("info")
    for key in ("config", "model", "model_name"):
        name = name.get(key) if isinstance(name, dict) else None
    return name if isinstance(name, str) else None


def _answer(message: dict[str, Any], turn: int) -> dict[str, Any]:
    answer: dict[str, Any] = {"role": "assistant", "content": text_of(message.get("content"))}
    calls = message.get("tool_calls")
    output = message.get("output") if message.get("object") == "response" else None
    if isinstance(output, list):
        items = [item for item in output if isinstance(item, dict)]
        answer["content"] = "\n".join(text_of(i.get("content")) for i in items if i.get("type") == "message")
        made = [i for i in items if i.get("type") == "function_call"]
        calls = [tool_call(str(i.get("call_id")), str(i.get("name")), i.get("arguments") or "{}") for i in made]
    if isinstance(calls, list) and calls:
        answer["tool_calls"] = [call for call in calls if isinstance(call, dict)]
        return answer
    actions = _extra(message).get("actions")
    if isinstance(actions, list) and actions:
        answer["tool_calls"] = [
            tool_call(
                str((isinstance(action, dict) and action.get("tool_call_id")) or f"turn{turn}-{number}"),
                "bash",
                {"command": action.get("command")} if isinstance(action, dict) else {"command": action},
            )
            for number, action in enumerate(actions)
        ]
    return answer
