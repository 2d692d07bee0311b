"""Commit and restore: everything, the minimum of what is left, or nothing, and always with the reason."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from dlite_agent.decode.kv import KVPool
from dlite_agent.errors import KVExhausted, NotFound
from dlite_agent.session.persist import Persister
from dlite_agent.session.record import BlockKind, decode
from dlite_agent.session.restore import Loaded, Restore
from dlite_agent.session.store.base import LeaseHeld, SessionStore, StaleLease, StoreUnavailable
from dlite_agent.session.store.disk import DiskStore
from dlite_agent.session.store.host import HostTier
from dlite_agent.session.store.memory import MemoryStore
from dlite_agent.session.store.redis import RedisStore
from dlite_agent.session.store.segments import Segments
from tests.session.servers import RedisServer
from tests.session.stored import (
    BYTES_PER_POSITION,
    CPU,
    FINGERPRINT,
    SPEC,
    check,
    facts,
    features_for,
    grow,
    new_state,
    persister,
    pool,
    rows_for,
    save,
)

IDS = [(7 * i) % 1000 for i in range(700)]


@pytest.fixture(params=["memory", "disk"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[SessionStore]:
    made = MemoryStore() if request.param == "memory" else DiskStore(tmp_path / "store")
    yield made
    made.close()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    with RedisServer(tmp_path_factory.mktemp("redis"), persistent=False) as running:
        yield running


def loaded(keeper: Persister, session: str) -> Loaded:
    keeper.hold(session)
    found = keeper.read(session)
    assert isinstance(found, Loaded), found
    return found


def missed(keeper: Persister, session: str) -> Restore:
    keeper.hold(session)
    found = keeper.read(session)
    assert isinstance(found, Restore)
    assert found.tier == "none"
    return found


def test_a_session_comes_back_whole(store: SessionStore) -> None:
    state = new_state(pool().sequence(), IDS[:300])
    keeper = persister(store)
    save(keeper, "s", state, 300)
    grow(state, IDS[300:700])
    save(keeper, "s", state, 300, 700)
    found = loaded(persister(store), "s")
    assert found.report.tier == store.tier
    assert (found.report.tokens, found.report.of, found.report.reason) == (699, 700, None)
    assert found.report.features
    assert found.record.anchor == IDS[699]
    assert len(found.record.history.turns) == 2
    assert check(found, IDS).boundary == 699
    assert sorted(found.kept) == [299, 699]
    assert torch.equal(found.kept[299], features_for(IDS, 299))


def test_a_second_commit_writes_only_new_rows(store: SessionStore) -> None:
    state = new_state(pool().sequence(), IDS[:600])
    keeper = persister(store)
    keeper.hold("s")
    first = keeper.commit(keeper.snapshot("s", state, facts(600)))
    grow(state, IDS[600:610])
    second = keeper.snapshot("s", state, facts(600, 610))
    assert sum(part["kv"].shape[3] for part in second.tensors.values() if "kv" in part) == 10
    assert keeper.commit(second).bytes < first.bytes / 10


def test_an_edited_conversation_replaces_what_followed(store: SessionStore) -> None:
    state = new_state(pool().sequence(), IDS[:400])
    keeper = persister(store)
    save(keeper, "s", state, 400)
    grow(state, IDS[400:650])
    save(keeper, "s", state, 400, 650)
    state.truncate(399)
    edited = [*IDS[:399], *range(200)]
    grow(state, edited[399:])
    save(keeper, "s", state, 399, len(edited))
    found = loaded(persister(store), "s")
    assert found.report.reason is None
    assert check(found, edited).ids == edited


def test_equal_prefixes_are_kept_once(store: SessionStore) -> None:
    keeper = persister(store)
    save(keeper, "s", new_state(pool().sequence(), IDS[:600]), 600)
    other = [*IDS[:550], *range(50)]
    keeper.hold("t")
    snapshot = keeper.snapshot("t", new_state(pool().sequence(), other), facts(600))
    assert sum(part["kv"].shape[3] for part in snapshot.tensors.values() if "kv" in part) == 599 - 512
    keeper.commit(snapshot)
    store.delete("s")
    check(loaded(persister(store), "t"), other)


@pytest.mark.parametrize(
    ("kind", "index", "tokens", "of"),
    [("ids", 0, 0, 0), ("features", 0, 699, 700), ("features", 1, 699, 700), ("kv", 0, 0, 700), ("kv", 2, 299, 700)],
)
@pytest.mark.parametrize("indexed", [True, False])
def test_a_flipped_bit_in_any_block_is_cut_and_said(
    tmp_path: Path, kind: BlockKind, index: int, tokens: int, of: int, indexed: bool
) -> None:
    said = "checksum" if indexed else "missing"
    store = DiskStore(tmp_path)
    keeper = persister(store)
    state = new_state(pool().sequence(), IDS[:300])
    save(keeper, "s", state, 300)
    grow(state, IDS[300:])
    save(keeper, "s", state, 300, 700)
    data = store.load("s")
    assert data is not None
    key = decode(data).refs(kind)[index].key
    (frame,) = store.fetch("s", [key])
    assert frame is not None
    store.close()
    segment = next((tmp_path / "segments").glob("*.seg"))
    content, database = segment.read_bytes(), (tmp_path / "index.sqlite").read_bytes()
    at = content.index(frame)
    for offset in (2, 4, 10, 24, 40, 50, len(frame) // 2, len(frame) - 1):
        damaged = bytearray(content)
        damaged[at + offset] ^= 4
        segment.write_bytes(damaged)
        (tmp_path / "index.sqlite").write_bytes(database if indexed else b"")
        store = DiskStore(tmp_path)
        again = persister(store)
        if of == 0:
            assert said in (missed(again, "s").reason or "")
        else:
            found = loaded(again, "s")
            assert (found.report.tokens, found.report.of) == (tokens, of)
            assert said in (found.report.reason or "")
            restored = check(found, IDS)
            # The next commit puts back what was refused.
            restored.kv.load(rows_for(IDS[:699])[:, :, :, restored.boundary :])
            restored.kept |= state.kept
            save(again, "s", restored, 300, 700)
            whole = loaded(persister(store), "s")
            assert (whole.report.tokens, whole.report.reason) == (699, None)
        store.close()


def test_lost_ids_cut_to_the_last_whole_turn(store: SessionStore) -> None:
    keeper = persister(store)
    state = new_state(pool().sequence(), IDS[:300])
    save(keeper, "s", state, 300)
    grow(state, IDS[300:])
    save(keeper, "s", state, 300, 700)
    data = store.load("s")
    assert data is not None
    store.discard("s", [decode(data).refs("ids")[1].key])
    found = loaded(persister(store), "s")
    assert (found.report.tokens, found.report.of) == (299, 300)
    assert "1 of 2 turns" in (found.report.reason or "")
    check(found, IDS)


def test_an_entry_of_another_session_is_never_served(tmp_path: Path) -> None:
    store = DiskStore(tmp_path)
    keeper = persister(store)
    other = [999 - token for token in IDS]
    save(keeper, "mine", new_state(pool().sequence(), IDS), 700)
    save(keeper, "canary", new_state(pool().sequence(), other), 700)
    store.close()
    folder = tmp_path / "segments"
    mine, canary = (folder / f"{Segments.name(name)}.seg" for name in ("mine", "canary"))
    mine.write_bytes(canary.read_bytes())
    (tmp_path / "index.sqlite").unlink()
    store = DiskStore(tmp_path)
    assert missed(persister(store), "mine").reason == "no such session"
    check(loaded(persister(store), "canary"), other)
    store.close()


@pytest.mark.parametrize("kind", ["ids", "features", "kv"])
def test_a_block_planted_under_anothers_key_is_refused(kind: BlockKind) -> None:
    store = MemoryStore()
    keeper = persister(store)
    other = [999 - token for token in IDS]
    save(keeper, "mine", new_state(pool().sequence(), IDS), 700)
    save(keeper, "canary", new_state(pool().sequence(), other), 700)
    mine, canary = (decode(store.load(name) or b"").refs(kind)[0].key for name in ("mine", "canary"))
    store._blocks[mine] = store._blocks[canary]
    if kind == "ids":
        assert "another one" in (missed(persister(store), "mine").reason or "")
        return
    found = loaded(persister(store), "mine")
    assert "another one" in (found.report.reason or "")
    assert found.report.tokens == (699 if kind == "features" else 0)
    check(found, IDS)


def test_a_record_of_another_model_is_refused(store: SessionStore) -> None:
    save(persister(store), "s", new_state(pool().sequence(), IDS), 700)
    other = Persister(
        store, replace(FINGERPRINT, drafter="d2"), bytes_per_position=BYTES_PER_POSITION, owner="one", lease_ttl_s=30
    )
    assert "another drafter" in (missed(other, "s").reason or "")
    state = new_state(pool().sequence(), IDS)
    other.hold("s")
    assert len(other.snapshot("s", state, facts(700)).tensors) == len(IDS[:699]) // 256 + 3
    other.commit(other.snapshot("s", state, facts(700)))
    assert loaded(other, "s").report.tokens == 699


def test_without_features_the_last_token_is_computed_again(store: SessionStore) -> None:
    state = new_state(pool().sequence(), IDS)
    state.kv.load(rows_for(IDS)[:, :, :, 699:])
    state.features, state.kept = None, {}
    save(persister(store), "s", state, 700)
    found = loaded(persister(store), "s")
    assert (found.report.tokens, found.report.features) == (699, False)
    assert "last token" in (found.report.reason or "")
    check(found, IDS)


def test_a_device_without_room_changes_nothing(store: SessionStore) -> None:
    save(persister(store), "s", new_state(pool().sequence(), IDS), 700)
    found = loaded(persister(store), "s")
    small = KVPool(SPEC, dtype=torch.float32, device=CPU, budget_bytes=100 * BYTES_PER_POSITION, max_positions=8192)
    kv = small.sequence()
    with pytest.raises(KVExhausted):
        found.apply(kv, CPU)
    assert (kv.length, small.free) == (0, 100)


def test_the_host_copy_is_the_state_itself(store: SessionStore) -> None:
    state = new_state(pool().sequence(), IDS)
    keeper = persister(store)
    keeper.hold("s")
    keeper.commit(keeper.snapshot("s", state, facts(700)))
    host = HostTier()
    host.put("s", state)
    state.kv.free()
    assert host.bytes >= 699 * BYTES_PER_POSITION
    copy = host.get("s")
    assert copy is not None
    assert copy.tokens == 699
    back = copy.apply(pool().sequence(), CPU)
    assert back.ids == IDS
    assert torch.equal(back.kv.export(), rows_for(IDS[:699]))
    assert back.features is not None
    host.drop("s")
    assert host.get("s") is None
    assert host.bytes == 0


def test_another_replica_goes_on_without_kv_and_says_so(tmp_path: Path, server: RedisServer) -> None:
    shared = [RedisStore(server.url, namespace=tmp_path.name) for _ in range(2)]
    disks = [DiskStore(tmp_path / name) for name in ("one", "two")]
    one, two = (persister(disks[i], shared[i], owner=name) for i, name in enumerate(("one", "two")))
    state = new_state(pool().sequence(), IDS[:500])
    save(one, "s", state, 500)
    with pytest.raises(LeaseHeld):
        two.hold("s")
    one.release("s")
    found = loaded(two, "s")
    assert (found.report.tier, found.report.tokens, found.report.of) == ("redis", 0, 500)
    assert "computed again" in (found.report.reason or "")
    assert sorted(found.kept) == [499]
    theirs = check(found, IDS)
    theirs.kv.load(rows_for(IDS[:499]))
    grow(theirs, IDS[500:])
    save(two, "s", theirs, 500, 700)
    # The first replica's own disk is behind: ids come from the shared record, old KV from its disk.
    two.release("s")
    back = loaded(one, "s")
    assert (back.report.tier, back.report.tokens, back.report.of) == ("disk", 499, 700)
    check(back, IDS)
    for replica in (one, two):
        replica.close()


def test_a_deleted_session_is_gone_from_every_store(tmp_path: Path, server: RedisServer) -> None:
    local, shared = DiskStore(tmp_path / "a"), RedisStore(server.url)
    keeper = persister(local, shared)
    save(keeper, "gone", new_state(pool().sequence(), IDS[:70]), 70)
    keeper.delete("gone")
    assert local.load("gone") is None
    assert shared.load("gone") is None
    with pytest.raises(NotFound):
        keeper.delete("gone")


def test_kv_goes_along_as_far_as_the_limit(tmp_path: Path, server: RedisServer) -> None:
    limit = 600 * BYTES_PER_POSITION
    shared = RedisStore(server.url, namespace=tmp_path.name, kv_limit=limit)
    save(persister(MemoryStore(), shared), "s", new_state(pool().sequence(), IDS), 700)
    found = loaded(persister(MemoryStore(), shared), "s")
    assert (found.report.tier, found.report.tokens) == ("redis", 512)
    check(found, IDS)
    shared.close()


def test_a_replica_that_was_overtaken_cannot_commit(tmp_path: Path, server: RedisServer) -> None:
    shared = RedisStore(server.url, namespace=tmp_path.name)
    disk = DiskStore(tmp_path / "one")
    one, two = persister(disk, shared), persister(MemoryStore(), shared, owner="two")
    state = new_state(pool().sequence(), IDS[:500])
    save(one, "s", state, 500)
    late = one.snapshot("s", state, facts(500))
    lease = shared.acquire("s", "one", 30)
    shared.release(lease)
    theirs = check(loaded(two, "s"), IDS)
    theirs.kv.load(rows_for(IDS[:499]))
    grow(theirs, IDS[500:])
    save(two, "s", theirs, 500, 700)
    newest = two.newest("s")
    with pytest.raises(StaleLease):
        one.commit(late)
    with pytest.raises(StaleLease):
        one.commit(late)
    two.release("s")
    one.hold("s")
    assert one.newest("s") == newest
    assert check(loaded(one, "s"), IDS).ids == IDS
    assert two.renew() == []
    disk.close()
    shared.close()


@pytest.mark.parametrize("persistent", [True, False])
def test_while_redis_is_down_sessions_held_here_go_on(tmp_path: Path, persistent: bool) -> None:
    with RedisServer(tmp_path / "redis", persistent=persistent) as server:
        shared = RedisStore(server.url)
        disk = DiskStore(tmp_path / "one")
        keeper = persister(disk, shared)
        state = new_state(pool().sequence(), IDS[:300])
        save(keeper, "s", state, 300)
        server.kill()
        keeper.hold("s")
        assert keeper.newest("s") == (1, 1)
        assert keeper.renew() == []
        grow(state, IDS[300:600])
        outcome = keeper.commit(keeper.snapshot("s", state, facts(300, 600)))
        assert outcome.shared is not None
        check(loaded(keeper, "s"), IDS)
        with pytest.raises(StoreUnavailable) as caught:
            keeper.hold("elsewhere")
        assert caught.value.status == 503
        server.start()
        grow(state, IDS[600:])
        keeper.hold("s")
        outcome = keeper.commit(keeper.snapshot("s", state, facts(300, 600, 700)))
        assert outcome.shared is None
        keeper.release("s")
        other = persister(MemoryStore(), shared, owner="two")
        assert check(loaded(other, "s"), IDS).ids == IDS
        disk.close()
        shared.close()
