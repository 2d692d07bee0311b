"""CUDA graphs for decode shapes: at batch 1 a round is bound by kernel launches, and a graph launches once.

A graph is captured the first time a shape is seen: B sequences of W rows each, B rounded up to the next of
`BATCHES` with idle rows on a scratch page. Inputs are copied into the graph's own tensors, so nothing is captured that
belongs to a session.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

from dlite_agent.model.attention import Span
from dlite_agent.model.flash import PAGE, PagedGroup, PagedKV, PagedPlan, page_table, span_slots

T = TypeVar("T")
BATCHES = (1, 2, 4, 8, 16, 32, 64)
WIDEST = 16


@dataclass(frozen=True)
class _Captured:
    graph: torch.cuda.CUDAGraph
    ids: Tensor
    positions: Tensor
    plan: PagedPlan
    outputs: tuple[Tensor, ...]


Body = Callable[[Tensor, Tensor, PagedPlan], tuple[Tensor, ...]]
"""(ids [B * W], positions [B * W], plan) -> outputs, each with B * W rows."""


def capture(body: Callable[[], T], memory: Any) -> tuple[torch.cuda.CUDAGraph, T]:
    """Capture what `body` launches; it is run twice before, since lazy initialisation cannot be captured."""
    side: torch.cuda.Stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            body()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=memory):
        output = body()
    return graph, output


class DecodeGraphs:
    """Captured forwards of a target by (batch, width).

    Args:
        body: the forward; every call must launch the same kernels on the tensors it is given.
        scratch_page: a page of the pool that holds nothing.
        max_pages: pages the longest sequence may hold.
    """

    def __init__(self, body: Body, *, device: torch.device, scratch_page: int, max_pages: int) -> None:
        self._body = body
        self._device = device
        self._scratch = scratch_page
        self._max_pages = max_pages
        self._captured: dict[tuple[int, int], _Captured] = {}
        self._memory = torch.cuda.graph_pool_handle() if device.type == "cuda" else None

    def fits(self, spans: Sequence[Span]) -> bool:
        """Whether a batch has a decode shape: equal narrow widths, not too many."""
        widths = {span.count for span in spans}
        return len(widths) == 1 and max(widths) <= WIDEST and len(spans) <= BATCHES[-1]

    def run(self, spans: Sequence[Span], ids: Tensor) -> tuple[Tensor, ...]:
        """Outputs for these spans; their tensors are overwritten by the next run of the same shape."""
        width = spans[0].count
        batch = next(size for size in BATCHES if size >= len(spans))
        if (batch, width) not in self._captured:
            self._captured[batch, width] = self._capture(batch, width)
        captured = self._captured[batch, width]
        self._fill(captured, spans, ids, batch, width)
        captured.graph.replay()
        rows = len(spans) * width
        return tuple(output[:rows] for output in captured.outputs)

    def _fill(self, captured: _Captured, spans: Sequence[Span], ids: Tensor, batch: int, width: int) -> None:
        idle = batch - len(spans)
        positions = [n for s in spans for n in range(s.start, s.start + width)] + [*range(width)] * idle
        slots = [slot for s in spans for slot in span_slots(s)] + [
            self._scratch * PAGE + n for n in range(width)
        ] * idle
        pages = [cast(PagedKV, s.kv).pages for s in spans] + [[self._scratch]] * idle
        lengths = [s.start + width for s in spans] + [width] * idle
        group = captured.plan.groups[0]
        captured.ids[: ids.shape[0]].copy_(ids, non_blocking=True)
        for into, values in ((captured.positions, positions), (captured.plan.slots, slots), (group.lengths, lengths)):
            into.copy_(torch.tensor(values, dtype=into.dtype).pin_memory(), non_blocking=True)
        table = page_table(pages, torch.device("cpu"), self._max_pages)
        group.table.copy_(table.pin_memory(), non_blocking=True)

    def _capture(self, batch: int, width: int) -> _Captured:
        rows, device = batch * width, self._device
        slots = torch.full((rows,), self._scratch * PAGE, dtype=torch.int64, device=device)
        table = torch.full((batch, self._max_pages), self._scratch, dtype=torch.int32, device=device)
        lengths = torch.full((batch,), width, dtype=torch.int32, device=device)
        plan = PagedPlan(slots, (PagedGroup(None, width, table, lengths),))
        ids = torch.zeros(rows, dtype=torch.int64, device=device)
        positions = torch.zeros(rows, dtype=torch.int64, device=device)
        graph, outputs = capture(lambda: self._body(ids, positions, plan), self._memory)
        return _Captured(graph, ids, positions, plan, outputs)


Drafts = tuple[Tensor, Tensor]


class DraftGraphs:
    """Captured greedy drafts by shape. `body`: see `Drafter.draft_greedy`."""

    def __init__(self, body: Callable[[Tensor, Tensor, int], Drafts]) -> None:
        self._body = body
        self._captured: dict[tuple[int, int, int], tuple[torch.cuda.CUDAGraph, Tensor, Tensor, Drafts]] = {}

    def run(self, features: Tensor, tokens: Tensor, steps: int) -> Drafts:
        """Ids and their probabilities [N, steps]; overwritten by the next run of the same shape."""
        key = (*tokens.shape, steps)
        if key not in self._captured:
            self._captured[key] = self._capture(features.clone(), tokens.clone(), steps)
        graph, into_features, into_tokens, drafts = self._captured[key]
        into_features.copy_(features)
        into_tokens.copy_(tokens)
        graph.replay()
        return drafts

    def _capture(
        self, features: Tensor, tokens: Tensor, steps: int
    ) -> tuple[torch.cuda.CUDAGraph, Tensor, Tensor, Drafts]:
        graph, drafts = capture(lambda: self._body(features, tokens, steps), None)
        return graph, features, tokens, drafts
