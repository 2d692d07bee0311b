"""Events that fill an interval: waiting, restoring, prefill, the rounds of decoding, masks, foreign model calls."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal, NamedTuple, Self

from pydantic import Field, model_validator

from dlite_agent.config import Mode
from dlite_agent.errors import InvalidRequest
from dlite_agent.trace.event_base import Count, Seconds, Span


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
    source: str = ""
    expected: float = 0.0


class Rounds(Span):
    """Consecutive decode rounds of one turn, stored as columns. `at` is seconds after `t`.

    `source` says what was drafted and why, `expected` what advance that promised; both are empty where nobody planned.
    """

    kind: Literal["rounds"] = "rounds"
    mode: Mode = "dlite"
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
    source: list[str] = Field(default_factory=list)
    expected: list[float] = Field(default_factory=list)

    @model_validator(mode="after")
    def _columns(self) -> Self:
        columns = (self.wall, self.t_d, self.t_v, self.t_s, self.advance, self.drafted, self.verified, self.batch)
        if any(len(column) != len(self.at) for column in columns):
            raise ValueError(f"every column needs one value a round ({len(self.at)} in `at`)")
        if any(column and len(column) != len(self.at) for column in (self.source, self.expected)):
            raise ValueError("source and expected have one value a round, or none at all")
        if any(value < 0 for column in (self.at, self.wall, self.t_d, self.t_v, self.t_s) for value in column):
            raise ValueError("seconds of a round cannot be negative")
        return self

    @classmethod
    def of(cls, segment: str, session: str, turn: int, rounds: Iterable[Round], mode: Mode = "dlite") -> Self:
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
            source=[row.source for row in rows] if any(row.source for row in rows) else [],
            expected=[round(row.expected, 2) for row in rows] if any(row.source for row in rows) else [],
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
                    self.source[i] if self.source else "",
                    self.expected[i] if self.expected else 0.0,
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
    """Handing the answer over: from the last token until the response may end, its commit to the store included."""

    kind: Literal["stream"] = "stream"
    chunks: Count | None = None


class Model(Span):
    """A foreign model call whose inside is not known. `includes_tools`: the log cannot tell tool time from it."""

    kind: Literal["model"] = "model"
    inferred: bool = False
    includes_tools: bool = False


class ClientIdle(Span):
    """Nobody works: the next request has not come. `waiting` says for whom, where that is known."""

    kind: Literal["client_idle"] = "client_idle"
    waiting: str | None = None
    inferred: bool = False
