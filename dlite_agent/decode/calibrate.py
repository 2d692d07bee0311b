"""How long a draft should be: the window with the least expected seconds a token, from measured costs.

A longer window costs more rows to verify and more head steps, and its last positions are accepted rarely. The
drafter's card says how often each position is accepted on held-out prompts; what rows and steps cost depends on the
machine and is measured once at load.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from functools import partial
from itertools import accumulate
from operator import mul

import torch

from dlite_agent.decode.rounds import Decoder
from dlite_agent.model.measured import remember
from dlite_agent.model.target import Rows

_CONTEXT = 256
_REPEATS = 9


def best_window(decoder: Decoder, acceptance: Sequence[float], name: str) -> int:
    """Verify window with the least (T_D + T_V) / (1 + accepted) at batch 1.

    Args:
        acceptance: how often each position 0..K - 1 is accepted once all before it are.
        name: tells target and drafter apart from others whose costs were measured here.
    """
    reached = list(accumulate(acceptance, mul))
    name = f"{name} {decoder.target.precision.name}/{decoder.target.precision.kernel}"
    windows = range(2, decoder.proposal_length + 2)
    seconds = remember(f"rounds {name} windows {windows[0]}-{windows[-1]}", partial(_measure, decoder, windows))
    costs = {w: cost / (1 + sum(reached[: w - 1])) for w, cost in zip(windows, seconds, strict=True)}
    return min(costs, key=lambda window: costs[window])


@torch.inference_mode()
def _measure(decoder: Decoder, windows: Sequence[int]) -> list[float]:
    """Median seconds of one draft of window - 1 tokens and one verify pass of `window` rows, for each window.

    The windows take turns, so that what else the machine does falls on all of them alike.
    """
    target, drafter = decoder.target, decoder.drafter
    assert drafter is not None
    ids = torch.arange(_CONTEXT, device=target.device) % target.spec.vocab_size
    features = torch.zeros(1, len(decoder.taps), target.spec.hidden_size, device=target.device, dtype=target.dtype)
    anchor = ids[:1].unsqueeze(0)
    kv = decoder.pool.sequence()
    try:
        kv.reserve(_CONTEXT + max(windows))
        target.forward([Rows(kv, ids)], logit_rows=torch.tensor([0], device=target.device))
        seconds: dict[int, list[float]] = {window: [] for window in windows}
        for _ in range(_REPEATS + 1):
            for window in windows:
                start = time.perf_counter()
                drafter.draft_greedy(features, anchor, target.embedding, window - 1)
                target.forward([Rows(kv, ids[:window])], tap_layers=decoder.taps)
                if target.device.type == "cuda":
                    torch.cuda.synchronize(target.device)
                seconds[window].append(time.perf_counter() - start)
                kv.truncate(_CONTEXT)
    finally:
        kv.free()
    return [statistics.median(seconds[window][1:]) for window in windows]
