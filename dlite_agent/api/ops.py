"""What is served and how it is: models, tokens, health, readiness, metrics."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime
from typing import Annotated, Any

from fastapi import APIRouter, Request, Response
from prometheus_client import CONTENT_TYPE_LATEST
from pydantic import WithJsonSchema

from dlite_agent.api import problems, shapes
from dlite_agent.api.fields import Strict, check_model, function_tools, read, service_of
from dlite_agent.api.service import Service
from dlite_agent.decode.engine import Unavailable
from dlite_agent.errors import InvalidRequest, NotFound
from dlite_agent.session.history import History
from dlite_agent.session.messages import normalise

router = APIRouter()


class TokenizeRequest(Strict):
    """Either `prompt` or `messages` (with `tools`)."""

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[dict[str, Any]], WithJsonSchema(shapes.CHAT_MESSAGES)] | None = None
    tools: Annotated[list[dict[str, Any]], WithJsonSchema(shapes.CHAT_TOOLS)] | None = None
    add_special_tokens: bool | None = None


def _card(service: Service, name: str) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "type": "model",
        "display_name": name,
        "created": service.created,
        "created_at": datetime.fromtimestamp(service.created, UTC).isoformat(),
        "owned_by": "dlite-agent",
        "root": service.model,
        "max_model_len": service.context_limit,
        "context_length": service.context_limit,
        "speculation": "dlite" if service.drafter else "none",
    }


@router.get("/v1/models")
async def models(request: Request) -> Response:
    service = service_of(request)
    cards = [_card(service, name) for name in service.names]
    paging = {"has_more": False, "first_id": service.names[0], "last_id": service.names[-1]}
    return problems.Json({"object": "list", "data": cards, **paging})


@router.get("/v1/models/{model:path}")
async def model(request: Request, model: str) -> Response:
    service = service_of(request)
    if model not in service.names:
        raise NotFound(f"The model {model!r} is not served here.", param="model")
    return problems.Json(_card(service, model))


@router.post("/tokenize")
async def tokenize(request: Request) -> Response:
    service = service_of(request)
    fields = await read(request, TokenizeRequest)
    if fields.model is not None:
        check_model(fields.model, service.names)
    if (fields.prompt is None) == (fields.messages is None):
        raise InvalidRequest("Give either prompt or messages.", param="prompt")
    if fields.prompt is not None:
        if fields.tools:
            raise InvalidRequest("tools go with messages.", param="tools")
        special = fields.add_special_tokens is not False
        ids = await asyncio.to_thread(service.tokens_of, fields.prompt, special)
    else:
        messages, tools = normalise(fields.messages or []), function_tools(fields.tools)
        prepared = await asyncio.to_thread(service.render, History(), [], messages, tools.functions, None)
        ids = prepared.ids
    return problems.Json({"tokens": ids, "count": len(ids), "max_model_len": service.context_limit})


@router.get("/health")
async def health() -> Response:
    """The process is alive."""
    return problems.Json({"status": "ok"})


@router.get("/ready")
async def ready(request: Request) -> Response:
    """Whether new requests are taken."""
    service = service_of(request)
    if request.app.state.draining:
        raise Unavailable("the server is shutting down")
    return problems.Json({"status": "ready", "model": service.model})


@router.get("/metrics")
async def metrics(request: Request) -> Response:
    return Response(service_of(request).recorder.metrics.text(), media_type=CONTENT_TYPE_LATEST)
