"""The numbers a model computes in and the kernels that serve them here: chosen by timing steps of its first layers.

A product alone says little: at small sizes most of a step is calls between products, which only some kernels avoid. So
candidates are timed once per machine as they will run, and the answer is kept.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Mapping
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from dlite_agent.decode.kv import KVPool
from dlite_agent.model.linear import CANDIDATES, Precision
from dlite_agent.model.measured import remember
from dlite_agent.model.spec import ModelSpec
from dlite_agent.model.target import Rows, Target

LAYERS = 6
STEPS = {1: 1.0, 8: 1.0, 256: 0.06}
"""Rows of the steps that are timed, and what each counts: thirty steps of each small kind to a prompt of 500."""
_CONTEXT = 256
_REPEATS = 5


def choose_precision(
    dtype: str, spec: ModelSpec, weights: Mapping[str, Tensor], device: torch.device, *, name: str
) -> Precision:
    """Pick the kernel, and for dtype `auto` also the precision, that runs this model fastest on this machine.

    The answer is cached in the user's cache folder per processor, thread count, torch version and model, so that a
    restart computes in the same numbers.

    Args:
        name: tells the model apart from others that were measured here.
    """
    if device.type != "cpu":
        return Precision("bf16" if dtype in ("auto", "fp16w", "packed") else dtype, "plain")
    numbers = CANDIDATES if dtype == "auto" else [dtype]
    candidates = [Precision(number, kernel) for number in numbers for kernel in CANDIDATES[number]]
    costs = {
        found: remember(f"steps {found.name}/{found.kernel} {name}", partial(_measure, found, spec, weights))
        for found in candidates
    }
    return min(costs, key=lambda found: costs[found])


def _measure(precision: Precision, spec: ModelSpec, weights: Mapping[str, Tensor]) -> float:
    """Weighted seconds of the steps through the model's first layers; infinite where the kernel does not serve."""
    spec = replace(spec, num_layers=min(LAYERS, spec.num_layers))
    positions = _CONTEXT + max(STEPS)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # packing announces its own deprecation on some builds
            target = Target(
                spec,
                weights,
                precision=precision,
                device=torch.device("cpu"),
                fingerprint="",
                context_limit=min(positions, spec.max_positions),
            )
            return _seconds(target)
    except (RuntimeError, NotImplementedError):
        return float("inf")


def _seconds(target: Target) -> float:
    positions = target.max_positions
    spec, size = target.spec, positions * 2 * target.spec.num_layers * target.spec.kv_size * target.dtype.itemsize
    pool = KVPool(spec, dtype=target.dtype, device=target.device, budget_bytes=size, max_positions=positions)
    kv, last = pool.sequence(), torch.tensor([0])
    kv.reserve(positions)
    context = max(0, min(_CONTEXT, positions - max(STEPS)))
    kv.load(pool.buffer(context).zero_())
    total = 0.0
    for rows, weight in STEPS.items():
        ids, seconds = torch.zeros(min(rows, positions - context), dtype=torch.int64), []
        for _ in range(_REPEATS):
            start = time.perf_counter()
            target.forward([Rows(kv, ids)], logit_rows=None if rows < max(STEPS) else last)
            seconds.append(time.perf_counter() - start)
            kv.truncate(context)
        total += weight * min(seconds)  # the least: whatever else the machine does only adds
    return total
