"""What a response streams: pieces of text, of reasoning and of tool calls, and the parts every parser of them shares.

Parsers take one character at a time, so any split of the stream gives the same pieces when joined: drafts that bring
seven tokens at once, across the end of a call and the start of the next, need no care.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
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
    """A call as streamed. `span` is what the model wrote for it, markers included, to the letter."""

    index: int
    id: str
    name: str
    arguments: str = ""
    span: str = ""
    status: CallStatus = "cut"


@dataclass
class Emitter:
    """Collects deltas between two reads, joining neighbours of one kind, and keeps the calls."""

    new_id: Callable[[], str] = field(default=lambda: f"call_{uuid.uuid4().hex[:24]}")
    calls: list[ParsedCall] = field(default_factory=list)
    after_call: bool = False
    _deltas: list[Delta] = field(default_factory=list)

    def text(self, text: str) -> None:
        """Answer text; empty text is nothing."""
        if text:
            self.after_call = False
            self._deltas.append(TextDelta(text))

    def start(self, name: str) -> None:
        """A call by its name."""
        call = ParsedCall(len(self.calls), self.new_id(), name)
        self.calls.append(call)
        self._deltas.append(CallStart(call.index, call.id, name))

    def arguments(self, text: str) -> None:
        """More arguments of the latest call."""
        self.calls[-1].arguments += text
        self._deltas.append(ArgumentsDelta(self.calls[-1].index, text))

    def end(self, span: str, *, closed: bool) -> None:
        """The latest call is over. `closed` says that its end was seen, or its arguments alone can prove it."""
        call = self.calls[-1]
        call.span = span
        if not call.arguments:
            self.arguments("")
        call.status = "complete" if _is_object(call.arguments) else "invalid" if closed else "cut"
        self.after_call = True
        self._deltas.append(CallEnd(call.index, call.status))

    def take(self) -> list[Delta]:
        """The deltas since the last read."""
        out: list[Delta] = []
        for delta in self._deltas:
            last = out[-1] if out else None
            if isinstance(delta, TextDelta) and isinstance(last, TextDelta):
                out[-1] = TextDelta(last.text + delta.text)
            elif isinstance(delta, ArgumentsDelta) and isinstance(last, ArgumentsDelta) and last.index == delta.index:
                out[-1] = ArgumentsDelta(delta.index, last.text + delta.text)
            else:
                out.append(delta)
        self._deltas = []
        return out


def _is_object(text: str) -> bool:
    try:
        return isinstance(json.loads(text), dict)
    except (ValueError, RecursionError):
        return False


class MarkerGate:
    """Lets text through up to a marker, holding back only what may still become one, and the spaces before it.

    Attributes:
        space: the spaces that stood before the latest marker; they were not let through.
    """

    def __init__(self, *markers: str) -> None:
        self._markers = markers
        self._spaces = ""
        self._held = ""
        self.space = ""

    def push(self, char: str) -> tuple[str, str]:
        """Text that is certainly text, and the marker that `char` completed, if it did."""
        self._held += char
        text = ""
        while self._held and not any(marker.startswith(self._held) for marker in self._markers):
            first, self._held = self._held[0], self._held[1:]
            if first.isspace():
                self._spaces += first
            else:
                text += self._spaces + first
                self._spaces = ""
        if self._held in self._markers:
            marker = self._held
            self.space, self._spaces, self._held = self._spaces, "", ""
            return text, marker
        return text, ""

    def flush(self) -> tuple[str, str]:
        """End of stream: the spaces and the unfinished marker that were held back."""
        spaces, held, self._spaces, self._held = self._spaces, self._held, "", ""
        return spaces, held
