"""A recorded session as something to play again: its turns with ids, messages, tool calls and waits, in order."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from dlite_agent.errors import InvalidRequest
from dlite_agent.trace.events import SessionStart, ToolEnd, ToolStart, TurnEnd, TurnStart
from dlite_agent.trace.log import Log
from dlite_agent.trace.phases import Timeline, timelines


class NotReplayable(InvalidRequest):
    """The recording lacks what the replay needs; the message names it."""

    code = "not_replayable"


@dataclass(frozen=True)
class RecordedCall:
    """A tool call: what was asked, what came back, and how long it took in seconds."""

    call_id: str
    name: str
    arguments: Any
    output: Any
    exit_code: int | None
    error: str | None
    seconds: float
    measured: bool
    answered: bool


@dataclass(frozen=True)
class RecordedTurn:
    """One turn that was answered.

    Attributes:
        prompt_ids, output_ids: the whole prompt and the answer; None where the recording does not hold them.
        sampling: parameters that were not greedy decoding's.
        tool_wait, idle: seconds between this answer and the next request, with a tool at work and without.
    """

    turn: int
    prompt_ids: list[int] | None
    output_ids: list[int] | None
    messages: list[dict[str, Any]] | None = None
    message: dict[str, Any] | None = None
    sampling: dict[str, Any] = field(default_factory=dict)
    constraint: str | None = None
    finish_reason: str | None = None
    calls: tuple[RecordedCall, ...] = ()
    tool_wait: float = 0.0
    idle: float = 0.0

    @property
    def greedy(self) -> bool:
        return not self.sampling.get("temperature")


@dataclass(frozen=True)
class Script:
    """One recorded session: `start` is its first request in wall-clock seconds, where known."""

    session: str
    turns: list[RecordedTurn]
    timeline: Timeline

    @property
    def start(self) -> float | None:
        return self.timeline.start_wall

    def need_ids(self) -> None:
        """Raises NotReplayable unless every turn holds the ids of its prompt and answer."""
        for turn in self.turns:
            if turn.prompt_ids is None or turn.output_ids is None:
                raise NotReplayable(
                    f"Session {self.session!r}, turn {turn.turn}: the recording holds no token ids, so the model cannot"
                    " be replayed; record with content (--log-content), and without secrets in the text.",
                    param="session",
                )

    def need_calls(self) -> None:
        """Raises NotReplayable unless there are tool calls, and every one that was answered holds its arguments."""
        calls = [(turn, call) for turn in self.turns for call in turn.calls]
        if not calls:
            raise NotReplayable(f"Session {self.session!r} holds no tool call to run again.", param="session")
        for turn, call in calls:
            if call.arguments is None:
                raise NotReplayable(
                    f"Session {self.session!r}, turn {turn.turn}, call {call.call_id} of {call.name}: the recording"
                    " holds no arguments; record with content (--log-content).",
                    param="session",
                )


def scripts(log: Log) -> list[Script]:
    """The sessions of a log that answered at least one turn, in order of appearance."""
    views = {view.session: view for view in timelines(log)}
    turns: dict[str, list[RecordedTurn]] = defaultdict(list)
    contexts: dict[str, list[int] | None] = defaultdict(list)
    open_turns: dict[tuple[str, int], tuple[TurnStart, list[int] | None]] = {}
    calls = _calls(log, views)
    for event in log.events:
        if isinstance(event, SessionStart):
            # A session that a later process took up again starts there once more, and goes on where it was.
            if event.session not in contexts:
                contexts[event.session] = list(contexts.get(event.parent or "") or [])
        elif isinstance(event, TurnStart):
            open_turns[event.session, event.turn] = event, _prompt(event, contexts[event.session])
        elif isinstance(event, TurnEnd) and (event.session, event.turn) in open_turns:
            start, prompt = open_turns.pop((event.session, event.turn))
            if event.error is not None:
                continue
            output = event.output_ids
            contexts[event.session] = None if prompt is None or output is None else [*prompt, *output]
            made = calls.get((event.session, event.turn), ())
            turns[event.session].append(_turn(views[event.session], start, event, prompt, made))
    return [Script(session, turns[session], view) for session, view in views.items() if turns[session]]


def _prompt(event: TurnStart, context: list[int] | None) -> list[int] | None:
    """The whole prompt from what the session held before and what was new."""
    if event.new_ids is None or event.prompt_tokens is None:
        return None
    known = event.prompt_tokens - len(event.new_ids)
    if known == 0:
        return list(event.new_ids)
    if context is None or not 0 <= known <= len(context):
        return None
    return [*context[:known], *event.new_ids]


def _turn(
    view: Timeline, start: TurnStart, end: TurnEnd, prompt: list[int] | None, calls: Sequence[RecordedCall]
) -> RecordedTurn:
    seconds = next(turn.seconds for turn in view.turns if turn.turn == end.turn)
    return RecordedTurn(
        turn=end.turn,
        prompt_ids=prompt,
        output_ids=end.output_ids,
        messages=start.messages,
        message=end.message,
        sampling=start.sampling or {},
        constraint=start.constraint,
        finish_reason=end.finish_reason,
        calls=tuple(calls),
        tool_wait=seconds.get("tool", 0.0),
        idle=seconds.get("client", 0.0) + seconds.get("outage", 0.0),
    )


def _calls(log: Log, views: dict[str, Timeline]) -> dict[tuple[str, int], list[RecordedCall]]:
    """Calls by session and turn, in order of their start."""
    starts = {(e.session, e.turn, e.call_id): e for e in log.events if isinstance(e, ToolStart)}
    ends = {(e.session, e.turn, e.call_id): e for e in log.events if isinstance(e, ToolEnd)}
    found: dict[tuple[str, int], list[RecordedCall]] = defaultdict(list)
    for view in views.values():
        for call in sorted(view.tools, key=lambda call: call.start):
            key = (view.session, call.turn, call.call_id)
            start, end = starts[key], ends.get(key)
            recorded = RecordedCall(
                call_id=call.call_id,
                name=call.name,
                arguments=_arguments(start.arguments),
                output=None if end is None else end.output,
                exit_code=call.exit_code,
                error=call.error,
                seconds=call.end - call.start,
                measured=call.measured,
                answered=end is not None,
            )
            found[view.session, call.turn].append(recorded)
    return found


def _arguments(value: Any) -> Any:
    """Arguments as an object where they are one written as text."""
    if not isinstance(value, str):
        return value
    try:
        parsed = json.loads(value)
    except ValueError:
        return value
    return parsed if isinstance(parsed, dict) else value
