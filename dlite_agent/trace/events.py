"""The event schema: everything that took time, as flat versioned records.

One line of a log is one event. Times are seconds of the monotonic clock of the process that wrote them; each process
segment stores one wall-clock anchor, and times of two segments are never subtracted. Content (messages, token ids,
tool arguments and outputs) is optional: a log without it still yields every figure. A record of a kind this version
does not know becomes `Unknown` and is written back verbatim; unknown fields of a known kind are kept as well.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Any, ClassVar, Literal, NamedTuple, Self, get_args

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError, model_validator

from dlite_agent.errors import InvalidRequest

SCHEMA_VERSION = 1

Seconds = Annotated[float, Field(allow_inf_nan=False, ge=-1e12, le=1e12)]
Count = Annotated[int, Field(ge=0)]


class Event(BaseModel):
    """Base of all events: `segment` names the process segment, `t` is seconds on its monotonic clock."""

    model_config = ConfigDict(frozen=True, extra="allow")
    content_fields: ClassVar[tuple[str, ...]] = ()

    segment: str
    t: Seconds

    def without_content(self) -> Self:
        """The same event with its optional content removed."""
        return self.model_copy(update=dict.fromkeys(self.content_fields)) if self.content_fields else self


class Segment(Event):
    """Start of a process segment. `wall` (Unix seconds) was read at the same instant as `t`.

    `clock` says what the times mean: `monotonic` (ours), `wall` (a foreign log's wall clock), `durations` (only some
    lengths are known and are laid end to end), `none` (order only).
    """

    kind: Literal["segment"] = "segment"
    version: int = SCHEMA_VERSION
    wall: Seconds
    clock: Literal["monotonic", "wall", "durations", "none"] = "monotonic"
    source: str = "dlite-agent"


class SessionEvent(Event):
    """Base of events that belong to one session."""

    session: str


class TurnEvent(SessionEvent):
    """Base of events that belong to one turn of a session, counted from 0."""

    turn: Count


class Span(TurnEvent):
    """Base of events that fill an interval `[t, end]` of one segment."""

    end: Seconds

    @model_validator(mode="after")
    def _forward(self) -> Self:
        if self.end < self.t:
            raise ValueError(f"end {self.end} lies before t {self.t}")
        return self


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
    """A request arrives. `prompt_tokens` is the whole prompt, of which `cached_tokens` need no prefill."""

    kind: Literal["turn_start"] = "turn_start"
    content_fields = ("messages", "new_ids")
    request_id: str | None = None
    trigger: Literal["user", "tool", "agent"] | None = None
    prompt_tokens: Count | None = None
    cached_tokens: Count | None = None
    new_tokens: Count | None = None
    messages: list[dict[str, Any]] | None = None
    new_ids: list[int] | None = None


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


class Queue(Span):
    """Waiting for admission or, after a pre-emption, for readmission."""

    kind: Literal["queue"] = "queue"
    reason: str | None = None


class Restore(Span):
    """Bringing a session's state back: `tokens` of `wanted` came from `tier`; `reason` says why not more."""

    kind: Literal["restore"] = "restore"
    tier: str
    tokens: Count
    wanted: Count | None = None
    reason: str | None = None


class Prefill(Span):
    """One prefill chunk of `tokens` rows written at position `context`."""

    kind: Literal["prefill"] = "prefill"
    tokens: Count
    context: Count = 0
    batch: Count = 1


class Round(NamedTuple):
    """One round's figures: seconds of draft, verify and the rest, and `advance` = accepted drafts + 1.

    `start` is on the segment's clock, `wall` the unsplit seconds, `context` the target KV length before the round.
    """

    start: float
    wall: float
    t_d: float
    t_v: float
    t_s: float
    advance: int
    drafted: int
    verified: int
    context: int
    batch: int


class Rounds(Span):
    """Consecutive decode rounds of one turn, stored as columns. `at` is seconds after `t`."""

    kind: Literal["rounds"] = "rounds"
    mode: Literal["ar", "dlite"] = "dlite"
    context: Count
    at: list[Seconds]
    wall: list[Seconds]
    t_d: list[Seconds]
    t_v: list[Seconds]
    t_s: list[Seconds]
    advance: list[Count]
    drafted: list[Count]
    verified: list[Count]
    batch: list[Count]

    @model_validator(mode="after")
    def _columns(self) -> Self:
        columns = (self.wall, self.t_d, self.t_v, self.t_s, self.advance, self.drafted, self.verified, self.batch)
        if any(len(column) != len(self.at) for column in columns):
            raise ValueError(f"every column needs one value a round ({len(self.at)} in `at`)")
        if any(value < 0 for column in (self.at, self.wall, self.t_d, self.t_v, self.t_s) for value in column):
            raise ValueError("seconds of a round cannot be negative")
        return self

    @classmethod
    def of(
        cls, segment: str, session: str, turn: int, rounds: Iterable[Round], mode: Literal["ar", "dlite"] = "dlite"
    ) -> Self:
        """Pack rounds of one turn. Raises InvalidRequest when empty or when the context does not follow the advances.

        Seconds are kept to 0.1 microsecond.
        """
        rows = list(rounds)
        if not rows:
            raise InvalidRequest("A rounds event needs at least one round; leave it out instead.", param="rounds")
        context = rows[0].context
        for row in rows:
            if row.context != context:
                raise InvalidRequest(
                    f"Round at context {row.context} does not continue context {context}; pack it apart.",
                    param="context",
                )
            context += row.advance
        first = rows[0].start
        return cls(
            segment=segment,
            session=session,
            turn=turn,
            t=first,
            end=max(row.start + row.wall for row in rows),
            mode=mode,
            context=rows[0].context,
            at=[round(row.start - first, 7) for row in rows],
            wall=[round(row.wall, 7) for row in rows],
            t_d=[round(row.t_d, 7) for row in rows],
            t_v=[round(row.t_v, 7) for row in rows],
            t_s=[round(row.t_s, 7) for row in rows],
            advance=[row.advance for row in rows],
            drafted=[row.drafted for row in rows],
            verified=[row.verified for row in rows],
            batch=[row.batch for row in rows],
        )

    def rows(self) -> list[Round]:
        """The rounds again, one tuple each."""
        rows = []
        context = self.context
        for i, at in enumerate(self.at):
            rows.append(
                Round(
                    self.t + at,
                    self.wall[i],
                    self.t_d[i],
                    self.t_v[i],
                    self.t_s[i],
                    self.advance[i],
                    self.drafted[i],
                    self.verified[i],
                    context,
                    self.batch[i],
                )
            )
            context += self.advance[i]
        return rows


class Mask(Span):
    """Time spent building token masks: one `[at, at + seconds]` a mask, `at` in seconds after `t`."""

    kind: Literal["mask"] = "mask"
    at: list[Seconds]
    seconds: list[Seconds]

    @model_validator(mode="after")
    def _columns(self) -> Self:
        if len(self.at) != len(self.seconds) or any(s < 0 for s in (*self.at, *self.seconds)):
            raise ValueError("`at` and `seconds` need one non-negative value a mask")
        return self


class Stream(Span):
    """Handing generated text to the client."""

    kind: Literal["stream"] = "stream"
    chunks: Count | None = None


class Model(Span):
    """A foreign model call whose inside is not known. `includes_tools`: the log cannot tell tool time from it."""

    kind: Literal["model"] = "model"
    inferred: bool = False
    includes_tools: bool = False


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


class ClientIdle(Span):
    """Nobody works: the next request has not come. `waiting` says for whom, where that is known."""

    kind: Literal["client_idle"] = "client_idle"
    waiting: str | None = None
    inferred: bool = False


class Divergence(TurnEvent):
    """The client's history left the session's ids at `position`."""

    kind: Literal["divergence"] = "divergence"
    reason: str
    position: Count


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
