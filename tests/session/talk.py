"""A session without a model: answers are given as text or ids, everything else is the real thing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from dlite_agent.session.history import History, Prompt, splice
from dlite_agent.session.messages import JSON, Message, normalise
from dlite_agent.session.template import ChatTemplate

WEATHER: JSON = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather in a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
            "required": ["city", "days"],
            "additionalProperties": False,
        },
    },
}


def system(text: str) -> dict[str, Any]:
    return {"role": "system", "content": text}


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def assistant(text: str | None, *calls: tuple[str, str], reasoning: str = "") -> dict[str, Any]:
    out: dict[str, Any] = {"role": "assistant", "content": text}
    if calls:
        out["tool_calls"] = [
            {"id": f"call_{i}", "type": "function", "function": {"name": name, "arguments": arguments}}
            for i, (name, arguments) in enumerate(calls)
        ]
    if reasoning:
        out["reasoning_content"] = reasoning
    return out


def tool(text: str, call: str = "call_0") -> dict[str, Any]:
    return {"role": "tool", "content": text, "tool_call_id": call}


def message(raw: JSON) -> Message:
    (out,) = normalise([raw])
    return out


class Talk:
    """Ids and history of one session, advanced by `ask` and `answer`."""

    def __init__(
        self, template: ChatTemplate, tools: Sequence[JSON] | None = None, thinking: bool | None = None
    ) -> None:
        self.template = template
        self.tools = tools
        self.thinking = thinking
        self.history = History()
        self.ids: list[int] = []
        self.answers: list[list[int]] = []

    def ask(self, messages: Sequence[JSON]) -> Prompt:
        return splice(self.template, self.history, self.ids, normalise(messages), self.tools, thinking=self.thinking)

    def answer(self, prompt: Prompt, answer: JSON, generated: str | Sequence[int], stop: int | None = -1) -> None:
        """Take `generated` as the model's tokens; stop -1 is the template's end of turn, None none at all."""
        ids = self.template.encode(generated) if isinstance(generated, str) else list(generated)
        if stop is not None:
            ids.append(self.template.turn_end if stop == -1 else stop)
        self.ids = prompt.ids + ids
        self.history = prompt.answered(message(answer), len(self.ids))
        self.answers.append(ids)
