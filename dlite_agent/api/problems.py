"""Errors on the wire: each API's own envelope, and the few errors that only HTTP knows."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Literal

from pydantic import ValidationError
from starlette.responses import Response

from dlite_agent.decode.scheduler import Overloaded
from dlite_agent.errors import DliteError, InvalidRequest

Envelope = Literal["openai", "anthropic"]


class Unauthorized(DliteError):
    """No valid API key."""

    status = 401
    code = "invalid_api_key"


class Forbidden(DliteError):
    """The request comes from where none is allowed to come from."""

    status = 403
    code = "forbidden"


class MethodNotAllowed(DliteError):
    """The path exists, the method does not."""

    status = 405
    code = "method_not_allowed"


class TooLarge(DliteError):
    """The body is larger than the server takes."""

    status = 413
    code = "request_too_large"


class WrongMediaType(DliteError):
    """The body is not JSON."""

    status = 415
    code = "unsupported_media_type"


class HeadersTooLarge(DliteError):
    """The headers are larger than the server takes."""

    status = 431
    code = "headers_too_large"


_OPENAI_TYPES = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 429: "rate_limit_error"}
_ANTHROPIC_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    409: "conflict_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


class Json(Response):
    """A JSON response that can carry half of a surrogate pair, which clients may send and get back."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        return encode(content)


def encode(content: Any) -> bytes:
    """JSON text in UTF-8; a lone surrogate becomes its JSON escape."""
    text = json.dumps(content, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return text.encode("utf-8", "backslashreplace")


def envelope_of(path: str) -> Envelope:
    """The shape in which a path's clients expect errors."""
    return "anthropic" if path.startswith("/v1/messages") else "openai"


def body(error: DliteError, envelope: Envelope, request_id: str) -> dict[str, Any]:
    """An error in an API's envelope."""
    if envelope == "anthropic":
        kind = _ANTHROPIC_TYPES.get(error.status, "api_error" if error.status >= 500 else "invalid_request_error")
        message = error.message
        if error.code == "context_length_exceeded":
            message = f"prompt is too long: {message}"
        detail = {"type": kind, "message": message, "code": error.code, "param": error.param}
        return {"type": "error", "error": detail, "request_id": request_id}
    kind = _OPENAI_TYPES.get(error.status, "server_error" if error.status >= 500 else "invalid_request_error")
    return {"error": {"message": error.message, "type": kind, "param": error.param, "code": error.code}}


def response(error: DliteError, envelope: Envelope, request_id: str) -> Response:
    """An error as a response."""
    headers: dict[str, str] = {}
    if isinstance(error, Overloaded):
        headers["retry-after"] = str(error.retry_after)
    elif error.status == 503:
        headers["retry-after"] = "5"
    elif error.status == 401:
        headers["www-authenticate"] = "Bearer"
    return Json(body(error, envelope, request_id), status_code=error.status, headers=headers)


def from_validation(problems: list[Mapping[str, Any]]) -> InvalidRequest:
    """Pydantic's first complaint as an error that names the field."""
    first = problems[0]
    where = ".".join(str(part) for part in first["loc"] if part != "body")
    if first["type"] == "extra_forbidden":
        return InvalidRequest(f"{where} is not supported by this server; leave it out.", param=where)
    if first["type"] == "missing":
        return InvalidRequest(f"{where or 'The body'} is required.", param=where or None)
    if first["type"] == "json_invalid":
        return InvalidRequest("The body is not valid JSON.")
    return InvalidRequest(f"{where or 'The body'}: {first['msg']}.", param=where or None)


def from_pydantic(error: ValidationError) -> InvalidRequest:
    """As `from_validation`."""
    return from_validation(list(error.errors(include_url=False, include_context=False)))
