"""Retention policies on a real, tiny model: what they are charged was really done."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from dlite_agent.bench.retention import POLICIES, Pause
from dlite_agent.bench.retention_live import LiveDevice, bench_live, measured_costs
from dlite_agent.decode.load import Runtime
from dlite_agent.decode.rounds import Decoder
from dlite_agent.session.retention import Move, Tier
from dlite_agent.tables import retention_live_table
from tests.bench.test_restore import Characters


@pytest.fixture
def runtime(make_decoder: Callable[..., Decoder], monkeypatch: pytest.MonkeyPatch) -> Runtime:
    monkeypatch.setattr("dlite_agent.bench.retention_live._SAMPLES", (64, 192))
    return Runtime(make_decoder(), Characters(), Path())


def test_every_policy_runs_live_and_gives_all_memory_back(runtime: Runtime) -> None:
    free = runtime.decoder.pool.free
    pauses = [
        Pause(f"s{number}", start := 10.0 * turn + number, start + wait, 900 + 300 * turn, 800 + 300 * turn, "tool")
        for number in range(3)
        for turn, wait in enumerate((0.5, 4.0, 9.0))
    ]
    result = bench_live(runtime, pauses, divide=10, conversations=2, budget=0.5)
    assert set(result["policies"]) == set(POLICIES)
    assert (result["pauses"], result["conversations"], result["longest"]) == (6, 2, 150)
    for rows in result["policies"].values():
        assert rows["live"]["restored"] == rows["simulated"]["restored"]
        assert rows["live"]["held_gbs"] == rows["simulated"]["held_gbs"]
        assert rows["live"]["waste"] > 0
    assert result["policies"]["drop all"]["live"]["recompute_s"] > 0
    assert result["policies"]["spill all"]["live"]["transfer_s"] > 0
    assert retention_live_table(result).row_count == len(POLICIES)
    assert runtime.decoder.pool.free == free


@pytest.mark.parametrize("tier", list(Tier))
def test_a_session_comes_back_from_every_tier(runtime: Runtime, tmp_path: Path, tier: Tier) -> None:
    device, pool = LiveDevice(runtime, tmp_path), runtime.decoder.pool
    free = pool.free
    device.pause("s", 100)
    assert pool.free == free - 100
    for source, target in zip(list(Tier)[:tier], list(Tier)[1 : tier + 1], strict=True):
        device.move(Move("s", source, target, "plan"), 100)
        assert pool.free == free
    seconds = device.restore("s", 80, tier)
    assert (seconds > 0) == (tier != Tier.DEVICE)
    device.pause("s", 130)
    assert pool.free == free - 130
    device.close()
    assert pool.free == free


def test_costs_are_measured(runtime: Runtime) -> None:
    costs = measured_costs(runtime)
    assert costs.prefill(100) > 0
    assert min(costs.host_bytes_s, costs.disk_bytes_s) > 0
    assert costs.bytes_per_token == runtime.decoder.pool.bytes_per_position
