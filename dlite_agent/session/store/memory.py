"""Sessions in this process's memory: gone with it. For tests, and for servers that shall write nothing."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from dlite_agent.errors import NotFound
from dlite_agent.session.record import SessionRecord, decode
from dlite_agent.session.store.base import Entry, Lease, LocalLeases


class MemoryStore:
    """A SessionStore in a dictionary; blocks that several sessions name are kept once."""

    tier = "memory"

    def __init__(self, *, kv_limit: int | None = None) -> None:
        self.kv_limit = kv_limit
        self._lock = threading.RLock()
        self._records: dict[str, bytes] = {}
        self._keys: dict[str, set[str]] = {}
        self._blocks: dict[str, bytes] = {}
        self._used: dict[str, float] = {}
        self._labels: dict[str, set[str]] = {}
        self._leases = LocalLeases(self._epoch)

    def _epoch(self, session: str) -> int:
        data = self._records.get(session)
        return 0 if data is None else decode(data, session).epoch

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
            return self._records.get(session)

    def find(self, labels: Sequence[str]) -> dict[str, str]:
        with self._lock:
            latest = sorted(self._labels, key=self._used.__getitem__)
            return {label: name for name in latest for label in labels if label in self._labels[name]}

    def held(self, session: str, keys: Sequence[str]) -> set[str]:
        with self._lock:
            return {key for key in keys if key in self._blocks}

    def commit(self, lease: Lease, record: SessionRecord, blocks: Mapping[str, bytes]) -> None:
        with self._lock:
            self._leases.renew(lease)
            self._blocks.update(blocks)
            self._records[lease.session] = record.encode()
            self._keys[lease.session] = set(record.keys)
            self._labels[lease.session] = set(record.labels)
            self._used[lease.session] = time.monotonic()
            self._collect()

    def _collect(self) -> None:
        named = set().union(*self._keys.values())
        for key in self._blocks.keys() - named:
            del self._blocks[key]

    def fetch(self, session: str, keys: Sequence[str]) -> Iterator[bytes | None]:
        for key in keys:
            with self._lock:
                yield self._blocks.get(key)

    def discard(self, session: str, keys: Sequence[str]) -> None:
        with self._lock:
            for key in keys:
                self._blocks.pop(key, None)

    def touch(self, session: str) -> None:
        with self._lock:
            if session in self._records:
                self._used[session] = time.monotonic()

    def delete(self, session: str) -> None:
        with self._lock:
            if self._records.pop(session, None) is None:
                raise NotFound("There is no such session.", param="session")
            del self._keys[session], self._used[session], self._labels[session]
            self._collect()

    def entries(self) -> list[Entry]:
        now = time.monotonic()
        with self._lock:
            found = []
            for session in sorted(self._used, key=self._used.__getitem__, reverse=True):
                record = decode(self._records[session], session)
                idle = now - self._used[session]
                entry = Entry(session, record.length, record.turn, record.epoch, record.size, idle)
                found.append(replace(entry, owner=record.owner, name=record.name))
            return found

    def close(self) -> None:
        """Nothing to release."""
