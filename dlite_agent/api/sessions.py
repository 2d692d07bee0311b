"""/v1/sessions: list, get, fork, delete, and a session's events live."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from typing import Annotated, Any

from fastapi import APIRouter, Query, Request, Response
from pydantic import Field

from dlite_agent.api import problems
from dlite_agent.api.fields import Name, Strict, caller_of, read, service_of
from dlite_agent.api.service import Service
from dlite_agent.api.stream import EventStream, follow, frame
from dlite_agent.session.registry import Session
from dlite_agent.session.store.base import Entry
from dlite_agent.trace.events import KnownEvent, dump

router = APIRouter()


class ForkRequest(Strict):
    """turn: keep only so many leading turns; session_id: a name for the fork."""

    turn: Annotated[int, Field(ge=0, le=1 << 31)] | None = None
    session_id: Name | None = None


def _card(service: Service, session: Session) -> dict[str, Any]:
    return {
        "id": session.id,
        "object": "session",
        "name": session.name or None,
        "parent": session.parent or None,
        "created": int(session.created),
        "last_used": int(session.used),
        "turns": session.turns,
        "tokens": len(session.ids),
        "device_tokens": service.engine.held(session.key),
        "host_tokens": service.tiers.host_tokens(session.key),
        "stored": session.version is not None,
        "in_flight": session.in_flight,
        "last_divergence": session.divergence,
    }


def _stored_card(entry: Entry) -> dict[str, Any]:
    """A session of an earlier run that nobody has asked for yet."""
    return {
        "id": entry.session,
        "object": "session",
        "name": entry.name or None,
        "last_used": int(time.time() - entry.idle_s),
        "turns": entry.turn,
        "tokens": entry.tokens,
        "device_tokens": 0,
        "host_tokens": 0,
        "stored": True,
        "in_flight": False,
    }


@router.get("/v1/sessions")
async def list_sessions(request: Request) -> Response:
    """The caller's sessions, the latest used first."""
    service = service_of(request)
    owner = caller_of(request).owner
    stored = await service.keeper.entries(owner)
    cards = [_card(service, session) for session in service.registry.list(owner)]
    return problems.Json({"object": "list", "data": cards + [_stored_card(entry) for entry in stored]})


@router.post("/v1/sessions/{session_id:path}/fork", status_code=201)
async def fork_session(request: Request, session_id: str) -> Response:
    """A new session with the same past; the KV they share is copied when the fork is first used."""
    service = service_of(request)
    fields = await read(request, ForkRequest) if await request.body() else ForkRequest()
    session = await service.session(caller_of(request).owner, session_id)
    fork = await service.fork(session, turn=fields.turn, name=fields.session_id or "")
    return problems.Json(_card(service, fork), status_code=201)


@router.get("/v1/sessions/{session_id:path}/events")
async def session_events(
    request: Request,
    session_id: str,
    follow: Annotated[bool, Query(description="Stay, and send coming events too.")] = True,
) -> Response:
    """The session's latest trace events as server-sent events."""
    service = service_of(request)
    recorder = service.recorder
    session = await service.session(caller_of(request).owner, session_id)
    past = recorder.events(session)
    mailbox = recorder.listen(session) if follow else None

    def leave() -> None:
        if mailbox is not None:
            recorder.leave(session, mailbox)

    frames = _frames(past, mailbox, service.settings.server.keepalive_seconds)
    return EventStream(frames, leave, {})


async def _frames(
    past: list[KnownEvent], mailbox: asyncio.Queue[KnownEvent | None] | None, pause: float
) -> AsyncIterator[bytes]:
    for event in past:
        yield _frame(event)
    if mailbox is not None:
        async for part in follow(mailbox, pause, _frame):
            yield part


def _frame(event: KnownEvent) -> bytes:
    return frame(dump(event), event.kind)


@router.get("/v1/sessions/{session_id:path}")
async def get_session(request: Request, session_id: str) -> Response:
    """One session, by its id or its name."""
    service = service_of(request)
    return problems.Json(_card(service, await service.session(caller_of(request).owner, session_id)))


@router.delete("/v1/sessions/{session_id:path}")
async def delete_session(request: Request, session_id: str) -> Response:
    """Forget a session, with all its memory."""
    service = service_of(request)
    session = await service.session(caller_of(request).owner, session_id)
    await service.delete(session)
    return problems.Json({"id": session.id, "object": "session.deleted", "deleted": True})
