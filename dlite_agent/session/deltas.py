"""What a response streams: pieces of text, of reasoning and of tool calls, and the parts every parser of them shares.

Parsers take one character at a time, so any split of the stream gives the same pieces when joined: drafts that bring
seven tokens at once, across the end of a call and the start of the next, need no care.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

CallStatus = Literal["complete", "invalid", "cut"]


@dataclass(frozen=True)
class TextDelta:
    """More of the answer's text."""

    text: str


@dataclass(frozen=True)
class ReasoningDelta:
    """More of the reasoning."""

    text: str


@dataclass(frozen=True)
class CallStart:
    """A call begins; calls count from 0 and do not overlap."""

    index: int
    id: str
    name: str


@dataclass(frozen=True)
class ArgumentsDelta:
    """More of a call's arguments as JSON text; at least one follows each start."""

    index: int
    text: str


@dataclass(frozen=True)
class CallEnd:
    """A call is over: "complete" (its arguments are a JSON object), "invalid" (closed, but none) or "cut" (open)."""

    index: int
    status: CallStatus


Delta = TextDelta | ReasoningDelta | CallStart | ArgumentsDelta | CallEnd


@dataclass
class ParsedCall:
    """A call as streamed, whole once it is over. `span` is what the model wrote for it, markers included."""

    index: int
    id: str
    name: str
    arguments: str = ""
    span: str = ""
    status: CallStatus = "cut"


class Emitter:
    """Collects deltas between two reads, joining neighbours of one kind, and keeps the calls.

    Attributes:
        calls: all calls so far.
        after_call: the latest delta belongs to a call.
    """

    def __init__(self, new_id: Callable[[], str] = lambda: f"call_{uuid.uuid4().hex[:24]}") -> None:
        self.calls: list[ParsedCall] = []
        self.after_call = False
        self._new_id = new_id
        self._deltas: list[Delta] = []
        self._pieces: list[str] = []
        self._arguments: list[str] = []

    def text(self, text: str) -> None:
        """Answer text; empty text is nothing."""
        if text:
            if self.after_call:
                self._join()
            self.after_call = False
            self._pieces.append(text)

    def start(self, name: str) -> None:
        """A call by its name."""
        self._join()
        self.after_call = True
        self._arguments = []
        call = ParsedCall(len(self.calls), self._new_id(), name)
        self.calls.append(call)
        self._deltas.append(CallStart(call.index, call.id, name))

    def arguments(self, text: str) -> None:
        """More arguments of the latest call."""
        self._arguments.append(text)
        self._pieces.append(text)

    def end(self, span: str, *, closed: bool) -> None:
        """The latest call is over; `closed` says that its end was seen."""
        call = self.calls[-1]
        if not self._arguments:
            self.arguments("")
        self._join()
        call.span = span
        call.arguments = "".join(self._arguments)
        call.status = "complete" if _is_object(call.arguments) else "invalid" if closed else "cut"
        self._deltas.append(CallEnd(call.index, call.status))

    def take(self) -> list[Delta]:
        """The deltas since the last read."""
        self._join()
        out, self._deltas = self._deltas, []
        return out

    def _join(self) -> None:
        if self._pieces:
            text = "".join(self._pieces)
            self._deltas.append(ArgumentsDelta(self.calls[-1].index, text) if self.after_call else TextDelta(text))
            self._pieces = []


def _is_object(text: str) -> bool:
    try:
        return isinstance(json.loads(text), dict)
    except (ValueError, RecursionError):
        return False


class Malformed(Exception):
    """A character cannot stand where it came; it was not consumed."""


class MarkerGate:
    """Lets text through up to a marker, holding back only what may still become one, and the spaces before it.

    Attributes:
        space: the spaces that stood before the latest marker; they were not let through.
    """

    def __init__(self, *markers: str) -> None:
        self._markers = markers
        self._first = {marker[0] for marker in markers}
        self._spaces: list[str] = []
        self._held = ""
        self.space = ""

    def push(self, char: str) -> tuple[str, str]:
        """Text that is certainly text, and the marker that `char` completed, if it did."""
        if not self._held and char not in self._first and not char.isspace():
            return self._release(char), ""
        self._held += char
        text = ""
        while self._held and not any(marker.startswith(self._held) for marker in self._markers):
            first, self._held = self._held[0], self._held[1:]
            if first.isspace():
                self._spaces.append(first)
            else:
                text += self._release(first)
        if self._held in self._markers:
            self.space, marker = self.flush()
            return text, marker
        return text, ""

    def flush(self) -> tuple[str, str]:
        """End of stream: the spaces and the unfinished marker that were held back."""
        spaces, held, self._held = self._release(""), self._held, ""
        return spaces, held

    def _release(self, char: str) -> str:
        text = "".join(self._spaces) + char
        self._spaces = []
        return text
