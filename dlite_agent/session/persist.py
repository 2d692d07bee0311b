"""Sessions between the decoder and the stores: commit at the end of a turn, restore at the start of the next.

A turn is committed in steps, so that the device thread only copies: `prepare` finds which rows no stored block covers,
the device's thread exports them, `commit` serialises and writes them. A restore mirrors it: `read` loads and checks,
`Loaded.apply` fills the sequence. What comes back is the minimum over ids, KV and what a resume needs, and says what it
lacks and why.

With a shared store its lease is what counts, and the local store is written first: whatever the shared one does, this
process's turn is on disk before the response ends.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

from torch import Tensor

from dlite_agent.decode.state import DecodeState
from dlite_agent.errors import NotFound
from dlite_agent.session.record import BlockRef, Fingerprint, Refused, SessionRecord, decode
from dlite_agent.session.restore import Loaded, Restore, read_session
from dlite_agent.session.snapshot import Cutter, Draft, Facts, Snapshot
from dlite_agent.session.store import frames
from dlite_agent.session.store.base import Lease, LeaseHeld, SessionStore, StaleLease, StoreUnavailable


@dataclass(frozen=True)
class Committed:
    """A committed turn: bytes of new blocks, seconds; `shared` says why the shared store lacks it, if it does."""

    version: tuple[int, int]
    bytes: int
    seconds: float
    shared: str | None = None


class Persister:
    """Commits and restores the sessions of one process.

    Args:
        local: the store this process owns.
        shared: a store it shares with other replicas; then that store's leases decide who may write.
        owner: a name no other process has.
        lease_ttl_s: seconds after which others may take over a session that this process does not renew.

    Attributes:
        counts: hits, restored tokens, bytes read and written, by "tier.what"; tier "none" counts misses.
    """

    def __init__(
        self,
        local: SessionStore,
        fingerprint: Fingerprint,
        *,
        bytes_per_position: int,
        owner: str,
        shared: SessionStore | None = None,
        lease_ttl_s: float = 30.0,
    ) -> None:
        self.local = local
        self.shared = shared
        self.fingerprint = fingerprint
        self.counts: Counter[str] = Counter()
        self._counting = threading.Lock()
        self._cutter = Cutter(fingerprint, bytes_per_position=bytes_per_position, kv_limit=local.kv_limit)
        self._owner = owner
        self._ttl = lease_ttl_s
        self._leases: dict[str, Lease] = {}
        self._latest: dict[str, SessionRecord] = {}

    @property
    def _authority(self) -> SessionStore:
        return self.shared or self.local

    def hold(self, session: str) -> Lease:
        """Take or prolong the right to write a session, before its turn starts.

        While the shared store is away, sessions held here go on.

        Raises:
            LeaseHeld: another replica has it.
            StoreUnavailable: the store is away and the session is not held here.
        """
        held = self._leases.get(session)
        known = self._latest.get(session) or self._peek(self.local, session)
        try:
            lease = self._authority.acquire(session, self._owner, self._ttl, after=0 if known is None else known.epoch)
        except StoreUnavailable:
            if held is None:
                raise
            return held
        except LeaseHeld:
            self._lose(session)
            raise
        if held is not None and held.epoch != lease.epoch:
            self._lose(session)
        self._leases[session] = lease
        return lease

    def _lease(self, session: str) -> Lease:
        lease = self._leases.get(session)
        if lease is None:
            raise StaleLease("The session is no longer held here: restore it anew.", param="epoch")
        return lease

    def renew(self, sessions: Iterable[str] | None = None) -> list[str]:
        """Prolong leases, all by default; returns the sessions that were taken over and are no longer held here."""
        lost = []
        for session in list(self._leases) if sessions is None else sessions:
            lease = self._leases.get(session)
            if lease is None:
                continue
            try:
                self._authority.renew(lease)
            except StaleLease:
                self._lose(session)
                lost.append(session)
            except StoreUnavailable:
                break
        return lost

    def release(self, session: str) -> None:
        """Hand a session over: another replica may take it at once. Raises StoreUnavailable."""
        lease = self._leases.pop(session, None)
        self._latest.pop(session, None)
        if lease is not None:
            self._authority.release(lease)

    def _lose(self, session: str) -> None:
        self._leases.pop(session, None)
        self._latest.pop(session, None)

    def newest(self, session: str) -> tuple[int, int] | None:
        """Version of the newest record anywhere: a state kept from an older one must not be continued.

        Raises StoreUnavailable if that cannot be known; for a session held here it is known without asking.
        """
        held, latest = self._leases.get(session), self._latest.get(session)
        if held is not None and latest is not None and latest.epoch == held.epoch:
            return latest.version
        records = [self._peek(store, session) for store in self._stores]
        return max((record.version for record in records if record is not None), default=None)

    @property
    def _stores(self) -> list[SessionStore]:
        return [self.local] if self.shared is None else [self.local, self.shared]

    def _peek(self, store: SessionStore, session: str) -> SessionRecord | None:
        data = store.load(session)
        try:
            return None if data is None else decode(data, session)
        except Refused:
            return None

    def snapshot(self, session: str, state: DecodeState, facts: Facts) -> Snapshot:
        """What a commit of this state needs, all at once. On the device thread, with the session held."""
        facts = replace(facts, odds=None if state.odds is None else state.odds.counts())
        draft = self.prepare(session, state.ids, state.boundary, state.kept, facts)
        return draft.complete(None if draft.first is None else state.kv.export(draft.first))

    def prepare(
        self,
        session: str,
        ids: Sequence[int],
        boundary: int,
        features: Mapping[int, Tensor],
        facts: Facts,
        *,
        base: SessionRecord | None = None,
    ) -> Draft:
        """The record of a turn's end. Any thread, with the session held.

        Args:
            boundary: positions that the target KV covers; features: of boundaries up to it.
            base: a record whose blocks may serve, for a session that has none of its own yet.
        """
        lease = self._lease(session)
        previous = self._latest.get(session) or self._peek(self.local, session)
        turn = 1 if previous is None else previous.turn + 1
        known = previous or base
        return self._cutter.draft(
            (lease.epoch, turn),
            session,
            ids,
            boundary,
            features,
            facts,
            old=() if known is None or known.fingerprint != self.fingerprint else known.blocks,
            held=lambda keys: self.local.held(session, keys),
        )

    def commit(self, snapshot: Snapshot) -> Committed:
        """Make a turn durable. Any thread; one commit of a session at a time.

        Raises:
            StoreUnavailable: the local store has no room; the previous turn stands.
            StaleLease: the session was taken over; what this process has of it is out of date.
        """
        began = time.monotonic()
        record = snapshot.record
        session = record.session
        lease = self._lease(session)
        if lease.epoch != record.epoch:
            raise StaleLease("The session is no longer held here: restore it anew.", param="epoch")
        blocks = {key: frames.pack_tensors(key, tensors) for key, tensors in snapshot.tensors.items()}
        local = lease if self.shared is None else self.local.acquire(session, self._owner, self._ttl)
        self.local.commit(local, record, blocks)
        self._latest[session] = record
        problem = None
        if self.shared is not None:
            try:
                self._share(self.shared, lease, record)
            except StoreUnavailable as error:
                problem = error.message
            except StaleLease:
                self._lose(session)
                raise
        size = sum(map(len, blocks.values()))
        self._count(self.local.tier, written_bytes=size)
        return Committed(record.version, size, time.monotonic() - began, problem)

    def _share(self, store: SessionStore, lease: Lease, record: SessionRecord) -> None:
        """Write a committed record to the shared store, with whatever blocks it lacks."""
        left = record.size if store.kv_limit is None else store.kv_limit
        blocks: list[BlockRef] = []
        for ref in record.blocks:
            if ref.kind == "kv":
                left -= ref.size
                if left < 0:
                    continue
            blocks.append(ref)
        reduced = replace(record, blocks=tuple(blocks))
        keys = reduced.keys
        there = store.held(record.session, keys)
        missing = [key for key in keys if key not in there]
        found = zip(missing, self.local.fetch(record.session, missing), strict=True)
        store.commit(lease, reduced, {key: data for key, data in found if data is not None})

    def read(self, session: str) -> Loaded | Restore:
        """The newest state of a session that can be had, checked; a Restore alone if there is none to be used.

        Any thread, with the session held. Raises StoreUnavailable if no store with a record can be read.
        """
        found = read_session(self._stores, self.fingerprint, session)
        report = found.report if isinstance(found, Loaded) else found
        self._count(report.tier, hits=1, restored_tokens=report.tokens, read_bytes=report.bytes)
        if isinstance(found, Loaded):
            self._latest[session] = found.record
        return found

    def _count(self, tier: str, **amounts: int) -> None:
        with self._counting:
            self.counts.update({f"{tier}.{what}": amount for what, amount in amounts.items()})

    def open(self, session: str) -> Loaded | Restore:
        """As `read`, but the record and the ids alone, for who needs to know the conversation first."""
        found = read_session(self._stores, self.fingerprint, session, kv=False)
        if isinstance(found, Loaded):
            self._latest[session] = found.record
        return found

    def latest(self, session: str) -> SessionRecord | None:
        """The newest record known here, without asking any store."""
        return self._latest.get(session)

    def held_sessions(self) -> list[str]:
        """Sessions this process may write."""
        return list(self._leases)

    def stored_positions(self, session: str) -> int:
        """Positions of KV that the newest record known here names."""
        latest = self._latest.get(session)
        return 0 if latest is None else max((ref.stop for ref in latest.refs("kv")), default=0)

    def find(self, labels: Sequence[str]) -> dict[str, str]:
        """Stored sessions by labels (see `SessionRecord.labels`). A shared store that is away finds nothing."""
        found: dict[str, str] = {}
        for store in reversed(self._stores):
            with suppress(StoreUnavailable):
                found |= store.find(labels)
        return found

    def copy(self, source: str, session: str, ids: Sequence[int], facts: Facts) -> None:
        """Commit a new session that begins as a stored one: what both have in common is kept once.

        Raises as `hold` and `commit` do.
        """
        base = self._latest.get(source) or self._peek(self.local, source)
        self.hold(session)
        boundary = 0 if base is None else min(base.boundary, len(ids))
        facts = replace(facts, odds=None if base is None else base.odds)
        self.commit(self.prepare(session, ids, boundary, {}, facts, base=base).complete(None))

    def delete(self, session: str) -> None:
        """Remove a session that is held here. The shared store comes first: a crash in between leaves it whole here.

        Raises:
            StoreUnavailable: a store is away or has no room; the session is still there.
            NotFound: no store has it.
        """
        found = False
        for store in reversed(self._stores):
            with suppress(NotFound):
                store.delete(session)
                found = True
        self._latest.pop(session, None)
        if not found:
            raise NotFound("There is no such session.", param="session")

    def close(self) -> None:
        """Close the stores. Leases run out by themselves."""
        for store in self._stores:
            store.close()
