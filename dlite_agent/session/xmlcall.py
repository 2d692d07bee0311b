"""A tool call in Qwen-coder's XML: `<function=name>`, then `<parameter=key>value</parameter>` for each argument."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from dlite_agent.session.deltas import Emitter, Malformed, MarkerGate
from dlite_agent.session.messages import JSON

_PARAMETER, _PARAMETER_END, _FUNCTION_END = "<parameter=", "</parameter>", "</function>"
_LITERALS = {"True": "true", "False": "false", "None": "null"}


class XmlCall:
    """Reads what follows `<function=`, up to and with `</function>`, as JSON arguments.

    String parameters stream as they come; others wait for their end, to be given as the JSON they are (or as a string,
    when they are none). One newline at each end of a value belongs to the markup.

    Args:
        emitter: receives the call.
        parameters: the JSON schema of a function's arguments by the function's name, empty when unknown.
    """

    def __init__(self, emitter: Emitter, parameters: Callable[[str], JSON]) -> None:
        self._emit = emitter
        self._parameters = parameters
        self._schema: JSON = {}
        self._word = ""
        self._take = self._in_name
        self._gate = MarkerGate(_PARAMETER, _FUNCTION_END)
        self._value: list[str] = []
        self._is_text = True
        self._at_start = False
        self._count = 0
        self.started = False

    def push(self, char: str) -> bool:
        """Take one character; True when `</function>` is complete.

        Raises:
            Malformed: the function's name is no name, so this is not a call.
        """
        return self._take(char)

    def cut(self) -> bool:
        """The stream ended inside; True when enough was there to call it a (cut) call."""
        return self.started

    def _in_name(self, char: str) -> bool:
        if char == ">" and self._word.strip():
            name = self._word.strip()
            self._schema = self._parameters(name)
            self.started = True
            self._emit.start(name)
            self._take = self._between
        elif char in "<>\n":
            raise Malformed
        self._word += char
        return False

    def _between(self, char: str) -> bool:
        """Between parameters anything but their start and the end is ignored."""
        marker = self._gate.push(char)[1]
        if marker == _FUNCTION_END:
            self._emit.arguments("}" if self._count else "{}")
            return True
        if marker:
            self._word = ""
            self._take = self._in_key
        return False

    def _in_key(self, char: str) -> bool:
        if char != ">":
            self._word += char
            return False
        key = self._word.strip()
        self._is_text = _is_text(self._schema, key)
        self._emit.arguments((", " if self._count else "{") + json.dumps(key, ensure_ascii=False) + ": ")
        if self._is_text:
            self._emit.arguments('"')
        self._count += 1
        self._value = []
        self._at_start = True
        self._gate = MarkerGate(_PARAMETER_END)
        self._take = self._in_value
        return False

    def _in_value(self, char: str) -> bool:
        if self._at_start:
            self._at_start = False
            if char == "\n":
                return False
        text, marker = self._gate.push(char)
        self._add(text)
        if marker:
            self._add(self._gate.space.removesuffix("\n"))
            self._emit.arguments('"' if self._is_text else _as_json("".join(self._value)))
            self._gate = MarkerGate(_PARAMETER, _FUNCTION_END)
            self._take = self._between
        return False

    def _add(self, text: str) -> None:
        if not self._is_text:
            self._value.append(text)
        elif text:
            self._emit.arguments(json.dumps(text, ensure_ascii=False)[1:-1])


def parameters_of(tools: Sequence[JSON]) -> Callable[[str], JSON]:
    """Argument schemas by function name, from OpenAI-shaped tools."""
    schemas: dict[str, JSON] = {}
    for tool in tools:
        function = tool.get("function")
        if isinstance(function, Mapping) and isinstance(function.get("parameters"), Mapping):
            schemas[str(function.get("name"))] = function["parameters"]
    return lambda name: schemas.get(name, {})


def _is_text(schema: JSON, key: str) -> bool:
    """Whether a parameter is a string: its type says so, or nothing says otherwise."""
    properties = schema.get("properties")
    field = properties.get(key) if isinstance(properties, Mapping) else None
    kinds = _kinds(field)
    return not kinds or "string" in kinds


def _kinds(field: Any) -> set[str]:
    if not isinstance(field, Mapping):
        return set()
    kinds = field.get("type", ())
    out = {kinds} if isinstance(kinds, str) else set(kinds)
    for option in (*field.get("anyOf", ()), *field.get("oneOf", ())):
        out |= _kinds(option)
    if not out and "$ref" in field:
        out = {"object"}
    return out


def _as_json(value: str) -> str:
    text = value.strip()
    text = _LITERALS.get(text, text)
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return json.dumps(value, ensure_ascii=False)
    return text
