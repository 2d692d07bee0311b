"""A tool call written as a JSON object, read one character at a time; its arguments pass through as they form."""

from __future__ import annotations

import json
from collections.abc import Collection
from enum import Flag, auto

from dlite_agent.session.deltas import Emitter, Malformed

_SPACE = " \t\r\n"
_ARGUMENT_KEYS = ("arguments", "parameters")
_CALL_KEYS = frozenset({"type", "id", "name", *_ARGUMENT_KEYS})


class Step(Flag):
    """What a character did in an `ObjectScanner`."""

    NOTHING = 0
    CHAR = auto()  # it belongs to the current member's value
    VALUE = auto()  # that value is now whole
    END = auto()  # so is the object


class ObjectScanner:
    """Splits one JSON object into its top-level members as characters arrive.

    Inside a value only strings and nesting are followed; raw control characters in strings are let pass, as models
    write them.

    Attributes:
        key: the current member's key.
        kind: the first character of the current member's value.
        in_string: the latest character stands inside a string of the value.
    """

    def __init__(self) -> None:
        self.key = ""
        self.kind = ""
        self._value: list[str] = []
        self.in_string = False
        self._state = "open"
        self._depth = 0
        self._escaped = False

    @property
    def value(self) -> str:
        """The current member's value so far, verbatim."""
        return "".join(self._value)

    def push(self, char: str) -> Step:
        """Take one character.

        Raises:
            Malformed: it cannot stand here.
        """
        if self._state == "value":
            return self._in_value(char)
        if self._state == "key":
            return self._in_key(char)
        if char in _SPACE:
            return Step.NOTHING
        match self._state, char:
            case "open", "{":
                self._state = "first"
            case (("first" | "next"), '"'):
                self._state, self.key = "key", '"'
            case (("first" | "next" | "after"), "}"):
                self._state = "closed"
                return Step.END
            case "colon", ":":
                self._state = "start"
            case "after", ",":
                self._state = "next"
            case "start", _ if char in '"{[-0123456789tfn':
                self._state, self.kind, self._value = "value", char, [char]
                self.in_string = char == '"'
                self._depth = int(char in "{[")
                return Step.CHAR
            case _:
                raise Malformed
        return Step.NOTHING

    def _in_key(self, char: str) -> Step:
        self.key += char
        if self._escaped:
            self._escaped = False
        elif char == "\\":
            self._escaped = True
        elif char == '"':
            try:
                self.key = json.loads(self.key, strict=False)
            except ValueError as error:
                raise Malformed from error
            self._state = "colon"
        return Step.NOTHING

    def _in_value(self, char: str) -> Step:
        if self.in_string:
            self._string_char(char)
        elif not self._depth:
            if char in _SPACE or char in ",}":
                self._state = "after"
                return Step.VALUE | (self.push(char) if char in ",}" else Step.NOTHING)
            if not (char.isascii() and (char.isalnum() or char in "+-.")):
                raise Malformed
        elif char == '"':
            self.in_string = True
        elif char in "{[":
            self._depth += 1
        elif char in "}]":
            self._depth -= 1
        elif not (char in _SPACE or (char.isascii() and (char.isalnum() or char in ",:+-."))):
            raise Malformed
        self._value.append(char)
        if not self._depth and not self.in_string and char in '"}]':
            self._state = "after"
            return Step.CHAR | Step.VALUE
        return Step.CHAR

    def _string_char(self, char: str) -> None:
        if self._escaped:
            self._escaped = False
        elif char == "\\":
            self._escaped = True
        elif char == '"':
            self.in_string = False


class JsonCall:
    """One `{"name": ..., "arguments": {...}}`; `parameters` is another word for `arguments`.

    The call starts as soon as its name and the start of its arguments are known. Arguments that are an object stream
    verbatim (control characters inside strings become escapes, so that clients can parse them); a string of JSON is
    unwrapped when whole; none or null become `{}`.

    Args:
        emitter: receives the call.
        names: the only names that make a call, or None for any. Given in the bare Llama style, where an answer may be
            JSON too.
        bare: be strict about what looks like a call: only the keys of one, and arguments must be there when `names` is
            None.
    """

    def __init__(self, emitter: Emitter, *, names: Collection[str] | None = None, bare: bool = False) -> None:
        self._emit = emitter
        self._names = names
        self._bare = bare
        self._scanner = ObjectScanner()
        self._name = ""
        self._kept: list[str] = []
        self._whole = False
        self.started = False

    def push(self, char: str) -> bool:
        """Take one character; True when the object is closed and is a call.

        Raises:
            Malformed: not JSON from here on (the character was not consumed) or, when not `started`, not a call.
        """
        step = self._scanner.push(char)
        if Step.CHAR in step:
            self._value_char(char)
        if Step.VALUE in step:
            self._member()
        if Step.END in step:
            self._object()
            return True
        return False

    def cut(self) -> bool:
        """The stream ended inside the object; True when enough was there to call it a (cut) call."""
        if self._name and not self.started and not self._bare:
            self._start()
        return self.started

    def _value_char(self, char: str) -> None:
        key = self._scanner.key
        if (self._bare and key not in _CALL_KEYS) or (key in _ARGUMENT_KEYS and self._whole):
            raise Malformed
        if key not in _ARGUMENT_KEYS or self._scanner.kind != "{":
            return
        if self._scanner.in_string and char < " ":
            char = json.dumps(char)[1:-1]
        if self.started:
            self._emit.arguments(char)
            return
        self._kept.append(char)
        if self._name:
            self._start()

    def _member(self) -> None:
        key, kind = self._scanner.key, self._scanner.kind
        if key == "name":
            name = _decoded(self._scanner.value)
            if (
                not isinstance(name, str)
                or not name
                or self.started
                or (self._names is not None and name not in self._names)
            ):
                raise Malformed
            self._name = name
        elif key in _ARGUMENT_KEYS and kind != "{":
            value = self._scanner.value
            decoded = _decoded(value)
            self._kept = [(decoded or "{}") if isinstance(decoded, str) else "{}" if decoded is None else value]
        self._whole = self._whole or key in _ARGUMENT_KEYS
        if self._name and self._kept and not self.started:
            self._start()

    def _object(self) -> None:
        if self.started:
            return
        if not self._name or (self._bare and self._names is None):
            raise Malformed
        self._kept = ["{}"]
        self._start()

    def _start(self) -> None:
        self.started = True
        self._emit.start(self._name)
        if self._kept:
            self._emit.arguments("".join(self._kept))


def _decoded(value: str) -> object:
    try:
        return json.loads(value, strict=False)
    except (ValueError, RecursionError):
        return value
