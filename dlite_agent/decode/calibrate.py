"""How long a draft should be: the window with the least expected seconds a token, from measured costs.

A longer window costs more rows to verify and more head steps, and its last positions are accepted rarely. The
drafter's card says how often each position is accepted on held-out prompts; what rows and steps cost depends on the
machine and is measured once at load.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from itertools import accumulate
from operator import mul

import torch

from dlite_agent.decode.rounds import Decoder
from dlite_agent.decode.state import DecodeState
from dlite_agent.model.measured import remember
from dlite_agent.model.target import Rows

_CONTEXT = 256
_REPEATS = 7


def best_window(decoder: Decoder, acceptance: Sequence[float], name: str) -> int:
    """Verify window with the least (T_D + T_V) / (1 + accepted) at batch 1.

    Args:
        acceptance: how often each position 0..K - 1 is accepted once all before it are.
        name: tells target and drafter apart from others whose costs were measured here.
    """
    reached = list(accumulate(acceptance, mul))
    name = f"{name} {decoder.target.precision.name}/{decoder.target.precision.kernel}"
    state = decoder.open()
    try:
        costs = {}
        for window in range(2, decoder.proposal_length + 2):
            seconds = remember(f"round {name} window={window}", partial(_measure, decoder, state, window))
            costs[window] = seconds / (1 + sum(reached[: window - 1]))
        return min(costs, key=lambda window: costs[window])
    finally:
        state.kv.free()


@torch.inference_mode()
def _measure(decoder: Decoder, state: DecodeState, window: int) -> float:
    """Median seconds of one draft of window - 1 tokens and one verify pass of `window` rows."""
    target, drafter = decoder.target, decoder.drafter
    assert drafter is not None
    ids = torch.arange(_CONTEXT, device=target.device) % target.spec.vocab_size
    if not state.kv.length:
        state.kv.reserve(_CONTEXT + decoder.proposal_length + 1)
        target.forward([Rows(state.kv, ids)], logit_rows=ids[:1])
    features = torch.zeros(1, len(decoder.taps), target.spec.hidden_size, device=target.device, dtype=target.dtype)
    anchor = ids[:1].unsqueeze(0)

    def round_once() -> None:
        drafter.draft(features, anchor, target.embedding, window - 1, lambda _, logits: logits.argmax(-1))
        target.forward([Rows(state.kv, ids[:window])], tap_layers=decoder.taps)
        state.kv.truncate(_CONTEXT)

    return _median_seconds(round_once, target.device)


def _median_seconds(run: Callable[[], None], device: torch.device) -> float:
    run()
    seconds = []
    for _ in range(_REPEATS):
        start = time.perf_counter()
        run()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds)
