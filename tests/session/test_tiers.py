"""Tiers of a live engine: what leaves the device comes back, and every token after it is the same."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from dlite_agent.decode.jobs import Finished
from dlite_agent.decode.rounds import Decoder
from dlite_agent.session.retention import Tier
from dlite_agent.session.snapshot import Facts
from dlite_agent.session.store.disk import DiskStore
from dlite_agent.session.store.memory import MemoryStore
from tests.helpers import prompt
from tests.session.replica import Replica, history

Make = Callable[..., Replica]


@pytest.fixture
def replica(make_decoder: Callable[..., Decoder], tmp_path: Path) -> Iterator[Make]:
    running: list[Replica] = []

    def start(*, positions: int = 20_000, store: bool = True, **options: Any) -> Replica:
        local = DiskStore(tmp_path / f"store {len(running)}") if store else None
        running.append(Replica(make_decoder(6, positions=positions), local, **options))
        return running[-1]

    yield start
    for each in running:
        each.close()


def rounds(done: Finished) -> list[tuple[int, int]]:
    return [(row.advance, row.drafted) for row in done.figures.rounds]


@pytest.mark.parametrize("new", [0, 1, 40])
@pytest.mark.parametrize("tier", [Tier.DEVICE, Tier.HOST, Tier.DISK])
def test_a_turn_after_any_tier_is_the_uninterrupted_one(replica: Make, tier: Tier, new: int) -> None:
    """Token for token and round for round; nothing that came back is computed again."""
    one = replica()
    first = one.turn("s", prompt(300))
    ids = [*prompt(300), *first.generated]
    before = one.held("s")
    assert before == (311, 0)
    one.move("s", tier)
    assert one.held("s") == {Tier.DEVICE: (311, 0), Tier.HOST: (0, 311), Tier.DISK: (0, 0)}[tier]
    drafts = one.decoder.drafter_forwards
    after = one.turn("s", [*ids, *prompt(new, seed=1)], [len(ids)], max_new_tokens=30)
    assert after.figures.tier == tier.name.lower()
    assert after.figures.reason is None
    assert after.figures.cached_tokens == 311
    assert sum(chunk.tokens for chunk in after.figures.prefills) == (0 if not new else new + 1)
    made = one.decoder.drafter_forwards - drafts
    assert made <= len(after.figures.rounds), "the drafter has nothing to prefill"
    other = replica(store=False)
    other.turn("s", prompt(300))
    whole = other.turn("s", [*ids, *prompt(new, seed=1)], max_new_tokens=30)
    assert whole.figures.tier == "device"
    assert after.generated == whole.generated
    assert rounds(after) == rounds(whole)


def test_another_process_goes_on_from_the_store(
    replica: Make, make_decoder: Callable[..., Decoder], tmp_path: Path
) -> None:
    first = Replica(make_decoder(6), DiskStore(tmp_path / "shared"))
    done = first.turn("s", prompt(100) * 3, mode="mixed")
    assert done.odds is not None
    first.close()
    second = Replica(make_decoder(6), DiskStore(tmp_path / "shared"), owner="two")
    found = second.open("s")
    assert found.ids == [*prompt(100) * 3, *done.generated]
    after = second.turn("s", [*found.ids, *prompt(20, seed=1)], [len(found.ids)], mode="ar")
    assert (after.figures.tier, after.figures.cached_tokens, after.figures.reason) == ("disk", 311, None)
    assert after.odds == done.odds, "no draft was made since"
    second.close()


def test_pressure_moves_idle_sessions_out_and_nothing_is_lost(replica: Make) -> None:
    one, free = replica(positions=420), replica(store=False)
    names = [f"s{i}" for i in range(4)]
    told = {}
    for seed, name in enumerate(names):
        told[name] = [*prompt(150, seed=seed), *one.turn(name, prompt(150, seed=seed)).generated]
    assert one.engine.stats.evictions == 0, "the policy chose, not the age"
    for name in names:
        again = one.turn(name, [*told[name], 5, 6, 7], [len(told[name])])
        assert again.figures.cached_tokens == len(told[name]) - 1
        assert again.figures.tier in ("device", "host", "disk")
        assert again.generated == free.turn(name, [*told[name], 5, 6, 7]).generated
    counts = one.tiers.retention.counts
    assert sum(count for name, count in counts.items() if name.startswith("device.")) >= 2


def test_caps_hold_on_the_live_engine(replica: Make) -> None:
    size = replica().decoder.pool.bytes_per_position
    one = replica(device_cap=250 * size, host_cap=170 * size)
    for seed in range(5):
        one.turn(f"s{seed}", prompt(150, seed=seed))
        one.on_engine(lambda: None)
        assert one.tiers.paused_bytes() <= 250 * size
        held = sum(one.held(f"s{i}")[0] for i in range(seed + 1))
        assert held <= 250
        assert one.tiers.host.bytes <= 170 * size + (1 << 20)


def test_without_any_store_the_host_keeps_and_what_is_dropped_is_computed_again(replica: Make) -> None:
    one = replica(store=False, costs={"disk_bytes_s": 0.0})
    done = one.turn("s", prompt(100))
    ids = [*prompt(100), *done.generated, 3]
    one.move("s", Tier.HOST)
    back = one.turn("s", ids)
    assert (back.figures.tier, back.figures.cached_tokens) == ("host", 111)
    one.move("s", Tier.DROPPED)
    again = one.turn("s", [*ids, *back.generated, 3])
    assert (again.figures.cached_tokens, again.figures.reason) == (0, "evicted")


def test_a_session_is_prefetched_before_its_tool_returns(replica: Make) -> None:
    """A tool that always takes the same time, on a device where holding is dear and waiting dearer."""
    costs = {"host_bytes_s": 1e9, "disk_bytes_s": 0.0, "wait_share": 50.0, "device_gb": 1e-4, "host_price": 1e-6}
    one = replica(store=False, positions=360, costs=costs)
    done = one.turn("s", prompt(300), tool="make")
    for _ in range(64):
        one.on_engine(lambda: one.tiers.retention.waits.observe("make", 1.2))
    ids = [*prompt(300), *done.generated]
    second = one.turn("s", ids, tool="make")
    assert one.held("s")[1] > 0, "it went to the host at once"
    until = time.monotonic() + 5
    while not one.held("s")[0] and time.monotonic() < until:
        time.sleep(0.02)
    back = one.turn("s", [*ids, *second.generated, 4])
    assert back.figures.tier == "device"
    assert one.tiers.retention.counts["prefetch.used"] == 1


def test_an_unreadable_store_is_said_and_the_prompt_computed(replica: Make) -> None:
    one = replica()
    done = one.turn("s", prompt(100))
    ids = [*prompt(100), *done.generated, 3]
    one.move("s", Tier.DISK)
    assert one.local is not None
    for key in [ref.key for ref in one.open("s").record.refs("kv")]:
        one.local.discard("s", [key])
    again = one.turn("s", ids, [len(ids) - 1])
    assert again.figures.cached_tokens == 0
    assert "missing" in (again.figures.reason or "")
    one.move("s", Tier.DISK)
    healed = one.turn("s", [*ids, *again.generated, 3], [len(ids)])
    assert (healed.figures.tier, healed.figures.cached_tokens) == ("disk", len(ids) + 11)


def test_a_fork_begins_from_its_source_s_blocks(replica: Make) -> None:
    one, other = replica(), replica(store=False)
    done = one.turn("s", prompt(300))
    ids = [*prompt(300), *done.generated]
    one.move("s", Tier.DISK)
    forked = one.turn("fork", [*ids, 8, 9], [len(ids)], stored="s")
    assert (forked.figures.tier, forked.figures.cached_tokens) == ("disk", 311)
    assert forked.generated == other.turn("x", [*ids, 8, 9]).generated
    assert isinstance(one.local, DiskStore)
    assert one.persister is not None
    one.open("s")
    one.persister.copy("s", "early", ids[:290], Facts(history([290])))
    early = one.open("early")
    assert early.ids == ids[:290]
    assert max(ref.stop for ref in early.record.refs("kv")) == 256


def test_a_replica_without_kv_says_so(make_decoder: Callable[..., Decoder]) -> None:
    shared = MemoryStore(kv_limit=0)
    one = Replica(make_decoder(6), MemoryStore(), shared)
    done = one.turn("s", prompt(200))
    two = Replica(make_decoder(6), MemoryStore(), shared, owner="two")
    time.sleep(0.01)
    ids = two.open("s").ids
    after = two.turn("s", [*ids, 4], [len(ids)])
    assert ids == [*prompt(200), *done.generated]
    assert after.figures.cached_tokens == 0
    assert "computed again" in (after.figures.reason or "")
    one.close()
    two.close()
