"""What a session store does, whichever way it keeps things, and the lease that says who may write."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from dlite_agent.errors import Conflict, DliteError
from dlite_agent.session.record import SessionRecord

MAX_BLOCK_BYTES = 8_000_000
"""Upper bound of a block with its header: what a Redis value may be without stalling its server."""


class StoreUnavailable(DliteError):
    """A store cannot be reached, or has no room. Nothing that was committed is lost; retry later."""

    status = 503
    code = "store_unavailable"


class LeaseHeld(Conflict):
    """Another process holds the session; retry after its lease has ended."""

    code = "session_held"


class StaleLease(Conflict):
    """The session has been taken over: what this process holds of it is out of date."""

    code = "stale_lease"


@dataclass(frozen=True)
class Lease:
    """The right to write a session for `ttl_s` from the last renewal or commit; each new holder has a higher epoch."""

    session: str
    owner: str
    epoch: int
    ttl_s: float


@dataclass(frozen=True)
class Entry:
    """A stored session: ids, commits, bytes of its blocks (shared ones included), seconds since the last use; whose it
    is, and what its client calls it."""

    session: str
    tokens: int
    turn: int
    epoch: int
    bytes: int
    idle_s: float
    owner: str = ""
    name: str = ""


@dataclass(frozen=True)
class Swept:
    """What a collection has freed."""

    sessions: int = 0
    bytes: int = 0


class SessionStore(Protocol):
    """Records and blocks of sessions. Safe to call from several threads.

    Every method raises StoreUnavailable when the store cannot be reached or is full.

    Attributes:
        tier: its name in reports.
        kv_limit: bytes of KV blocks it takes for one session; None: all.
    """

    tier: str
    kv_limit: int | None

    def acquire(self, session: str, owner: str, ttl_s: float, *, after: int = 0) -> Lease:
        """Take or prolong the lease. A holder that asks again keeps its epoch; a new one's is above `after`.

        Raises LeaseHeld.
        """
        ...

    def renew(self, lease: Lease) -> None:
        """Prolong a lease, also one that has run out while nobody took over. Raises StaleLease."""
        ...

    def release(self, lease: Lease) -> None:
        """Hand over: the next acquisition need not wait. Nothing happens if the lease is stale."""
        ...

    def load(self, session: str) -> bytes | None:
        """The encoded record last committed, or None."""
        ...

    def find(self, labels: Sequence[str]) -> dict[str, str]:
        """For each label that stored records have, the session with it that was used last (a hint: load it to know)."""
        ...

    def held(self, session: str, keys: Sequence[str]) -> set[str]:
        """Which of the keys need not be sent with the session's next commit."""
        ...

    def commit(self, lease: Lease, record: SessionRecord, blocks: Mapping[str, bytes]) -> None:
        """Make a record and the new blocks it names durable, all or nothing; refreshes the session's time to live.

        Raises StaleLease; then nothing has changed.
        """
        ...

    def fetch(self, session: str, keys: Sequence[str]) -> Iterator[bytes | None]:
        """Frames of blocks in the order asked for, unverified; None for a missing one."""
        ...

    def discard(self, session: str, keys: Sequence[str]) -> None:
        """Forget blocks that were found damaged, so that the next commit sends them again."""
        ...

    def touch(self, session: str) -> None:
        """The session has been used: start its time to live again."""
        ...

    def delete(self, session: str) -> None:
        """Remove a session. Blocks that other sessions use stay."""
        ...

    def entries(self) -> list[Entry]:
        """All stored sessions, most recently used first."""
        ...

    def close(self) -> None: ...


class LocalLeases:
    """Leases of a store that one process owns. Not thread-safe: the store's lock covers it.

    Args:
        last_epoch: epoch of a session's stored record, 0 if there is none.
    """

    def __init__(self, last_epoch: Callable[[str], int]) -> None:
        self._last_epoch = last_epoch
        self._held: dict[str, tuple[Lease, float]] = {}

    def acquire(self, session: str, owner: str, ttl_s: float, after: int) -> Lease:
        now = time.monotonic()
        held = self._held.get(session)
        if held is not None and held[0].owner == owner:
            lease = replace(held[0], ttl_s=ttl_s)
        elif held is not None and held[1] > now:
            raise LeaseHeld(
                f"The session is held by another owner for {held[1] - now:.1f} s more: retry then.", param="session"
            )
        else:
            epoch = max(self._last_epoch(session), held[0].epoch if held else 0, after) + 1
            lease = Lease(session, owner, epoch, ttl_s)
        self._held[session] = lease, now + ttl_s
        return lease

    def renew(self, lease: Lease) -> None:
        if not self._is_held(lease):
            raise StaleLease(f"Epoch {lease.epoch} of the session has been superseded.", param="epoch")
        self._held[lease.session] = lease, time.monotonic() + lease.ttl_s

    def release(self, lease: Lease) -> None:
        if self._is_held(lease):
            # The epoch must stay known, or a later holder could be given the same one.
            self._held[lease.session] = replace(lease, owner=""), 0.0

    def _is_held(self, lease: Lease) -> bool:
        held = self._held.get(lease.session)
        return held is not None and (held[0].owner, held[0].epoch) == (lease.owner, lease.epoch)
