"""`bench gate`: what the planner drafts while the load changes in steps, and how soon and how steadily it follows."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from dlite_agent.bench.batch import prefilled
from dlite_agent.decode.load import Runtime, chat_ids
from dlite_agent.decode.rounds import Decoder, StepFigures
from dlite_agent.decode.state import Turn
from dlite_agent.train.data import Request

NEW_TOKENS = 512
"""Of a session, before another takes its place."""
SETTLED = 0.5
"""The last part of a stretch, taken as what the planner settles on."""
NEAR = 0.5
"""Drafted tokens a session and round: so near to the settled number counts as arrived."""


def bench_gate(
    runtime: Runtime,
    prompts: Sequence[Request],
    *,
    loads: Sequence[int] = (1, 16, 1),
    seconds: float = 10.0,
    on_row: Callable[[dict[str, Any]], None] | None = None,
) -> dict[str, Any]:
    """Decode `loads[0]` sessions in mixed mode for some seconds, then `loads[1]`, and so on.

    Returns:
        `rounds` (seconds since the start, batch, drafted tokens a session, changes of source); `stretches`, one a load:
        settled draft length, seconds from the first round of the new load until the running mean was there, and how
        often a session changed its source in a round.
    """
    ids = [chat_ids(runtime.tokenizer, prompt.messages) for prompt in prompts]
    rounds: list[dict[str, float]] = []
    stretches: list[dict[str, Any]] = []
    turns: list[Turn] = []
    sources: dict[int, str] = {}
    start = time.perf_counter()
    try:
        for load in loads:
            while len(turns) > load:
                turns.pop().state.kv.free()
            while len(turns) < load:
                turns.append(prefilled(runtime.decoder, ids[len(turns) % len(ids)], "mixed", NEW_TOKENS))
            first, until = len(rounds), time.perf_counter() + seconds
            while time.perf_counter() < until:
                figures = runtime.decoder.step(turns)
                rounds.append(_round(figures, sources, time.perf_counter() - start))
                turns = [
                    turn if turn.finish is None else _again(runtime.decoder, turn, ids[i % len(ids)])
                    for i, turn in enumerate(turns)
                ]
            stretches.append(_stretch(load, rounds[first:]))
            if on_row is not None:
                on_row(stretches[-1])
    finally:
        for turn in turns:
            turn.state.kv.free()
    return {"loads": list(loads), "seconds": seconds, "stretches": stretches, "rounds": rounds}


def _again(decoder: Decoder, turn: Turn, ids: Sequence[int]) -> Turn:
    turn.state.kv.free()
    return prefilled(decoder, ids, "mixed", NEW_TOKENS)


def _round(figures: StepFigures, sources: dict[int, str], at: float) -> dict[str, float]:
    changes = 0
    for row in figures.rows:
        key = id(row.turn)
        changes += key in sources and sources[key] != row.plan.source
        sources[key] = row.plan.source
    return {
        "at": at,
        "batch": figures.batch,
        "drafted": statistics.fmean(row.drafted for row in figures.rows),
        "changes": changes / figures.batch,
    }


def _stretch(load: int, rounds: Sequence[dict[str, float]]) -> dict[str, Any]:
    drafted = [row["drafted"] for row in rounds]
    settled = statistics.fmean(drafted[int(len(drafted) * (1 - SETTLED)) :])
    width = max(4, len(rounds) // 20)
    means = [statistics.fmean(drafted[i : i + width]) for i in range(max(1, len(drafted) - width))]
    arrived = next((i for i, mean in enumerate(means) if abs(mean - settled) <= NEAR), len(rounds) - 1)
    return {
        "load": load,
        "rounds": len(rounds),
        "drafted": settled,
        "seconds_to_settle": rounds[arrived]["at"] - rounds[0]["at"],
        "changes_a_round": statistics.fmean(row["changes"] for row in rounds),
    }


def plot_gate(result: dict[str, Any], path: Path) -> None:
    """Drafted tokens a session and batch size over time, as PNG."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    at = [row["at"] for row in result["rounds"]]
    figure, (above, below) = pyplot.subplots(2, sharex=True, figsize=(9, 5), height_ratios=(3, 1))
    above.plot(at, [row["drafted"] for row in result["rounds"]], linewidth=0.6)
    above.set_ylabel("drafted tokens a session")
    below.step(at, [row["batch"] for row in result["rounds"]], where="post")
    below.set_ylabel("sessions")
    below.set_xlabel("seconds")
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
