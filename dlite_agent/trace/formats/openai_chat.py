"""OpenAI chat logs: a list of messages, an object with `messages`, or JSON lines of those or of request and response.

These hold no durations: at most the whole second a response was created. Order, content and usage are kept.
"""

from __future__ import annotations

from typing import Any

from dlite_agent.trace.events import AnyEvent
from dlite_agent.trace.formats.build import Builder, Conversation, Document, Usage, text_of

NAME = "openai-chat"


def matches(document: Document) -> bool:
    if isinstance(document.whole, list):
        return bool(document.whole) and all(isinstance(item, dict) and "role" in item for item in document.whole)
    return bool(document.records) and all(
        isinstance(record.get("messages"), list) or isinstance(record.get("request"), dict)
        for record in document.records
    )


def load(document: Document) -> list[AnyEvent]:
    """Events: one session a list of messages; request and response lines that continue each other share one."""
    builder = Builder(NAME, "none")
    records = [{"messages": document.whole}] if isinstance(document.whole, list) else document.records
    open_sessions: list[tuple[Conversation, list[Any]]] = []
    for number, record in enumerate(records):
        request = record.get("request") if isinstance(record.get("request"), dict) else record
        messages = request.get("messages") if isinstance(request, dict) else None
        if not isinstance(request, dict) or not isinstance(messages, list):
            builder.foreign(record, 0.0)
            continue
        response = record.get("response") if isinstance(record.get("response"), dict) else None
        found = next((pair for pair in open_sessions if _continues(pair[1], messages)), None)
        if found is None:
            name = str(record.get("id") or request.get("session_id") or f"chat{number}")
            found = (Conversation(builder, name, request.get("model")), [])
            open_sessions.append(found)
        session, history = found
        for message in messages[len(history) :]:
            _message(session, message, Usage())
        history[:] = messages
        answer = _answer(response)
        if answer is not None and response is not None:
            reason = response["choices"][0].get("finish_reason")
            _message(session, answer, Usage.openai(response.get("usage")), reason, response.get("id"))
            history.append(answer)
        rest = {key: value for key, value in record.items() if key not in ("messages", "request", "response")}
        if rest:
            builder.foreign(rest, 0.0, session.session)
    return builder.events()


def _continues(history: list[Any], messages: list[Any]) -> bool:
    return 0 < len(history) <= len(messages) and all(
        isinstance(new, dict)
        and isinstance(old, dict)
        and old.get("role") == new.get("role")
        and text_of(old.get("content")) == text_of(new.get("content"))
        for old, new in zip(history, messages, strict=False)
    )


def _answer(response: Any) -> dict[str, Any] | None:
    choices = response.get("choices") if isinstance(response, dict) else None
    if not isinstance(choices, list) or not choices or not isinstance(choices[0], dict):
        return None
    message = choices[0].get("message")
    return message if isinstance(message, dict) else None


def _message(
    session: Conversation, message: Any, usage: Usage, finish_reason: Any = None, request_id: Any = None
) -> None:
    role = message.get("role") if isinstance(message, dict) else None
    if role == "assistant":
        session.turn(
            message,
            0.0,
            0.0,
            usage=usage,
            finish_reason=finish_reason if isinstance(finish_reason, str) else None,
            request_id=request_id if isinstance(request_id, str) else None,
        )
    elif role == "tool" and session.result(str(message.get("tool_call_id")), message.get("content"), 0.0):
        return
    elif role in ("system", "developer", "user", "tool"):
        session.incoming(message)
    else:
        session.builder.foreign(message, 0.0, session.session)
