"""What a round costs here and now: measured once by rows and steps, then kept up to date by every round.

Rows do not cost alike: a verify pass of two may be as fast as one of one, and of nine a third dearer than of eight, so
the shape over rows is a table. Load moves everything together and quickly: one factor over the table follows it within
a few rounds, while the table itself moves slowly.
"""

from __future__ import annotations

import statistics
import time
from bisect import bisect_left
from collections.abc import Sequence

import torch

from dlite_agent.decode.rounds import Decoder, StepFigures
from dlite_agent.model.fused import PROMPT_ROWS
from dlite_agent.model.measured import remember
from dlite_agent.model.target import Rows

ROWS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
CONTEXTS = (64, 2048)
WINDOW = 8
BATCH = 8
_REPEATS = 5
_FAST, _SLOW = 0.2, 0.02
_OUTLIER = 4.0
"""A round that took so many times what was expected was interrupted, and says little."""


class Curve:
    """Seconds over a count, piecewise linear between measured points, times a factor that follows the load."""

    def __init__(self, points: Sequence[tuple[int, float]]) -> None:
        self._at = [count for count, _ in points]
        self._seconds = [seconds for _, seconds in points]
        self.factor = 1.0

    def __call__(self, count: float) -> float:
        return self.factor * self._plain(count)

    def _plain(self, count: float) -> float:
        at, seconds = self._at, self._seconds
        right = min(max(bisect_left(at, count), 1), len(at) - 1)
        left = right - 1
        slope = (seconds[right] - seconds[left]) / (at[right] - at[left])
        return max(seconds[left] + slope * (count - at[left]), seconds[0] / 2)

    def observe(self, count: int, seconds: float) -> None:
        """A measured round. The nearest point learns slowly, the factor at once."""
        ratio = min(seconds / self(count), _OUTLIER)
        self.factor *= ratio**_FAST
        nearest = min(range(len(self._at)), key=lambda i: abs(self._at[i] - count))
        if self._at[nearest] == count:
            self._seconds[nearest] *= (ratio / ratio**_FAST) ** _SLOW


class CostModel:
    """T_V by rows and context, T_D by steps and drafting rows, T_S; seconds.

    Args:
        verify: points (rows, seconds) at no context worth counting.
        a_position: seconds that each cached position of a sequence adds to the first row of its window.
        a_further: share of that which each further row of the window adds.
        draft: points (steps, seconds) for one row; None without a drafter.
        a_row: share of its cost that each further row adds to a draft.
    """

    def __init__(
        self,
        verify: Sequence[tuple[int, float]],
        a_position: float,
        draft: Sequence[tuple[int, float]] | None,
        a_row: float = 0.5,
        a_further: float = 0.0,
    ) -> None:
        self._verify = Curve(verify)
        self._a_position = a_position
        self._draft = None if draft is None else Curve(draft)
        self._a_row = a_row
        self._a_further = a_further
        self._rest = 0.0

    def verify(self, rows: float, positions: int) -> float:
        """A verify pass of `rows` over sequences that hold `positions` together; see `further`."""
        return self._verify(rows) + self._reading(positions)

    def further(self, rows: int, positions: int) -> float:
        """What `rows` beyond the first of a window add over a sequence of `positions`."""
        return self._reading(self._a_further * rows * positions)

    def _reading(self, positions: float) -> float:
        return self._verify.factor * self._a_position * positions

    def draft(self, steps: int, rows: int) -> float:
        """A draft of `steps` tokens for each of `rows` sequences, in one pass."""
        if self._draft is None or not steps or not rows:
            return 0.0
        return self._draft(steps) * (1 + self._a_row * (rows - 1))

    @property
    def rest(self) -> float:
        return self._rest

    def observe(self, step: StepFigures) -> None:
        """Learn from a step, unless prompt rows took part in it."""
        if any(row.prefilled for row in step.rows) or not step.rows:
            return
        rows, positions = sum(row.verified for row in step.rows), sum(row.context for row in step.rows)
        if rows:
            further = sum(self.further(row.verified - 1, row.context) for row in step.rows if row.verified)
            bare = step.seconds.verify - self._reading(positions) - further
            self._verify.observe(rows, max(bare, 0.2 * step.seconds.verify))
        steps = [row.plan.made for row in step.rows if row.plan.source == "dlite"]
        if self._draft is not None and steps:
            self._draft.observe(max(steps), step.seconds.draft / (1 + self._a_row * (len(steps) - 1)))
        self._rest += _FAST * (step.seconds.rest - self._rest)


def cost_model(decoder: Decoder, name: str) -> CostModel:
    """A model from measurements that are made once for a machine; `name` tells target and drafter apart from others."""
    precision = decoder.target.precision
    name = f"{name} {precision.name}/{precision.kernel} limit {decoder.target.context_limit}"
    verify = remember(f"verify {name}", lambda: verify_seconds(decoder, CONTEXTS[0], ROWS))
    longer = min(CONTEXTS[1], decoder.target.context_limit - 2)
    windows = (1, WINDOW)
    slope = remember(f"context {name} rows {windows}", lambda: verify_seconds(decoder, longer, windows))
    first, whole = (max(slope[i] - verify[ROWS.index(rows)], 0.0) for i, rows in enumerate(windows))
    a_position = first / max(longer - CONTEXTS[0], 1)
    a_further = max(whole / first - 1, 0.0) / (WINDOW - 1) if first else 0.0
    points = list(zip(ROWS, verify, strict=True))
    if decoder.drafter is None:
        return CostModel(points, a_position, None, a_further=a_further)
    steps = sorted({1, 2, 4, decoder.proposal_length} & set(range(1, decoder.proposal_length + 1)))
    draft = remember(f"draft {name} {steps}", lambda: draft_seconds(decoder, steps, 1))
    batch = remember(f"draft {name} {steps[-1:]} batch {BATCH}", lambda: draft_seconds(decoder, steps[-1:], BATCH))
    a_row = max(batch[0] / draft[-1] - 1, 0.0) / (BATCH - 1)
    return CostModel(points, a_position, list(zip(steps, draft, strict=True)), a_row, a_further)


@torch.inference_mode()
def verify_seconds(decoder: Decoder, context: int, rows: Sequence[int], *, repeats: int = _REPEATS) -> list[float]:
    """Median seconds of forwards of each number of rows, taking turns. KV rows are blank.

    Rows beyond PROMPT_ROWS are further sequences': those of one would be a prompt's.
    """
    target = decoder.target
    sequences = [decoder.pool.sequence() for _ in range(0, max(rows), PROMPT_ROWS)]
    ids = torch.zeros(PROMPT_ROWS, dtype=torch.int64, device=target.device)
    seconds: list[list[float]] = [[] for _ in rows]
    try:
        for kv in sequences:
            kv.reserve(context + min(PROMPT_ROWS, max(rows)))
            kv.load(decoder.pool.buffer(context).zero_())
        for _ in range(repeats + 1):
            for count, times in zip(rows, seconds, strict=True):
                firsts = range(0, count, PROMPT_ROWS)
                batch = [Rows(kv, ids[: count - first]) for kv, first in zip(sequences, firsts, strict=False)]
                start = _now(target.device)
                target.forward(batch, tap_layers=decoder.taps)
                times.append(_now(target.device) - start)
                for kv in sequences:
                    kv.truncate(context)
    finally:
        for kv in sequences:
            kv.free()
    return [statistics.median(times[1:]) for times in seconds]


@torch.inference_mode()
def draft_seconds(decoder: Decoder, steps: Sequence[int], batch: int, *, repeats: int = _REPEATS) -> list[float]:
    """Median seconds of drafts of each number of tokens for `batch` sequences, taking turns."""
    target, drafter = decoder.target, decoder.drafter
    assert drafter is not None
    shape = (batch, len(decoder.taps), target.spec.hidden_size)
    features = torch.zeros(shape, device=target.device, dtype=target.dtype)
    anchor = torch.zeros(batch, 1, dtype=torch.int64, device=target.device)
    seconds: list[list[float]] = [[] for _ in steps]
    for _ in range(repeats + 1):
        for count, times in zip(steps, seconds, strict=True):
            start = _now(target.device)
            drafter.draft_greedy(features, anchor, target.embedding, count)
            times.append(_now(target.device) - start)
    return [statistics.median(times[1:]) for times in seconds]


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
