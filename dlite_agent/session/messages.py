"""Client messages in one shape, and digests that say when two of them are the same message.

Clients re-send a conversation with small changes that mean nothing: null or missing content, a list of text parts
instead of a string, JSON keys in another order, spaces in tool arguments, reasoning left out. `normalise` reduces all
of them to `Message`, and `digest` ignores what cannot be told apart by meaning.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from dlite_agent.errors import InvalidRequest

JSON = Mapping[str, Any]

_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}
_FIELDS = {
    "assistant": ("tool_calls", "reasoning_content", "reasoning", "refusal"),
    "tool": ("tool_call_id",),
}
"""What only messages of one role have."""
_TEXT_PARTS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}
_MARKS = ("id", "type", "status", "phase", "index", "caller")
_ASIDES = ("annotations", "citations", "logprobs", "parsed", "parsed_arguments", "parsed_output")
_HINTS = ("cache_control", "prompt_cache_breakpoint", "provider_specific_fields")
_SEALED = ("signature", "data", "encrypted_content", "summary")
_TRACES = ("reasoning_details", "reasoning_items", "thinking_blocks")
NOTES = frozenset((*_MARKS, *_ASIDES, *_HINTS, *_SEALED, *_TRACES))
"""What servers and clients write beside what was said, and send again; no template shows it to a model. Reasoning that
only its maker can read counts as left out."""
_BILLING_LINE = re.compile(r"\A\s*x-anthropic-billing-header:[^\n]*\n*")
_THINK_BLOCK = re.compile(r"\A\s*<think>.*?</think>", re.DOTALL)


@dataclass(frozen=True)
class ToolCall:
    """One call as the model wrote it; `arguments` is the verbatim JSON text."""

    id: str
    name: str
    arguments: str


@dataclass(frozen=True)
class Message:
    """One message of a conversation. `role` is system, user, assistant or tool; absent text is the empty string."""

    role: str
    content: str
    reasoning: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str = ""
    name: str = ""


def check_fields(raw: JSON, where: str, *honoured: str) -> None:
    """Refuse what an object of a conversation says beyond the fields that are honoured.

    `NOTES` are let through, and so is what is null or empty, which says nothing.

    Raises:
        InvalidRequest: `param` names the field.
    """
    for field, value in raw.items():
        if field not in honoured and field not in NOTES and value not in (None, "", [], {}):
            raise InvalidRequest(f"{where}.{field} is not supported.", param=f"{where}.{field}")


def _check_type(raw: JSON, where: str, expected: str) -> None:
    if raw.get("type") not in (None, expected):
        raise InvalidRequest(f"{where}.type must be {expected!r}.", param=f"{where}.type")


def normalise(messages: Sequence[JSON]) -> list[Message]:
    """OpenAI-shaped messages as `Message`s.

    A system message that holds only a billing header (its value changes with each request) disappears, and an assistant
    message that directly follows another is joined to it: clients split one response into several. (Two answers
    generated one behind the other therefore come back as one that no turn holds; nothing is lost but the match.)

    Raises:
        InvalidRequest: a message, role, part or tool call has a shape that cannot be honoured; `param` names it.
    """
    out: list[Message] = []
    for i, raw in enumerate(messages):
        message = _normalise_one(raw, f"messages[{i}]")
        if message is None:
            continue
        if out and message.role == "assistant" == out[-1].role:
            last = out[-1]
            out[-1] = replace(
                last,
                content=last.content + message.content,
                reasoning=last.reasoning + message.reasoning,
                tool_calls=last.tool_calls + message.tool_calls,
            )
        else:
            out.append(message)
    return out


def _normalise_one(raw: JSON, where: str) -> Message | None:
    if not isinstance(raw, Mapping):
        raise InvalidRequest(f"{where} must be an object with a role.", param=where)
    given = raw.get("role")
    role = _ROLES.get(given) if isinstance(given, str) else None
    if role is None:
        raise InvalidRequest(f"{where}.role must be one of {', '.join(_ROLES)}; got {given!r}.", param=f"{where}.role")
    _check_type(raw, where, "message")
    if raw.get("function_call") is not None:
        raise InvalidRequest(f"{where}.function_call is obsolete; send tool_calls.", param=f"{where}.function_call")
    check_fields(raw, where, "role", "content", "name", *_FIELDS.get(role, ()))
    content = _text(raw.get("content"), role, f"{where}.content")
    if role == "system" and not content and raw.get("content"):
        return None
    reasoning = _string(raw, "reasoning_content", where) or _string(raw, "reasoning", where)
    calls = () if raw.get("tool_calls") is None else raw["tool_calls"]
    if not isinstance(calls, Sequence) or isinstance(calls, str):
        raise InvalidRequest(f"{where}.tool_calls must be an array.", param=f"{where}.tool_calls")
    return Message(
        role=role,
        content=content + _string(raw, "refusal", where),
        reasoning=reasoning,
        tool_calls=tuple(_call(call, f"{where}.tool_calls[{j}]") for j, call in enumerate(calls)),
        tool_call_id=_string(raw, "tool_call_id", where),
        name=_string(raw, "name", where),
    )


def _string(raw: JSON, field: str, where: str) -> str:
    value = raw.get(field)
    if value is None:
        return ""
    if not isinstance(value, str):
        raise InvalidRequest(f"{where}.{field} must be a string.", param=f"{where}.{field}")
    return value


def _text(content: Any, role: str, where: str) -> str:
    """Content as text; parts are joined by a newline, an assistant's directly (they were one text when generated)."""
    if content is None:
        return ""
    if isinstance(content, str):
        return _BILLING_LINE.sub("", content) if role == "system" else content
    if not isinstance(content, Sequence):
        raise InvalidRequest(f"{where} must be a string, null or an array of text parts.", param=where)
    parts = [_part(part, f"{where}[{i}]") for i, part in enumerate(content)]
    if role == "system":
        parts = [_BILLING_LINE.sub("", part) for part in parts]
    return ("" if role == "assistant" else "\n").join(part for part in parts if part)


def _part(part: Any, where: str) -> str:
    if isinstance(part, str):
        return part
    kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
    if not isinstance(part, Mapping) or not isinstance(kind, str) or kind not in _TEXT_PARTS:
        raise InvalidRequest(f"{where}: only text parts are supported, got {kind!r}.", param=where)
    check_fields(part, where, _TEXT_PARTS[kind])
    text = part.get(_TEXT_PARTS[kind])
    if not isinstance(text, str):
        raise InvalidRequest(f"{where}.text must be a string.", param=f"{where}.text")
    return text


def _call(raw: Any, where: str) -> ToolCall:
    function = raw.get("function") if isinstance(raw, Mapping) else None
    if not isinstance(function, Mapping):
        raise InvalidRequest(f"{where} must be an object with a function.", param=where)
    _check_type(raw, where, "function")
    check_fields(raw, where, "function")
    check_fields(function, f"{where}.function", "name", "arguments")
    name = function.get("name")
    if not isinstance(name, str) or not name:
        raise InvalidRequest(f"{where}.function.name must be a non-empty string.", param=f"{where}.function.name")
    arguments = function.get("arguments")
    if arguments is None or arguments == "":
        text = "{}"
    elif isinstance(arguments, str):
        text = arguments
    else:
        text = json.dumps(arguments, ensure_ascii=False)
    call_id = raw.get("id")
    return ToolCall(id=call_id if isinstance(call_id, str) else "", name=name, arguments=text)


def canonical_json(text: str) -> str:
    """JSON text with sorted keys and no spaces; text that is not JSON comes back stripped, so it still compares."""
    try:
        return json.dumps(json.loads(text, strict=False), sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    except (ValueError, RecursionError):
        return text.strip()


def digest(message: Message) -> str:
    """What the message means, as 32 hex digits: without ids, reasoning and the spaces around an answer."""
    content = message.content
    if message.role == "assistant":
        content = _THINK_BLOCK.sub("", content).strip()
    calls = [[call.name, canonical_json(call.arguments)] for call in message.tool_calls]
    return _hash([message.role, content, calls])


def tools_digest(tools: Sequence[JSON] | None) -> str:
    """The tool definitions as 32 hex digits; their order counts, that of keys does not. No tools is empty."""
    return _hash(list(tools)) if tools else ""


def _hash(value: Any) -> str:
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return hashlib.sha256(text.encode()).hexdigest()[:32]


class Call(Protocol):
    """What a tool call has, parsed from an answer or given by a client."""

    @property
    def id(self) -> str: ...
    @property
    def name(self) -> str: ...
    @property
    def arguments(self) -> str: ...


def calls_json(calls: Iterable[Call]) -> list[dict[str, Any]]:
    """Tool calls in OpenAI's shape."""
    return [
        {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
        for call in calls
    ]


def message_json(message: Message) -> dict[str, Any]:
    """A message in OpenAI's shape, without what only a tool's has."""
    found: dict[str, Any] = {"role": message.role, "content": message.content}
    if message.reasoning:
        found["reasoning_content"] = message.reasoning
    if message.tool_calls:
        found["tool_calls"] = calls_json(message.tool_calls)
    return found
