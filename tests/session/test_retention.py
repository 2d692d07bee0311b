"""The retention policy against brute force and by its promises, and the simulator that drives it."""

from __future__ import annotations

import itertools
import json
import math
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from dlite_agent.bench.retention import (
    BASELINES,
    PROFILES,
    Baseline,
    Pause,
    clairvoyant,
    load_pauses,
    main,
    run,
    simulate,
)
from dlite_agent.errors import InvalidRequest
from dlite_agent.session.retention import FOREVER, Costs, Retention, Tier, Waits, plan

COSTS = Costs(bytes_per_token=1e5, prefill_s=1e-4, prefill_s2=1e-9)
TOKENS = 50_000


def cost_of(costs: Costs, tokens: int, tiers: tuple[Tier, ...], grid: NDArray[np.float64], wait: float) -> float:
    """Cost of one wait when tier tiers[i] is held from grid[i] on, worked out step by step."""
    total, at = 0.0, Tier.DEVICE
    for tier, begin, end in zip(tiers, grid, grid[1:], strict=False):
        if wait <= begin:
            break
        total += float(costs.moving(tokens)[at, tier])
        total += float(costs.holding(tokens)[tier]) * (min(end, wait) - begin)
        at = tier
    return total + float(costs.restoring(tokens)[at])


@pytest.mark.parametrize("seed", range(8))
def test_a_plan_is_the_best_of_all_sequences(seed: int) -> None:
    source = random.Random(seed)
    costs = Costs(
        1e5,
        10 ** source.uniform(-6, -3),
        host_bytes_s=10 ** source.uniform(9, 11),
        disk_bytes_s=10 ** source.uniform(8, 10),
        copy_share=source.random(),
        wait_share=source.random(),
    )
    rest = np.array(sorted(10 ** source.uniform(0, 3.5) for _ in range(2)))
    early = rest - 1.5 * costs.transfer(TOKENS, Tier.HOST)
    grid = np.unique(np.concatenate(([0.0], rest, early[early > 0])))
    best = min(
        float(np.mean([cost_of(costs, TOKENS, tiers, grid, wait) for wait in rest]))
        for tiers in itertools.product(Tier, repeat=len(grid) - 1)
    )
    made = plan(costs, TOKENS, Tier.DEVICE, rest)
    assert made.cost[Tier.DEVICE] == pytest.approx(best)


@pytest.mark.parametrize(
    ("wait", "tier"), [(0.01, Tier.DEVICE), (20.0, Tier.HOST), (20_000.0, Tier.DISK), (FOREVER * 100, Tier.DROPPED)]
)
def test_known_waits_go_where_they_are_cheapest(wait: float, tier: Tier) -> None:
    moves = plan(COSTS, TOKENS, Tier.DEVICE, np.array([wait])).moves
    assert (moves[0] if moves else (0.0, Tier.DEVICE)) == (0.0, tier)


def test_prefetching_pays_for_a_punctual_tool_whose_session_must_not_wait() -> None:
    costs = Costs(1e5, 1e-4, host_bytes_s=1e9, disk_bytes_s=1e8, wait_share=5.0)
    made = plan(costs, TOKENS, Tier.DEVICE, np.array([500.0]))
    assert [tier for _, tier in made.moves] == [Tier.HOST, Tier.DEVICE]
    assert 480 < made.moves[1][0] < 500


def test_a_tier_that_does_not_exist_is_never_chosen() -> None:
    costs = Costs(1e5, 1e-4, host_bytes_s=0, disk_bytes_s=0)
    for wait in (0.01, 10.0, 1e4, 1e6):
        assert {tier for _, tier in plan(costs, TOKENS, Tier.DEVICE, np.array([wait])).moves} <= {Tier.DROPPED}


def test_waits_follow_a_tools_history() -> None:
    waits = Waits()
    prior = waits.quantile("make", 0.5)
    for _ in range(200):
        waits.observe("make", 90.0)
    assert waits.quantile("make", 0.5) == pytest.approx(90.0)
    assert waits.quantile("ls", 0.5) == prior
    assert waits.quantile("make", 0.5, elapsed_s=60.0) == pytest.approx(30.0)
    for _ in range(300):
        waits.observe("make", 2.0)
    assert waits.quantile("make", 0.9) == pytest.approx(2.0)


def test_what_has_lasted_longer_than_anything_seen_is_expected_to_last_on() -> None:
    waits = Waits()
    for _ in range(100):
        waits.observe("ls", 0.1)
    assert waits.quantile("ls", 0.5, 1000.0) > 100
    assert waits.quantile("ls", 0.5, 10_000.0) > waits.quantile("ls", 0.5, 1000.0)
    waits.observe("ls", math.inf)
    assert np.isfinite(waits.rest("ls")).all()


def policy(device: float = 1e12, host: float = 1e12, costs: Costs = COSTS) -> Retention:
    return Retention(costs, device, host)


def test_caps_hold_after_every_step() -> None:
    source = random.Random(1)
    keeper = policy(device=3 * TOKENS * 1e5, host=5 * TOKENS * 1e5)
    now, there = 0.0, set()
    for step in range(300):
        now += source.expovariate(1.0)
        keeper.tick(now)
        name = f"s{source.randrange(30)}"
        if name in there:
            there.discard(name)
            assert keeper.resume(name, now) is not None
        else:
            there.add(name)
            keeper.pause(name, source.randrange(1, TOKENS), source.choice(["ls", "make"]), now)
        assert keeper.held(Tier.DEVICE) <= keeper.device_cap, step
        assert keeper.held(Tier.HOST) <= keeper.host_cap, step
    assert set(keeper.paused) == there


@pytest.mark.parametrize("price", [0.0, 0.3, 1.0])
def test_nothing_is_held_for_ever(price: float) -> None:
    """Nor moved to and fro, where an idle device seems to cost nothing."""
    keeper = policy(costs=replace(COSTS, device_price=price))
    keeper.pause("s", TOKENS, "ls", 0.0)
    tiers, now = [keeper.paused["s"].tier], 0.0
    while (due := keeper.next_due()) < math.inf:
        assert due > now
        now = due
        for move in keeper.tick(now):
            assert now <= keeper.ttl.get(move.target, math.inf), "brought to a tier that it has to leave at once"
            tiers.append(move.target)
        assert len(tiers) < 12, tiers
    assert tiers[-1] == Tier.DROPPED
    assert now <= keeper.ttl[Tier.DISK]
    found = keeper.resume("s", now + 1)
    assert found is not None
    assert found.tier == Tier.DROPPED


def test_use_starts_the_time_to_live_again() -> None:
    keeper = policy(costs=Costs(1e5, 1.0, host_bytes_s=0, disk_bytes_s=0))
    keeper.pause("s", TOKENS, "ls", 0.0)
    assert keeper.tick(599.0) == []
    keeper.resume("s", 599.0)
    keeper.pause("s", TOKENS, "ls", 600.0)
    assert keeper.tick(1199.0) == []
    assert [move.cause for move in keeper.tick(1200.0)] == ["ttl"]


def test_pressure_takes_what_loses_least() -> None:
    waits = Waits()
    for _ in range(100):
        waits.observe("ls", 0.05)
        waits.observe("make", 0.2)
    keeper = Retention(COSTS, 1e12, 1e12, waits)
    keeper.pause("soon", TOKENS, "ls", 0.0)
    keeper.pause("late", TOKENS, "make", 0.0)
    assert keeper.held(Tier.DEVICE) == 2 * TOKENS * 1e5
    (move,) = keeper.reclaim(1.0, 0.01)
    assert (move.session, move.source, move.cause) == ("late", Tier.DEVICE, "pressure")
    keeper.reclaim(1e15, 0.02)
    assert keeper.held(Tier.DEVICE) == 0
    assert keeper.counts["device.pressure"] == 2


def test_what_could_not_be_brought_stays_for_the_time_that_its_tier_has() -> None:
    keeper = policy(costs=replace(COSTS, device_price=0.0))
    keeper.pause("s", TOKENS, "ls", 0.0)
    assert keeper.paused["s"].tier == Tier.DEVICE
    keeper.not_brought("s", Tier.HOST, 20.0)
    assert (keeper.held(Tier.DEVICE), keeper.held(Tier.HOST)) == (0, TOKENS * 1e5)
    assert keeper.next_due() == keeper.ttl[Tier.HOST]
    keeper.not_brought("gone", Tier.HOST, 20.0)


@pytest.mark.parametrize("seed", range(20))
def test_what_is_held_and_what_is_due_agree_with_the_paused_sessions(seed: int) -> None:
    source = random.Random(seed)
    costs = replace(COSTS, device_price=source.choice([0.0, 0.2, 1.0]))
    keeper = policy(device=source.choice([3, 1e6]) * TOKENS * 1e5, host=5 * TOKENS * 1e5, costs=costs)
    now = 0.0
    for _ in range(120):
        now += source.choice([source.expovariate(1.0), source.expovariate(0.01)])
        keeper.tick(now)
        name = f"s{source.randrange(12)}"
        if name not in keeper.paused or source.random() < 0.2:
            keeper.pause(name, source.randrange(TOKENS), source.choice(["ls", "make"]), now)
        elif source.random() < 0.2:
            keeper.close(name)
        elif source.random() < 0.2:
            keeper.reclaim(1.0, now)
        else:
            keeper.resume(name, now)
        for tier in Tier:
            tokens = sum(paused.tokens for paused in keeper.paused.values() if paused.tier == tier)
            assert keeper.held(tier) == tokens * 1e5
        assert keeper.next_due() == min((paused.due for paused in keeper.paused.values()), default=math.inf)


def test_prefetches_are_counted_as_used_or_wasted() -> None:
    costs = Costs(1e5, 1e-4, host_bytes_s=1e9, disk_bytes_s=1e8, wait_share=5.0)
    waits = Waits()
    for _ in range(100):
        waits.observe("make", 500.0)
    for late in (False, True):
        keeper = Retention(costs, 1e12, 1e12, waits)
        keeper.pause("s", TOKENS, "make", 0.0)
        while keeper.paused["s"].tier != Tier.DEVICE:
            now = keeper.next_due()
            keeper.tick(now)
        assert keeper.counts["host.prefetch"] == 1
        if late:
            keeper.reclaim(1.0, now + 100)
        found = keeper.resume("s", now + 101)
        assert found is not None
        assert (keeper.counts["prefetch.used"], keeper.counts["prefetch.wasted"]) == ((0, 1) if late else (1, 0))


def workload(path: Path, sessions: int = 8, calls: int = 12) -> Path:
    """Conversations that grow, with mostly short tool waits, some long ones, and a person now and then."""
    source = random.Random(4)
    lines = ["session_id,sent_at_ms,round_idx,prefix_len,input_len,output_len,api_time_ms,wait_kind,wait_after_ms"]
    for session in range(sessions):
        at, length = 0, 0
        for index in range(calls):
            kind = source.choice(["tool"] * 5 + ["user"])
            wait = int(1000 * source.lognormvariate(2 if kind == "tool" else 5, 1.2))
            new, api = source.randrange(500, 8000), source.randrange(2000, 20_000)
            last = index + 1 == calls
            lines.append(
                f"s{session},{at},{index},{length},{new},200,{api},{'' if last else kind},{0 if last else wait}"
            )
            length += new + 200
            at += api + wait
    path.write_text("\n".join(lines) + "\n")
    return path


def test_the_policy_wastes_less_than_every_baseline_and_more_than_the_clairvoyant(tmp_path: Path) -> None:
    pauses = load_pauses(workload(tmp_path / "w.csv"))
    for row in run(pauses, profiles=(PROFILES[0], PROFILES[3]), budgets=(0.1, 0.5)):
        assert row.ratio <= (0.85 if row.tight else 1.0), row
        assert row.ratio == row.outcomes["planned"].waste / min(row.outcomes[name].waste for name in BASELINES)
        assert all(outcome.waste >= row.clairvoyant for outcome in row.outcomes.values())


def test_the_simulator_adds_up() -> None:
    pauses = [Pause("a", 0.0, 10.0, 1000, 800, "tool"), Pause("a", 20.0, 50.0, 2000, 2000, "tool")]
    gigabytes = COSTS.gigabytes(1000)
    held = simulate(Baseline(COSTS, 1e12, 1e12), pauses, COSTS)
    assert held.waste == pytest.approx(gigabytes * 10 + 2 * gigabytes * 30)
    assert held.restored == {"device": 2, "host": 0, "disk": 0, "dropped": 0}
    dropped = simulate(Baseline(COSTS, 1e12, 1e12, first=Tier.DROPPED), pauses, COSTS)
    assert dropped.recompute_s == pytest.approx(COSTS.prefill(800) + COSTS.prefill(2000))
    assert dropped.waste == pytest.approx(COSTS.device_gb * 1.1 * dropped.recompute_s)
    spilled = simulate(Baseline(COSTS, 1e12, 1e12, ttl={Tier.DEVICE: 4.0}), pauses, COSTS)
    assert spilled.held_gbs == pytest.approx(gigabytes * (4 + 0.05 * 6) + 2 * gigabytes * (4 + 0.05 * 26))
    assert spilled.transfer_s == pytest.approx(5800 * 1e5 / COSTS.host_bytes_s)
    assert clairvoyant(pauses, COSTS) < min(held.waste, dropped.waste, spilled.waste)


def test_baselines_evict_the_longest_paused() -> None:
    lru = Baseline(COSTS, 2.5 * TOKENS * 1e5, 1.5 * TOKENS * 1e5)
    moves = [move for i, name in enumerate("abcd") for move in lru.pause(name, TOKENS, "ls", float(i))]
    assert [(move.session, move.source, move.target) for move in moves] == [
        ("a", Tier.DEVICE, Tier.HOST),
        ("b", Tier.DEVICE, Tier.HOST),
        ("a", Tier.HOST, Tier.DISK),
    ]


def test_the_bench_prints_a_table_and_writes_json(tmp_path: Path) -> None:
    text = main(workload(tmp_path / "w.csv", sessions=3, calls=4), output=tmp_path / "out.json")
    rows = json.loads((tmp_path / "out.json").read_text())
    assert len(text.splitlines()) == len(rows) + 1 == len(PROFILES) * 4 + 1
    assert set(rows[0]["outcomes"]) >= {"planned", *BASELINES}


@pytest.mark.parametrize(
    ("change", "param"),
    [
        (lambda text: text.replace("prefix_len", "prefix"), "prefix_len"),
        (lambda text: text.replace("s0,0,0,0,", "s0,0,0,-3,"), "prefix_len"),
        (lambda text: text.replace("s0,0,0,0,", "s0,zero,0,0,"), "sent_at_ms"),
    ],
)
def test_a_bad_workload_is_refused_by_column(tmp_path: Path, change: Callable[[str], str], param: str) -> None:
    path = workload(tmp_path / "w.csv", sessions=1, calls=2)
    path.write_text(change(path.read_text()))
    with pytest.raises(InvalidRequest) as caught:
        load_pauses(path)
    assert caught.value.param == param


def test_sessions_that_never_return_are_pauses_without_end(tmp_path: Path) -> None:
    path = workload(tmp_path / "w.csv", sessions=2, calls=3)
    assert len(load_pauses(path)) == 4
    assert [pause.end for pause in load_pauses(path, closed=False)].count(math.inf) == 2
