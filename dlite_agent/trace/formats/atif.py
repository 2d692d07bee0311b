"""ATIF (Harbor's agent trajectory interchange format): version 1.7 out, any 1.x in.

ATIF has one timestamp a step. What it has no place for, above all our times, goes to `extra.dlite` as our own records
without the content that ATIF's fields carry; reading such a file back restores the events. In a foreign file the
stretch between two steps holds model and tools together, and is labelled so.
"""

from __future__ import annotations

import json
from collections import defaultdict
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from dlite_agent.errors import InvalidRequest
from dlite_agent.trace.events import AnyEvent, Event, Segment, ToolEnd, ToolStart, TurnEnd, TurnStart, dump, parse
from dlite_agent.trace.formats.build import (
    Builder,
    Conversation,
    Document,
    Usage,
    count,
    iso_time,
    text_of,
    tool_call,
    unix_seconds,
)
from dlite_agent.trace.log import Log
from dlite_agent.trace.phases import Timeline, timelines

NAME = "atif"
VERSION = "ATIF-v1.7"
_OURS = "dlite"


def matches(document: Document) -> bool:
    whole = document.whole
    return isinstance(whole, dict) and str(whole.get("schema_version", "")).startswith("ATIF")


def load(document: Document) -> list[AnyEvent]:
    """Events of the trajectory and of the sub-agents embedded in it. Raises InvalidRequest without `steps`."""
    whole: dict[str, Any] = document.whole
    if not isinstance(whole.get("steps"), list):
        raise InvalidRequest("The ATIF file has no list of steps.", param="steps")
    if isinstance(_own(whole).get("events"), list):
        return _restore(whole)
    stamps = _stamps(whole)
    wall = min(stamps, default=0.0)
    builder = Builder(NAME, "wall" if stamps else "none", wall)
    _foreign_trajectory(builder, whole, None, bool(stamps))
    return builder.events()


def _own(part: Any) -> dict[str, Any]:
    extra = part.get("extra") if isinstance(part, dict) else None
    own = extra.get(_OURS) if isinstance(extra, dict) else None
    return own if isinstance(own, dict) else {}


# --- out ---------------------------------------------------------------------------------------------------------


def to_atif(log: Log) -> dict[str, Any]:
    """One session as an ATIF 1.7 document. Raises InvalidRequest unless the log holds exactly one session."""
    names = log.sessions()
    if len(names) != 1:
        raise InvalidRequest(
            f"ATIF holds one session a file; choose one of: {', '.join(names) or 'none'}.", param="session"
        )
    timeline = timelines(log)[0]
    writer = _Writer(log, timeline)
    return writer.document()


class _Writer:
    def __init__(self, log: Log, timeline: Timeline) -> None:
        self._log = log
        self._timeline = timeline
        self._anchors = {e.segment: e for e in log.events if isinstance(e, Segment)}
        self._steps: list[dict[str, Any]] = []
        self._records: dict[int | None, list[list[Any]]] = defaultdict(list)
        # Call ids may come again in a later turn, so a result is found by the step that called, newest first.
        self._results: dict[str, list[tuple[int, dict[str, Any]]]] = defaultdict(list)

    def document(self) -> dict[str, Any]:
        ended = {event.turn for event in self._log.events if isinstance(event, TurnEnd)}
        agents: dict[int, dict[str, Any]] = {}
        for index, event in enumerate(self._log.events):
            record = dict(dump(event))
            if isinstance(event, TurnStart):
                self._incoming(event, record)
            elif isinstance(event, TurnEnd):
                agents[event.turn] = self._answer(event, record)
            elif isinstance(event, ToolStart):
                self._call(event, record, agents.get(event.turn))
            elif isinstance(event, ToolEnd):
                self._result(event, record, agents.get(event.turn))
            turn = getattr(event, "turn", None)
            self._records[turn if turn in ended else None].append([index, record])
        for turn, step in agents.items():
            self._close(turn, step)
        timeline = self._timeline
        totals = [(t.prompt_tokens or 0, t.output_tokens or 0, t.cached_tokens or 0) for t in timeline.turns]
        return {
            "schema_version": VERSION,
            "session_id": timeline.session,
            "trajectory_id": timeline.session,
            "agent": {"name": timeline.source, "version": _version(), **_given(model_name=timeline.target)},
            "steps": self._steps,
            "final_metrics": {
                "total_prompt_tokens": sum(prompt for prompt, _, _ in totals),
                "total_completion_tokens": sum(output for _, output, _ in totals),
                "total_cached_tokens": sum(cached for _, _, cached in totals),
                "total_steps": len(self._steps),
            },
            "extra": {_OURS: {"seconds": timeline.seconds(), "events": self._records[None]}},
        }

    def _step(self, source: str, event: Event, message: str) -> dict[str, Any]:
        step: dict[str, Any] = {"step_id": len(self._steps) + 1, "source": source, "message": message}
        anchor = self._anchors.get(event.segment)
        if anchor is not None and anchor.clock in ("monotonic", "wall"):
            step["timestamp"] = iso_time(anchor.wall + event.t - anchor.t)
        self._steps.append(step)
        return step

    def _incoming(self, event: TurnStart, record: dict[str, Any]) -> None:
        if event.messages is None:
            return
        kept = []
        for message in event.messages:
            rest = dict(message)
            role, text = message.get("role"), message.get("content")
            found = self._results.get(str(message.get("tool_call_id"))) if role == "tool" else None
            if found and isinstance(text, str) and found[-1][1].get("content") in (None, text):
                rest["$result"], result = found[-1]
                result["content"] = rest.pop("content")
            elif role in ("system", "user") and isinstance(text, str):
                rest["$step"] = self._step(str(role), event, rest.pop("content"))["step_id"]
            kept.append(rest)
        record["messages"] = kept

    def _answer(self, event: TurnEnd, record: dict[str, Any]) -> dict[str, Any]:
        message = dict(event.message or {})
        step = self._step("agent", event, text_of(message.get("content")))
        if isinstance(message.get("content"), str):
            message.pop("content")
            message["$content"] = True
        if isinstance(message.get("reasoning_content"), str):
            step["reasoning_content"] = message.pop("reasoning_content")
        calls = message.get("tool_calls")
        if isinstance(calls, list) and all(_is_call(call) for call in calls):
            step["tool_calls"] = [_atif_call(c["id"], c["function"]["name"], c["function"]["arguments"]) for c in calls]
            message["tool_calls"] = [_without_arguments(call) for call in calls]
        if event.message is not None:
            record["message"] = {**message, "$step": step["step_id"]}
        if event.output_ids is not None and event.message is not None:
            step["metrics"] = {"completion_token_ids": record.pop("output_ids")}
        return step

    def _call(self, event: ToolStart, record: dict[str, Any], step: dict[str, Any] | None) -> None:
        if step is None:
            return
        calls = step.setdefault("tool_calls", [])
        known = next((call for call in calls if call["tool_call_id"] == event.call_id), None)
        if known is None:
            known = _atif_call(event.call_id, event.name, event.arguments)
            calls.append(known)
        if event.arguments is not None and known["arguments"] == event.arguments:
            record["arguments"] = {"$call": step["step_id"]}
        # A result may only name a call of its own step.
        result = {"source_call_id": event.call_id}
        step.setdefault("observation", {"results": []})["results"].append(result)
        self._results[event.call_id].append((step["step_id"], result))

    def _result(self, event: ToolEnd, record: dict[str, Any], step: dict[str, Any] | None) -> None:
        number = step["step_id"] if step is not None else None
        result = next((found for own, found in reversed(self._results[event.call_id]) if own == number), None)
        if result is None:
            return
        if isinstance(event.output, str) and result.get("content") in (None, event.output):
            result["content"] = record.pop("output")
            record["$result"] = number
        call = next((c for c in self._timeline.tools if (c.turn, c.call_id) == (event.turn, event.call_id)), None)
        if call is not None:
            extra: dict[str, Any] = {"duration_s": call.end - call.start, "measured": call.measured}
            start_wall = self._timeline.start_wall
            if start_wall is not None and self._timeline.clock in ("monotonic", "wall"):
                extra["started_at"] = iso_time(start_wall + call.start)
                extra["completed_at"] = iso_time(start_wall + call.end)
            extra.update(_given(exit_code=call.exit_code, sandbox=call.sandbox, error=call.error))
            result["extra"] = extra

    def _close(self, turn: int, step: dict[str, Any]) -> None:
        view = next(t for t in self._timeline.turns if t.turn == turn)
        metrics = step.pop("metrics", {})
        metrics.update(
            _given(
                prompt_tokens=view.prompt_tokens, completion_tokens=view.output_tokens, cached_tokens=view.cached_tokens
            )
        )
        if metrics:
            step["metrics"] = metrics
        step["extra"] = {_OURS: {"turn": turn, "seconds": view.seconds, "events": self._records[turn]}}


def _given(**values: Any) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value is not None}


def _version() -> str:
    try:
        return version("dlite-agent")
    except PackageNotFoundError:
        return "unknown"


def _is_call(call: Any) -> bool:
    function = call.get("function") if isinstance(call, dict) else None
    return isinstance(function, dict) and {"name", "arguments"} <= function.keys() and "id" in call


def _arguments(value: Any) -> dict[str, Any]:
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError:
            return {"$text": value}
    return value if isinstance(value, dict) else {} if value is None else {"$value": value}


def _atif_call(call_id: Any, name: Any, arguments: Any) -> dict[str, Any]:
    return {"tool_call_id": str(call_id), "function_name": str(name), "arguments": _arguments(arguments)}


def _without_arguments(call: dict[str, Any]) -> dict[str, Any]:
    """The call without its arguments, if they can be written again letter by letter from the parsed ones."""
    text = call["function"]["arguments"]
    if not isinstance(text, str) or json.dumps(_arguments(text)) != text:
        return call
    function = {key: value for key, value in call["function"].items() if key != "arguments"}
    return {**call, "function": {**function, "$arguments": True}}


# --- our own file back -------------------------------------------------------------------------------------------


def _restore(whole: dict[str, Any]) -> list[AnyEvent]:
    """Events from the records in `extra.dlite`, with the content taken from ATIF's own fields."""
    steps = [step for step in whole["steps"] if isinstance(step, dict)]
    results: dict[tuple[Any, str], Any] = {}
    arguments: dict[tuple[Any, str], Any] = {}
    pairs: list[list[Any]] = list(_own(whole)["events"])
    for step in steps:
        pairs += _own(step).get("events", [])
    if not all(isinstance(pair, list) and len(pair) == 2 and isinstance(pair[1], dict) for pair in pairs):
        raise InvalidRequest("The ATIF file's extra.dlite.events are not pairs of index and record.", param="extra")
    for step in steps:
        number = step.get("step_id")
        for call in step.get("tool_calls") or []:
            arguments.setdefault((number, str(call["tool_call_id"])), call.get("arguments"))
        for result in (step.get("observation") or {}).get("results", []):
            results[number, str(result.get("source_call_id"))] = result.get("content")
    events = []
    for _, record in sorted(pairs, key=lambda pair: pair[0]):
        record = dict(record)
        if record.get("kind") == "turn_start" and record.get("messages") is not None:
            record["messages"] = [_message_back(message, steps, results) for message in record["messages"]]
        elif record.get("kind") == "turn_end" and isinstance(record.get("message"), dict):
            record["message"], step = _answer_back(record["message"], steps)
            ids = (step.get("metrics") or {}).get("completion_token_ids")
            if ids is not None:
                record["output_ids"] = ids
        elif record.get("kind") == "tool_start" and _reference(record.get("arguments"), "$call"):
            record["arguments"] = arguments.get((record["arguments"]["$call"], str(record.get("call_id"))))
        elif record.get("kind") == "tool_end" and "$result" in record:
            record["output"] = results.get((record.pop("$result"), str(record.get("call_id"))))
        events.append(parse(record))
    return events


def _reference(value: Any, key: str) -> bool:
    return isinstance(value, dict) and value.keys() == {key}


def _step_of(message: dict[str, Any], steps: list[dict[str, Any]]) -> dict[str, Any]:
    number = message.pop("$step", None)
    if not isinstance(number, int) or not 1 <= number <= len(steps):
        raise InvalidRequest(f"The ATIF file has no step {number!r}, which a message refers to.", param="steps")
    return steps[number - 1]


def _message_back(
    message: dict[str, Any], steps: list[dict[str, Any]], results: dict[tuple[Any, str], Any]
) -> dict[str, Any]:
    message = dict(message)
    if "$result" in message:
        message["content"] = results.get((message.pop("$result"), str(message.get("tool_call_id"))))
    elif "$step" in message:
        message["content"] = _step_of(message, steps).get("message")
    return message


def _answer_back(message: dict[str, Any], steps: list[dict[str, Any]]) -> tuple[dict[str, Any], dict[str, Any]]:
    message = dict(message)
    step = _step_of(message, steps)
    if message.pop("$content", False):
        message["content"] = step.get("message")
    if "reasoning_content" in step:
        message["reasoning_content"] = step["reasoning_content"]
    if isinstance(message.get("tool_calls"), list):
        calls = []
        for index, call in enumerate(message["tool_calls"]):
            function = call.get("function") if isinstance(call, dict) else None
            if isinstance(function, dict) and "$arguments" in function:
                rest = {key: value for key, value in function.items() if key != "$arguments"}
                rest["arguments"] = json.dumps(step["tool_calls"][index]["arguments"])
                call = {**call, "function": rest}
            calls.append(call)
        message["tool_calls"] = calls
    return message, step


# --- foreign files in --------------------------------------------------------------------------------------------


def _stamps(trajectory: dict[str, Any]) -> list[float]:
    found = []
    for step in trajectory.get("steps") or []:
        if isinstance(step, dict) and step.get("timestamp") is not None:
            found.append(unix_seconds(step["timestamp"]))
    for child in trajectory.get("subagent_trajectories") or []:
        found += _stamps(child)
    return found


def _foreign_trajectory(builder: Builder, whole: dict[str, Any], parent: str | None, timed: bool) -> None:
    agent = whole.get("agent") if isinstance(whole.get("agent"), dict) else {}
    name = str(whole.get("trajectory_id") or whole.get("session_id") or "trajectory")
    own = _stamps({"steps": whole["steps"]})
    at = own[0] - builder.wall if own else 0.0
    session = Conversation(builder, name, (agent or {}).get("model_name"), parent, at)
    for step in whole["steps"]:
        if not isinstance(step, dict) or step.get("source") not in ("system", "user", "agent"):
            builder.foreign(step, at, name)
            continue
        before = at
        if step.get("timestamp") is not None:
            at = max(at, unix_seconds(step["timestamp"]) - builder.wall)
        if step["source"] != "agent":
            session.incoming({"role": step["source"], "content": text_of(step.get("message"))})
            continue
        _agent_step(session, step, before, at, timed)
    for child in whole.get("subagent_trajectories") or []:
        if isinstance(child, dict) and isinstance(child.get("steps"), list):
            _foreign_trajectory(builder, child, name, timed)
    carried = ("steps", "subagent_trajectories")
    builder.foreign({key: value for key, value in whole.items() if key not in carried}, at, name)


def _agent_step(session: Conversation, step: dict[str, Any], start: float, end: float, timed: bool) -> None:
    answer: dict[str, Any] = {"role": "assistant", "content": text_of(step.get("message"))}
    if step.get("reasoning_content"):
        answer["reasoning_content"] = step["reasoning_content"]
    calls = [call for call in step.get("tool_calls") or [] if isinstance(call, dict)]
    if calls:
        answer["tool_calls"] = [
            tool_call(str(c.get("tool_call_id")), str(c.get("function_name")), c.get("arguments")) for c in calls
        ]
    metrics = step.get("metrics") if isinstance(step.get("metrics"), dict) else {}
    usage = Usage(*(count((metrics or {}).get(f"{kind}_tokens")) for kind in ("prompt", "cached", "completion")))
    spans = [session.model(start, end, inferred=True, includes_tools=True)] if timed else []
    session.turn(answer, start, end, usage=usage, spans=spans)
    for result in (step.get("observation") or {}).get("results") or []:
        if not session.result(str(result.get("source_call_id")), text_of(result.get("content")), end):
            session.builder.foreign(result, end, session.session)
