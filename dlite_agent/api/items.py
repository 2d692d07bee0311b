"""The Responses API's items: its input as the messages that all shapes share, answers as its output."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from dlite_agent.api.fields import Tools, read_tools
from dlite_agent.api.turns import Answer
from dlite_agent.errors import InvalidRequest
from dlite_agent.session.deltas import ParsedCall
from dlite_agent.session.messages import check_fields

_ITEMS = {
    "message": ("role", "content"),
    "function_call": ("call_id", "name", "arguments"),
    "function_call_output": ("call_id", "name", "output"),
    "reasoning": ("content",),
}


_CALLS = {"function_call": ("call_id", "name", "arguments"), "function_call_output": ("call_id",)}
"""Texts that an item of a call cannot do without."""


def openai_messages(given: str | Sequence[Any]) -> list[dict[str, Any]]:
    """Input as chat messages.

    Raises:
        InvalidRequest: an item has a type or shape that cannot be honoured.
    """
    if isinstance(given, str):
        return [{"role": "user", "content": given}] if given else []
    return [_message(item, f"input[{i}]") for i, item in enumerate(given)]


def _message(item: Any, where: str) -> dict[str, Any]:
    if not isinstance(item, dict):
        raise InvalidRequest(f"{where} must be an object.", param=where)
    kind = "message" if item.get("type") is None else item["type"]
    if not isinstance(kind, str) or kind not in _ITEMS:
        raise InvalidRequest(f"{where}.type {kind!r} is not supported.", param=f"{where}.type")
    check_fields(item, where, *_ITEMS[kind])
    if kind == "message":
        return {"role": item.get("role"), "content": item.get("content")}
    for field in _CALLS.get(kind, ()):
        if not isinstance(item.get(field), str):
            raise InvalidRequest(f"{where}.{field} must be a string.", param=f"{where}.{field}")
    if kind == "function_call":
        function = {"name": item.get("name"), "arguments": item.get("arguments")}
        call = {"id": item.get("call_id"), "type": "function", "function": function}
        return {"role": "assistant", "content": None, "tool_calls": [call]}
    if kind == "function_call_output":
        if "output" not in item:
            raise InvalidRequest(f"{where}.output is missing: give what the tool said.", param=f"{where}.output")
        name, said = item.get("name"), item.get("output")
        return {"role": "tool", "tool_call_id": item.get("call_id"), "name": name, "content": said}
    return {"role": "assistant", "content": None, "reasoning_content": _reasoning(item.get("content"), where)}


def _reasoning(content: Any, where: str) -> str:
    if content is None:
        return ""
    if not isinstance(content, list) or any(not isinstance(part, dict) for part in content):
        raise InvalidRequest(f"{where}.content must be an array of parts.", param=f"{where}.content")
    for i, part in enumerate(content):
        check_fields(part, f"{where}.content[{i}]", "text")
    texts = [part.get("text") for part in content if part.get("type") == "reasoning_text"]
    if len(texts) < len(content) or any(not isinstance(text, str) for text in texts):
        raise InvalidRequest(f"{where}.content must hold reasoning_text parts.", param=f"{where}.content")
    return "".join(texts)


def flat_tools(tools: Sequence[Any] | None) -> Tools:
    """Function tools, whose definition stands beside their type here. Raises InvalidRequest, see `read_tools`."""
    return read_tools(tools, ("function",), "function tools", lambda tool, where: (tool, where))


def nested_choice(choice: Any) -> Any:
    """`tool_choice` as chat has it, with the function's name one level down."""
    if isinstance(choice, dict) and choice.get("type") == "function":
        return {"type": "function", "function": {"name": choice.get("name")}}
    return "auto" if choice is None else choice


def text_part(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def message_item(item_id: str, text: str, status: str) -> dict[str, Any]:
    content = [] if status == "in_progress" else [text_part(text)]
    return {"id": item_id, "type": "message", "role": "assistant", "status": status, "content": content}


def reasoning_item(item_id: str, text: str, status: str) -> dict[str, Any]:
    content = [] if status == "in_progress" else [{"type": "reasoning_text", "text": text}]
    return {"id": item_id, "type": "reasoning", "summary": [], "status": status, "content": content}


def call_item(item_id: str, call_id: str, name: str, arguments: str, status: str) -> dict[str, Any]:
    return {
        "id": item_id,
        "type": "function_call",
        "call_id": call_id,
        "name": name,
        "arguments": arguments,
        "status": status,
    }


def call_status(call: ParsedCall) -> str:
    """A call cut short is incomplete."""
    return "incomplete" if call.status == "cut" else "completed"


def output_items(answer: Answer, request_id: str) -> list[dict[str, Any]]:
    """A complete answer as output items: reasoning, text, calls."""
    items: list[dict[str, Any]] = []
    status = "incomplete" if answer.finish == "length" else "completed"

    def name(kind: str) -> str:
        return f"{kind}_{request_id}_{len(items) + 1}"

    if answer.message.reasoning:
        items.append(reasoning_item(name("rs"), answer.message.reasoning, status))
    if answer.message.content or not (answer.calls or items):
        items.append(message_item(name("msg"), answer.message.content, status))
    for call in answer.calls:
        items.append(call_item(name("fc"), call.id, call.name, call.arguments, call_status(call)))
    return items
