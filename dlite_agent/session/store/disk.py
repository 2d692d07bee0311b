"""Sessions on disk: segment files hold the truth, SQLite the index that finds it.

A commit is one append and one fsync to the session's segment; the index follows in a transaction of its own. If the
process dies in between, or the index is lost, the segments are read back when a session is next asked for. One
process owns a store for writing (a lock on its folder); others may open it for reading.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import sqlite3
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from dlite_agent.errors import Conflict, NotFound
from dlite_agent.session.record import Refused, SessionRecord, decode
from dlite_agent.session.store.base import Entry, Lease, LocalLeases, StoreUnavailable, Swept
from dlite_agent.session.store.segments import Contents, Place, Segments, record_frame

_SCHEMA = """
CREATE TABLE IF NOT EXISTS segments (name TEXT PRIMARY KEY, committed INTEGER NOT NULL);
CREATE TABLE IF NOT EXISTS records (segment TEXT PRIMARY KEY, session TEXT NOT NULL, body BLOB NOT NULL,
    tokens INTEGER NOT NULL, turn INTEGER NOT NULL, epoch INTEGER NOT NULL, bytes INTEGER NOT NULL, used REAL NOT NULL,
    owner TEXT NOT NULL, name TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS labels (label TEXT NOT NULL, segment TEXT NOT NULL, PRIMARY KEY (label, segment))
    WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS labels_by_segment ON labels (segment);
CREATE TABLE IF NOT EXISTS blocks (key TEXT PRIMARY KEY, segment TEXT NOT NULL, offset INTEGER NOT NULL,
    length INTEGER NOT NULL);
CREATE TABLE IF NOT EXISTS uses (segment TEXT NOT NULL, key TEXT NOT NULL, PRIMARY KEY (segment, key)) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS blocks_by_segment ON blocks (segment);
CREATE INDEX IF NOT EXISTS uses_by_key ON uses (key);
"""
_LAYOUT = 2
_ASK = 500
"""Labels asked for at once: SQLite takes a limited number of parameters."""


class DiskStore:
    """A SessionStore in a folder.

    Args:
        root: created if need be.
        writable: False opens an existing store beside its owner, to look at it.

    Raises:
        Conflict: another process owns the store.
        StoreUnavailable: the folder cannot be used.
    """

    tier = "disk"
    kv_limit: int | None = None

    def __init__(self, root: Path, *, writable: bool = True) -> None:
        self._lock = threading.RLock()
        self._guard: int | None = None
        self._whole = False
        try:
            self._segments = Segments(root / "segments", writable=writable)
            if writable:
                self._guard = _own(root / "lock")
            self._index = self._open_index(root / "index.sqlite", writable)
        except (OSError, StoreUnavailable) as error:
            self._let_go()
            raise StoreUnavailable(f"The session folder cannot be used: {error}", param="store") from error
        self._leases = LocalLeases(self._epoch)

    def _open_index(self, path: Path, writable: bool) -> sqlite3.Connection:
        if not writable:
            # A reader must not disturb the owner's index: it rebuilds what it needs in memory.
            connection = sqlite3.connect(":memory:", check_same_thread=False, isolation_level=None)
            connection.executescript(_SCHEMA)
            return connection
        for fresh in (False, True):
            if fresh:
                for stale in path.parent.glob(path.name + "*"):
                    stale.unlink()
            connection = sqlite3.connect(path, check_same_thread=False, isolation_level=None)
            try:
                connection.execute("PRAGMA journal_mode=WAL")
                connection.execute("PRAGMA synchronous=NORMAL")
                version = connection.execute("PRAGMA user_version").fetchone()[0]
                sound = connection.execute("PRAGMA quick_check(1)").fetchone()[0] == "ok"
                if sound and version in (0, _LAYOUT):
                    connection.executescript(_SCHEMA)
                    connection.execute(f"PRAGMA user_version={_LAYOUT}")
                    return connection
            except sqlite3.DatabaseError:
                pass
            connection.close()
        raise StoreUnavailable(f"{path.name} can be neither read nor written anew.", param="store")

    @contextlib.contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        try:
            self._index.execute("BEGIN IMMEDIATE")
            try:
                yield self._index
            except BaseException:
                self._index.execute("ROLLBACK")
                raise
            self._index.execute("COMMIT")
        except sqlite3.Error as error:
            with contextlib.suppress(sqlite3.Error):
                self._index.execute("ROLLBACK")
            raise StoreUnavailable(
                f"The index of the session store cannot be written ({error}); it is rebuilt from the segments once "
                "there is room.",
                param="store",
            ) from error

    def _catch_up(self, segment: str) -> int:
        """Bring the index up to the segment's last commit; returns the end of that commit."""
        row = self._index.execute("SELECT committed FROM segments WHERE name=?", (segment,)).fetchone()
        committed, size = 0 if row is None else int(row[0]), self._segments.size(segment)
        if size == committed:
            return committed
        start = committed if size > committed else 0
        found = self._segments.scan(segment, start) if size else Contents(0, None, {})
        with self._transaction() as index:
            if start == 0:
                index.execute("DELETE FROM blocks WHERE segment=?", (segment,))
                _forget(index, segment)
            index.executemany(
                "INSERT OR REPLACE INTO blocks VALUES (?,?,?,?)",
                [(key, place.segment, place.offset, place.length) for key, place in found.blocks.items()],
            )
            if found.end > start:
                if found.record is None:
                    _forget(index, segment)
                else:
                    _remember(index, segment, decode(found.record), found.record)
            index.execute("INSERT OR REPLACE INTO segments VALUES (?,?)", (segment, found.end))
        return found.end

    def _catch_up_all(self) -> None:
        for segment in self._segments.names():
            self._catch_up(segment)
        # Whoever owns the store keeps the index up to date from then on; a reader must look again.
        self._whole = self._guard is not None

    def _epoch(self, session: str) -> int:
        data = self.load(session)
        try:
            return 0 if data is None else decode(data, session).epoch
        except Refused:
            return 0

    def acquire(self, session: str, owner: str, ttl_s: float, *, after: int = 0) -> Lease:
        with self._lock:
            return self._leases.acquire(session, owner, ttl_s, after)

    def renew(self, lease: Lease) -> None:
        with self._lock:
            self._leases.renew(lease)

    def release(self, lease: Lease) -> None:
        with self._lock:
            self._leases.release(lease)

    def load(self, session: str) -> bytes | None:
        with self._lock:
            segment = self._segments.name(session)
            self._catch_up(segment)
            row = self._index.execute("SELECT body FROM records WHERE segment=?", (segment,)).fetchone()
            return None if row is None else bytes(row[0])

    def find(self, labels: Sequence[str]) -> dict[str, str]:
        with self._lock:
            if not self._whole:
                self._catch_up_all()
            found: dict[str, str] = {}
            for first in range(0, len(labels), _ASK):
                some = labels[first : first + _ASK]
                rows = self._index.execute(
                    "SELECT l.label, r.session FROM labels l JOIN records r ON r.segment = l.segment "
                    f"WHERE l.label IN ({','.join('?' * len(some))}) ORDER BY r.used",
                    list(some),
                )
                found |= dict(rows.fetchall())
            return found

    def _place(self, key: str) -> Place | None:
        row = self._index.execute("SELECT segment, offset, length FROM blocks WHERE key=?", (key,)).fetchone()
        return None if row is None else Place(*row)

    def held(self, session: str, keys: Sequence[str]) -> set[str]:
        with self._lock:
            self._catch_up(self._segments.name(session))
            return {key for key in keys if self._place(key) is not None}

    def commit(self, lease: Lease, record: SessionRecord, blocks: Mapping[str, bytes]) -> None:
        with self._lock:
            self._leases.renew(lease)
            segment = self._segments.name(lease.session)
            end = self._catch_up(segment)
            new = {key: data for key, data in blocks.items() if self._place(key) is None}
            tail = record_frame(record)
            offsets = self._segments.append(segment, [*new.values(), tail], end=end)
            with self._transaction() as index:
                index.executemany(
                    "INSERT INTO blocks VALUES (?,?,?,?)",
                    [(key, segment, at, len(new[key])) for key, at in zip(new, offsets, strict=False)],
                )
                _remember(index, segment, record, record.encode())
                index.execute("INSERT OR REPLACE INTO segments VALUES (?,?)", (segment, offsets[-1] + len(tail)))

    def fetch(self, session: str, keys: Sequence[str]) -> Iterator[bytes | None]:
        with self._lock:
            places = [self._place(key) for key in keys]
            if None in places:
                # Blocks shared with a session whose segment is not indexed yet.
                self._catch_up_all()
                places = [self._place(key) for key in keys]
        return self._segments.read(places)

    def discard(self, session: str, keys: Sequence[str]) -> None:
        with self._lock, self._transaction() as index:
            index.executemany("DELETE FROM blocks WHERE key=?", [(key,) for key in keys])

    def touch(self, session: str) -> None:
        with self._lock, self._transaction() as index:
            segment = self._segments.name(session)
            index.execute("UPDATE records SET used=? WHERE segment=?", (time.time(), segment))

    def delete(self, session: str) -> None:
        with self._lock:
            segment = self._segments.name(session)
            if self.load(session) is None:
                raise NotFound("There is no such session.", param="session")
            tail = record_frame(None)
            end = self._catch_up(segment)
            self._segments.append(segment, [tail], end=end)
            with self._transaction() as index:
                _forget(index, segment)
                index.execute("INSERT OR REPLACE INTO segments VALUES (?,?)", (segment, end + len(tail)))
            self._catch_up_all()
            self._compact(segment)

    def entries(self) -> list[Entry]:
        with self._lock:
            self._catch_up_all()
            now = time.time()
            rows = self._index.execute(
                "SELECT session, tokens, turn, epoch, bytes, used, owner, name FROM records ORDER BY used DESC"
            ).fetchall()
            return [
                Entry(session, tokens, turn, epoch, size, max(now - used, 0.0), owner, name)
                for session, tokens, turn, epoch, size, used, owner, name in rows
            ]

    def gc(self, *, ttl_s: float | None = None, max_bytes: int | None = None) -> Swept:
        """Remove sessions idle for longer than ttl_s, then the longest idle until files fit max_bytes; free the rest.

        A segment is written anew once more than half of it is dead. Leased sessions in use elsewhere in this process
        are not special: whoever collects decides.
        """
        with self._lock:
            before, gone = self.bytes, 0
            for entry in reversed(self.entries()):
                late = ttl_s is not None and entry.idle_s > ttl_s
                if late or (max_bytes is not None and self.bytes > max_bytes):
                    self.delete(entry.session)
                    gone += 1
            for segment in self._segments.names():
                self._compact(segment)
            return Swept(gone, before - self.bytes)

    @property
    def bytes(self) -> int:
        """Of all segment files."""
        return sum(self._segments.size(segment) for segment in self._segments.names())

    def _compact(self, segment: str) -> None:
        """Free what no session needs. Every segment must be indexed, or blocks in use would look dead."""
        rows = self._index.execute(
            "SELECT b.key, b.segment, b.offset, b.length FROM blocks b WHERE b.segment=? "
            "AND EXISTS (SELECT 1 FROM uses u WHERE u.key = b.key) ORDER BY b.offset",
            (segment,),
        ).fetchall()
        body = self._index.execute("SELECT body FROM records WHERE segment=?", (segment,)).fetchone()
        if not rows and body is None:
            with self._transaction() as index:
                index.execute("DELETE FROM blocks WHERE segment=?", (segment,))
                index.execute("DELETE FROM segments WHERE name=?", (segment,))
            self._segments.remove(segment)
            return
        live = sum(row[3] for row in rows) + (0 if body is None else len(body[0]))
        if 2 * live >= self._segments.size(segment):
            return
        record = None if body is None else decode(bytes(body[0]))
        self._segments.rewrite(segment, record, [Place(*row[1:]) for row in rows])
        # The index now points into the old file: what it says of this segment is made anew from the new one.
        with self._transaction() as index:
            index.execute("DELETE FROM blocks WHERE segment=?", (segment,))
            index.execute("DELETE FROM segments WHERE name=?", (segment,))
        self._catch_up(segment)

    def close(self) -> None:
        with self._lock:
            self._index.close()
            self._let_go()

    def _let_go(self) -> None:
        if self._guard is not None:
            os.close(self._guard)
            self._guard = None


def _own(path: Path) -> int:
    handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(handle)
        raise Conflict(
            "Another process serves this session folder: stop it, or give this one a folder of its own.", param="store"
        ) from None
    return handle


def _remember(index: sqlite3.Connection, segment: str, record: SessionRecord, body: bytes) -> None:
    index.execute(
        "INSERT OR REPLACE INTO records VALUES (?,?,?,?,?,?,?,?,?,?)",
        (
            *(segment, record.session, body, record.length, record.turn, record.epoch, record.size, time.time()),
            *(record.owner, record.name),
        ),
    )
    index.execute("DELETE FROM labels WHERE segment=?", (segment,))
    index.executemany("INSERT OR IGNORE INTO labels VALUES (?,?)", [(label, segment) for label in record.labels])
    index.execute("DELETE FROM uses WHERE segment=?", (segment,))
    index.executemany("INSERT INTO uses VALUES (?,?)", [(segment, key) for key in record.keys])


def _forget(index: sqlite3.Connection, segment: str) -> None:
    index.execute("DELETE FROM records WHERE segment=?", (segment,))
    index.execute("DELETE FROM labels WHERE segment=?", (segment,))
    index.execute("DELETE FROM uses WHERE segment=?", (segment,))
