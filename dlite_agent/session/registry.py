"""Live sessions: whose they are, which one a request belongs to, and one turn at a time in each.

To be used from one event loop. What a session holds here is committed: a turn in flight changes nothing until
`commit`, so undoing it is forgetting it.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from dlite_agent.errors import Conflict, InvalidRequest, NotFound
from dlite_agent.session.history import History
from dlite_agent.session.identity import SessionIndex, SessionName
from dlite_agent.session.messages import JSON, Message, digest
from dlite_agent.session.record import Acceptance, SessionRecord

BINDING = "body session_id"
"""The one convention that binds: other names are given by clients that also run side conversations under them."""

OnConflict = Literal["refuse", "wait"]


@dataclass(eq=False)
class Session:
    """One conversation.

    Attributes:
        name: what its client calls it, or empty.
        parent: id of the session it was forked from, or of the one its client says it belongs to, or empty.
        ids: the canonical ids of all committed turns.
        turns: commits so far; it only grows, history may be cut.
        divergence: why the last turn did not simply continue, or None.
        acceptance: sums over all its rounds.
        version: of its newest stored record that this process knows, None if there is none.
        stored: name of the stored session that its ids begin with: its own, or the one it was forked from; or empty.
        unstored: why what is stored of it is not used, if so.
    """

    id: str
    owner: str
    name: str = ""
    parent: str = ""
    ids: list[int] = field(default_factory=list)
    history: History = field(default_factory=History)
    turns: int = 0
    created: float = field(default_factory=time.time)
    used: float = field(default_factory=time.time)
    divergence: str | None = None
    acceptance: Acceptance = field(default_factory=Acceptance)
    version: tuple[int, int] | None = None
    stored: str = ""
    unstored: str | None = None
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)

    @property
    def key(self) -> str:
        """Its state's key in the engine."""
        return f"{self.owner}/{self.id}"

    @property
    def in_flight(self) -> bool:
        return self.lock.locked()


class Registry:
    """All sessions of a process.

    Args:
        max_sessions: beyond it the longest unused sessions are forgotten.
        on_drop: told of each session that is gone.
    """

    def __init__(self, *, max_sessions: int, on_drop: Callable[[Session], None]) -> None:
        self._max = max_sessions
        self._on_drop = on_drop
        self._sessions: OrderedDict[str, Session] = OrderedDict()
        self._names: dict[tuple[str, str], str] = {}
        self._index = SessionIndex()

    def __len__(self) -> int:
        return len(self._sessions)

    def get(self, owner: str, reference: str) -> Session:
        """A session by id, or by the name its client gave it. Raises NotFound, also for another owner's."""
        session = self._sessions.get(self._names.get((owner, reference), reference))
        if session is None or session.owner != owner:
            raise NotFound(f"There is no session {reference!r}.", param="session_id")
        return session

    def known(self, session_id: str) -> Session | None:
        """A session by id, whoever's it is."""
        return self._sessions.get(session_id)

    def in_flight(self) -> Sequence[Session]:
        """Sessions with a turn in flight."""
        return [session for session in self._sessions.values() if session.in_flight]

    def matched(self, owner: str, messages: Sequence[Message], tools: Sequence[JSON]) -> int:
        """How many leading messages of a request are a session's here."""
        found = self._index.find(owner, messages, tools)
        return 0 if found is None else found.messages

    def adopt(self, record: SessionRecord, ids: Sequence[int]) -> Session:
        """A stored session, from now on known here; or brought up to date, if it was."""
        session = self._sessions.get(record.session)
        if session is None:
            session = Session(record.session, record.owner, record.name, record.parent, created=record.created)
            self._sessions[session.id] = session
        if session.name:
            self._names.setdefault((session.owner, session.name), session.id)
        session.ids, session.history = list(ids), record.history
        session.turns, session.divergence, session.acceptance = record.turn, record.divergence, record.acceptance
        session.version, session.stored = record.version, record.session
        if record.history.turns:
            self._index.put(session.owner, session.id, record.history)
        self._trim()
        return session

    def list(self, owner: str) -> list[Session]:
        """An owner's sessions, the latest used first."""
        return [session for session in reversed(self._sessions.values()) if session.owner == owner]

    def find(self, owner: str, name: SessionName | None, messages: Sequence[Message], tools: Sequence[JSON]) -> Session:
        """The session that a request belongs to, a new one where there is none.

        A name that binds is followed. Any other name is followed unless that session is busy or holds quite another
        conversation; then, and without a name, the conversation itself decides: the session that it continues, or a
        fork where that session has gone on or is busy.
        """
        if name is not None:
            try:
                named = self.get(owner, name.id)
            except NotFound:
                return self._new(owner, name.id, self._parent(owner, name))
            if name.source == BINDING or not (named.in_flight or _foreign(named.history, messages)):
                return named
        found = self._index.find(owner, messages, tools)
        if found is None:
            return self._new(owner)
        session = self._sessions[found.session_id]
        if found.at_tip and not session.in_flight:
            return session
        return self.fork(session, turn=_turns_in(session.history, found.messages))

    def continues(self, owner: str, name: SessionName | None, ids: Sequence[int]) -> Session:
        """The session for a prompt that is given as text or ids: the named one, else one whose ids all begin it."""
        if name is not None:
            try:
                return self.get(owner, name.id)
            except NotFound:
                return self._new(owner, name.id, self._parent(owner, name))
        for session in self.list(owner):
            length = len(session.ids)
            idle = not session.in_flight and not session.history.turns
            if idle and 0 < length < len(ids) and list(ids[:length]) == session.ids:
                return session
        return self._new(owner)

    def _parent(self, owner: str, name: SessionName) -> str:
        try:
            return self.get(owner, name.parent).id if name.parent else ""
        except NotFound:
            return ""

    def _new(self, owner: str, name: str = "", parent: str = "") -> Session:
        session = Session(f"sess_{uuid.uuid4().hex}", owner, name, parent)
        self._sessions[session.id] = session
        if name:
            self._names[owner, name] = session.id
        self._trim()
        return session

    async def hold(self, session: Session, on_conflict: OnConflict) -> None:
        """Take a session for one turn; `release` gives it back.

        Raises:
            Conflict: it has a turn in flight and the request does not want to wait.
        """
        if session.in_flight and on_conflict == "refuse":
            raise Conflict(
                f"Session {session.name or session.id} has a turn in flight: wait for it, fork the session, or send "
                '{"dlite": {"on_conflict": "wait"}}.',
                param="session_id",
            )
        await session.lock.acquire()

    def release(self, session: Session) -> None:
        """Give a session back. One that never had a turn is forgotten."""
        session.lock.release()
        if not session.ids and not session.in_flight:
            self._forget(session)

    def commit(self, session: Session, ids: Sequence[int], history: History, divergence: str | None) -> None:
        """A turn is complete: its ids and history are now the session's."""
        session.ids = list(ids)
        session.history = history
        session.divergence = divergence
        session.turns += 1
        session.used = time.time()
        self._sessions[session.id] = session
        self._sessions.move_to_end(session.id)
        if session.name:
            self._names[session.owner, session.name] = session.id
        if history.turns:
            self._index.put(session.owner, session.id, history)
        self._trim()

    def fork(self, session: Session, *, turn: int | None = None, name: str = "") -> Session:
        """A new session that begins as this one did, up to the end of its first `turn` turns (all by default).

        Raises:
            InvalidRequest: it has no such turn.
            Conflict: the name is taken.
        """
        turns = session.history.turns
        if turn is not None and not 0 <= turn <= len(turns):
            raise InvalidRequest(f"The session has {len(turns)} turns; turn must be 0..{len(turns)}.", param="turn")
        if name and (session.owner, name) in self._names:
            raise Conflict(f"There is a session named {name!r} already.", param="session_id")
        copy = self._new(session.owner, name, session.id)
        copy.stored = session.stored
        if turn is None or turn == len(turns):
            copy.ids, copy.history = list(session.ids), session.history
        else:
            copy.history = History(session.history.tools, turns[:turn]) if turn else History()
            copy.ids = session.ids[: turns[turn - 1].end] if turn else []
        if copy.history.turns:
            self._index.put(copy.owner, copy.id, copy.history)
        return copy

    def delete(self, session: Session) -> None:
        """Forget a session. Raises Conflict while it has a turn in flight."""
        if session.in_flight:
            raise Conflict("The session has a turn in flight: cancel or await it first.", param="session_id")
        self._forget(session)

    def _forget(self, session: Session) -> None:
        if self._sessions.pop(session.id, None) is None:
            return
        if self._names.get((session.owner, session.name)) == session.id:
            del self._names[session.owner, session.name]
        self._index.drop(session.id)
        self._on_drop(session)

    def _trim(self) -> None:
        while len(self._sessions) > self._max:
            idle = next((session for session in self._sessions.values() if not session.in_flight), None)
            if idle is None or idle is next(reversed(self._sessions.values())):
                return
            self._forget(idle)


def _turns_in(history: History, messages: int) -> int:
    """How many leading turns hold just so many messages."""
    count, seen = 0, 0
    for turn in history.turns:
        if seen >= messages:
            break
        count, seen = count + 1, seen + len(turn.digests)
    return count


def _foreign(history: History, messages: Sequence[Message]) -> bool:
    """Whether a request is about something else: its first user message is not the stored one."""
    if not history.turns:
        return False
    first = history.turns[0]
    stored = next((item for role, item in zip(first.roles, first.digests, strict=True) if role == "user"), None)
    given = next((digest(message) for message in messages if message.role == "user"), None)
    return stored != given
