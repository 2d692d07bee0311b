"""Where a run stands: a fold of its journal. Living runs and recovered ones apply the same records."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from dlite_agent.agent.journal import Record
from dlite_agent.agent.run_spec import End
from dlite_agent.session import messages
from dlite_agent.session.messages import Message, ToolCall


@dataclass
class Progress:
    """The state of a run.

    Attributes:
        messages: the conversation, up to the last turn all of whose calls have been answered.
        turns: committed turns; `turn` of a record counts from 0.
        tokens: generated in them; tool_seconds: sum over finished calls; seconds: of work, without pauses and outages.
        invalid: latest turns in a row without one valid call.
        started: calls that began, by id; results: answers to the model, by id.
        waiting: follow-up messages not yet taken up.
        cwd: working folder of the next call, below the workspace.
    """

    messages: list[Message] = field(default_factory=list)
    turns: int = 0
    tokens: int = 0
    tool_seconds: float = 0.0
    seconds: float = 0.0
    invalid: int = 0
    calls: int = 0
    restarts: int = 0
    started: dict[str, Record] = field(default_factory=dict)
    results: dict[str, Record] = field(default_factory=dict)
    open_turn: tuple[ToolCall, ...] = ()
    waiting: dict[str, str] = field(default_factory=dict)
    cwd: str = "."
    paused: bool = False
    end: End | None = None
    error: str | None = None
    answer: str | None = None

    def apply(self, record: Record) -> None:
        """Take over one record."""
        self.seconds = max(self.seconds, record.get("active", 0.0))
        handler = getattr(self, f"_on_{record['kind']}", None)
        if handler is not None:
            handler(record)

    @property
    def unanswered(self) -> list[ToolCall]:
        """Calls of the last committed turn that the model has no answer to yet."""
        return [call for call in self.open_turn if call.id not in self.results]

    def begun(self) -> list[Record]:
        """Starts of calls whose turn was never committed, in their order."""
        return [record for record in self.started.values() if record["turn"] == self.turns]

    def _on_message(self, record: Record) -> None:
        self.messages.append(Message(record["role"], record["content"]))

    def _on_follow_up(self, record: Record) -> None:
        self.waiting[record["id"]] = record["content"]

    def _on_taken(self, record: Record) -> None:
        self.messages.append(Message("user", self.waiting.pop(record["id"])))
        self.end = self.answer = None

    def _on_process(self, _: Record) -> None:
        self.restarts += 1

    def _on_tool_start(self, record: Record) -> None:
        self.started[record["id"]] = record
        self.calls += 1

    def _on_tool_end(self, record: Record) -> None:
        self.results[record["id"]] = record
        self.tool_seconds += record.get("seconds", 0.0)
        self.cwd = record.get("cwd", self.cwd)
        self.answer = record.get("submission", self.answer)
        self._settle()

    def _on_turn(self, record: Record) -> None:
        message = message_of(record["message"])
        self.messages.append(message)
        self.turns += 1
        self.tokens += record["tokens"]
        self.invalid = 0 if record["valid"] else self.invalid + 1
        self.open_turn = message.tool_calls
        if record.get("nudge"):
            self.messages.append(Message("user", record["nudge"]))
        self._settle()

    def _settle(self) -> None:
        """Once every call of the turn is answered, the answers follow it, in the order of the calls."""
        if self.open_turn and not self.unanswered:
            self.messages += [
                Message("tool", self.results[call.id]["content"], tool_call_id=call.id, name=call.name)
                for call in self.open_turn
            ]
            self.open_turn = ()
            self.started.clear()
            self.results.clear()

    def _on_pause(self, _: Record) -> None:
        self.paused = True

    def _on_resume(self, _: Record) -> None:
        self.paused = False

    def _on_end(self, record: Record) -> None:
        self.end = End(record["state"])
        self.error = record.get("error")
        self.answer = record.get("answer")


def message_json(message: Message) -> dict[str, Any]:
    """A message in OpenAI's shape, a tool's with its name."""
    out = messages.message_json(message)
    if message.tool_call_id:
        out |= {"tool_call_id": message.tool_call_id, "name": message.name}
    return out


def message_of(value: dict[str, Any]) -> Message:
    """What `message_json` made of an assistant's message."""
    calls = tuple(
        ToolCall(call["id"], call["function"]["name"], call["function"]["arguments"])
        for call in value.get("tool_calls", ())
    )
    return Message(value["role"], value["content"], value.get("reasoning_content", ""), calls)
