"""OpenTelemetry export: OTLP JSON, over HTTP or as a file of one request a line.

Span and attribute names follow the GenAI conventions after they left the main repository (see `SCHEMA_URL`). They
have no word for queue, restore, prefill, rounds or drafts: those are spans and attributes named `dlite.*`.
"""

from __future__ import annotations

import hashlib
import json
import urllib.error
import urllib.request
from collections.abc import Iterable
from typing import Any

from dlite_agent.errors import InvalidRequest
from dlite_agent.trace.amdahl import round_means
from dlite_agent.trace.intervals import Slice, joined
from dlite_agent.trace.log import Log
from dlite_agent.trace.phases import Timeline, ToolCall, Turn, timelines

NAME = "otel"
SCHEMA_URL = "https://opentelemetry.io/schemas/gen-ai-dev/1.42.0-dev"
"""The version of the GenAI conventions these names are from; all of it is marked Development."""

_INTERNAL = 1
_ERROR = 2


def to_otlp(log: Log) -> dict[str, Any]:
    """The log as one OTLP trace request (`ExportTraceServiceRequest` in JSON): one trace a session.

    Raises InvalidRequest for a log without wall-clock times: spans need them.
    """
    spans: list[dict[str, Any]] = []
    for timeline in timelines(log):
        if timeline.start_wall is None or timeline.clock not in ("monotonic", "wall"):
            raise InvalidRequest(
                f"Session {timeline.session!r} has no wall-clock times, which spans need.", param="session"
            )
        spans += _Spans(timeline).all()
    return {
        "resourceSpans": [
            {
                "resource": {"attributes": attributes({"service.name": "dlite-agent"})},
                "scopeSpans": [
                    {
                        "scope": {"name": "dlite_agent.trace"},
                        "schemaUrl": SCHEMA_URL,
                        "spans": spans,
                    }
                ],
            }
        ]
    }


def send(endpoint: str, request: dict[str, Any], *, timeout: float = 10.0) -> None:
    """Post a request to an OTLP/HTTP receiver; `endpoint` is its base, for instance http://localhost:4318.

    Raises InvalidRequest when it cannot be reached or refuses.
    """
    if not endpoint.startswith(("http://", "https://")):
        raise InvalidRequest(f"The OTLP endpoint {endpoint!r} must start with http:// or https://.", param="endpoint")
    call = urllib.request.Request(
        endpoint.rstrip("/") + "/v1/traces",
        data=json.dumps(request).encode(),
        headers={"Content-Type": "application/json"},
        method="POST",
    )
    try:
        with urllib.request.urlopen(call, timeout=timeout) as answer:
            body = answer.read()
    except urllib.error.HTTPError as error:
        with error:
            reason = f"The OTLP receiver answered {error.code} {error.reason}."
        raise InvalidRequest(reason, param="endpoint") from None
    except OSError as error:
        raise InvalidRequest(f"The OTLP receiver cannot be reached: {error}.", param="endpoint") from error
    partial = json.loads(body).get("partialSuccess", {}) if body.strip().startswith(b"{") else {}
    if int(partial.get("rejectedSpans", 0) or 0):
        raise InvalidRequest(
            f"The OTLP receiver rejected {partial['rejectedSpans']} spans: {partial.get('errorMessage', '')}.",
            param="endpoint",
        )


def attributes(values: dict[str, Any]) -> list[dict[str, Any]]:
    """OTLP attributes of the values that are not None."""
    return [{"key": key, "value": _value(value)} for key, value in values.items() if value is not None]


def _value(value: Any) -> dict[str, Any]:
    if isinstance(value, bool):
        return {"boolValue": value}
    if isinstance(value, int):
        return {"intValue": str(value)}
    if isinstance(value, float):
        return {"doubleValue": value}
    if isinstance(value, (list, tuple)):
        return {"arrayValue": {"values": [_value(item) for item in value]}}
    return {"stringValue": str(value)}


class _Spans:
    """The spans of one session: agent > turn > phases, and tools beside the turns."""

    def __init__(self, timeline: Timeline) -> None:
        self._timeline = timeline
        self._trace = hashlib.sha256(timeline.session.encode()).hexdigest()[:32]

    def all(self) -> list[dict[str, Any]]:
        timeline = self._timeline
        seconds = {f"dlite.seconds.{phase}": value for phase, value in timeline.seconds().items()}
        root = self._span(
            "invoke_agent dlite-agent",
            "session",
            None,
            0.0,
            timeline.wall,
            {
                "gen_ai.operation.name": "invoke_agent",
                "gen_ai.provider.name": "dlite",
                "gen_ai.agent.name": "dlite-agent",
                "gen_ai.conversation.id": timeline.session,
                "gen_ai.request.model": timeline.target,
                "dlite.source": timeline.source,
                "dlite.segments": timeline.segments,
                "dlite.divergences": len(timeline.divergences),
                **seconds,
            },
        )
        spans = [root]
        for turn in timeline.turns:
            spans.append(self._turn(turn))
        spans += self._phases(timeline.slices)
        spans += [self._tool(call, number) for number, call in enumerate(timeline.tools)]
        return spans

    def _turn(self, turn: Turn) -> dict[str, Any]:
        model = self._timeline.target
        means = round_means(turn.rounds)
        values: dict[str, Any] = {
            "gen_ai.operation.name": "chat",
            "gen_ai.provider.name": "dlite",
            "gen_ai.request.model": model,
            "gen_ai.conversation.id": self._timeline.session,
            "gen_ai.response.id": turn.request_id,
            "gen_ai.response.finish_reasons": [turn.finish_reason] if turn.finish_reason else None,
            "gen_ai.response.time_to_first_chunk": turn.ttft,
            "gen_ai.usage.input_tokens": turn.prompt_tokens,
            "gen_ai.usage.output_tokens": turn.output_tokens,
            "gen_ai.usage.cache_read.input_tokens": turn.cached_tokens,
            "error.type": turn.error,
            "dlite.turn": turn.turn,
            "dlite.restore.tier": turn.restores[-1].tier if turn.restores else None,
        }
        if means is not None:
            values |= {
                "dlite.rounds": means.rounds,
                "dlite.tau": means.tau,
                "dlite.t_d": means.t_d,
                "dlite.t_v": means.t_v,
                "dlite.t_s": means.t_s,
                "dlite.drafted_tokens": sum(row.drafted for row in turn.rounds),
                "dlite.accepted_tokens": sum(max(0, row.advance - 1) for row in turn.rounds if row.drafted),
                "dlite.context": means.context,
                "dlite.batch": means.batch,
            }
        name = f"chat {model}" if model else "chat"
        return self._span(
            name, f"turn{turn.turn}", "session", turn.start, turn.end, values, error=turn.error is not None
        )

    def _phases(self, slices: Iterable[Slice]) -> list[dict[str, Any]]:
        spans = []
        turns = {turn.turn: turn for turn in self._timeline.turns}
        called = {call.turn for call in self._timeline.tools}
        for number, piece in enumerate(joined(slices)):
            if piece.phase == "tool" and piece.turn in called:
                continue
            turn = turns.get(piece.turn) if piece.turn is not None else None
            inside = turn is not None and piece.start >= turn.start and piece.end <= turn.end
            parent = f"turn{piece.turn}" if inside else "session"
            values = {"dlite.phase": piece.phase, "dlite.inferred": piece.inferred, "dlite.turn": piece.turn}
            name = f"dlite.{piece.phase}"
            spans.append(self._span(name, f"phase{number}", parent, piece.start, piece.end, values))
        return spans

    def _tool(self, call: ToolCall, number: int) -> dict[str, Any]:
        values = {
            "gen_ai.operation.name": "execute_tool",
            "gen_ai.tool.name": call.name,
            "gen_ai.tool.call.id": call.call_id,
            "gen_ai.tool.type": "function",
            "error.type": call.error,
            "dlite.turn": call.turn,
            "dlite.measured": call.measured,
            "dlite.finished": call.finished,
            "dlite.sandbox": call.sandbox,
            "dlite.exit_code": call.exit_code,
        }
        name = f"execute_tool {call.name}"
        return self._span(name, f"tool{number}", "session", call.start, call.end, values, error=call.error is not None)

    def _id(self, key: str) -> str:
        return hashlib.sha256(f"{self._timeline.session}\0{key}".encode()).hexdigest()[:16]

    def _span(
        self,
        name: str,
        key: str,
        parent: str | None,
        start: float,
        end: float,
        values: dict[str, Any],
        *,
        error: bool = False,
    ) -> dict[str, Any]:
        span: dict[str, Any] = {
            "traceId": self._trace,
            "spanId": self._id(key),
            "name": name,
            "kind": _INTERNAL,
            "startTimeUnixNano": str(self._nanoseconds(start)),
            "endTimeUnixNano": str(self._nanoseconds(end)),
            "attributes": attributes(values),
        }
        if parent is not None:
            span["parentSpanId"] = self._id(parent)
        if error:
            span["status"] = {"code": _ERROR}
        return span

    def _nanoseconds(self, at: float) -> int:
        # Unix time times 1e9 does not fit a double: whole seconds and the rest are scaled apart.
        wall = self._timeline.start_wall or 0.0
        return int(wall) * 10**9 + round((wall - int(wall) + at) * 1e9)
