"""SDPA over contiguous KV against attention written out with a full mask."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from dlite_agent.model.attention import WINDOW_ROWS, SdpaAttention, Span
from dlite_agent.model.target import Target
from tests.helpers import CPU, pool_for

HEADS, KV_HEADS, DIM = 4, 2, 16


def written_out(q: Tensor, keys: Tensor, values: Tensor, start: int) -> Tensor:
    """q [n, heads, d] at positions start.. over keys and values [end, kv_heads, d], one head at a time."""
    outputs = []
    for head in range(HEADS):
        scores = q[:, head] @ keys[:, head // (HEADS // KV_HEADS)].T / math.sqrt(DIM)
        positions = torch.arange(start, start + q.shape[0])
        scores[torch.arange(keys.shape[0])[None] > positions[:, None]] = float("-inf")
        outputs.append(scores.softmax(-1) @ values[:, head // (HEADS // KV_HEADS)])
    return torch.stack(outputs, dim=1).flatten(1)


@pytest.mark.parametrize("count", [1, 2, 8, WINDOW_ROWS, WINDOW_ROWS + 1, 40])
@pytest.mark.parametrize("start", [0, 1, 30])
def test_each_row_sees_what_came_before_it(count: int, start: int, target: Target) -> None:
    torch.manual_seed(count * 100 + start)
    kv = pool_for(target).sequence()
    kv.reserve(start + 2 * count)
    keys, values = torch.randn(2, start + count, KV_HEADS, DIM)
    q = torch.randn(count, HEADS, DIM)
    attention = SdpaAttention(HEADS, KV_HEADS, DIM)
    kv.write(0, 0, keys[:start], values[:start])
    attend = attention.plan([Span(kv, 0, count, start)], device=CPU, dtype=torch.float32)
    found = attend(0, q, keys[start:], values[start:])
    torch.testing.assert_close(found, written_out(q, keys, values, start), rtol=1e-4, atol=1e-5)
