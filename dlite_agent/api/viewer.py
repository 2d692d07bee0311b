"""The viewer at /viewer: its page, and the JSON that the page reads. The page needs no key, the JSON does."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator
from functools import cache
from pathlib import Path
from typing import Annotated, Any

from fastapi import APIRouter, Query, Request, Response
from pydantic import Field

from dlite_agent.api import problems
from dlite_agent.api.fields import Strict, caller_of, read, service_of
from dlite_agent.api.runs import runs_of
from dlite_agent.api.stream import EventStream, follow, frame
from dlite_agent.api.viewer_library import Library
from dlite_agent.api.viewer_view import MAX_PIECE, content, overview, parts, piece, rounds_between
from dlite_agent.errors import InvalidRequest, NotFound

router = APIRouter(include_in_schema=False)
"""Not in the API document: these routes belong to the page and change with it."""

PAGES = Path(__file__).parent.parent / "viewer"
_MEDIA = {
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".svg": "image/svg+xml",
}
HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    "require-trusted-types-for 'script'; trusted-types 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "permissions-policy": "camera=(), geolocation=(), microphone=()",
    "cache-control": "no-cache",
}
"""No inline script or style, no other origin, and no string may become markup or code (trusted types)."""

Ref = Annotated[str, Query(min_length=1, max_length=300)]
Index = Annotated[int, Query(ge=0, le=1 << 40)]
Moment = Annotated[float, Query(ge=-1e12, le=1e12, allow_inf_nan=False)]


class FileRequest(Strict):
    """A session file: its name and its text."""

    name: Annotated[str, Field(max_length=300)]
    text: str


@cache
def _assets() -> dict[str, tuple[bytes, str, str]]:
    """Every file of the page by name: bytes, media type, entity tag. Only these names are ever served."""
    found = {}
    for path in sorted(PAGES.iterdir()):
        if path.suffix in _MEDIA:
            data = path.read_bytes()
            found[path.name] = (data, _MEDIA[path.suffix], f'"{hashlib.sha256(data).hexdigest()[:32]}"')
    return found


@router.get("/viewer")
@router.get("/viewer/")
async def page(request: Request) -> Response:
    """The page. Its files are found relative to `/viewer/`, so the bare path is sent there."""
    if not request.url.path.endswith("/"):
        return Response(status_code=307, headers={"location": "viewer/", **HEADERS})
    return await asset(request, "index.html")


@router.get("/viewer/{name}")
async def asset(request: Request, name: str) -> Response:
    """One file of the page."""
    if name not in _assets():
        raise NotFound(f"There is nothing at /viewer/{name[:100]}.")
    data, media, tag = _assets()[name]
    headers = HEADERS | {"etag": tag}
    if request.headers.get("if-none-match") == tag:
        return Response(status_code=304, headers=headers)
    return Response(data, media_type=media, headers=headers)


def _library(request: Request) -> Library:
    library: Library = request.app.state.library
    return library


@router.get("/v1/viewer/sessions")
async def list_sessions(
    request: Request, offset: Index = 0, limit: Annotated[int, Query(ge=1, le=100)] = 40
) -> Response:
    """A page of the sessions to show, with their sparklines."""
    return problems.Json(await _library(request).cards(caller_of(request).owner, offset, limit))


@router.get("/v1/viewer/session")
async def get_session(request: Request, ref: Ref, from_turn: Index = 0) -> Response:
    """A session's figures and a page of its turns."""
    library = _library(request)
    owner = caller_of(request).owner
    shown = await library.open(owner, ref)
    view = await asyncio.to_thread(overview, shown, from_turn)
    view |= {"ref": ref, "in_flight": library.in_flight(owner, ref), "age": library.age(owner, ref, shown)}
    return problems.Json(view)


@router.get("/v1/viewer/rounds")
async def get_rounds(request: Request, ref: Ref, start: Moment, end: Moment, offset: Index = 0) -> Response:
    """The rounds of a stretch of time, a page at a time."""
    shown = await _library(request).open(caller_of(request).owner, ref)
    return problems.Json(await asyncio.to_thread(rounds_between, shown, start, end, offset))


@router.get("/v1/viewer/content")
async def get_content(
    request: Request,
    ref: Ref,
    turn: Index,
    part: Annotated[int | None, Query(ge=0, le=1 << 20)] = None,
    offset: Index = 0,
    limit: Annotated[int, Query(ge=1, le=MAX_PIECE)] = MAX_PIECE,
) -> Response:
    """The texts of a turn, the beginning of each; with `part` a piece of one of them."""
    shown = await _library(request).open(caller_of(request).owner, ref)
    decode = service_of(request).tokenizer.decode if ref.startswith("live~") else None
    found = await asyncio.to_thread(parts, shown, turn, decode)
    return problems.Json(content(found) if part is None else piece(found, part, offset, limit))


@router.post("/v1/viewer/files")
async def add_file(request: Request) -> Response:
    """Look at a session file of any importable format; it is kept in memory for a while."""
    fields = await read(request, FileRequest)
    if not fields.text.strip():
        raise InvalidRequest("The file is empty.", param="text")
    return problems.Json(await _library(request).add(caller_of(request).owner, fields.name, fields.text))


@router.get("/v1/viewer/live")
async def live(request: Request, ref: Ref) -> Response:
    """A line for each thing that happens in a session or run from now on: what it is, without content."""
    service, owner = service_of(request), caller_of(request).owner
    pause = service.settings.server.keepalive_seconds
    kind, _, rest = ref.partition("~")
    if kind == "run":
        run = runs_of(request).get(owner, rest)
        watcher = run.log.watch()
        return EventStream(_notices(watcher, pause), lambda: run.log.leave(watcher), {})
    recorder = service.recorder
    session = await service.session(owner, rest)
    mailbox = recorder.listen(session)
    return EventStream(_notices(mailbox, pause), lambda: recorder.leave(session, mailbox), {})


async def _notices(mailbox: asyncio.Queue[Any], pause: float) -> AsyncIterator[bytes]:
    yield b": open\n\n"
    async for part in follow(mailbox, pause, lambda event: frame({"kind": event.kind}, event.kind)):
        yield part
