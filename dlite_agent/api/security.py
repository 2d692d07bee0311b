"""The door: who may come in, from where, and with how much. One ASGI middleware, before anything else."""

from __future__ import annotations

import hashlib
import hmac
import re
import uuid
from collections.abc import Iterable
from typing import Any
from urllib.parse import urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from dlite_agent.api import problems
from dlite_agent.config import ServerSettings, is_loopback
from dlite_agent.errors import DliteError

OPEN_PATHS = ("/health", "/ready", "/viewer")
"""Paths that need no key, and so does all below /viewer/: they tell nothing of what this server holds."""

_REQUEST_ID = re.compile(r"[A-Za-z0-9._-]{1,128}")


class Gate:
    """Checks host, origin, key, media type and sizes, and names each request.

    The request's id and its caller's owner are in the scope's state as `request_id` and `owner`.
    """

    def __init__(self, app: ASGIApp, settings: ServerSettings) -> None:
        self._app = app
        self._settings = settings
        self._keys = [key.encode() for key in settings.api_keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        given = headers.get("x-request-id", "")
        request_id = given if _REQUEST_ID.fullmatch(given) else f"req_{uuid.uuid4().hex}"
        state = scope.setdefault("state", {})
        state["request_id"] = request_id

        async def named(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)["x-request-id"] = request_id
            await send(message)

        try:
            self._check_place(headers)
            state["owner"] = self._owner(scope["path"], scope["method"], headers)
            self._check_sizes(scope, headers)
        except DliteError as error:
            answer = problems.response(error, problems.envelope_of(scope["path"]), request_id)
            await answer(scope, receive, named)
            return
        await self._app(scope, _Limited(receive, self._settings.max_body_bytes), named)

    def _check_place(self, headers: Headers) -> None:
        """Host and Origin: a web page, or a name rebound to this address, must not reach a server without keys."""
        settings = self._settings
        host = _name(headers.get("host", ""))
        checked = bool(settings.allowed_hosts) or not self._keys
        if checked and not (is_loopback(host) or host in settings.allowed_hosts):
            raise problems.Forbidden("This host name is not served here; add it with allowed_hosts.", param="host")
        origin = headers.get("origin")
        if origin is None or origin in settings.allowed_origins:
            return
        parts = urlsplit(origin)
        own = parts.scheme in ("http", "https") and parts.netloc.lower() == headers.get("host", "").lower()
        if not own:
            raise problems.Forbidden("Web pages of this origin may not call; see allowed_origins.", param="origin")

    def _owner(self, path: str, method: str, headers: Headers) -> str:
        """Digest of the caller's key; empty where no keys are set. Every key is compared, in constant time each."""
        if not self._keys or path in OPEN_PATHS or path.startswith("/viewer/") or method == "OPTIONS":
            return ""
        scheme, _, token = headers.get("authorization", "").partition(" ")
        given = (token.strip() if scheme.lower() == "bearer" else headers.get("x-api-key", "")).encode()
        matches = [hmac.compare_digest(given, key) for key in self._keys]
        if not any(matches):
            raise problems.Unauthorized("Send a valid API key as `Authorization: Bearer KEY` or `x-api-key: KEY`.")
        return hashlib.sha256(given).hexdigest()[:16]

    def _check_sizes(self, scope: Scope, headers: Headers) -> None:
        limit = self._settings.max_header_bytes
        if sum(len(name) + len(value) for name, value in scope["headers"]) > limit:
            raise problems.HeadersTooLarge(f"The headers are larger than {limit} bytes.")
        length = headers.get("content-length", "0")
        if length.isdigit() and int(length) > self._settings.max_body_bytes:
            raise problems.TooLarge(f"The body is larger than {self._settings.max_body_bytes} bytes.")
        if scope["method"] == "POST" and (length != "0" or "transfer-encoding" in headers):
            media = headers.get("content-type", "").partition(";")[0].strip().lower()
            if media != "application/json":
                raise problems.WrongMediaType("Send JSON with `Content-Type: application/json`.", param="content-type")


class _Limited:
    """A receive function that refuses a body beyond a limit, whatever its length header said."""

    def __init__(self, receive: Receive, limit: int) -> None:
        self._receive = receive
        self._limit = limit
        self._seen = 0

    async def __call__(self) -> Message:
        message = await self._receive()
        if message["type"] == "http.request":
            self._seen += len(message.get("body", b""))
            if self._seen > self._limit:
                raise problems.TooLarge(f"The body is larger than {self._limit} bytes.")
        return message


def _name(host: str) -> str:
    """The name in a Host header, without port and brackets."""
    return (urlsplit(f"//{host}").hostname or "") if _parses(host) else ""


def _parses(host: str) -> bool:
    try:
        urlsplit(f"//{host}").hostname  # noqa: B018  # malformed brackets raise
    except ValueError:
        return False
    return True


def middleware_options(origins: Iterable[str]) -> dict[str, Any]:
    """Options of starlette's CORS middleware for the allowed origins."""
    return {"allow_origins": list(origins), "allow_methods": ["GET", "POST", "DELETE"], "allow_headers": ["*"]}
