"""T_AR kept up to date: the measured table, corrected by what autoregressive steps have taken since."""

from __future__ import annotations

import math
import statistics
import threading
import time
from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING

from dlite_agent.trace.amdahl import StepTimes, median_error
from dlite_agent.trace.events import Calibration

if TYPE_CHECKING:
    # The engine's modules load the tensor library, which reading and reporting logs should not need.
    from dlite_agent.decode.rounds import StepFigures

Point = tuple[int, int, float, float]

LATEST = 64
FEWEST = 5
"""Steps of a batch that are remembered, and the fewest that correct the table."""


class StepTimeKeeper:
    """T_AR by context length and batch. Safe from several threads.

    How much longer or shorter than the table the latest autoregressive steps of a batch took corrects the table for
    that batch; a batch with too few of its own takes those of all batches.
    """

    def __init__(self, points: Sequence[Point] = (), *, latest: int = LATEST) -> None:
        self._table = StepTimes(tuple(points)) if points else None
        self._latest = latest
        self._ratios: dict[int, deque[float]] = {}
        self._lock = threading.Lock()

    def start(self, points: Sequence[Point]) -> None:
        """Take over a measured table, and forget what corrected the last."""
        with self._lock:
            self._table, self._ratios = (StepTimes(tuple(points)) if points else None), {}

    def observe(self, step: StepFigures) -> None:
        """Learn from a step, if every row of it was an autoregressive round."""
        if all(row.verified == 1 and not row.drafted for row in step.rows):
            context = sum(row.context for row in step.rows) // len(step.rows)
            self.learn(context, step.batch, step.seconds.wall)

    def learn(self, context: int, batch: int, seconds: float) -> None:
        """An autoregressive step of a batch took so many seconds at a mean context."""
        with self._lock:
            if self._table is not None:
                wanted = self._table.at(context, batch).seconds
                self._ratios.setdefault(batch, deque(maxlen=self._latest)).append(seconds / wanted)

    def points(self) -> list[Point]:
        """The table as it stands now; empty where there is none."""
        with self._lock:
            if self._table is None:
                return []
            everything = [ratio for ratios in self._ratios.values() for ratio in ratios]
            own = {batch: list(ratios) for batch, ratios in self._ratios.items() if len(ratios) >= FEWEST}
            return [_corrected(point, own.get(point[1], everything)) for point in self._table.points]

    def event(self, segment: str) -> Calibration | None:
        """The table as an event of the present moment; None where there is none."""
        points = self.points()
        return Calibration(segment=segment, t=time.monotonic(), points=points) if points else None


def _corrected(point: Point, ratios: Sequence[float]) -> Point:
    if len(ratios) < FEWEST:
        return point
    context, batch, seconds, error = point
    ratio = statistics.median(ratios)
    # The table's own error is of the machine's speed then, which the ratio replaces; what is left is the steps' spread.
    return context, batch, seconds * ratio, math.hypot(error, seconds * median_error(ratios))
