"""Server-sent events, and what happens when the client goes away, streamed or not."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from dlite_agent.api.problems import Json, encode
from dlite_agent.api.turns import Answer, Run, Waiting
from dlite_agent.decode.engine import Cancelled
from dlite_agent.trace.events import KnownEvent

T = TypeVar("T")


def frame(data: Any, event: str | None = None) -> bytes:
    """One event; `data` is JSON, or text to be sent as it is."""
    head = f"event: {event}\n".encode() if event else b""
    return head + b"data: " + (data.encode() if isinstance(data, str) else encode(data)) + b"\n\n"


async def follow(
    mailbox: asyncio.Queue[KnownEvent | None], pause: float, frame_of: Callable[[KnownEvent], bytes]
) -> AsyncIterator[bytes]:
    """Frames of what arrives in a mailbox, and a comment after each `pause` seconds without any; None ends it."""
    while True:
        try:
            async with asyncio.timeout(pause):
                coming = await mailbox.get()
        except TimeoutError:
            yield b": idle\n\n"
            continue
        if coming is None:
            return
        yield frame_of(coming)


def comment(waiting: Waiting) -> bytes:
    """A keep-alive comment that tells how far the prompt is."""
    if waiting.done == waiting.total:
        return b": decoding\n\n"
    return f": prefill {waiting.done}/{waiting.total}\n\n".encode()


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class EventStream(Response):
    """Sends frames as they come; when the client goes away, or all is sent, `close` is called once."""

    media_type = "text/event-stream"

    def __init__(self, frames: AsyncIterator[bytes], close: Callable[[], None], headers: dict[str, str]) -> None:
        super().__init__(headers={"cache-control": "no-store", "x-accel-buffering": "no", **headers})
        del self.headers["content-length"]
        self._frames = frames
        self._close = close

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            await _first(self._send(send), _gone(receive))
        finally:
            self._close()

    async def _send(self, send: Send) -> bool:
        async for data in self._frames:
            await send({"type": "http.response.body", "body": data, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})
        return True


async def respond(
    request: Request,
    run: Run,
    frames: AsyncIterator[bytes] | None,
    whole: Callable[[list[Answer]], dict[str, Any]],
    **headers: str,
) -> Response:
    """The response to a run, closed afterwards: a stream of `frames`, or without them what `whole` makes of it.

    Raises:
        DliteError: the run failed before it could be answered; in a stream that is an event.
    """
    sent = {"x-session-id": run.session.id} | headers
    if frames is not None:
        return EventStream(frames, run.close, sent)
    return Json(whole(await _collect(request, run, run.answers())), headers=sent)


async def _collect(request: Request, run: Run, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work` on a run, closed afterwards. What becomes of it, the run itself records.

    Raises:
        Cancelled: the client went away first; the run is undone.
    """
    request.state.recorded = True
    try:
        result = await _first(work, _gone(request.receive))
    finally:
        run.close()
    if result is None:
        raise Cancelled("the client went away")
    return result


async def _first(work: Coroutine[Any, Any, T], gone: Coroutine[Any, Any, None]) -> T | None:
    """The result of `work`, or None if `gone` was first; the other one is cancelled and awaited."""
    task, watcher = asyncio.ensure_future(work), asyncio.ensure_future(gone)
    try:
        await asyncio.wait({task, watcher}, return_when=asyncio.FIRST_COMPLETED)
        return task.result() if task.done() else None
    finally:
        for one in (task, watcher):
            one.cancel()
        await asyncio.gather(task, watcher, return_exceptions=True)
