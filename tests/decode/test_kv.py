"""KV memory: rows stay where they were written, and the budget is exact."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import Tensor

from dlite_agent.decode.kv import KVPool, SequenceKV
from dlite_agent.errors import KVExhausted
from dlite_agent.model.target import Target
from tests.helpers import pool_for


@pytest.fixture
def pool(target: Target) -> KVPool:
    return pool_for(target, positions=300)


def fill(kv: SequenceKV, count: int, seed: int = 0) -> Tensor:
    """Append random rows; returned as `export` would."""
    spec = kv_spec(kv)
    rows = torch.randn(2, *spec[:2], count, spec[2], generator=torch.Generator().manual_seed(seed))
    start = kv.length
    for layer in range(spec[0]):
        kv.write(layer, start, rows[0, layer].transpose(0, 1), rows[1, layer].transpose(0, 1))
    kv.advance(count)
    return rows


def kv_spec(kv: SequenceKV) -> tuple[int, int, int]:
    """Layers, KV heads and head width."""
    shape = kv.export().shape
    return shape[1], shape[2], shape[4]


def test_rows_are_read_back_without_a_copy(pool: KVPool) -> None:
    kv = pool.sequence()
    kv.reserve(20)
    rows = torch.cat((fill(kv, 5), fill(kv, 7, 1)), dim=3)
    assert torch.equal(kv.export(), rows)
    assert torch.equal(kv.export(4), rows[:, :, :, 4:])
    keys, values = kv.read(2, 9)
    assert torch.equal(keys[0], rows[0, 2, :, :9])
    assert torch.equal(values[0], rows[1, 2, :, :9])
    again, _ = kv.read(2, 12)
    assert keys.data_ptr() == again.data_ptr()


def test_a_reservation_does_not_move_rows(pool: KVPool) -> None:
    kv = pool.sequence()
    kv.reserve(10)
    fill(kv, 10)
    before = kv.read(0, 10)[0].data_ptr()
    kv.reserve(200)
    assert kv.read(0, 10)[0].data_ptr() == before, "on a CPU history is never copied"


def test_more_than_the_budget_changes_nothing(pool: KVPool) -> None:
    one, two = pool.sequence(), pool.sequence()
    one.reserve(250)
    rows = fill(one, 30)
    attempts = (
        partial(two.reserve, 51),
        partial(one.reserve, 301),
        partial(two.load, one.export().repeat(1, 1, 1, 2, 1)),
    )
    for attempt in attempts:
        with pytest.raises(KVExhausted) as caught:
            attempt()
        assert caught.value.param == "kv_budget"
        assert (pool.reserved, pool.free, one.reserved, two.reserved, two.length) == (250, 50, 250, 0, 0)
    assert torch.equal(one.export(), rows)
    one.shrink()
    two.reserve(270)
    assert pool.free == 0


def test_a_sequence_has_a_longest_length(target: Target) -> None:
    pool = pool_for(target)
    with pytest.raises(KVExhausted) as caught:
        pool.sequence().reserve(target.max_positions + 1)
    assert caught.value.param == "max_positions"
    assert pool.reserved == 0


def test_bytes_per_position_are_those_of_the_rows(pool: KVPool) -> None:
    kv = pool.sequence()
    kv.reserve(8)
    assert fill(kv, 8).nbytes == 8 * pool.bytes_per_position
    assert pool.capacity == 300


def test_misuse_is_caught(pool: KVPool) -> None:
    kv = pool.sequence()
    kv.reserve(4)
    with pytest.raises(AssertionError, match="past the reservation"):
        kv.advance(5)
    with pytest.raises(AssertionError, match="only shortens"):
        kv.truncate(1)
