"""Disk: torn writes, lost indexes, full disks, shared blocks, collection, one owner."""

from __future__ import annotations

import contextlib
import resource
import shutil
import sqlite3
from collections.abc import Iterator
from pathlib import Path

import pytest

from dlite_agent.errors import Conflict
from dlite_agent.session.record import decode
from dlite_agent.session.store.base import StoreUnavailable
from dlite_agent.session.store.disk import DiskStore
from tests.session.test_store import A, B, C, block, record


def commit(store: DiskStore, session: str, turn: int, *keys: str, text: bytes = b"payload") -> None:
    lease = store.acquire(session, "me", 30)
    store.commit(lease, record(session, turn, *keys), {key: block(key, text) for key in keys})


def turn_of(store: DiskStore, session: str) -> int:
    data = store.load(session)
    return 0 if data is None else decode(data, session).turn


def only_segment(root: Path) -> Path:
    (path,) = (root / "segments").glob("*.seg")
    return path


def test_sessions_outlive_the_process(tmp_path: Path) -> None:
    store = DiskStore(tmp_path)
    commit(store, "s", 1, A)
    store.close()
    again = DiskStore(tmp_path)
    assert turn_of(again, "s") == 1
    assert list(again.fetch("s", [A])) == [block(A)]
    assert again.acquire("s", "me", 30).epoch == 2
    again.close()


@pytest.mark.parametrize("damage", ["gone", "garbage", "other layout"])
def test_a_lost_index_is_made_anew(tmp_path: Path, damage: str) -> None:
    store = DiskStore(tmp_path)
    commit(store, "s", 1, A)
    commit(store, "t", 1, A, B)
    store.close()
    index = tmp_path / "index.sqlite"
    if damage == "gone":
        index.unlink()
    elif damage == "garbage":
        index.write_bytes(b"not a database, but long enough to look like one" * 100)
    else:
        with sqlite3.connect(index) as connection:
            connection.execute("PRAGMA user_version=99")
        connection.close()
    again = DiskStore(tmp_path)
    # A is in the segment of "s", which nobody has asked for yet.
    assert turn_of(again, "t") == 1
    assert list(again.fetch("t", [A, B])) == [block(A), block(B)]
    assert {entry.session for entry in again.entries()} == {"s", "t"}
    again.close()


def test_a_torn_write_is_cut(tmp_path: Path) -> None:
    store = DiskStore(tmp_path / "whole")
    commit(store, "s", 1, A)
    first = only_segment(tmp_path / "whole").stat().st_size
    store.close()
    shutil.copytree(tmp_path / "whole", tmp_path / "first")
    store = DiskStore(tmp_path / "whole")
    commit(store, "s", 2, A, B)
    store.close()
    data = only_segment(tmp_path / "whole").read_bytes()
    torn = DiskStore(tmp_path / "first")
    segment = only_segment(tmp_path / "first")
    for end in range(first, len(data), 11):
        segment.write_bytes(data[:end])
        assert turn_of(torn, "s") == 1
        assert segment.stat().st_size == first
        assert torn.held("s", [A, B]) == {A}
    # Whole, but the index has not heard of it: the commit counts.
    segment.write_bytes(data)
    assert turn_of(torn, "s") == 2
    assert list(torn.fetch("s", [A, B])) == [block(A), block(B)]
    torn.close()


def test_garbage_behind_a_commit_is_overwritten(tmp_path: Path) -> None:
    store = DiskStore(tmp_path)
    commit(store, "s", 1, A)
    with only_segment(tmp_path).open("ab") as file:
        file.write(b"DLf1 half a frame")
    commit(store, "s", 2, A, B)
    assert turn_of(store, "s") == 2
    store.close()
    (tmp_path / "index.sqlite").unlink()
    again = DiskStore(tmp_path)
    assert turn_of(again, "s") == 2
    assert list(again.fetch("s", [A, B])) == [block(A), block(B)]
    again.close()


def test_only_new_blocks_are_written(tmp_path: Path) -> None:
    store = DiskStore(tmp_path)
    big = b"x" * 100_000
    commit(store, "s", 1, A, text=big)
    before = only_segment(tmp_path).stat().st_size
    commit(store, "s", 2, A, B)
    assert only_segment(tmp_path).stat().st_size - before < 5_000
    commit(store, "t", 1, A, text=big)
    assert sum(path.stat().st_size for path in (tmp_path / "segments").iterdir()) < before + 10_000
    store.close()


def test_blocks_outlive_the_session_that_wrote_them(tmp_path: Path) -> None:
    store = DiskStore(tmp_path)
    commit(store, "s", 1, A, B, text=b"x" * 10_000)
    commit(store, "t", 1, A, text=b"x" * 10_000)
    store.delete("s")
    assert list(store.fetch("t", [A])) == [block(A, b"x" * 10_000)]
    assert store.held("t", [A, B]) == {A}
    store.close()
    (tmp_path / "index.sqlite").unlink()
    again = DiskStore(tmp_path)
    assert [entry.session for entry in again.entries()] == ["t"]
    assert list(again.fetch("t", [A])) == [block(A, b"x" * 10_000)]
    again.delete("t")
    again.gc()
    assert list((tmp_path / "segments").glob("*.seg")) == []
    again.close()


def test_dead_bytes_are_collected(tmp_path: Path) -> None:
    store = DiskStore(tmp_path)
    commit(store, "s", 1, A, text=b"x" * 10_000)
    commit(store, "s", 2, B, text=b"y" * 1_000)
    swept = store.gc()
    assert swept.sessions == 0
    assert swept.bytes > 9_000
    assert list(store.fetch("s", [A, B])) == [None, block(B, b"y" * 1_000)]
    commit(store, "s", 3, B, C)
    store.close()
    (tmp_path / "index.sqlite").unlink()
    again = DiskStore(tmp_path)
    assert turn_of(again, "s") == 3
    assert list(again.fetch("s", [B, C])) == [block(B, b"y" * 1_000), block(C)]
    again.close()


def test_idle_sessions_are_collected_longest_idle_first(tmp_path: Path) -> None:
    store = DiskStore(tmp_path)
    for name, key in (("old", A), ("mid", B), ("new", C)):
        commit(store, name, 1, key, text=b"x" * 10_000)
    store.touch("old")
    assert store.gc(ttl_s=3600).sessions == 0
    assert store.gc(max_bytes=25_000).sessions == 1
    assert [entry.session for entry in store.entries()] == ["old", "new"]
    assert store.gc(ttl_s=0).sessions == 2
    assert store.entries() == []
    store.close()


def test_one_process_writes_and_others_may_look(tmp_path: Path) -> None:
    store = DiskStore(tmp_path)
    commit(store, "s", 1, A)
    with pytest.raises(Conflict) as caught:
        DiskStore(tmp_path)
    assert caught.value.param == "store"
    segment = only_segment(tmp_path)
    with segment.open("ab") as file:
        file.write(b"DLf1 being written")
    size = segment.stat().st_size
    reader = DiskStore(tmp_path, writable=False)
    assert turn_of(reader, "s") == 1
    assert list(reader.fetch("s", [A])) == [block(A)]
    with pytest.raises(Conflict):
        commit(reader, "s", 2, A, B)
    assert segment.stat().st_size == size
    reader.close()
    store.close()


@contextlib.contextmanager
def file_limit(size: int) -> Iterator[None]:
    """No file of this process grows beyond size: to the code under test, a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_full_disk_refuses_the_turn_and_keeps_the_last(tmp_path: Path) -> None:
    store = DiskStore(tmp_path)
    lease = store.acquire("s", "me", 30)
    store.commit(lease, record("s", 1, A), {A: block(A)})
    segment = only_segment(tmp_path)
    size = segment.stat().st_size
    for spare in (0, 10, 300, 1500):
        with file_limit(size + spare), pytest.raises(StoreUnavailable) as caught:
            store.commit(lease, record("s", 2, A, B), {B: block(B, bytes(3000))})
        assert caught.value.status == 503
        assert segment.stat().st_size == size
        assert turn_of(store, "s") == 1
        assert list(store.fetch("s", [A, B])) == [block(A), None]
    store.commit(lease, record("s", 2, A, C), {C: block(C)})
    assert list(store.fetch("s", [A, B, C])) == [block(A), None, block(C)]
    store.close()
    again = DiskStore(tmp_path)
    assert turn_of(again, "s") == 2
    again.close()


def test_an_index_that_cannot_be_written_loses_nothing(tmp_path: Path) -> None:
    store = DiskStore(tmp_path)
    for number in range(40):
        commit(store, f"filler {number}", 1, A)
    commit(store, "s", 1, A)
    room = 10_000
    assert (tmp_path / "index.sqlite-wal").stat().st_size > room
    with file_limit(room), pytest.raises(StoreUnavailable, match="index"):
        commit(store, "s", 2, A, B)
    assert turn_of(store, "s") == 2
    assert list(store.fetch("s", [A, B])) == [block(A), block(B)]
    store.close()
