"""`bench batch`: tokens a second at several batch sizes, the modes taking turns on the same prompts."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from typing import Any

from dlite_agent.config import Mode
from dlite_agent.decode.figures import RunFigures, merged
from dlite_agent.decode.load import Runtime, chat_ids
from dlite_agent.decode.rounds import Decoder
from dlite_agent.decode.sampling import SamplingParams
from dlite_agent.decode.state import Turn
from dlite_agent.train.data import Request


def bench_batch(
    runtime: Runtime,
    prompts: Sequence[Request],
    *,
    sizes: Sequence[int],
    modes: Sequence[Mode],
    new_tokens: int,
    repeats: int = 3,
    on_row: Callable[[dict[str, Any]], None] | None = None,
) -> dict[str, Any]:
    """Decode `size` prompts together, greedily, until the first has its `new_tokens`: so far the batch is full.

    Prompts are used in turn, several times over if there are fewer than `size`. The unmeasured first repeat warms up.

    Returns:
        `rows`, one a size: context range, T_AR, and by mode tokens a second, tau, T_D, T_V, T_S (medians, seconds), the
        ratio to AR (median and range over repeats) and whether every session's tokens were AR's.
    """
    ids = [chat_ids(runtime.tokenizer, prompt.messages) for prompt in prompts]
    rows = []
    for size in sizes:
        chosen = [ids[i % len(ids)] for i in range(size)]
        runs: dict[Mode, list[RunFigures]] = {mode: [] for mode in modes}
        same = dict.fromkeys(modes, True)
        for repeat in range(repeats + 1):
            turned = repeat % len(modes)
            done = {}
            for mode in (*modes[turned:], *modes[:turned]):
                figures, done[mode] = _together(runtime.decoder, chosen, mode, new_tokens)
                if repeat:
                    runs[mode].append(figures)
            for mode in modes:
                pairs = zip(done[mode], done["ar"], strict=True)
                same[mode] &= all(a[: len(b)] == b[: len(a)] for a, b in pairs)
        rows.append(_row(size, runs, same))
        if on_row is not None:
            on_row(rows[-1])
    precision = runtime.decoder.target.precision
    return {"dtype": precision.name, "kernel": precision.kernel, "repeats": repeats, "rows": rows}


def prefilled(decoder: Decoder, ids: Sequence[int], mode: Mode, new_tokens: int) -> Turn:
    """A greedy turn of a new session, its prompt run, about to decode `new_tokens`."""
    params = SamplingParams(temperature=0.0)
    turn = decoder.begin(decoder.open(), ids, params, max_new_tokens=new_tokens, mode=mode, ignore_eos=True)
    while not turn.decoding:
        decoder.step([turn])
    return turn


def _together(
    decoder: Decoder, prompts: Sequence[Sequence[int]], mode: Mode, new_tokens: int
) -> tuple[RunFigures, list[list[int]]]:
    """Figures of the rounds of a full batch, and what each session generated in them."""
    turns: list[Turn] = []
    figures = RunFigures()
    try:
        for ids in prompts:
            turns.append(prefilled(decoder, ids, mode, new_tokens))
        while all(turn.finish is None for turn in turns):
            figures.add(decoder.step(turns))
        return figures, [list(turn.generated) for turn in turns]
    finally:
        for turn in turns:
            turn.state.kv.free()


def _row(size: int, runs: dict[Mode, list[RunFigures]], same: dict[Mode, bool]) -> dict[str, Any]:
    ar = runs["ar"]
    found = {}
    for mode, figures in runs.items():
        together = merged(figures)
        ratios = [_rate(run) / _rate(base) for run, base in zip(figures, ar, strict=True)]
        found[mode] = {
            "tokens_a_second": statistics.median(map(_rate, figures)),
            "speedup": statistics.median(ratios),
            "speedup_min": min(ratios),
            "speedup_max": max(ratios),
            "tau": together.tau,
            "t_d": together.median("draft"),
            "t_v": together.median("verify"),
            "t_s": together.median("rest"),
            "same_tokens": same[mode],
        }
    everything = merged(ar)
    return {
        "batch": size,
        "context": everything.summary()["context"],
        "t_ar": everything.median("wall"),
        "modes": found,
    }


def _rate(figures: RunFigures) -> float:
    """Tokens of all sessions a second."""
    return sum(figures.advances) / figures.decode_seconds
