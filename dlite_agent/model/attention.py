"""Attention over KV memory for a ragged batch: what the executor asks of a backend, and the SDPA backend."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, cast

import torch
import torch.nn.functional as F
from torch import Tensor

WINDOW_ROWS = 16
"""Up to here the query heads of a KV head share one pass over its keys; wider spans use SDPA's own grouping."""


class KV(Protocol):
    """KV memory of one sequence, as the executor sees it: `length` positions are filled."""

    @property
    def length(self) -> int: ...

    def advance(self, count: int) -> None:
        """`count` further positions have been written in every layer."""


class ContiguousKV(KV, Protocol):
    """KV whose positions lie side by side, as SDPA wants it."""

    def write(self, layer: int, start: int, k: Tensor, v: Tensor) -> None:
        """Store k and v [n, kv_heads, head_dim] at positions start.. of a layer. Space must have been reserved."""

    def read(self, layer: int, end: int) -> tuple[Tensor, Tensor]:
        """Keys and values [1, kv_heads, end, head_dim] of a layer, without a copy."""

    def memory(self) -> tuple[Tensor, Tensor]:
        """All keys and values there is room for, [layers, kv_heads, positions, head_dim], without a copy."""


@dataclass(frozen=True)
class Span:
    """Rows [first, first + count) of a batch: new positions start.. of one sequence."""

    kv: KV
    first: int
    count: int
    start: int


Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]
"""(layer, q [N, heads, head_dim], k and v [N, kv_heads, head_dim]) -> [N, heads * head_dim]; k and v are stored."""


class Attention(Protocol):
    """A backend: prepares what all layers of one forward share."""

    def plan(self, spans: Sequence[Span], *, device: torch.device, dtype: torch.dtype) -> Attend: ...


class SdpaAttention:
    """Causal attention, one SDPA call per sequence and layer, on KV that is contiguous in position."""

    def __init__(self, num_heads: int, num_kv_heads: int, head_dim: int) -> None:
        self.num_heads = num_heads
        self.num_kv_heads = num_kv_heads
        self.head_dim = head_dim
        self.group = num_heads // num_kv_heads

    def plan(self, spans: Sequence[Span], *, device: torch.device, dtype: torch.dtype) -> Attend:
        """Masks are made once per span and shared by all layers."""
        masks = [self._mask(span, device, dtype) for span in spans]

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            outputs = []
            for span, mask in zip(spans, masks, strict=True):
                kv = cast(ContiguousKV, span.kv)
                rows = slice(span.first, span.first + span.count)
                kv.write(layer, span.start, k[rows], v[rows])
                keys, values = kv.read(layer, span.start + span.count)
                outputs.append(self._attend(q[rows], keys, values, mask))
            return outputs[0] if len(outputs) == 1 else torch.cat(outputs)

        return attend

    def _mask(self, span: Span, device: torch.device, dtype: torch.dtype) -> Tensor | None:
        if span.count == 1:
            return None
        # Row i (counted from the last query backwards) sees keys up to end - 1 - i. As mask[i, j] depends on i + j
        # alone, a strided view over one line of end + count numbers serves and prefill memory stays flat in context.
        end = span.start + span.count
        line = torch.zeros(end + span.count, device=device, dtype=dtype)
        line[end:] = float("-inf")
        mask = line.as_strided((span.count, end), (1, 1))
        if span.count > WINDOW_ROWS:
            return mask
        return mask.repeat(self.group, 1)

    def _attend(self, q: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None) -> Tensor:
        count = q.shape[0]
        if count > WINDOW_ROWS:
            heads = q.flip(0).transpose(0, 1).unsqueeze(0)
            out = F.scaled_dot_product_attention(heads, keys, values, attn_mask=mask, enable_gqa=self.group > 1)
            return out.squeeze(0).transpose(0, 1).flip(0).reshape(count, -1)
        flipped = q if count == 1 else q.flip(0)
        grouped = flipped.view(count, self.num_kv_heads, self.group, self.head_dim).permute(1, 2, 0, 3)
        grouped = grouped.reshape(1, self.num_kv_heads, self.group * count, self.head_dim)
        out = F.scaled_dot_product_attention(grouped, keys, values, attn_mask=mask)
        out = out.view(self.num_kv_heads, self.group, count, self.head_dim).permute(2, 0, 1, 3)
        out = out.reshape(count, -1)
        return out if count == 1 else out.flip(0)
