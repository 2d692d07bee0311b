"""What every store does alike: memory, disk, Redis, and Valkey if only that is there."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from dlite_agent.errors import NotFound
from dlite_agent.session.history import History
from dlite_agent.session.record import BlockRef, SessionRecord, decode
from dlite_agent.session.store import frames
from dlite_agent.session.store.base import LeaseHeld, SessionStore, StaleLease
from dlite_agent.session.store.disk import DiskStore
from dlite_agent.session.store.memory import MemoryStore
from dlite_agent.session.store.redis import RedisStore
from tests.session.servers import RedisServer
from tests.session.stored import FINGERPRINT

A, B, C = ("a" * 32, "b" * 32, "c" * 32)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    with RedisServer(tmp_path_factory.mktemp("redis"), persistent=False, password="se:cret") as running:
        yield running


@pytest.fixture(params=["memory", "disk", "redis"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[SessionStore]:
    made: SessionStore
    if request.param == "memory":
        made = MemoryStore()
    elif request.param == "disk":
        made = DiskStore(tmp_path / "store")
    else:
        server: RedisServer = request.getfixturevalue("server")
        made = RedisStore(server.url, namespace=tmp_path.name)
    yield made
    made.close()


def record(session: str, turn: int, *keys: str, epoch: int = 1) -> SessionRecord:
    blocks = tuple(BlockRef("ids", i, i + 1, key, 4) for i, key in enumerate(keys))
    return SessionRecord(session, epoch, turn, FINGERPRINT, len(keys), 0, None, History(), blocks)


def block(key: str, text: bytes = b"payload") -> bytes:
    return frames.pack(frames.BLOCK, key, text)


def test_what_is_not_there_is_a_miss(store: SessionStore) -> None:
    assert store.load("s") is None
    assert store.held("s", [A]) == set()
    assert list(store.fetch("s", [A, B])) == [None, None]
    assert store.entries() == []
    store.touch("s")
    store.discard("s", [A])
    with pytest.raises(NotFound):
        store.delete("s")


def test_a_commit_is_read_back(store: SessionStore) -> None:
    lease = store.acquire("s", "me", 30)
    store.commit(lease, record("s", 1, A), {A: block(A)})
    store.commit(lease, record("s", 2, A, B), {B: block(B)})
    data = store.load("s")
    assert data is not None
    assert decode(data, "s") == record("s", 2, A, B)
    assert store.held("s", [A, B, C]) == {A, B}
    assert list(store.fetch("s", [B, C, A])) == [block(B), None, block(A)]
    (entry,) = store.entries()
    assert (entry.session, entry.tokens, entry.turn, entry.epoch, entry.bytes) == ("s", 2, 2, 1, 8)
    assert 0 <= entry.idle_s < 30


def test_sessions_are_kept_apart_and_removed_alone(store: SessionStore) -> None:
    for name, key in (("s", A), ("t", B)):
        store.commit(store.acquire(name, "me", 30), record(name, 1, key, C), {key: block(key), C: block(C)})
    store.delete("s")
    assert store.load("s") is None
    assert list(store.fetch("t", [B, C])) == [block(B), block(C)]
    assert [entry.session for entry in store.entries()] == ["t"]


def test_a_removed_session_can_begin_again(store: SessionStore) -> None:
    lease = store.acquire("s", "me", 30)
    store.commit(lease, record("s", 1, A), {A: block(A)})
    store.delete("s")
    assert store.held("s", [A]) == set()
    store.commit(lease, record("s", 1, B), {B: block(B)})
    assert list(store.fetch("s", [B])) == [block(B)]


def test_discarded_blocks_are_wanted_again(store: SessionStore) -> None:
    lease = store.acquire("s", "me", 30)
    store.commit(lease, record("s", 1, A, B), {A: block(A), B: block(B)})
    store.discard("s", [A])
    assert store.held("s", [A, B]) == {B}
    store.commit(lease, record("s", 2, A, B), {A: block(A, b"again")})
    assert list(store.fetch("s", [A])) == [block(A, b"again")]


def test_one_owner_at_a_time(store: SessionStore) -> None:
    lease = store.acquire("s", "me", 30)
    assert store.acquire("s", "me", 30) == lease
    with pytest.raises(LeaseHeld):
        store.acquire("s", "you", 30)
    assert store.acquire("t", "you", 30).owner == "you"


def test_epochs_only_rise(store: SessionStore) -> None:
    epochs = []
    for owner in ("me", "you", "me"):
        lease = store.acquire("s", owner, 30)
        store.commit(lease, record("s", 1, A, epoch=lease.epoch), {A: block(A)})
        store.release(lease)
        epochs.append(lease.epoch)
    assert epochs == sorted(set(epochs))
    assert store.acquire("s", "you", 30, after=90).epoch == 91


def test_a_stale_holder_cannot_write(store: SessionStore) -> None:
    stale = store.acquire("s", "me", 30)
    store.commit(stale, record("s", 1, A), {A: block(A)})
    store.release(stale)
    lease = store.acquire("s", "you", 30)
    store.commit(lease, record("s", 2, B, epoch=lease.epoch), {B: block(B)})
    store.release(lease)
    before = store.load("s")
    for attempt in (stale, replace(stale, epoch=lease.epoch), replace(lease, epoch=lease.epoch + 1)):
        with pytest.raises(StaleLease):
            store.commit(attempt, record("s", 3, C, epoch=attempt.epoch), {C: block(C)})
        with pytest.raises(StaleLease):
            store.renew(attempt)
        store.release(attempt)
    assert store.load("s") == before
    assert store.held("s", [C]) == set()


def test_a_lease_that_ran_out_serves_until_somebody_takes_over(store: SessionStore) -> None:
    lease = store.acquire("s", "me", 0.001)
    store.commit(lease, record("s", 1, A), {A: block(A)})
    wait_for_expiry(store)
    store.renew(lease)
    wait_for_expiry(store)
    assert store.acquire("s", "you", 30).epoch == lease.epoch + 1
    with pytest.raises(StaleLease):
        store.commit(lease, record("s", 2, A, B), {B: block(B)})


def wait_for_expiry(store: SessionStore) -> None:
    """Wait as long as a lease of one millisecond needs, on the clock that the store uses."""
    probe = store.acquire("probe", "one", 0.001)
    while True:
        try:
            store.release(store.acquire("probe", "two", 0.001))
            return
        except LeaseHeld:
            assert probe.owner == "one"
