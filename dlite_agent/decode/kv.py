"""KV memory: one budget for a device, one contiguous buffer a sequence.

A decoding round writes its rows in place and truncation moves a number, so history is never copied while decoding.
On a CPU a buffer spans the whole context as address space and the system commits pages as they are written; elsewhere
it grows in steps inside `reserve`, which happens at the start of a turn.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dlite_agent.errors import KVExhausted
from dlite_agent.model.spec import ModelSpec

GROWTH = 1024
"""Positions a buffer grows by where memory is committed at once (CUDA)."""


class KVPool:
    """The KV budget of one device, in positions; every sequence reserves from it.

    Args:
        budget_bytes: bytes that all sequences together may reserve.
        max_positions: longest sequence, draft windows included.
    """

    def __init__(
        self, spec: ModelSpec, *, dtype: torch.dtype, device: torch.device, budget_bytes: int, max_positions: int
    ) -> None:
        self.spec = spec
        self.dtype = dtype
        self.device = device
        self.max_positions = max_positions
        self.bytes_per_position = 2 * spec.num_layers * spec.kv_size * dtype.itemsize
        self.capacity = budget_bytes // self.bytes_per_position
        self.reserved = 0

    @property
    def free(self) -> int:
        """Positions that can still be reserved."""
        return self.capacity - self.reserved

    def sequence(self) -> SequenceKV:
        """An empty sequence that has reserved nothing."""
        return SequenceKV(self)

    def take(self, positions: int) -> None:
        """Account for positions, or raise KVExhausted and change nothing."""
        if positions > self.free:
            raise KVExhausted(
                f"{positions} KV positions wanted, {self.free} of {self.capacity} free: wait for other sessions, "
                "or start with a larger KV budget",
                param="kv_budget",
            )
        self.reserved += positions

    def give(self, positions: int) -> None:
        self.reserved -= positions

    def buffer(self, positions: int) -> Tensor:
        """Uninitialised [2, layers, kv_heads, positions, head_dim]."""
        spec = self.spec
        shape = (2, spec.num_layers, spec.num_kv_heads, positions, spec.head_dim)
        try:
            return torch.empty(shape, dtype=self.dtype, device=self.device)
        except (torch.OutOfMemoryError, RuntimeError) as error:
            raise KVExhausted(f"no memory for {positions} KV positions: {error}", param="kv_budget") from error


class SequenceKV:
    """Keys and values of one sequence at positions 0..length-1."""

    def __init__(self, pool: KVPool) -> None:
        self._pool = pool
        self._buffer: Tensor | None = None
        self.length = 0
        self.reserved = 0

    def reserve(self, positions: int) -> None:
        """Make room for `positions` in all. Raises KVExhausted, then nothing has changed."""
        if positions <= self.reserved:
            return
        pool = self._pool
        if positions > pool.max_positions:
            raise KVExhausted(
                f"{positions} positions wanted, a sequence may hold {pool.max_positions}", param="max_positions"
            )
        pool.take(positions - self.reserved)
        try:
            self._grow(positions)
        except KVExhausted:
            pool.give(positions - self.reserved)
            raise
        self.reserved = positions

    def _grow(self, positions: int) -> None:
        have = 0 if self._buffer is None else self._buffer.shape[3]
        if positions <= have:
            return
        lazy = self._pool.device.type == "cpu"
        want = self._pool.max_positions if lazy else -(-positions // GROWTH) * GROWTH
        grown = self._pool.buffer(want)
        if self._buffer is not None:
            grown[:, :, :, : self.length] = self._buffer[:, :, :, : self.length]
        self._buffer = grown

    def write(self, layer: int, start: int, k: Tensor, v: Tensor) -> None:
        """Store k and v [n, kv_heads, head_dim] at positions start.. of a layer; `advance` makes them count."""
        assert self._buffer is not None, "reserve before writing"
        end = start + k.shape[0]
        self._buffer[0, layer, :, start:end] = k.transpose(0, 1)
        self._buffer[1, layer, :, start:end] = v.transpose(0, 1)

    def read(self, layer: int, end: int) -> tuple[Tensor, Tensor]:
        """Views [1, kv_heads, end, head_dim] of keys and values of a layer."""
        assert self._buffer is not None, "reserve before reading"
        return self._buffer[0, layer, None, :, :end], self._buffer[1, layer, None, :, :end]

    def memory(self) -> tuple[Tensor, Tensor]:
        """Views [layers, kv_heads, positions, head_dim] of all keys and values there is room for."""
        assert self._buffer is not None, "reserve before use"
        return self._buffer[0], self._buffer[1]

    def advance(self, count: int) -> None:
        """Positions length..length+count-1 have been written in every layer."""
        assert self.length + count <= self.reserved, "wrote past the reservation"
        self.length += count

    def truncate(self, length: int) -> None:
        """Forget positions from `length` on."""
        assert 0 <= length <= self.length, "truncate only shortens"
        self.length = length

    def shrink(self) -> None:
        """Give the reservation beyond `length` back to the pool (at a pause)."""
        self._pool.give(self.reserved - self.length)
        self.reserved = self.length

    def fork(self) -> SequenceKV:
        """A new sequence with a copy of this one's rows."""
        other = self._pool.sequence()
        if self.length:
            other.load(self.export())
        return other

    def export(self, start: int = 0) -> Tensor:
        """Copy of positions start.. as [2, layers, kv_heads, n, head_dim]."""
        if self._buffer is None:
            return self._pool.buffer(0)
        return self._buffer[:, :, :, start : self.length].clone()

    def load(self, rows: Tensor) -> None:
        """Append exported rows [2, layers, kv_heads, n, head_dim]. Raises KVExhausted, then nothing has changed."""
        if not rows.shape[3]:
            return
        end = self.length + rows.shape[3]
        self.reserve(end)
        assert self._buffer is not None
        self._buffer[:, :, :, self.length : end] = rows
        self.length = end

    def free(self) -> None:
        """Give everything back; the sequence is empty and may be used again."""
        self._pool.give(self.reserved)
        self._buffer = None
        self.length = self.reserved = 0
