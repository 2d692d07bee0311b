"""Anthropic's content blocks to the messages that all shapes share."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from dlite_agent.api.fields import Tools, is_function_name, read_tools
from dlite_agent.errors import InvalidRequest
from dlite_agent.session.messages import JSON, check_fields

_OTHER_BLOCKS = {"thinking": ("thinking",), "tool_use": ("name", "input"), "redacted_thinking": ()}
"""Blocks of an assistant beside its text, and what of them is honoured beside their type and id."""


def openai_messages(system: Any, messages: Sequence[Any]) -> list[dict[str, Any]]:
    """The conversation in OpenAI's shape.

    Raises:
        InvalidRequest: a message or block has a shape or type that cannot be honoured.
    """
    out: list[dict[str, Any]] = []
    if system:
        out.append({"role": "system", "content": _texts(system, "system")})
    for i, message in enumerate(messages):
        where = f"messages[{i}]"
        if not isinstance(message, dict):
            raise InvalidRequest(f"{where} must be an object.", param=where)
        check_fields(message, where, "role", "content")
        role, content = message.get("role"), message.get("content")
        if role not in ("user", "assistant", "system"):
            raise InvalidRequest(f"{where}.role must be user, assistant or system.", param=f"{where}.role")
        if content is None or not isinstance(content, (str, list)):
            raise InvalidRequest(f"{where}.content must be a string or an array of blocks.", param=f"{where}.content")
        if isinstance(content, str):
            out.append({"role": role, "content": content})
        elif role == "assistant":
            out.append(_assistant(content, f"{where}.content"))
        elif role == "system":
            out.append({"role": role, "content": _texts(content, f"{where}.content")})
        else:
            out += _user(content, f"{where}.content")
    if out and out[-1]["role"] == "assistant":
        raise InvalidRequest("A final assistant message (prefill) is not supported.", param="messages")
    return out


def _texts(content: Any, where: str) -> list[str] | str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise InvalidRequest(f"{where} must be a string or an array of text blocks.", param=where)
    return [_text(block, f"{where}[{i}]") for i, block in enumerate(content)]


def _text(block: Any, where: str) -> str:
    kind = block.get("type") if isinstance(block, dict) else None
    text = block.get("text") if isinstance(block, dict) else None
    if kind != "text" or not isinstance(text, str):
        raise InvalidRequest(f"{where}: only text blocks are supported here, got {kind!r}.", param=where)
    check_fields(block, where, "text")
    return text


def _assistant(blocks: list[Any], where: str) -> dict[str, Any]:
    texts: list[str] = []
    reasoning = ""
    calls = []
    for i, block in enumerate(blocks):
        kind = block.get("type") if isinstance(block, dict) else None
        if isinstance(kind, str) and kind in _OTHER_BLOCKS:
            check_fields(block, f"{where}[{i}]", *_OTHER_BLOCKS[kind])
        if kind == "thinking" and isinstance(block.get("thinking"), str):
            reasoning += block["thinking"]
        elif kind == "tool_use":
            name, given = block.get("name"), block.get("input")
            if not isinstance(name, str) or not isinstance(given, dict) or not isinstance(block.get("id"), str):
                raise InvalidRequest(f"{where}[{i}] needs id, name and an input object.", param=f"{where}[{i}]")
            arguments = json.dumps(given, ensure_ascii=False)
            calls.append(
                {"id": block.get("id"), "type": "function", "function": {"name": name, "arguments": arguments}}
            )
        elif kind != "redacted_thinking":
            texts.append(_text(block, f"{where}[{i}]"))
    return {"role": "assistant", "content": texts, "reasoning_content": reasoning, "tool_calls": calls}


def _user(blocks: list[Any], where: str) -> list[dict[str, Any]]:
    """Tool results as messages of their own, then what the user says."""
    results: list[dict[str, Any]] = []
    texts: list[str] = []
    for i, block in enumerate(blocks):
        if isinstance(block, dict) and block.get("type") == "tool_result":
            check_fields(block, f"{where}[{i}]", "tool_use_id", "content", "is_error")
            if not isinstance(block.get("tool_use_id"), str):
                raise InvalidRequest(f"{where}[{i}].tool_use_id must be a string.", param=f"{where}[{i}].tool_use_id")
            content = block.get("content")
            told = "" if content is None else _texts(content, f"{where}[{i}].content")
            text = told if isinstance(told, str) else "\n".join(told)
            if not isinstance(block.get("is_error"), bool | None):
                raise InvalidRequest(f"{where}[{i}].is_error must be a boolean.", param=f"{where}[{i}].is_error")
            if block.get("is_error"):
                text = f"Error: {text}"
            results.append({"role": "tool", "tool_call_id": block.get("tool_use_id"), "content": text})
        else:
            texts.append(_text(block, f"{where}[{i}]"))
    said = [{"role": "user", "content": texts}] if texts or not results else []
    return results + said


_TOOL_HINTS = ("eager_input_streaming",)
"""How finely the arguments may be streamed, which changes nothing in them."""


def client_tools(tools: Sequence[Any] | None) -> Tools:
    """Anthropic's client tools as OpenAI function tools. Raises InvalidRequest, see `read_tools`."""
    return read_tools(tools, (None, "custom"), "client tools with a schema", _definition)


def _definition(tool: dict[str, Any], where: str) -> tuple[JSON, str]:
    check_fields(tool, where, "name", "description", "strict", "input_schema", *_TOOL_HINTS)
    schema = tool.get("input_schema")
    if not isinstance(schema, dict):
        raise InvalidRequest(f"{where}.input_schema must be a JSON schema.", param=f"{where}.input_schema")
    return {key: tool.get(key) for key in ("name", "description", "strict")} | {"parameters": schema}, where


def openai_choice(choice: Any) -> tuple[Any, bool]:
    """`tool_choice` in OpenAI's words, and whether parallel calls are allowed. Raises InvalidRequest."""
    if choice is None:
        return "auto", True
    choice = choice if isinstance(choice, dict) else {}
    kind, name, single = choice.get("type"), choice.get("name"), choice.get("disable_parallel_tool_use")
    words: dict[str, Any] = {"auto": "auto", "any": "required", "none": "none"}
    if kind == "tool" and is_function_name(name):
        words["tool"] = {"type": "function", "function": {"name": name}}
    if not isinstance(kind, str) or kind not in words:
        raise InvalidRequest("tool_choice.type must be auto, any, none, or tool with a name.", param="tool_choice")
    if not isinstance(single, bool | None):
        where = "tool_choice.disable_parallel_tool_use"
        raise InvalidRequest(f"{where} must be a boolean.", param=where)
    return words[kind], not single
