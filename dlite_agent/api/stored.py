"""Responses kept for `GET /v1/responses/{id}` and `previous_response_id`."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

from dlite_agent.errors import NotFound
from dlite_agent.session.messages import Message


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
    """The latest stored responses, by id."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._stored: OrderedDict[str, Stored] = OrderedDict()

    def put(self, stored: Stored) -> None:
        self._stored[stored.body["id"]] = stored
        if len(self._stored) > self._limit:
            self._stored.popitem(last=False)

    def get(self, owner: str, response_id: str, param: str) -> Stored:
        """Raises NotFound, also for another owner's."""
        stored = self._stored.get(response_id)
        if stored is None or stored.owner != owner:
            raise NotFound(f"There is no stored response {response_id!r}.", param=param)
        return stored

    def drop(self, response_id: str) -> None:
        self._stored.pop(response_id, None)
