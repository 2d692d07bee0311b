"""The app's OpenAPI document: bodies are read by our own hand, so their schemas are added here."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel

from dlite_agent.agent.run_spec import RunSpec
from dlite_agent.api.chat import ChatRequest
from dlite_agent.api.completions import CompletionRequest
from dlite_agent.api.messages import CountRequest, MessagesRequest
from dlite_agent.api.ops import TokenizeRequest
from dlite_agent.api.problems import envelope_of
from dlite_agent.api.responses import ResponsesRequest
from dlite_agent.api.runs import FollowUp
from dlite_agent.api.security import OPEN_PATHS
from dlite_agent.api.service import Service
from dlite_agent.api.sessions import ForkRequest
from dlite_agent.api.shapes import ANTHROPIC_ERROR, OPENAI_ERROR, RESPONSES, SERVER_SENT

BODIES: dict[str, type[BaseModel]] = {
    "/v1/chat/completions": ChatRequest,
    "/v1/completions": CompletionRequest,
    "/v1/responses": ResponsesRequest,
    "/v1/messages": MessagesRequest,
    "/v1/messages/count_tokens": CountRequest,
    "/v1/sessions/{session_id}/fork": ForkRequest,
    "/v1/agents/runs": RunSpec,
    "/v1/agents/runs/{run_id}/messages": FollowUp,
    "/tokenize": TokenizeRequest,
}

STREAMS = ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages")


def describe(app: FastAPI) -> None:
    """Give the app an `openapi` that knows the bodies, the streams, the errors, the served names and the keys."""

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            app.openapi_schema = _document(app)
        return app.openapi_schema

    app.openapi = openapi  # type: ignore[method-assign]


def _document(app: FastAPI) -> dict[str, Any]:
    document = get_openapi(title=app.title, version=app.version, description=app.description, routes=app.routes)
    schemas: dict[str, Any] = document.setdefault("components", {}).setdefault("schemas", {})
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            operation["responses"].pop("422", None)
            operation["responses"] |= {"4XX": _error(path), "5XX": _error(path)}
            ok = operation["responses"].get("200") or operation["responses"]["201"]
            ok.setdefault("content", {})["application/json"] = {"schema": RESPONSES.get((method, path), {})}
            if path in BODIES and method == "post":
                operation["requestBody"] = _body(BODIES[path], schemas, required="fork" not in path)
            if path in STREAMS and method == "post":
                ok["content"]["text/event-stream"] = {"schema": SERVER_SENT}
    document["paths"]["/metrics"]["get"]["responses"]["200"]["content"] = {"text/plain": {"schema": {"type": "string"}}}
    for path in ("/v1/sessions/{session_id}/events", "/v1/agents/runs/{run_id}/events"):
        events = document["paths"][path]["get"]["responses"]["200"]
        events["content"] = {"text/event-stream": {"schema": SERVER_SENT}}
    _link(document["paths"])
    service: Service = app.state.service
    for schema in schemas.values():
        if (model := schema.get("properties", {}).get("model")) is not None:
            model["enum"] = [*service.names, *([None] if "anyOf" in model else [])]
    if service.settings.server.api_keys:
        document["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
        document["security"] = [{"key": []}]
        for path in document["paths"].keys() & set(OPEN_PATHS):
            document["paths"][path]["get"]["security"] = []
    return document


def _link(paths: dict[str, Any]) -> None:
    """Say where the ids come from that other routes take."""
    response, session = "/v1/responses/{response_id}", "/v1/sessions/{session_id}"
    for source, found, parameter, targets in (
        ("/v1/responses", "id", "response_id", (("get", response), ("delete", response))),
        (
            "/v1/chat/completions",
            "usage/dlite/session_id",
            "session_id",
            (("get", session), ("delete", session), ("post", f"{session}/fork")),
        ),
    ):
        paths[source]["post"]["responses"]["200"]["links"] = {
            paths[path][method]["operationId"]: {
                "operationId": paths[path][method]["operationId"],
                "parameters": {parameter: f"$response.body#/{found}"},
            }
            for method, path in targets
        }


def _error(path: str) -> dict[str, Any]:
    schema = ANTHROPIC_ERROR if envelope_of(path) == "anthropic" else OPENAI_ERROR
    return {"description": "An error, in the API's own envelope.", "content": {"application/json": {"schema": schema}}}


def _body(model: type[BaseModel], schemas: dict[str, Any], *, required: bool) -> dict[str, Any]:
    schema = model.model_json_schema(ref_template="#/components/schemas/{model}")
    schemas |= schema.pop("$defs", {})
    schemas[model.__name__] = schema
    reference = {"$ref": f"#/components/schemas/{model.__name__}"}
    return {"required": required, "content": {"application/json": {"schema": reference}}}
