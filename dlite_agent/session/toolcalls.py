"""Parsers that separate tool calls from the text around them while a response streams.

What is a call and what stays text:

- A call starts once its name is known and its arguments begin (or turn out to be absent). Before that, a block that
  proves not to be a call is given back as text to the letter, markers included. So is one that the stream leaves
  without a name.
- After that it stays a call. If its arguments are not a JSON object in the end it is "invalid" when its end was seen,
  "cut" when the stream stopped inside; either way its span is kept. Junk between the arguments and the end marker is
  dropped from the deltas, not from the span.
- Spaces that touch the start of a call, or follow the last one, are markup; all other text passes unchanged.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal, Protocol

from dlite_agent.session.deltas import Delta, Emitter, Malformed, MarkerGate, ParsedCall
from dlite_agent.session.jsoncall import JsonCall
from dlite_agent.session.messages import JSON
from dlite_agent.session.template import ToolStyle
from dlite_agent.session.xmlcall import XmlCall, parameters_of

FinishReason = Literal["stop", "length", "tool_calls"]

_OPEN, _CLOSE, _FUNCTION, _PYTHON_TAG = "<tool_call>", "</tool_call>", "<function=", "<|python_tag|>"


class ToolParser(Protocol):
    """Reads a response's text in pieces of any size."""

    def feed(self, text: str) -> list[Delta]:
        """The deltas that more text gives."""

    def finish(self) -> list[Delta]:
        """The deltas that the end of the stream gives: held text, and the end of an open call."""

    @property
    def calls(self) -> list[ParsedCall]:
        """All calls so far; the last may still be open."""


def tool_parser(style: ToolStyle, tools: Sequence[JSON] = (), new_id: Callable[[], str] | None = None) -> ToolParser:
    """The parser for a template's way to write calls.

    Args:
        style: `ChatTemplate.tool_style`.
        tools: the request's OpenAI-shaped tools: types of XML parameters, and the names that tell a bare JSON call from
            an answer in JSON.
        new_id: makes call ids.
    """
    emitter = Emitter(new_id) if new_id else Emitter()
    return BareParser(emitter, tools) if style == "llama" else TaggedParser(emitter, tools, xml=style == "xml")


def finish_reason(stopped: Literal["stop", "length"], calls: Sequence[ParsedCall]) -> FinishReason:
    """The response's finish reason: a call cut short makes it "length", whatever stopped the engine."""
    if stopped == "length" or any(call.status == "cut" for call in calls):
        return "length"
    return "tool_calls" if calls else "stop"


class _Parser:
    """The feeding of one character after another, shared by the parsers below."""

    def __init__(self, emitter: Emitter) -> None:
        self._emit = emitter
        self._take: Callable[[str], None] = self._in_text
        self._gate = MarkerGate()
        self._call: JsonCall | XmlCall | None = None
        self._raw: list[str] = []

    @property
    def calls(self) -> list[ParsedCall]:
        """All calls so far; the last may still be open."""
        return self._emit.calls

    def feed(self, text: str) -> list[Delta]:
        """The deltas that more text gives."""
        for char in text:
            self._take(char)
        return self._emit.take()

    def _in_text(self, char: str) -> None:
        raise NotImplementedError

    def _written(self) -> str:
        """What the model wrote since the text ended."""
        return "".join(self._raw)

    def _end_text(self) -> None:
        """Give back what the gate held, unless it is only the space behind a call."""
        spaces, held = self._gate.flush()
        if held or not self._emit.after_call:
            self._emit.text(spaces + held)


class TaggedParser(_Parser):
    """Calls between `<tool_call>` and `</tool_call>`: a JSON object, an array of them, or Qwen-coder XML.

    Args:
        emitter: collects the deltas.
        tools: the request's tools.
        xml: `<function=` starts a call without the outer tag too; models often leave it out.
    """

    def __init__(self, emitter: Emitter, tools: Sequence[JSON] = (), *, xml: bool = False) -> None:
        super().__init__(emitter)
        self._parameters = parameters_of(tools)
        self._markers = (_OPEN, _FUNCTION) if xml else (_OPEN,)
        self._gate = MarkerGate(*self._markers)
        self._space = ""
        self._array = False
        self._tagged = False

    def finish(self) -> list[Delta]:
        """The deltas that the end of the stream gives."""
        if self._take == self._in_text:
            self._end_text()
        elif self._call and self._call.cut():
            self._end_call(closed=False)
        else:
            self._emit.text(self._space + self._written())
        return self._emit.take()

    def _in_text(self, char: str) -> None:
        text, marker = self._gate.push(char)
        self._emit.text(text)
        if marker:
            self._space = self._gate.space
            self._open(marker)

    def _open(self, marker: str) -> None:
        self._raw = [marker]
        self._array = False
        self._call = None
        self._tagged = marker == _OPEN
        if self._tagged:
            self._take = self._at_body
            self._gate = MarkerGate(_FUNCTION, _OPEN)
        else:
            self._begin(XmlCall(self._emit, self._parameters))

    def _begin(self, call: JsonCall | XmlCall) -> None:
        self._call = call
        self._take = self._in_call

    def _at_body(self, char: str) -> None:
        """Behind `<tool_call>`: the first character that is no space tells the kind."""
        text, marker = self._gate.push(char)
        if char == "{" and text:
            self._begin(JsonCall(self._emit))
            self._in_call(char)
        elif char == "[" and text and not self._array:
            self._raw.append(char)
            self._array = True
        elif text:
            self._reject(char)
        else:
            self._raw.append(char)
            if marker == _FUNCTION:
                self._begin(XmlCall(self._emit, self._parameters))
            elif marker:
                self._emit.text(self._space + self._written().removesuffix(marker))
                self._space = ""
                self._open(marker)

    def _in_call(self, char: str) -> None:
        assert self._call is not None
        try:
            whole = self._call.push(char)
        except Malformed:
            if not self._call.started:
                self._reject(char)
                return
            self._end_body()
            self._behind_call(char)
            return
        self._raw.append(char)
        if whole:
            self._end_body()

    def _end_body(self) -> None:
        if self._tagged:
            self._take = self._behind_call
            self._gate = MarkerGate(_CLOSE, *self._markers)
        else:
            self._end_call(closed=True)

    def _behind_call(self, char: str) -> None:
        """Behind a call's body anything but an end, a next start, or an array's next object is junk."""
        if self._array and char == "{":
            self._end_call(closed=True)
            self._raw, self._space = [], ""
            self._begin(JsonCall(self._emit))
            self._in_call(char)
            return
        self._raw.append(char)
        marker = self._gate.push(char)[1]
        if marker == _CLOSE:
            self._end_call(closed=True)
        elif marker:
            self._raw = [self._written().removesuffix(marker)]
            self._end_call(closed=True)
            self._space = ""
            self._open(marker)

    def _end_call(self, *, closed: bool) -> None:
        self._emit.end(self._written(), closed=closed)
        self._take = self._in_text
        self._gate = MarkerGate(*self._markers)

    def _reject(self, char: str) -> None:
        """No call after all: everything since the text was text; the character is read again, it may start a marker."""
        self._emit.text(self._space + self._written())
        self._take = self._in_text
        self._gate = MarkerGate(*self._markers)
        self._in_text(char)


class BareParser(_Parser):
    """Llama's way: the answer is one or more JSON objects, separated by `;` or spaces, and nothing else.

    A JSON object at the very start, behind `<|python_tag|>` or behind another call is a call if its `name` is one of
    the tools'; with no tools given, if it has a name and arguments. Anything else is text, and so is all that follows.
    """

    def __init__(self, emitter: Emitter, tools: Sequence[JSON] = ()) -> None:
        super().__init__(emitter)
        names = [tool["function"].get("name") for tool in tools if isinstance(tool.get("function"), dict)]
        self._names = names or None
        self._take = self._at_start
        self._gate = MarkerGate(_PYTHON_TAG)

    def finish(self) -> list[Delta]:
        """The deltas that the end of the stream gives."""
        if self._take == self._in_text:
            self._end_text()
        elif isinstance(self._call, JsonCall) and self._call.cut():
            self._emit.end(self._written(), closed=False)
        elif self._written().strip(" \t\r\n;") or not self._emit.after_call:
            self._emit.text(self._written())
        return self._emit.take()

    def _at_start(self, char: str) -> None:
        """Where a call may start: spaces and separators are kept aside, in case it does not."""
        text, _ = self._gate.push(char)
        self._raw.append(char)
        if char == "{" and text:
            self._call = JsonCall(self._emit, names=self._names, bare=True)
            self._call.push(char)
            self._take = self._in_call
        elif text.strip() and not (char == ";" and self._emit.after_call):
            self._reject()

    def _in_call(self, char: str) -> None:
        assert self._call is not None
        self._raw.append(char)
        try:
            whole = self._call.push(char)
        except Malformed:
            if self._call.started:
                self._raw.pop()
                self._end()
                self._at_start(char)
            else:
                self._reject()
            return
        if whole:
            self._end()

    def _end(self) -> None:
        self._emit.end(self._written(), closed=True)
        self._raw = []
        self._call = None
        self._gate = MarkerGate(_PYTHON_TAG)
        self._take = self._at_start

    def _reject(self) -> None:
        self._emit.text(self._written())
        self._raw = []
        self._gate = MarkerGate(_PYTHON_TAG)
        self._take = self._in_text

    def _in_text(self, char: str) -> None:
        text, marker = self._gate.push(char)
        self._emit.text(text)
        if marker:
            self._raw = [self._gate.space, marker]
            self._gate = MarkerGate(_PYTHON_TAG)
            self._take = self._at_start
