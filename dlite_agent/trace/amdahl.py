"""What faster decoding can bring: decode share, bound and prediction.

With D the seconds decoding took, A the seconds the same tokens would have taken one by one, and R the seconds of
everything else (queue, restore, prefill, mask, stream, tools), the share of the autoregressive-equivalent time is
f = A / (A + R), the decode speed-up S_D = A / D, the workflow's speed-up 1 / ((1 - f) + f / S_D) and its bound
1 / (1 - f) (Amdahl 1967). A is the sum over rounds of advance * T_AR(context, batch); T_AR comes from a calibration
table and carries its error into every figure. Client idle and outages are left out.
"""

from __future__ import annotations

import bisect
import math
import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from dlite_agent.errors import InvalidRequest
from dlite_agent.trace.events import Round

EXCLUDED = ("client", "outage")
"""Phases that are nobody's work and count for no share."""

_NO_DRAFT = 0.02  # share of a step that goes by between the clock's stamps where nothing is drafted, at most
_MEDIAN_ERROR = 1.2533  # the standard error of a median is this times that of a mean (normal errors)


def workflow_speedup(f: float, s_d: float) -> float:
    """1 / ((1 - f) + f / s_d). Raises InvalidRequest unless 0 <= f <= 1 and s_d > 0."""
    _check(f, s_d)
    return 1.0 / ((1.0 - f) + f / s_d)


def bound(f: float) -> float:
    """1 / (1 - f), infinite at f = 1."""
    _check(f, 1.0)
    return math.inf if f == 1.0 else 1.0 / (1.0 - f)


def decode_speedup(t_ar: float, tau: float, round_seconds: float) -> float:
    """S_D = tau * t_ar / round_seconds, with tau the mean advance and `t_ar` seconds of one autoregressive step."""
    if t_ar < 0 or tau < 0 or round_seconds <= 0:
        raise InvalidRequest("T_AR and tau must not be negative and a round must take time.", param="round_seconds")
    return tau * t_ar / round_seconds


def share_before(f_accelerated: float, s_d: float) -> float:
    """f of the autoregressive-equivalent time from the decode share of an accelerated timeline: the inverse."""
    _check(f_accelerated, s_d)
    return f_accelerated * s_d / ((1.0 - f_accelerated) + f_accelerated * s_d)


def _check(f: float, s_d: float) -> None:
    if not 0.0 <= f <= 1.0:
        raise InvalidRequest(f"A share lies between 0 and 1, not {f}.", param="f")
    if not s_d > 0.0:
        raise InvalidRequest(f"A speed-up is positive, not {s_d}.", param="s_d")


class StepTime(NamedTuple):
    """T_AR in seconds with its error; `extrapolated` when context or batch lie outside the table."""

    seconds: float
    error: float
    extrapolated: bool


@dataclass(frozen=True)
class StepTimes:
    """Calibration table of T_AR: rows of (context, batch, seconds, error), interpolated linearly, clamped outside."""

    points: tuple[tuple[int, int, float, float], ...]

    def __post_init__(self) -> None:
        if not self.points:
            raise InvalidRequest("A calibration of T_AR needs at least one point.", param="calibration")
        for context, batch, seconds, error in self.points:
            if context < 0 or batch < 1 or not seconds > 0 or not error >= 0 or not math.isfinite(seconds + error):
                raise InvalidRequest(
                    f"Calibration point {(context, batch, seconds, error)} needs context >= 0, batch >= 1, seconds > 0 "
                    "and a finite error >= 0.",
                    param="calibration",
                )

    @cached_property
    def _table(self) -> dict[int, list[tuple[int, float, float]]]:
        rows: dict[int, dict[int, tuple[float, float]]] = defaultdict(dict)
        for context, batch, seconds, error in self.points:
            rows[batch][context] = (seconds, error)
        return {batch: sorted((c, *value) for c, value in row.items()) for batch, row in sorted(rows.items())}

    @classmethod
    def measured(cls, rounds: Iterable[Round]) -> StepTimes | None:
        """A table from autoregressive rounds: median by batch and context octave, standard error of the median.

        None when there is no such round.
        """
        groups: dict[tuple[int, int], list[Round]] = defaultdict(list)
        for row in rounds:
            if autoregressive(row):
                groups[row.batch, row.context.bit_length()].append(row)
        points = []
        for (batch, _), rows in groups.items():
            walls = [row.wall for row in rows]
            context = round(statistics.fmean(row.context for row in rows))
            points.append((context, batch, statistics.median(walls), median_error(walls)))
        return cls(tuple(sorted(points))) if points else None

    def at(self, context: int, batch: int) -> StepTime:
        """T_AR at a context length and batch."""
        low, high, weight, outside = _bracket(list(self._table), batch)
        a, b = _along(self._table[low], context), _along(self._table[high], context)
        return StepTime(
            a.seconds + weight * (b.seconds - a.seconds),
            a.error + weight * (b.error - a.error),
            outside or a.extrapolated or b.extrapolated,
        )


def autoregressive(row: Round) -> bool:
    """Whether a round was one autoregressive step, and took no time for another row's drafts."""
    return row.drafted == 0 and row.advance == 1 and row.wall > 0 and row.t_d <= _NO_DRAFT * row.wall


def median_error(values: Sequence[float]) -> float:
    """Standard error of the median of some values; of one alone, the value itself."""
    return _MEDIAN_ERROR * statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else values[0]


def _along(row: Sequence[tuple[int, float, float]], context: int) -> StepTime:
    contexts = [point[0] for point in row]
    low, high, weight, outside = _bracket(contexts, context)
    a, b = row[contexts.index(low)], row[contexts.index(high)]
    return StepTime(a[1] + weight * (b[1] - a[1]), a[2] + weight * (b[2] - a[2]), outside)


def _bracket(values: Sequence[int], wanted: int) -> tuple[int, int, float, bool]:
    if wanted <= values[0] or wanted >= values[-1]:
        edge = values[0] if wanted <= values[0] else values[-1]
        return edge, edge, 0.0, wanted != edge
    at = bisect.bisect_right(values, wanted)
    low, high = values[at - 1], values[at]
    return low, high, (wanted - low) / (high - low), False


@dataclass(frozen=True)
class RoundMeans:
    """Means over rounds, the figures a speed-up must stand beside. Seconds; `tau` is the mean advance."""

    rounds: int
    tokens: int
    tau: float
    t_d: float
    t_v: float
    t_s: float
    wall: float
    context: float
    batch: float


def round_means(rounds: Sequence[Round]) -> RoundMeans | None:
    """Means of the rounds' figures; None without rounds."""
    if not rounds:
        return None
    n = len(rounds)
    return RoundMeans(
        rounds=n,
        tokens=sum(row.advance for row in rounds),
        tau=sum(row.advance for row in rounds) / n,
        t_d=sum(row.t_d for row in rounds) / n,
        t_v=sum(row.t_v for row in rounds) / n,
        t_s=sum(row.t_s for row in rounds) / n,
        wall=sum(row.wall for row in rounds) / n,
        context=sum(row.context for row in rounds) / n,
        batch=sum(row.batch for row in rounds) / n,
    )


@dataclass(frozen=True)
class Equivalent:
    """Autoregressive-equivalent decode seconds with their error; `extrapolated` is the share of tokens off the table.

    The errors of single steps are added, not averaged: one table is wrong in one direction everywhere.
    """

    seconds: float
    error: float
    tokens: int
    extrapolated: float

    @property
    def t_ar(self) -> float | None:
        """Mean seconds of one autoregressive step over these tokens."""
        return self.seconds / self.tokens if self.tokens else None

    def __add__(self, other: Equivalent) -> Equivalent:
        tokens = self.tokens + other.tokens
        outside = self.extrapolated * self.tokens + other.extrapolated * other.tokens
        return Equivalent(
            self.seconds + other.seconds, self.error + other.error, tokens, outside / tokens if tokens else 0.0
        )


def equivalent(rounds: Iterable[Round], table: StepTimes) -> Equivalent:
    """Seconds the tokens of these rounds would take one by one at each round's context and batch."""
    seconds = error = 0.0
    tokens = outside = 0
    known: dict[tuple[int, int], StepTime] = {}
    for row in rounds:
        key = (row.context + row.advance // 2, row.batch)
        step = known.get(key) or known.setdefault(key, table.at(*key))
        seconds += row.advance * step.seconds
        error += row.advance * step.error
        tokens += row.advance
        outside += row.advance if step.extrapolated else 0
    return Equivalent(seconds, error, tokens, outside / tokens if tokens else 0.0)


class Estimate(NamedTuple):
    """A figure and the range the error of T_AR leaves it."""

    value: float
    low: float
    high: float


@dataclass(frozen=True)
class Amdahl:
    """Shares and speed-ups of one turn, session or fleet.

    `decode` seconds were spent decoding, `rest` on everything else that counts; `ar` is the autoregressive
    equivalent. `f`, `bound` and `workflow` speak of that equivalent time; `decode_share` and `bound_from_here` of the
    timeline as it is: how much still faster decoding could bring. `s_d` is None where nothing was decoded.
    """

    decode: float
    rest: float
    ar: Equivalent
    f: Estimate
    s_d: Estimate | None
    workflow: Estimate
    bound: Estimate
    decode_share: float
    bound_from_here: float


def analyse(seconds: Mapping[str, float], ar: Equivalent) -> Amdahl:
    """The figures from seconds by phase and the autoregressive equivalent of the decoded tokens."""
    decode = seconds.get("decode", 0.0)
    rest = sum(value for phase, value in seconds.items() if phase not in EXCLUDED and phase != "decode")
    cases = [max(0.0, ar.seconds + sign * ar.error) for sign in (0, -1, 1)]
    return Amdahl(
        decode=decode,
        rest=rest,
        ar=ar,
        f=Estimate(*(_share(a, rest) for a in cases)),
        s_d=Estimate(*(a / decode for a in cases)) if decode > 0 else None,
        workflow=Estimate(*((a + rest) / (decode + rest) if decode + rest > 0 else 1.0 for a in cases)),
        bound=Estimate(*(_limit(a, rest) for a in cases)),
        decode_share=_share(decode, rest),
        bound_from_here=_limit(decode, rest),
    )


def _share(part: float, rest: float) -> float:
    return part / (part + rest) if part > 0 else 0.0


def _limit(part: float, rest: float) -> float:
    # The same as bound(_share(part, rest)), without the cancellation near f = 1.
    return (part + rest) / rest if rest > 0 else math.inf if part > 0 else 1.0


@dataclass(frozen=True)
class Lever:
    """One change, the seconds it would save, and the timeline's speed-up against how it ran (1.0: nothing)."""

    name: str
    saved: float
    speedup: float


def levers(
    seconds: Mapping[str, float], *, tau: float | None, new_tokens: int = 0, avoidable_tokens: int = 0
) -> list[Lever]:
    """What a better tau, full prefix hits or faster tools would each bring, the rest unchanged.

    One more token a round keeps the cost of a round, so decode shrinks by tau / (tau + 1). Prefill is taken as linear
    in tokens; `avoidable_tokens` of the `new_tokens` prefilled were in the session before and a full hit would spare.
    """
    total = sum(value for phase, value in seconds.items() if phase not in EXCLUDED)
    decode, tool = seconds.get("decode", 0.0), seconds.get("tool", 0.0)
    saved = {}
    if tau:
        saved["tau + 1 at the same cost of a round"] = decode / (tau + 1.0)
    if new_tokens > 0:
        saved["every known prefix hit"] = seconds.get("prefill", 0.0) * min(1.0, avoidable_tokens / new_tokens)
    saved["tools twice as fast"] = tool / 2.0
    saved["tools in no time"] = tool
    saved["decoding in no time"] = decode
    return [
        Lever(name, value, math.inf if value >= total > 0 else total / (total - value) if total > 0 else 1.0)
        for name, value in saved.items()
    ]
