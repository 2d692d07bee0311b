"""Figures of a run from the figures of its steps: advances, tau, and where the seconds went."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from dlite_agent.decode.rounds import StepFigures


@dataclass
class RunFigures:
    """Collects steps; use its `add` as a decoder's observer.

    A round is a step of at least one turn with an anchor; steps that ran prompt rows count as prefill.
    """

    rounds: list[StepFigures] = field(default_factory=list)
    prefills: list[StepFigures] = field(default_factory=list)

    def add(self, step: StepFigures) -> None:
        (self.prefills if any(row.verified == 0 for row in step.rows) else self.rounds).append(step)

    @property
    def advances(self) -> list[int]:
        return [row.advance for step in self.rounds for row in step.rows]

    @property
    def tau(self) -> float:
        """Mean advance of a round: accepted drafts that were kept, plus one."""
        return statistics.fmean(self.advances) if self.advances else 0.0

    @property
    def decode_seconds(self) -> float:
        return sum(step.seconds.wall for step in self.rounds)

    @property
    def prefill_seconds(self) -> float:
        return sum(step.seconds.wall for step in self.prefills)

    @property
    def prefilled(self) -> int:
        """Prompt rows that went through the target."""
        return sum(row.prefilled for step in self.prefills for row in step.rows)

    @property
    def seconds_per_token(self) -> float:
        tokens = sum(self.advances)
        return self.decode_seconds / tokens if tokens else 0.0

    def median(self, part: str) -> float:
        """Median seconds of a round's part: draft, verify, rest or wall."""
        return statistics.median(getattr(step.seconds, part) for step in self.rounds) if self.rounds else 0.0

    def summary(self) -> dict[str, Any]:
        """Everything a report needs; seconds are medians per round where the name begins with t_."""
        contexts = [row.context for step in self.rounds for row in step.rows]
        return {
            "tau": self.tau,
            "rounds": len(self.rounds),
            "advances": dict(sorted(Counter(self.advances).items())),
            "sources": dict(sorted(Counter(row.plan.source for step in self.rounds for row in step.rows).items())),
            "t_d": self.median("draft"),
            "t_v": self.median("verify"),
            "t_s": self.median("rest"),
            "t_round": self.median("wall"),
            "decode_seconds": self.decode_seconds,
            "seconds_per_token": self.seconds_per_token,
            "prefill_seconds": self.prefill_seconds,
            "prefilled": self.prefilled,
            "context": [min(contexts), max(contexts)] if contexts else [],
            "batch": max((step.batch for step in self.rounds), default=0),
        }


def merged(runs: Sequence[RunFigures]) -> RunFigures:
    """All steps of several runs as one."""
    return RunFigures([s for run in runs for s in run.rounds], [s for run in runs for s in run.prefills])
