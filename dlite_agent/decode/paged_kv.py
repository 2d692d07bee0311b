"""KV memory in pages of one pool, for flash-attn: the same interface as `SequenceKV`, no growth by copying."""

from __future__ import annotations

import torch
from torch import Tensor

from dlite_agent.decode.kv import KVPool, SequenceKV
from dlite_agent.errors import KVExhausted
from dlite_agent.model.flash import PAGE
from dlite_agent.model.spec import ModelSpec


class PagedKVPool(KVPool):
    """A pool of pages [2, layers, pages, PAGE, kv_heads, head_dim], allocated once.

    One page beyond the budget is scratch: graphs of a padded batch write their idle rows there.
    """

    def __init__(
        self, spec: ModelSpec, *, dtype: torch.dtype, device: torch.device, budget_bytes: int, max_positions: int
    ) -> None:
        super().__init__(spec, dtype=dtype, device=device, budget_bytes=budget_bytes, max_positions=max_positions)
        pages = self.capacity // PAGE
        self.capacity = pages * PAGE
        shape = (2, spec.num_layers, pages + 1, PAGE, spec.num_kv_heads, spec.head_dim)
        try:
            self.store = torch.zeros(shape, dtype=dtype, device=device)
        except torch.OutOfMemoryError as error:
            raise KVExhausted(f"no memory for {pages} KV pages: {error}", param="kv_budget") from error
        self.scratch_page = pages
        self._free_pages = list(range(pages))[::-1]

    def sequence(self) -> SequenceKV:
        return PagedSequenceKV(self)

    def take_pages(self, count: int) -> list[int]:
        self.take(count * PAGE)
        return [self._free_pages.pop() for _ in range(count)]

    def give_pages(self, pages: list[int]) -> None:
        self._free_pages += pages
        self.give(len(pages) * PAGE)


class PagedSequenceKV(SequenceKV):
    """Keys and values of one sequence in pages of a `PagedKVPool`; `reserved` counts whole pages."""

    def __init__(self, pool: PagedKVPool) -> None:
        super().__init__(pool)
        self._paged = pool
        self.pages: list[int] = []

    @property
    def store(self) -> Tensor:
        return self._paged.store

    def reserve(self, positions: int) -> None:
        if positions > self._paged.max_positions:
            raise KVExhausted(
                f"{positions} positions wanted, a sequence may hold {self._paged.max_positions}", param="max_positions"
            )
        missing = -(-positions // PAGE) - len(self.pages)
        if missing > 0:
            self.pages += self._paged.take_pages(missing)
            self.reserved = len(self.pages) * PAGE

    def shrink(self) -> None:
        keep = -(-self.length // PAGE)
        self._paged.give_pages(self.pages[keep:])
        del self.pages[keep:]
        self.reserved = len(self.pages) * PAGE

    def export(self, start: int = 0) -> Tensor:
        slots = self._slots(start, self.length)
        return self.store.flatten(2, 3)[:, :, slots].transpose(2, 3).contiguous()

    def load(self, rows: Tensor) -> None:
        end = self.length + rows.shape[3]
        self.reserve(end)
        self.store.flatten(2, 3)[:, :, self._slots(self.length, end)] = rows.transpose(2, 3).to(self.store)
        self.length = end

    def _slots(self, start: int, end: int) -> Tensor:
        slots = [self.pages[n // PAGE] * PAGE + n % PAGE for n in range(start, end)]
        return torch.tensor(slots, dtype=torch.int64, device=self.store.device)

    def free(self) -> None:
        self._paged.give_pages(self.pages)
        self.pages = []
        self.length = self.reserved = 0
