"""Paged attention by flash-attn (CUDA). Everything a layer reads is a device tensor, so a forward can be graphed."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, Protocol, cast

import torch
from torch import Tensor

from dlite_agent.model.attention import KV, Attend, Span

PAGE = 256
"""Positions a page; flash-attn's paged kernel wants multiples of 256."""


class PagedKV(KV, Protocol):
    """KV of one sequence in pages of a pool shared by all."""

    @property
    def pages(self) -> list[int]:
        """Pages that hold positions 0.., in order."""

    @property
    def store(self) -> Tensor:
        """The pool [2, layers, pages, PAGE, kv_heads, head_dim]."""


def load_flash() -> Any | None:
    """flash-attn's `flash_attn_with_kvcache`, or None where the package cannot be imported."""
    try:
        return importlib.import_module("flash_attn").flash_attn_with_kvcache
    except ImportError:
        return None


@dataclass(frozen=True)
class PagedGroup:
    """Spans of equal width W in one kernel call: B rows of W queries.

    Attributes:
        rows: indices [B * W] into the batch's rows, or None where the group is the whole batch in order.
        table: pages [B, most pages] int32; lengths [B] int32: positions filled once this forward has written its own.
    """

    rows: Tensor | None
    width: int
    table: Tensor
    lengths: Tensor


@dataclass(frozen=True)
class PagedPlan:
    """Where new rows go (`slots` [N] int64 into the pool's positions) and what each group reads."""

    slots: Tensor
    groups: tuple[PagedGroup, ...]


class FlashAttention:
    """Causal attention on paged KV.

    Args:
        kernel: `flash_attn_with_kvcache` (q, k_cache, v_cache, cache_seqlens=, block_table=, causal=).
    """

    def __init__(self, kernel: Any) -> None:
        self._kernel = kernel

    def plan(self, spans: Sequence[Span], *, device: torch.device, dtype: torch.dtype) -> Attend:
        store = cast(PagedKV, spans[0].kv).store
        return self.attend(store, paged_plan(spans, device))

    def attend(self, store: Tensor, plan: PagedPlan) -> Attend:
        """Attention over `store` by a plan whose tensors may be overwritten between calls (graphs do)."""
        flat = store.flatten(2, 3)

        def run(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            flat[0, layer].index_copy_(0, plan.slots, k)
            flat[1, layer].index_copy_(0, plan.slots, v)
            outputs = [self._group(store, layer, q, group) for group in plan.groups]
            if len(outputs) == 1 and plan.groups[0].rows is None:
                return outputs[0]
            joined = torch.empty(q.shape[0], q.shape[1] * q.shape[2], device=q.device, dtype=q.dtype)
            for group, out in zip(plan.groups, outputs, strict=True):
                assert group.rows is not None
                joined.index_copy_(0, group.rows, out)
            return joined

        return run

    def _group(self, store: Tensor, layer: int, q: Tensor, group: PagedGroup) -> Tensor:
        queries = q if group.rows is None else q[group.rows]
        out: Tensor = self._kernel(
            queries.view(-1, group.width, *queries.shape[1:]),
            store[0, layer],
            store[1, layer],
            cache_seqlens=group.lengths,
            block_table=group.table,
            causal=True,
        )
        return out.flatten(0, 1).flatten(1)


def paged_plan(spans: Sequence[Span], device: torch.device) -> PagedPlan:
    """Plan of a ragged batch: spans of the same width share a kernel call."""
    slots = [slot for span in spans for slot in span_slots(span)]
    groups = []
    whole = len({span.count for span in spans}) == 1
    for width, found in groupby(sorted(spans, key=lambda s: s.count), key=lambda s: s.count):
        group = list(found)
        rows = [row for span in group for row in range(span.first, span.first + width)]
        groups.append(
            PagedGroup(
                rows=None if whole else torch.tensor(rows, device=device),
                width=width,
                table=page_table([cast(PagedKV, span.kv).pages for span in group], device),
                lengths=torch.tensor([s.start + s.count for s in group], dtype=torch.int32, device=device),
            )
        )
    return PagedPlan(torch.tensor(slots, dtype=torch.int64, device=device), tuple(groups))


def span_slots(span: Span) -> list[int]:
    """Pool positions of a span's rows."""
    pages = cast(PagedKV, span.kv).pages
    return [pages[n // PAGE] * PAGE + n % PAGE for n in range(span.start, span.start + span.count)]


def page_table(pages: list[list[int]], device: torch.device, width: int | None = None) -> Tensor:
    """Rows of pages padded with page 0 to equal width, int32."""
    width = width or max(len(row) for row in pages)
    return torch.tensor([row + [0] * (width - len(row)) for row in pages], dtype=torch.int32, device=device)
