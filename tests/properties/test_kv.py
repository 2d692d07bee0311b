"""KV memory against a plain tensor, for any order of operations; the budget returns to where it began."""

from __future__ import annotations

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from dlite_agent.decode.kv import KVPool, SequenceKV
from dlite_agent.errors import KVExhausted
from dlite_agent.model.spec import ModelSpec, RopeSpec
from tests.helpers import CPU

LAYERS, HEADS, DIM, CAPACITY, LONGEST = 2, 2, 4, 60, 40
SPEC = ModelSpec("llama", LAYERS, 16, 16, 4, HEADS, DIM, 10, 1e-5, LONGEST, RopeSpec("default", 1e4), False, False, ())
sizes = st.integers(0, 25)
which = st.integers(0, 5)


class Memory(RuleBasedStateMachine):
    """Sequences beside the rows [2, layers, heads, n, dim] they ought to hold and what they ought to have reserved."""

    @initialize()
    def begin(self) -> None:
        self.pool = KVPool(
            SPEC,
            dtype=torch.float32,
            device=CPU,
            budget_bytes=CAPACITY * 2 * LAYERS * HEADS * DIM * 4,
            max_positions=LONGEST,
        )
        self.held: list[tuple[SequenceKV, torch.Tensor, int]] = []
        self.clock = 0

    def pick(self, index: int) -> int:
        return index % len(self.held)

    def fits(self, extra: int, total: int) -> bool:
        return total <= LONGEST and extra <= CAPACITY - sum(reserved for _, _, reserved in self.held)

    @rule()
    def open(self) -> None:
        if len(self.held) < 4:
            self.held.append((self.pool.sequence(), torch.empty(2, LAYERS, HEADS, 0, DIM), 0))

    @precondition(lambda self: self.held)
    @rule(index=which, size=sizes)
    def reserve(self, index: int, size: int) -> None:
        at = self.pick(index)
        kv, rows, reserved = self.held[at]
        if size <= reserved or self.fits(size - reserved, size):
            kv.reserve(size)
            self.held[at] = (kv, rows, max(size, reserved))
        else:
            with pytest.raises(KVExhausted):
                kv.reserve(size)

    @precondition(lambda self: self.held)
    @rule(index=which, size=sizes)
    def write(self, index: int, size: int) -> None:
        at = self.pick(index)
        kv, rows, reserved = self.held[at]
        count = min(size, reserved - rows.shape[3])
        if count:
            self.clock += 1
            new = torch.randn(2, LAYERS, HEADS, count, DIM, generator=torch.Generator().manual_seed(self.clock))
            for layer in range(LAYERS):
                kv.write(layer, kv.length, new[0, layer].transpose(0, 1), new[1, layer].transpose(0, 1))
            kv.advance(count)
            self.held[at] = (kv, torch.cat((rows, new), dim=3), reserved)

    @precondition(lambda self: self.held)
    @rule(index=which, size=sizes)
    def truncate(self, index: int, size: int) -> None:
        at = self.pick(index)
        kv, rows, reserved = self.held[at]
        length = min(size, rows.shape[3])
        kv.truncate(length)
        self.held[at] = (kv, rows[:, :, :, :length], reserved)

    @precondition(lambda self: self.held)
    @rule(index=which)
    def shrink(self, index: int) -> None:
        at = self.pick(index)
        kv, rows, _ = self.held[at]
        kv.shrink()
        self.held[at] = (kv, rows, rows.shape[3])

    @precondition(lambda self: self.held)
    @rule(index=which)
    def fork(self, index: int) -> None:
        kv, rows, _ = self.held[self.pick(index)]
        length = rows.shape[3]
        if self.fits(length, length):
            self.held.append((kv.fork(), rows.clone(), length))
        else:
            with pytest.raises(KVExhausted):
                kv.fork()

    @precondition(lambda self: self.held)
    @rule(source=which, into=which, start=sizes)
    def load(self, source: int, into: int, start: int) -> None:
        at = self.pick(into)
        origin, theirs, _ = self.held[self.pick(source)]
        kv, rows, reserved = self.held[at]
        begin = min(start, theirs.shape[3])
        exported = origin.export(begin)
        assert torch.equal(exported, theirs[:, :, :, begin:])
        end = rows.shape[3] + exported.shape[3]
        if end <= reserved or self.fits(end - reserved, end):
            kv.load(exported)
            self.held[at] = (kv, torch.cat((rows, exported), dim=3), max(end, reserved))
        else:
            with pytest.raises(KVExhausted):
                kv.load(exported)

    @precondition(lambda self: self.held)
    @rule(index=which)
    def free(self, index: int) -> None:
        kv, _, _ = self.held.pop(self.pick(index))
        kv.free()
        assert (kv.length, kv.reserved) == (0, 0)

    @invariant()
    def rows_are_as_written(self) -> None:
        for kv, rows, reserved in getattr(self, "held", []):
            assert (kv.length, kv.reserved) == (rows.shape[3], reserved)
            assert torch.equal(kv.export(), rows)
            if rows.shape[3]:
                keys, values = kv.read(1, rows.shape[3])
                assert torch.equal(torch.stack((keys[0], values[0])), rows[:, 1])

    @invariant()
    def the_budget_is_exact(self) -> None:
        if hasattr(self, "held"):
            assert self.pool.reserved == sum(reserved for _, _, reserved in self.held)
            assert 0 <= self.pool.free <= CAPACITY

    def teardown(self) -> None:
        for kv, _, _ in getattr(self, "held", []):
            kv.free()
        if hasattr(self, "pool"):
            assert self.pool.reserved == 0


TestMemory = Memory.TestCase
TestMemory.settings = settings(max_examples=25, stateful_step_count=30, deadline=None)
