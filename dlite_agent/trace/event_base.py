"""What all events share: where and when, and whether they are moments or fill an interval."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

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
