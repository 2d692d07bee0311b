"""The event schema: everything that took time, as flat versioned records.

One line of a log is one event. Times are seconds of the monotonic clock of the process that wrote them; each process
segment stores one wall-clock anchor, and times of two segments are never subtracted. Content (messages, token ids,
tool arguments and outputs) is optional: a log without it still yields every figure. A record of a kind this version
does not know becomes `Unknown` and is written back verbatim; unknown fields of a known kind are kept as well.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, NamedTuple, get_args

from pydantic import Field, TypeAdapter, ValidationError

from dlite_agent.errors import InvalidRequest
from dlite_agent.trace.event_base import (
    SCHEMA_VERSION,
    Count,
    Event,
    Seconds,
    Segment,
    SessionEvent,
    Span,
    TurnEvent,
)
from dlite_agent.trace.spans import ClientIdle, Mask, Model, Prefill, Queue, Restore, Round, Rounds, Stream

__all__ = [
    "KINDS",
    "SCHEMA_VERSION",
    "AnyEvent",
    "Calibration",
    "ClientIdle",
    "Divergence",
    "Event",
    "Foreign",
    "KnownEvent",
    "Mask",
    "Mismatch",
    "Model",
    "Note",
    "Outage",
    "Prefill",
    "Queue",
    "Replayed",
    "Restore",
    "Round",
    "Rounds",
    "Segment",
    "SessionEnd",
    "SessionEvent",
    "SessionStart",
    "Span",
    "Stream",
    "ToolEnd",
    "ToolStart",
    "TurnEnd",
    "TurnEvent",
    "TurnStart",
    "Unknown",
    "dump",
    "parse",
]


class SessionStart(SessionEvent):
    """A session appears. `parent` is the session it was forked from or delegated by."""

    kind: Literal["session_start"] = "session_start"
    target: str | None = None
    drafter: str | None = None
    parent: str | None = None


class SessionEnd(SessionEvent):
    kind: Literal["session_end"] = "session_end"
    reason: str | None = None


class TurnStart(TurnEvent):
    """A request arrives. `prompt_tokens` is the whole prompt, of which `cached_tokens` need no prefill.

    `new_ids` are the prompt's ids behind those that the session had already; `sampling` are the parameters that are not
    greedy decoding's, and `constraint` is the grammar that held the answer, in the grammar compiler's own format.
    """

    kind: Literal["turn_start"] = "turn_start"
    content_fields = ("messages", "new_ids", "constraint")
    request_id: str | None = None
    trigger: Literal["user", "tool", "agent"] | None = None
    prompt_tokens: Count | None = None
    cached_tokens: Count | None = None
    new_tokens: Count | None = None
    messages: list[dict[str, Any]] | None = None
    new_ids: list[int] | None = None
    sampling: dict[str, Any] | None = None
    constraint: str | None = None


class TurnEnd(TurnEvent):
    """A response is complete. `first_token` is the time (same clock as `t`) of the first generated token."""

    kind: Literal["turn_end"] = "turn_end"
    content_fields = ("message", "output_ids")
    request_id: str | None = None
    finish_reason: str | None = None
    output_tokens: Count | None = None
    first_token: Seconds | None = None
    error: str | None = None
    message: dict[str, Any] | None = None
    output_ids: list[int] | None = None


class ToolStart(TurnEvent):
    """A tool call begins. `measured` is true when we ran the tool, false when its time is inferred from a gap."""

    kind: Literal["tool_start"] = "tool_start"
    content_fields = ("arguments",)
    call_id: str
    name: str
    measured: bool = True
    sandbox: str | None = None
    arguments: Any = None


class ToolEnd(TurnEvent):
    kind: Literal["tool_end"] = "tool_end"
    content_fields = ("output",)
    call_id: str
    exit_code: int | None = None
    error: str | None = None
    output: Any = None


class Divergence(TurnEvent):
    """The client's history left the session's ids at `position`."""

    kind: Literal["divergence"] = "divergence"
    reason: str
    position: Count


class Replayed(SessionEvent):
    """This session is a replay of session `original`, run as `side`; `wait` says how its waits were kept."""

    kind: Literal["replayed"] = "replayed"
    original: str
    side: str
    wait: str | None = None


class Mismatch(TurnEvent):
    """A replay gave something else than it was compared with (`against`: the recording, or another side's name).

    `position` is the first difference: of tokens it counts in the answer, of an observation (whose call is `call_id`)
    in its characters. `expected` and `found` are what stands there, if anything does; `count` places differ in all.
    """

    kind: Literal["mismatch"] = "mismatch"
    content_fields = ("expected", "found")
    what: Literal["token", "observation"]
    against: str
    position: Count
    count: Count = 1
    call_id: str | None = None
    expected: int | str | None = None
    found: int | str | None = None


class Outage(Event):
    """A restart was noticed. `seconds` comes from wall clocks, so it is an estimate; None: not even that is known."""

    kind: Literal["outage"] = "outage"
    session: str | None = None
    previous: str
    seconds: Seconds | None = None
    reason: str | None = None


class Calibration(Event):
    """Measured T_AR: rows of (context length, batch, seconds of one step, standard error in seconds)."""

    kind: Literal["calibration"] = "calibration"
    points: list[tuple[Count, Count, Seconds, Seconds]]


class Note(Event):
    """A remark by a person."""

    kind: Literal["note"] = "note"
    session: str | None = None
    turn: Count | None = None
    text: str


class Foreign(Event):
    """A record of another program's log that has no counterpart here, kept whole."""

    kind: Literal["foreign"] = "foreign"
    content_fields = ("raw",)
    session: str | None = None
    source: str
    raw: Any = None


class Unknown(NamedTuple):
    """A record this version cannot read, kept verbatim, and why."""

    raw: dict[str, Any]
    problem: str


KnownEvent = (
    Segment
    | SessionStart
    | SessionEnd
    | TurnStart
    | TurnEnd
    | Queue
    | Restore
    | Prefill
    | Rounds
    | Mask
    | Stream
    | Model
    | ToolStart
    | ToolEnd
    | ClientIdle
    | Divergence
    | Replayed
    | Mismatch
    | Outage
    | Calibration
    | Note
    | Foreign
)
AnyEvent = KnownEvent | Unknown

KINDS = frozenset(str(model.model_fields["kind"].default) for model in get_args(KnownEvent))
_ADAPTER: TypeAdapter[KnownEvent] = TypeAdapter(Annotated[KnownEvent, Field(discriminator="kind")])


def parse(record: dict[str, Any]) -> AnyEvent:
    """One record as an event; a record of an unknown kind or shape becomes `Unknown`.

    Raises InvalidRequest for a segment of a later schema version.
    """
    kind = record.get("kind")
    if not isinstance(kind, str) or kind not in KINDS:
        return Unknown(record, f"unknown kind {kind!r}")
    if kind == "segment" and isinstance(record.get("version"), int) and record["version"] > SCHEMA_VERSION:
        raise InvalidRequest(
            f"The log uses event schema {record['version']}, this program reads up to {SCHEMA_VERSION}; update it.",
            param="version",
        )
    try:
        return _ADAPTER.validate_python(record)
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(str(part) for part in first["loc"][1:]) or str(kind)
        return Unknown(record, f"{kind}: field {field}: {first['msg']}")


def dump(event: AnyEvent) -> dict[str, Any]:
    """The record of an event, without fields that are None."""
    if isinstance(event, Unknown):
        return event.raw
    fields = {name: value for name, value in event.model_dump().items() if value is not None}
    return {"kind": fields.pop("kind"), **fields}
