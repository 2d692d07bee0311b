"""`bench floor`: how far T_AR, T_V and T_D are from reading their weights once at the measured memory bandwidth."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

from dlite_agent.decode.load import Runtime
from dlite_agent.decode.rounds import Decoder
from dlite_agent.errors import InvalidRequest
from dlite_agent.model.target import Rows

VERIFY_ROWS = 8
_BUFFER = 512 << 20


def bandwidth(repeats: int = 7) -> float:
    """Bytes a second of reading a buffer that no cache holds, all threads together."""
    buffer = torch.ones(_BUFFER // 4)
    return _BUFFER / min(_seconds(buffer.sum, repeats))


def bench_floor(runtime: Runtime, *, context: int, repeats: int = 31) -> dict[str, Any]:
    """Measured medians against limits.

    The limit of a forward is its weights and the KV it reads, once, at the measured bandwidth; of a draft its backbone
    once and its recurrent head as often as it drafts. T_S has no such limit. Weights that fit a shared last-level cache
    may be read faster than that, so a share above 1 is possible.

    Raises:
        InvalidRequest: the native kernels do not serve here, or there is no drafter.
    """
    decoder = runtime.decoder
    target, drafter = decoder.target, decoder.drafter
    if target.weight_bytes is None or drafter is None or drafter.weight_bytes is None:
        raise InvalidRequest("the floor is that of the native kernels with a drafter: try dtype packed", param="dtype")
    speed = bandwidth()
    kv_bytes = 2 * target.spec.num_layers * target.spec.kv_size * target.dtype.itemsize * context
    forward = (target.weight_bytes + kv_bytes) / speed
    backbone, head = drafter.weight_bytes
    steps = decoder.proposal_length
    ar, verify, draft = _times(decoder, context, repeats)
    figures = {
        "T_AR": (ar, forward),
        f"T_V({VERIFY_ROWS})": (verify, forward),
        f"T_D({steps})": (draft, (backbone + steps * head) / speed),
    }
    return {
        "dtype": target.precision.name,
        "kernel": target.precision.kernel,
        "threads": torch.get_num_threads(),
        "context": context,
        "batch": 1,
        "bandwidth": speed,
        "target_bytes": target.weight_bytes,
        "kv_bytes": kv_bytes,
        "drafter_bytes": {"backbone": backbone, "head": head},
        "rows": [
            {"figure": name, "seconds": seconds, "floor": floor, "share": floor / seconds}
            for name, (seconds, floor) in figures.items()
        ],
    }


@torch.inference_mode()
def _times(decoder: Decoder, context: int, repeats: int) -> tuple[float, float, float]:
    """Median seconds of a one-row forward, a verify pass and a whole draft, taking turns."""
    target, drafter, kv = decoder.target, decoder.drafter, decoder.pool.sequence()
    assert drafter is not None
    ids = torch.zeros(VERIFY_ROWS, dtype=torch.int64)
    features = torch.zeros(1, len(decoder.taps), target.spec.hidden_size, dtype=target.dtype)
    seconds: list[list[float]] = [[], [], []]
    try:
        kv.reserve(context + VERIFY_ROWS)
        kv.load(decoder.pool.buffer(context).zero_())

        def forward(rows: int) -> None:
            target.forward([Rows(kv, ids[:rows])], tap_layers=decoder.taps)
            kv.truncate(context)

        def draft() -> None:
            drafter.draft_greedy(features, ids[:1].view(1, 1), target.embedding, decoder.proposal_length)

        for _ in range(repeats + 1):
            seconds[0] += _seconds(lambda: forward(1))
            seconds[1] += _seconds(lambda: forward(VERIFY_ROWS))
            seconds[2] += _seconds(draft)
    finally:
        kv.free()
    one, window, whole = (statistics.median(times[1:]) for times in seconds)
    return one, window, whole


def _seconds(work: Callable[[], object], repeats: int = 1) -> list[float]:
    found = []
    for _ in range(repeats):
        start = time.perf_counter()
        work()
        found.append(time.perf_counter() - start)
    return found
