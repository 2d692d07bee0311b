"""Responses kept for `GET /v1/responses/{id}` and `previous_response_id`."""

from __future__ import annotations

import json
import sqlite3
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from dlite_agent.errors import NotFound
from dlite_agent.session.messages import Message, ToolCall
from dlite_agent.session.store.base import StoreUnavailable

FILE = "responses.sqlite"


@dataclass(frozen=True)
class Stored:
    """A response that can be fetched and continued.

    Attributes:
        messages: the conversation with its answer, without instructions: those hold for one request.
        session, turns: the session, and how many turns it had when this was its latest.
    """

    owner: str
    body: dict[str, Any]
    messages: tuple[Message, ...]
    session: str
    turns: int


class ResponseStore:
    """The latest stored responses, by id.

    Args:
        folder: where they outlive the process, a folder that this process alone writes; None keeps them in memory.

    Raises:
        StoreUnavailable: the file cannot be used.
    """

    def __init__(self, limit: int, folder: Path | None = None) -> None:
        self._limit = limit
        self._path = ":memory:" if folder is None else folder / FILE
        with self._translated():
            self._table = sqlite3.connect(self._path, check_same_thread=False, isolation_level=None)
            self._table.execute("PRAGMA journal_mode=WAL")
            self._table.execute("PRAGMA synchronous=NORMAL")
            self._table.execute(
                "CREATE TABLE IF NOT EXISTS responses (number INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT UNIQUE, "
                "owner TEXT, session TEXT, turns INTEGER, body BLOB, messages BLOB)"
            )
            self._table.execute("CREATE INDEX IF NOT EXISTS by_session ON responses (session)")

    @contextmanager
    def _translated(self) -> Iterator[None]:
        try:
            yield
        except sqlite3.Error as error:
            raise StoreUnavailable(
                f"Stored responses ({self._path}) cannot be used: {error}. Make room, or move the file away: sessions "
                "do not need it.",
                param="store",
            ) from error

    def put(self, stored: Stored) -> None:
        """Keep a response, and forget the oldest beyond the limit. Raises StoreUnavailable."""
        messages = _pack([asdict(message) for message in stored.messages])
        row = (stored.body["id"], stored.owner, stored.session, stored.turns, _pack(stored.body), messages)
        with self._translated():
            insert = "INSERT OR REPLACE INTO responses (id, owner, session, turns, body, messages) VALUES (?,?,?,?,?,?)"
            number = self._table.execute(insert, row).lastrowid or 0
            self._table.execute("DELETE FROM responses WHERE number <= ?", (number - self._limit,))

    def get(self, owner: str, response_id: str, param: str) -> Stored:
        """Raises NotFound, also for another owner's, and StoreUnavailable."""
        row = None
        if response_id.isprintable():  # SQLite takes no lone surrogates.
            with self._translated():
                select = "SELECT body, messages, session, turns FROM responses WHERE id=? AND owner=?"
                row = self._table.execute(select, (response_id, owner)).fetchone()
        if row is None:
            raise NotFound(
                f"There is no stored response {response_id!r} here: send the conversation's items in its place.",
                param=param,
            )
        body, messages, session, turns = row
        return Stored(owner, _unpack(body), tuple(map(_message, _unpack(messages))), session, turns)

    def drop(self, response_id: str) -> None:
        """Forget one. Raises StoreUnavailable."""
        with self._translated():
            self._table.execute("DELETE FROM responses WHERE id=?", (response_id,))

    def drop_session(self, session: str) -> None:
        """Forget all of a session. Raises StoreUnavailable."""
        with self._translated():
            self._table.execute("DELETE FROM responses WHERE session=?", (session,))

    def close(self) -> None:
        self._table.close()


def _pack(value: Any) -> bytes:
    return zlib.compress(json.dumps(value, separators=(",", ":")).encode())


def _unpack(data: bytes) -> Any:
    return json.loads(zlib.decompress(data))


def _message(value: dict[str, Any]) -> Message:
    return Message(**value | {"tool_calls": tuple(ToolCall(**call) for call in value["tool_calls"])})
