"""`bench executor`: one cached step of the target against transformers', alternating, in the same precision."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

from dlite_agent.decode.kv import KVPool
from dlite_agent.decode.load import load_target
from dlite_agent.model.target import Rows, Target
from dlite_agent.model.weights import resolve


@torch.inference_mode()
def bench_executor(
    target: str, *, dtypes: tuple[str, ...], context: int, rows: tuple[int, ...], repeats: int
) -> dict[str, Any]:
    """Median seconds of a forward of `rows` new tokens on `context` cached ones, ours and transformers', and the ratio.

    `fp16w` has no counterpart in transformers and is set against its fp32. Transformers starts every repeat from a copy
    of the same cache that is made outside the measured time.
    """
    from transformers import AutoModelForCausalLM

    results = []
    for dtype in dtypes:
        ours = load_target(target, dtype=dtype, device="cpu")
        theirs = AutoModelForCausalLM.from_pretrained(str(resolve(target)), dtype=ours.dtype).eval()
        for count in rows:
            results.append({"dtype": dtype, "rows": count} | _compare(ours, theirs, context, count, repeats))
    return {"target": target, "context": context, "batch": 1, "threads": torch.get_num_threads(), "rows": results}


def _compare(ours: Target, theirs: Any, context: int, count: int, repeats: int) -> dict[str, float]:
    from transformers import DynamicCache

    ids = torch.arange(1000, 1000 + context + count) % ours.spec.vocab_size
    prompt, new = ids[:context], ids[context:]
    pool = KVPool(
        ours.spec, dtype=ours.dtype, device=ours.device, budget_bytes=1 << 32, max_positions=ours.max_positions
    )
    kv = pool.sequence()
    kv.reserve(context + count)
    ours.forward([Rows(kv, prompt)], logit_rows=torch.tensor([0]))
    cache = DynamicCache()
    theirs(prompt.unsqueeze(0), past_key_values=cache, logits_to_keep=1)
    layers = [(layer.keys, layer.values) for layer in cache.layers]

    def fresh_cache() -> Any:
        copy = DynamicCache()
        for index, (keys, values) in enumerate(layers):
            copy.update(keys, values, index)
        return copy

    seconds: dict[str, list[float]] = {"ours": [], "transformers": []}
    for repeat in range(repeats + 1):
        copied = fresh_cache()
        sides: list[tuple[str, Callable[[], Any]]] = [
            ("ours", lambda: ours.forward([Rows(kv, new)])),
            ("transformers", lambda cache=copied: theirs(new.unsqueeze(0), past_key_values=cache)),  # type: ignore[misc]
        ]
        for name, run in sides if repeat % 2 else sides[::-1]:
            start = time.perf_counter()
            run()
            seconds[name].append(time.perf_counter() - start)
        kv.truncate(context)
    kv.free()
    medians = {name: statistics.median(times[1:]) for name, times in seconds.items()}
    ratios = sorted(a / b for a, b in zip(seconds["ours"][1:], seconds["transformers"][1:], strict=True))
    return medians | {"ratio": statistics.median(ratios), "ratio_min": ratios[0], "ratio_max": ratios[-1]}
