"""`bench decode`: autoregressive and DLite decoding on the same prompts, alternating, in one run."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from typing import Any

from dlite_agent.decode.figures import RunFigures, merged
from dlite_agent.decode.generate import generate
from dlite_agent.decode.load import Runtime, chat_ids
from dlite_agent.decode.sampling import SamplingParams
from dlite_agent.decode.state import Mode
from dlite_agent.train.data import Request


def bench_decode(
    runtime: Runtime,
    prompts: Sequence[Request],
    params: SamplingParams,
    *,
    max_new_tokens: int,
    verify_window: int | None = None,
    on_row: Callable[[dict[str, Any]], None] | None = None,
) -> dict[str, Any]:
    """Decode every prompt in both modes, the order swapped from prompt to prompt, after one unmeasured warm-up.

    Returns:
        `tau`, `speedup` (ratio of decode seconds per token over all prompts, prefill excluded), median `t_ar`, `t_d`,
        `t_v`, `t_s` in seconds, the median and spread of the per-prompt ratio, then `rows`.
    """
    both: dict[Mode, list[RunFigures]] = {"ar": [], "dlite": []}
    rows: list[dict[str, Any]] = []
    _decode(runtime, prompts[0], params, 8, "ar", None)
    _decode(runtime, prompts[0], params, 8, "dlite", verify_window)
    for index, prompt in enumerate(prompts):
        order: tuple[Mode, ...] = ("ar", "dlite") if index % 2 == 0 else ("dlite", "ar")
        done = {}
        for mode in order:
            window = verify_window if mode == "dlite" else None
            done[mode] = _decode(runtime, prompt, params, max_new_tokens, mode, window)
            both[mode].append(done[mode][1])
        ar, dlite = done["ar"], done["dlite"]
        rows.append(
            {
                "id": prompt.id,
                "tokens": len(dlite[0]),
                "same_tokens": ar[0] == dlite[0],
                "tau": dlite[1].tau,
                "speedup": ar[1].seconds_per_token / dlite[1].seconds_per_token if dlite[1].advances else None,
                "ar": ar[1].summary(),
                "dlite": dlite[1].summary(),
            }
        )
        if on_row is not None:
            on_row(rows[-1])
    ar_all, dlite_all = merged(both["ar"]), merged(both["dlite"])
    ratios = sorted(row["speedup"] for row in rows if row["speedup"] is not None)
    return {
        "tau": dlite_all.tau,
        "speedup": ar_all.seconds_per_token / dlite_all.seconds_per_token,
        "t_ar": ar_all.median("wall"),
        "t_d": dlite_all.median("draft"),
        "t_v": dlite_all.median("verify"),
        "t_s": dlite_all.median("rest"),
        "speedup_per_prompt": {"median": statistics.median(ratios), "min": ratios[0], "max": ratios[-1]},
        "same_tokens": sum(row["same_tokens"] for row in rows),
        "prompts": len(rows),
        "batch": 1,
        "context": dlite_all.summary()["context"],
        "advances": dlite_all.summary()["advances"],
        "verify_window": verify_window or runtime.decoder.verify_window,
        "dtype": runtime.decoder.target.precision.name,
        "kernel": runtime.decoder.target.precision.kernel,
        "rows": rows,
    }


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
