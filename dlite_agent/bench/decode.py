"""`bench decode`: all modes of decoding on the same prompts, taking turns, in one run."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from typing import Any, get_args

from dlite_agent.config import Mode
from dlite_agent.decode.figures import RunFigures, merged
from dlite_agent.decode.generate import generate
from dlite_agent.decode.load import Runtime, chat_ids
from dlite_agent.decode.sampling import SamplingParams
from dlite_agent.errors import InvalidRequest
from dlite_agent.train.data import Request

MODES: tuple[Mode, ...] = get_args(Mode)


def known_modes(text: str) -> tuple[Mode, ...]:
    """Modes from `mixed,ar,..`, in that order. Raises InvalidRequest for an unknown or repeated one."""
    names = [name.strip() for name in text.split(",")]
    modes = tuple(mode for name in names for mode in MODES if mode == name)
    if len(modes) != len(names) or len(set(modes)) < len(modes):
        raise InvalidRequest(f"modes must be some of {', '.join(MODES)}, not {text!r}", param="modes")
    return modes


def modes_of(text: str) -> tuple[Mode, ...]:
    """Modes to compare with ar. Raises InvalidRequest unless ar is there, and something to compare with it."""
    modes = known_modes(text)
    if "ar" not in modes or len(modes) < 2:
        raise InvalidRequest(f"modes must be ar and some of {', '.join(MODES[1:])}, not {text!r}", param="modes")
    return tuple(mode for mode in MODES if mode in modes)


def bench_decode(
    runtime: Runtime,
    prompts: Sequence[Request],
    params: SamplingParams,
    *,
    max_new_tokens: int,
    modes: Sequence[Mode] = MODES,
    verify_window: int | None = None,
    repeats: int = 1,
    on_row: Callable[[dict[str, Any]], None] | None = None,
) -> dict[str, Any]:
    """Decode every prompt in every mode, the modes taking turns, after an unmeasured warm-up.

    Args:
        modes: `ar`, which all others are compared with, and some others.
        verify_window: of `dlite`.
        repeats: how often; of a prompt in a mode the run of median seconds per token counts.

    Returns:
        `tau`, `speedup` (ratio of decode seconds per token over all prompts, prefill excluded), median `t_ar`, `t_d`,
        `t_v`, `t_s` in seconds, median and spread of the per-prompt ratio, all for `dlite` (or the last mode, if that
        is not among them); `mixed_speedup`; the same per mode in `modes`; speed-ups by kind of text in `kinds`; `rows`.
    """
    runs: dict[Mode, list[RunFigures]] = {mode: [] for mode in modes}
    rows: list[dict[str, Any]] = []
    for mode in modes:
        _decode(runtime, prompts[0], params, 8, mode, None)
    for index, prompt in enumerate(prompts):
        tries: dict[Mode, list[tuple[list[int], RunFigures]]] = {mode: [] for mode in modes}
        for turned in range(index, index + repeats):
            for mode in (*modes[turned % len(modes) :], *modes[: turned % len(modes)]):
                window = verify_window if mode == "dlite" else None
                tries[mode].append(_decode(runtime, prompt, params, max_new_tokens, mode, window))
        done = {mode: _median(found) for mode, found in tries.items()}
        for mode, (_, figures) in done.items():
            runs[mode].append(figures)
        rows.append(_row(prompt, done))
        if on_row is not None:
            on_row(rows[-1])
    found: dict[Mode, dict[str, Any]] = {mode: _summary(mode, runs, rows) for mode in modes if mode != "ar"}
    main = found["dlite"] if "dlite" in found else found[modes[-1]]
    return {
        **main,
        "mixed_speedup": found["mixed"]["speedup"] if "mixed" in found else None,
        "t_ar": merged(runs["ar"]).median("wall"),
        "prompts": len(rows),
        "repeats": repeats,
        "batch": 1,
        "context": merged(runs["ar"]).summary()["context"],
        "verify_window": verify_window or runtime.decoder.verify_window,
        "dtype": runtime.decoder.target.precision.name,
        "kernel": runtime.decoder.target.precision.kernel,
        "modes": found,
        "kinds": _kinds(prompts, runs),
        "rows": rows,
    }


def _median(tries: Sequence[tuple[list[int], RunFigures]]) -> tuple[list[int], RunFigures]:
    return sorted(tries, key=lambda done: done[1].seconds_per_token)[(len(tries) - 1) // 2]


def _row(prompt: Request, done: dict[Mode, tuple[list[int], RunFigures]]) -> dict[str, Any]:
    ids, ar = done["ar"]
    others = {mode: run for mode, run in done.items() if mode != "ar"}
    return {
        "id": prompt.id,
        "kind": prompt.kind,
        "tokens": len(ids),
        "same_tokens": {mode: generated == ids for mode, (generated, _) in others.items()},
        "speedup": {mode: _speedup(ar, figures) for mode, (_, figures) in others.items()},
        **{mode: figures.summary() for mode, (_, figures) in done.items()},
    }


def _speedup(ar: RunFigures, other: RunFigures) -> float | None:
    """None where an answer was over before the first round."""
    return ar.seconds_per_token / other.seconds_per_token if other.advances and ar.advances else None


def _summary(mode: Mode, runs: dict[Mode, list[RunFigures]], rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    together = merged(runs[mode])
    ratios = sorted(row["speedup"][mode] for row in rows if row["speedup"][mode] is not None)
    return {
        "tau": together.tau,
        "speedup": _speedup(merged(runs["ar"]), together),
        "t_d": together.median("draft"),
        "t_v": together.median("verify"),
        "t_s": together.median("rest"),
        "speedup_per_prompt": {"median": statistics.median(ratios), "min": ratios[0], "max": ratios[-1]},
        "same_tokens": sum(row["same_tokens"][mode] for row in rows),
        "advances": together.summary()["advances"],
        "sources": together.summary()["sources"],
    }


def _kinds(prompts: Sequence[Request], runs: dict[Mode, list[RunFigures]]) -> dict[str, dict[str, float | None]]:
    """Speed-up of each mode by kind of text."""
    found: dict[str, dict[str, float | None]] = {}
    for kind in sorted({prompt.kind for prompt in prompts}):
        mine = [i for i, prompt in enumerate(prompts) if prompt.kind == kind]
        ar = merged([runs["ar"][i] for i in mine])
        others = {mode: [run[i] for i in mine] for mode, run in runs.items() if mode != "ar"}
        found[kind] = {str(mode): _speedup(ar, merged(run)) for mode, run in others.items()}
    return found


def _decode(
    runtime: Runtime, prompt: Request, params: SamplingParams, max_new_tokens: int, mode: Mode, window: int | None
) -> tuple[list[int], RunFigures]:
    state = runtime.decoder.open()
    try:
        turn, figures = generate(
            runtime.decoder,
            state,
            chat_ids(runtime.tokenizer, prompt.messages),
            params,
            max_new_tokens=max_new_tokens,
            mode=mode,
            verify_window=window,
        )
        return turn.generated, figures
    finally:
        state.kv.free()
