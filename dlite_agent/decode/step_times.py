"""T_AR, the seconds of one autoregressive step, by context length and batch: measured with real steps.

A table is measured once for a machine. While an engine drafts in every round it would never see T_AR again, so a
`Probe` makes a round now and then autoregressive.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from functools import partial

from dlite_agent.decode.rounds import Decoder, StepFigures
from dlite_agent.decode.sampling import SamplingParams
from dlite_agent.decode.state import Turn
from dlite_agent.model.measured import remember

Point = tuple[int, int, float, float]
"""Context length, batch, seconds of one step, standard error in seconds."""

CONTEXTS = (64, 1024, 4096)
BATCHES = (1, 4)
REPEATS = 7
PROBE_EVERY = 48
_POSITIONS = 8192
_MEDIAN_ERROR = 1.2533  # the standard error of a median is this times that of a mean (normal errors)


def measure(
    decoder: Decoder, contexts: Sequence[int] = CONTEXTS, batches: Sequence[int] = BATCHES, repeats: int = REPEATS
) -> list[Point]:
    """Points for each batch at each context, as far as the model, its KV budget and 8192 positions in all allow.

    KV rows are blank: a step takes as long over them as over real ones.
    """
    rows = repeats + 2 + decoder.verify_window
    longest = decoder.target.context_limit - repeats - 2
    points = []
    for batch in batches:
        most = min(_POSITIONS, decoder.pool.free) // batch
        for context in sorted({min(context, longest) for context in contexts}):
            if context >= 1 and context + rows <= most:
                walls = _walls(decoder, context, batch, repeats)
                points.append((context, batch, statistics.median(walls), _median_error(walls)))
    return points


def remembered(decoder: Decoder, name: str) -> list[Point]:
    """`measure`, once for a machine; `name` tells the target apart from others."""
    precision = decoder.target.precision
    what = f"t_ar {name} {precision.name}/{precision.kernel} limit {decoder.target.context_limit}"
    flat = remember(what, partial(_flat, decoder))
    return [(int(flat[i]), int(flat[i + 1]), flat[i + 2], flat[i + 3]) for i in range(0, len(flat), 4)]


def _median_error(values: Sequence[float]) -> float:
    return _MEDIAN_ERROR * statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else values[0]


def _flat(decoder: Decoder) -> list[float]:
    return [float(value) for point in measure(decoder) for value in point]


def _walls(decoder: Decoder, context: int, batch: int, repeats: int) -> list[float]:
    turns: list[Turn] = []
    try:
        for _ in range(batch):
            turns.append(_turn(decoder, context, repeats))
        walls = [decoder.step(turns).seconds.wall for _ in range(repeats + 2)]
    finally:
        for turn in turns:
            turn.state.kv.free()
    # The first is the prompt's last row, the second warms up.
    return walls[2:]


def _turn(decoder: Decoder, context: int, repeats: int) -> Turn:
    state = decoder.open()
    if context > 1:
        state.kv.load(decoder.pool.buffer(context - 1).zero_())
    state.ids = [0] * (context - 1)
    return decoder.begin(state, [0], SamplingParams(), max_new_tokens=repeats + 2, mode="ar", ignore_eos=True)


class Probe:
    """An observer of steps that makes one step in `every` autoregressive, as long as all its rows would draft.

    What comes out stays the same: greedy and matched decoding do not depend on the drafts. Turns verified by rejection
    do, seed by seed, and are left alone.
    """

    def __init__(self, every: int = PROBE_EVERY) -> None:
        self.every = every
        self._drafted = 0
        self._windows: list[tuple[Turn, int]] = []

    def __call__(self, step: StepFigures) -> None:
        """To be called after each step, on the thread that makes them."""
        for turn, window in self._windows:
            turn.verify_window = window
        self._windows = []
        if any(row.drafted == 0 or row.turn.sampler.drafts_sampled for row in step.rows):
            return
        self._drafted += 1
        if self._drafted % self.every == 0:
            self._windows = [(row.turn, row.turn.verify_window) for row in step.rows if row.turn.finish is None]
            for turn, _ in self._windows:
                turn.verify_window = 1
