"""`bench floor`: how far T_AR, T_V and T_D are from reading their weights once at the measured memory bandwidth."""

from __future__ import annotations

import time
from typing import Any

import torch

from dlite_agent.decode.costs import draft_seconds, verify_seconds
from dlite_agent.decode.load import Runtime
from dlite_agent.errors import InvalidRequest

VERIFY_ROWS = 8
_BUFFER = 512 << 20


def bandwidth(repeats: int = 7) -> float:
    """Bytes a second of reading a buffer that no cache holds, all threads together."""
    buffer, seconds = torch.ones(_BUFFER // 4), []
    for _ in range(repeats):
        start = time.perf_counter()
        buffer.sum()
        seconds.append(time.perf_counter() - start)
    return _BUFFER / min(seconds)


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
    kv_bytes = decoder.pool.bytes_per_position * context
    forward = (target.weight_bytes + kv_bytes) / speed
    backbone, head = drafter.weight_bytes
    steps = decoder.proposal_length
    ar, verify = verify_seconds(decoder, context, (1, VERIFY_ROWS), repeats=repeats)
    (draft,) = draft_seconds(decoder, [steps], 1, repeats=repeats)
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
