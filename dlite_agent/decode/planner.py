"""What each row drafts in the next round: from which source, how much, or nothing, by expected tokens a second.

Each source has odds: how often its drafts were accepted in this session so far, DLite's by position in the block, the
suffix index's by the length of its match. Odds give the expected advance of every choice, the cost model its seconds.
A batch shares its forward, so the best choice of one row depends on the others': the ratio of all tokens to all seconds
is maximised by Dinkelbach's method (On Nonlinear Fractional Programming, 1967), starting from the ratio of the round
before. Speculation that does not pay is thereby off, row by row; a row changes its source for STAY tokens at least.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import accumulate
from operator import mul
from typing import TYPE_CHECKING, Literal, NamedTuple

from dlite_agent.decode.suffix import Match

if TYPE_CHECKING:
    from torch import Tensor

    from dlite_agent.decode.costs import CostModel
    from dlite_agent.decode.state import Turn

Source = Literal["dlite", "suffix", "none"]
MAX_DRAFT = 15
"""Longest suffix draft."""
STAY = 0.02
"""Expected tokens that another source must gain over the present one, so that equals do not take turns."""
ROUNDS = 3
"""Dinkelbach steps a round; it converges faster than linearly and starts near the end."""
_MEMORY = 0.98
"""Share of what is known of a session that one further round leaves standing: recent text counts more."""
_COMMON_MEMORY = 0.995
"""The same for all sessions together, from which a new one starts."""
_PRIOR = 4.0
"""Drafts that the prior odds count for."""
PROBE = 24
"""Rounds without a draft after which one token is drafted, since text that cannot be drafted does not last for ever."""
_BUCKETS = (2, 3, 4, 6, 10, 20)
_COPY_PRIOR = (0.35, 0.5, 0.6, 0.72, 0.84, 0.93)
"""Acceptance of a copied token by match length, before a session has shown its own."""
_SURE_PRIOR = tuple((i + 0.5) / 10 for i in range(10))
"""Acceptance of DLite's drafts by the head's probability of them, in tenths: at first it is believed."""
_CUT_WORTH = 0.02
"""Share of a verify pass that drafts must cost for them to be cut: where rows are free, all may stay."""
_SLOWLY = 0.05


class Chance:
    """A rate with a prior: of `tried` drafts `accepted` were right."""

    def __init__(self, prior: float, memory: float = _MEMORY) -> None:
        self._prior = prior
        self._memory = memory
        self._accepted = self._tried = 0.0

    @property
    def rate(self) -> float:
        return (self._accepted + _PRIOR * self._prior) / (self._tried + _PRIOR)

    def counts(self) -> list[float]:
        return [self._prior, self._accepted, self._tried]

    @classmethod
    def from_counts(cls, counts: Sequence[float]) -> Chance:
        chance = cls(counts[0])
        _, chance._accepted, chance._tried = counts
        return chance

    def record(self, accepted: float, tried: int) -> None:
        self._accepted = self._accepted * self._memory + accepted
        self._tried = self._tried * self._memory + tried


OddsCounts = dict[str, list[list[float]]]
"""What odds have seen, as plain values: by source, for each of its chances the prior, accepted and tried."""


class Odds:
    """Acceptance by source, of a session or of all.

    Args:
        prior: DLite's rates by position, each given that all before were right.
        copies: those of copied tokens by match length.
        sure: DLite's again, by the head's own probability of its draft.
    """

    def __init__(
        self,
        prior: Sequence[float],
        copies: Sequence[float] = _COPY_PRIOR,
        sure: Sequence[float] = _SURE_PRIOR,
        *,
        memory: float = _MEMORY,
    ) -> None:
        self._dlite, self._suffix, self._sure = ([Chance(r, memory) for r in rates] for rates in (prior, copies, sure))

    @property
    def _all(self) -> dict[str, list[Chance]]:
        return {"dlite": self._dlite, "suffix": self._suffix, "sure": self._sure}

    def young(self) -> Odds:
        """Odds of a session that begins where these are now."""
        return Odds(*([chance.rate for chance in chances] for chances in self._all.values()))

    def counts(self) -> OddsCounts:
        return {name: [chance.counts() for chance in chances] for name, chances in self._all.items()}

    @classmethod
    def from_counts(cls, counts: OddsCounts) -> Odds:
        """What `counts` gave, of a session."""
        odds = cls([])
        for name, chances in odds._all.items():
            chances[:] = map(Chance.from_counts, counts[name])
        return odds

    def fits(self, other: Odds) -> bool:
        """Whether both are about drafts of the same kinds; another drafter may have shorter blocks."""
        return [len(chances) for chances in self._all.values()] == [len(chances) for chances in other._all.values()]

    def dlite(self) -> list[float]:
        """Expected advance of drafting 1, 2 .. K tokens."""
        return [1 + gain for gain in accumulate(accumulate((chance.rate for chance in self._dlite), mul))]

    def suffix(self, match: Match) -> list[float]:
        """Expected advance of copying 1, 2 .. MAX_DRAFT tokens."""
        rate = self._suffix[_bucket(match.length)].rate
        return [1 + gain for gain in accumulate(rate**i for i in range(1, MAX_DRAFT + 1))]

    def sure(self, probability: float) -> float:
        """How often a draft is right of which the head was so sure, given that all before it were."""
        return self._tenth(probability).rate

    def _tenth(self, probability: float) -> Chance:
        return self._sure[min(int(probability * len(self._sure)), len(self._sure) - 1)]

    def record(self, plan: Plan, accepted: int) -> None:
        """What became of a plan's drafts: so many were right, the next was not if there was one.

        The first draft that was cut off counts with its odds, for a position is not to look good because only sure
        drafts were tried there.
        """
        tried = min(accepted + 1, plan.length)
        if plan.match is not None:
            self._suffix[_bucket(plan.match.length)].record(accepted, tried)
        elif plan.source == "dlite":
            for position in range(tried):
                self._dlite[position].record(int(position < accepted), 1)
            for position, probability in enumerate(plan.sure[:tried]):
                self._tenth(probability).record(int(position < accepted), 1)
            if accepted == plan.length < len(plan.sure):
                self._dlite[accepted].record(self.sure(plan.sure[accepted]), 1)


def _bucket(length: int) -> int:
    return max(i for i, least in enumerate(_BUCKETS) if length >= least)


@dataclass(frozen=True)
class Plan:
    """One row's draft: its source, its length, the match it is copied from, and the advance that it promised.

    `expected` is 0 where the mode, not the odds, decided. `sure` are the head's probabilities of all that DLite made;
    `length` of them are verified.
    """

    source: Source = "none"
    length: int = 0
    match: Match | None = None
    expected: float = 0.0
    sure: tuple[float, ...] = ()

    @property
    def made(self) -> int:
        """Drafts before the unsure ones were cut off."""
        return max(self.length, len(self.sure))

    @property
    def label(self) -> str:
        """Source and reason in a word or two, for the trace."""
        if self.match is not None:
            return f"suffix: match of {self.match.length}"
        if self.source == "none":
            return "none: no draft pays" if self.expected else "none"
        return self.source if self.length == self.made else f"dlite: sure of {self.length} in {self.made}"


NOTHING = Plan()


class _Choice(NamedTuple):
    """Something a row could draft; plain values, as a round weighs dozens of them for each row.

    `rows` are the drafts that will be verified, as far as is known; `seconds` are those of drafting, and of what these
    rows read of this row's context.
    """

    source: Source
    length: int
    rows: float
    tokens: float
    seconds: float


class Planner:
    """Plans rounds for one decoder.

    Args:
        prior: see `Odds`; empty without a drafter. New sessions start from what all sessions have shown since.
        costs: None plans every mixed row as if drafts were free up to the turn's window.
    """

    def __init__(self, prior: Sequence[float], costs: CostModel | None = None) -> None:
        self.prior = tuple(prior)
        self.costs = costs
        self._common = Odds(prior, memory=_COMMON_MEMORY)
        self._ratio = 0.0
        self._kept = 0.6
        self._sources: dict[int, Source] = {}
        self._idle: dict[int, int] = {}

    def plan(self, turns: Sequence[Turn]) -> dict[int, Plan]:
        """Plans by id(turn) for turns that decode."""
        plans = {id(turn): self._fixed(turn) for turn in turns if turn.mode != "mixed"}
        mixed = [turn for turn in turns if id(turn) not in plans]
        if mixed:
            plans |= self._mixed(mixed, plans, turns)
        self._sources = {key: plan.source for key, plan in plans.items()}
        return plans

    def _fixed(self, turn: Turn) -> Plan:
        if turn.mode == "suffix":
            match, length = _match(turn), turn.draft_length(MAX_DRAFT)
            return Plan("suffix", length, match) if match is not None and length else NOTHING
        length = 0 if turn.mode == "ar" or turn.state.features is None else turn.draft_length(len(self.prior))
        return Plan("dlite", length) if length else NOTHING

    def _choices(self, turn: Turn, match: Match | None, drafting: int) -> list[_Choice]:
        """Everything a row could do. A pass of the drafter is shared by the `drafting` rows of the round before."""
        costs, odds, context = self.costs, self._odds(turn), turn.state.boundary
        choices = [_Choice("none", 0, 0.0, 1.0, 0.0)]
        longest = turn.draft_length(MAX_DRAFT)
        a_row = 0.0 if costs is None else costs.further(1, context)
        if match is not None:
            gains = odds.suffix(match)
            choices += [_Choice("suffix", k, k, gains[k - 1], k * a_row) for k in range(1, longest + 1)]
        if turn.state.features is not None:
            gains = odds.dlite()
            for k in range(1, min(len(gains), longest) + 1):
                seconds = 0.0 if costs is None else costs.draft(k, drafting) / drafting
                rows = round(self._kept * k, 1)
                choices.append(_Choice("dlite", k, rows, gains[k - 1], seconds + rows * a_row))
        return choices

    def _odds(self, turn: Turn) -> Odds:
        if turn.state.odds is None or not turn.state.odds.fits(self._common):
            turn.state.odds = self._common.young()
        return turn.state.odds

    def cut(self, turns: Sequence[Turn], plans: dict[int, Plan], sure: Mapping[int, Tensor]) -> dict[int, Plan]:
        """Plans without the drafts that the head is too unsure of to pay for their rows.

        Args:
            sure: the head's probabilities [k] by id(turn), where it has told them.
        """
        costs = self.costs
        rows = len(turns) + sum(plan.length for plan in plans.values())
        if costs is None or costs.verify(rows, 0) < (1 + _CUT_WORTH) * costs.verify(len(turns), 0):
            return plans
        cut = dict(plans)
        for turn in turns:
            plan = plans[id(turn)]
            if turn.mode != "mixed" or plan.source != "dlite" or id(turn) not in sure:
                continue
            odds, found = self._odds(turn), tuple(sure[id(turn)].tolist())
            others, a_row = rows - plan.length, costs.further(1, turn.state.boundary)
            without, reached, tokens, best, length = costs.verify(others, 0), 1.0, 0.0, 0.0, 0
            for k, probability in enumerate(found, 1):
                reached *= odds.sure(probability)
                tokens += reached
                value = tokens - self._ratio * (costs.verify(others + k, 0) - without + k * a_row)
                if value > best:
                    best, length = value, k
            self._kept += _SLOWLY * (length / plan.length - self._kept)
            rows = others + length
            cut[id(turn)] = replace(plan, length=length, sure=found)
        return cut

    def record(self, turn: Turn, plan: Plan, accepted: int) -> None:
        """A round's drafts have been verified: `accepted` of them were right."""
        if plan.made:
            self._odds(turn).record(plan, accepted)
            self._common.record(plan, accepted)

    def _mixed(self, mixed: Sequence[Turn], fixed: dict[int, Plan], turns: Sequence[Turn]) -> dict[int, Plan]:
        drafting = max(1, sum(self._sources.get(id(turn)) == "dlite" for turn in turns))
        matches = {id(turn): _match(turn) for turn in mixed}
        options = {id(turn): self._choices(turn, matches[id(turn)], drafting) for turn in mixed}

        def plans(chosen: dict[int, _Choice]) -> dict[int, Plan]:
            return {
                key: Plan(
                    choice.source, choice.length, matches[key] if choice.source == "suffix" else None, choice.tokens
                )
                for key, choice in chosen.items()
            }

        costs = self.costs
        if costs is None:
            return plans({key: max(choices, key=lambda c: c.tokens) for key, choices in options.items()})
        positions = sum(turn.state.boundary for turn in turns)
        rows = total = len(turns) + float(sum(plan.length for plan in fixed.values()))
        seconds_of = cache(lambda count: costs.verify(count, 0))
        ratio = self._ratio or len(turns) / (costs.verify(rows, positions) + costs.rest)
        chosen = {key: choices[0] for key, choices in options.items()}
        for _ in range(ROUNDS):
            before = dict(chosen)
            for key, choices in options.items():
                others = total - chosen[key].rows
                chosen[key] = _best(choices, ratio, others, seconds_of, self._sources.get(key, "none"))
                total = round(others + chosen[key].rows, 1)
            seconds = costs.verify(total, positions) + costs.rest + sum(c.seconds for c in chosen.values())
            ratio = (sum(choice.tokens for choice in chosen.values()) + len(fixed)) / seconds
            if chosen == before:
                break
        self._ratio = ratio
        self._idle = {key: self._idle.get(key, 0) + 1 for key, choice in chosen.items() if not choice.length}
        for key in [key for key, idle in self._idle.items() if idle >= PROBE]:
            self._idle[key] = 0
            chosen[key] = _probe(options[key], ratio, total, seconds_of) or chosen[key]
        return plans(chosen)


def _best(
    choices: Sequence[_Choice], ratio: float, rows: float, seconds_of: Callable[[float], float], before: Source
) -> _Choice:
    """The choice with the greatest tokens - ratio * seconds, where `rows` are verified beside its drafts."""
    without, best, most = seconds_of(rows), choices[0], -math.inf
    for choice in choices:
        source, _, added, tokens, seconds = choice
        value = tokens - ratio * (seconds_of(rows + added) - without + seconds)
        if source == before:
            value += STAY
        if value > most:
            best, most = choice, value
    return best


def _probe(
    choices: Sequence[_Choice], ratio: float, rows: float, seconds_of: Callable[[float], float]
) -> _Choice | None:
    """The shortest draft of a source that would pay if all of a draft were right."""
    for choice in choices:
        added = seconds_of(rows + choice.rows) - seconds_of(rows) + choice.seconds
        if choice.length > ratio * added:
            return next(other for other in choices if other.source == choice.source)
    return None


def _match(turn: Turn) -> Match | None:
    index = turn.state.suffix
    index.grow(turn.state.ids)
    return index.match(turn.state.ids)
