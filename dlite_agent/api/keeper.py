"""What of sessions outlives the process, seen from the event loop: found, held, committed, handed over.

Stores are slow, so everything here runs on worker threads. Without a store nothing is found and nothing is kept.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import ParamSpec, TypeVar

from torch import Tensor

from dlite_agent.config import SessionSettings
from dlite_agent.decode.engine import Engine
from dlite_agent.decode.jobs import Finished
from dlite_agent.errors import DliteError, NotFound
from dlite_agent.session.history import History
from dlite_agent.session.identity import message_labels, name_label
from dlite_agent.session.messages import JSON, Message
from dlite_agent.session.persist import Committed, Persister
from dlite_agent.session.record import Acceptance, SamplerState
from dlite_agent.session.registry import Registry, Session
from dlite_agent.session.restore import Loaded
from dlite_agent.session.snapshot import Facts
from dlite_agent.session.store.base import Entry, StaleLease, StoreUnavailable
from dlite_agent.session.store.disk import DiskStore

log = logging.getLogger("dlite_agent.sessions")
_EXPORT_S = 60.0
"""Seconds to wait for the engine's copy of a turn's rows; a turn without them is stored without their KV."""
_COLLECT_S = 60.0
_P = ParamSpec("_P")
_T = TypeVar("_T")


class Keeper:
    """The registry's sessions in the stores.

    Args:
        persister: None keeps nothing.
        settings: lease_ttl_s and disk_bytes count here.
    """

    def __init__(
        self, registry: Registry, engine: Engine, persister: Persister | None, settings: SessionSettings
    ) -> None:
        self.persister = persister
        self._registry = registry
        self._engine = engine
        self._settings = settings
        self._chores: list[asyncio.Task[None]] = []
        self._commits: set[asyncio.Task[None]] = set()

    async def adopt(self, owner: str, reference: str) -> str | None:
        """Make a stored session known here by its id or its client's name for it, unless it is known.

        Returns:
            Why what is stored under that name is of no use, if so.

        Raises:
            StoreUnavailable: nobody can tell now.
        """
        if self.persister is None:
            return None
        with contextlib.suppress(NotFound):
            self._registry.get(owner, reference)
            return None
        label = name_label(owner, reference)
        found = (await asyncio.to_thread(self.persister.find, [label])).get(label)
        return await self._adopt(owner, found or reference)

    async def adopt_conversation(self, owner: str, messages: Sequence[Message], tools: Sequence[JSON]) -> None:
        """Make the stored session known here that holds more of a conversation than any that is known."""
        if self.persister is None:
            return
        labels = message_labels(owner, messages, tools)[self._registry.matched(owner, messages, tools) :]
        found = await asyncio.to_thread(self.persister.find, labels)
        for label in reversed(labels):
            if label in found:
                await self._adopt(owner, found[label])
                return

    async def _adopt(self, owner: str, name: str) -> str | None:
        known = self._registry.known(name)
        if self.persister is None or known is not None:
            return None
        found = await asyncio.to_thread(self.persister.open, name)
        if isinstance(found, Loaded):
            if found.record.owner == owner and self._registry.known(name) is None:
                self._registry.adopt(found.record, found.ids)
            return None
        return None if found.reason == "no such session" else found.reason

    async def hold(self, session: Session) -> None:
        """Take the right to write a session before its turn, and what another replica has added to it.

        Raises:
            LeaseHeld: another replica has it.
            StoreUnavailable: the shared store is away, and the session is not held here.
        """
        if self.persister is None:
            return
        found = await self._done(self._hold, self.persister, session)
        if isinstance(found, Loaded):
            self._registry.adopt(found.record, found.ids)
        if not self._chores:
            work = (self._renew(self.persister), self._collect(self.persister))
            self._chores = [asyncio.get_running_loop().create_task(chore) for chore in work]

    @staticmethod
    def _hold(persister: Persister, session: Session) -> Loaded | None:
        persister.hold(session.id)
        if session.version is None and not session.turns:
            return None
        newest = persister.newest(session.id)
        if newest is None or newest == session.version:
            return None
        found = persister.open(session.id)
        if isinstance(found, Loaded):
            return found
        session.unstored = found.reason
        return None

    @staticmethod
    async def _done(work: Callable[_P, _T], *args: _P.args, **kwargs: _P.kwargs) -> _T:
        """The result of work on a thread. It is waited for even when the request is cancelled meanwhile: what it does
        to a session must be over before the session is given back."""
        task = asyncio.ensure_future(asyncio.to_thread(work, *args, **kwargs))
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            await asyncio.wait({task})
            raise

    async def commit(
        self,
        session: Session,
        ids: list[int],
        history: History,
        reply: Finished,
        divergence: str | None,
        sampler: SamplerState,
    ) -> Committed | None:
        """Make a turn durable, its new KV rows included. Afterwards `session.version` is the stored one.

        Raises:
            StoreUnavailable: there is no room; the previous turn stands.
            StaleLease: another replica has taken the session over.
        """
        persister = self.persister
        if persister is None:
            session.acceptance = _added(session.acceptance, reply)
            return None
        with self._counted():
            return await self._commit(persister, session, ids, history, reply, divergence, sampler)

    @contextlib.contextmanager
    def _counted(self) -> Iterator[None]:
        task = asyncio.current_task()
        assert task is not None
        self._commits.add(task)
        try:
            yield
        finally:
            self._commits.discard(task)

    async def _commit(
        self,
        persister: Persister,
        session: Session,
        ids: list[int],
        history: History,
        reply: Finished,
        divergence: str | None,
        sampler: SamplerState,
    ) -> Committed:
        acceptance = _added(session.acceptance, reply)
        facts = replace(
            _facts(session, history),
            sampler=sampler,
            divergence=divergence,
            acceptance=acceptance,
            odds=reply.odds,
        )
        base = persister.latest(session.stored) if session.stored != session.id else None
        try:
            draft = await asyncio.to_thread(
                persister.prepare, session.id, ids, reply.boundary, reply.features, facts, base=base
            )
            rows = None if draft.first is None else await self._rows(session.key, draft.first)
            done = await asyncio.to_thread(lambda: persister.commit(draft.complete(rows)))
        except StaleLease:
            session.version = None
            raise
        if done.shared is not None:
            log.warning("not in the shared store", extra={"dlite": {"session": session.id, "reason": done.shared}})
        session.version, session.stored, session.unstored = done.version, session.id, None
        session.acceptance = acceptance
        return done

    async def _rows(self, key: str, first: int) -> Tensor | None:
        try:
            async with asyncio.timeout(_EXPORT_S):
                return await asyncio.wrap_future(self._engine.export(key, first))
        except (TimeoutError, DliteError):
            log.warning("a turn is stored without its KV", extra={"dlite": {"key": key}})
            return None

    async def fork(self, source: Session, fork: Session) -> None:
        """Make a fork durable: what it shares with its source is kept once. Raises as `hold` and `commit` do."""
        persister = self.persister
        if persister is None or not fork.ids:
            return
        await self._done(persister.copy, source.stored, fork.id, fork.ids, _facts(fork, fork.history))
        fork.stored, fork.turns, fork.version = fork.id, 1, await asyncio.to_thread(persister.newest, fork.id)

    async def delete(self, session: Session) -> None:
        """Remove a session from all stores. Raises LeaseHeld or StoreUnavailable; then it is still there."""
        if self.persister is None:
            return
        await self._done(self.persister.hold, session.id)
        with contextlib.suppress(NotFound):
            await self._done(self.persister.delete, session.id)

    def forget(self, session: Session) -> None:
        """Hand over a session that is no longer known here."""
        persister = self.persister
        if persister is None:
            return

        def release() -> None:
            if self._registry.known(session.id) is None:
                with contextlib.suppress(StoreUnavailable):
                    persister.release(session.id)

        with contextlib.suppress(RuntimeError):
            asyncio.get_running_loop().run_in_executor(None, release)

    async def entries(self, owner: str) -> list[Entry]:
        """The owner's sessions in this process's own store that are not known here, the latest used first."""
        if self.persister is None:
            return []
        found = await asyncio.to_thread(self.persister.local.entries)
        return [entry for entry in found if entry.owner == owner and self._registry.known(entry.session) is None]

    async def _renew(self, persister: Persister) -> None:
        """Keep the leases of sessions whose turns run; idle sessions are free for others when theirs run out."""
        while persister.shared is not None:
            await asyncio.sleep(self._settings.lease_ttl_s / 3)
            running = [session.id for session in self._registry.in_flight()]
            for lost in await asyncio.to_thread(persister.renew, running):
                log.warning("session taken over", extra={"dlite": {"session": lost}})

    async def _collect(self, persister: Persister) -> None:
        """Keep the session files within their limit."""
        store, limit = persister.local, self._settings.disk_bytes
        while isinstance(store, DiskStore) and limit is not None:
            await asyncio.sleep(_COLLECT_S)
            try:
                swept = await asyncio.to_thread(store.gc, max_bytes=limit)
            except StoreUnavailable as error:
                log.warning("session files cannot be collected", extra={"dlite": {"reason": error.message}})
                continue
            if swept.sessions:
                log.info("sessions removed", extra={"dlite": {"sessions": swept.sessions, "bytes": swept.bytes}})

    async def settle(self) -> None:
        """Wait for commits that have begun."""
        if self._commits:
            await asyncio.wait(set(self._commits), timeout=_EXPORT_S)

    async def close(self) -> None:
        """Hand all sessions over and close the stores."""
        for chore in self._chores:
            chore.cancel()
        await asyncio.gather(*self._chores, return_exceptions=True)
        if self.persister is not None:
            await asyncio.to_thread(_hand_over, self.persister)


def _hand_over(persister: Persister) -> None:
    with contextlib.suppress(StoreUnavailable):
        for session in persister.held_sessions():
            persister.release(session)
    persister.close()


def _facts(session: Session, history: History) -> Facts:
    return Facts(
        history,
        acceptance=session.acceptance,
        divergence=session.divergence,
        owner=session.owner,
        name=session.name,
        parent=session.parent,
        created=session.created,
    )


def _added(known: Acceptance, reply: Finished) -> Acceptance:
    rounds = reply.figures.rounds
    advance = sum(row.advance for row in rounds)
    return Acceptance(
        known.rounds + len(rounds),
        known.drafted + sum(row.drafted for row in rounds),
        known.accepted + advance - len(rounds),
        known.emitted + len(reply.generated),
    )
