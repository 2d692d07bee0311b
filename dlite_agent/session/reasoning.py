"""Reasoning in a `<think>` block told from the answer, and the whole response: reasoning, text and calls."""

from __future__ import annotations

from collections.abc import Callable

from dlite_agent.session.deltas import Delta, MarkerGate, ParsedCall, ReasoningDelta, TextDelta
from dlite_agent.session.messages import Message, ToolCall
from dlite_agent.session.template import Reasoning
from dlite_agent.session.toolcalls import ToolParser

_OPEN, _CLOSE = "<think>", "</think>"


class ReasoningParser:
    """Splits a response into one block of reasoning at its start and the text behind it.

    Spaces at both ends of the block and in front of the text are markup. A block that never closes is all reasoning.
    `<think>` anywhere but at the start is text.

    Args:
        start: `ChatTemplate.reasoning`: whether the block is open already, may come, or cannot.
    """

    def __init__(self, start: Reasoning) -> None:
        begin: dict[Reasoning, Callable[[str], tuple[str, str]]] = {"open": self._inside, "optional": self._before}
        self._take = begin.get(start, self._behind)
        self._gate = MarkerGate(_CLOSE if start == "open" else _OPEN)
        self._at_edge = True

    def feed(self, text: str) -> list[TextDelta | ReasoningDelta]:
        """The deltas that more text gives."""
        reasoning, answer = "", ""
        for char in text:
            thought, said = self._take(char)
            reasoning += thought
            answer += said
        return _deltas(reasoning, answer)

    def finish(self) -> list[TextDelta | ReasoningDelta]:
        """What was held back until the end of the stream."""
        spaces, held = self._gate.flush()
        if self._take == self._inside:
            return _deltas(spaces + held if held else "", "")
        return _deltas("", spaces + held)

    def _before(self, char: str) -> tuple[str, str]:
        text, marker = self._gate.push(char)
        if marker:
            self._gate = MarkerGate(_CLOSE)
            self._take = self._inside
        elif text:
            self._take = self._behind
            spaces, held = self._gate.flush()
            text += spaces + held
        return "", text

    def _inside(self, char: str) -> tuple[str, str]:
        text, marker = self._gate.push(char)
        if self._at_edge and text:
            text = text.lstrip()
            self._at_edge = False
        if marker:
            self._take = self._edge
        return text, ""

    def _edge(self, char: str) -> tuple[str, str]:
        """Between the block and the first character of the answer."""
        if char.isspace():
            return "", ""
        self._take = self._behind
        return "", char

    def _behind(self, char: str) -> tuple[str, str]:
        return "", char


def _deltas(reasoning: str, answer: str) -> list[TextDelta | ReasoningDelta]:
    out: list[TextDelta | ReasoningDelta] = []
    if reasoning:
        out.append(ReasoningDelta(reasoning))
    if answer:
        out.append(TextDelta(answer))
    return out


class ResponseParser:
    """One response as deltas while it streams, and as a message when it is over.

    Args:
        reasoning: splits the reasoning off.
        tools: splits the calls off the rest, or None when the request has no tools: then everything else is text.
    """

    def __init__(self, reasoning: ReasoningParser, tools: ToolParser | None) -> None:
        self._reasoning = reasoning
        self._tools = tools
        self._thought: list[str] = []
        self._said: list[str] = []

    @property
    def calls(self) -> list[ParsedCall]:
        """All calls so far."""
        return self._tools.calls if self._tools else []

    def feed(self, text: str) -> list[Delta]:
        """The deltas that more text gives."""
        return self._through_tools(self._reasoning.feed(text))

    def finish(self) -> list[Delta]:
        """The deltas that the end of the stream gives."""
        out = self._through_tools(self._reasoning.finish())
        return out + (self._keep(self._tools.finish()) if self._tools else [])

    def message(self) -> Message:
        """The assistant's message, whole once finished, as a client sees it and will send it back."""
        calls = tuple(ToolCall(call.id, call.name, call.arguments) for call in self.calls)
        return Message("assistant", "".join(self._said), reasoning="".join(self._thought), tool_calls=calls)

    def _through_tools(self, deltas: list[TextDelta | ReasoningDelta]) -> list[Delta]:
        out: list[Delta] = []
        for delta in deltas:
            if self._tools and isinstance(delta, TextDelta):
                out += self._tools.feed(delta.text)
            else:
                out.append(delta)
        return self._keep(out)

    def _keep(self, deltas: list[Delta]) -> list[Delta]:
        for delta in deltas:
            if isinstance(delta, TextDelta):
                self._said.append(delta.text)
            elif isinstance(delta, ReasoningDelta):
                self._thought.append(delta.text)
        return deltas
