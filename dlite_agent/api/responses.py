"""/v1/responses: OpenAI's Responses API, with stored responses that `previous_response_id` continues."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Request, Response
from pydantic import Field, WithJsonSchema

from dlite_agent.api import problems, shapes
from dlite_agent.api.chat import answer_schema
from dlite_agent.api.fields import (
    Int,
    Off,
    Strict,
    TokenCount,
    TurnRequest,
    begin,
    caller_of,
    read_served,
    service_of,
)
from dlite_agent.api.items import flat_tools, nested_choice, openai_messages, output_items
from dlite_agent.api.output import Output
from dlite_agent.api.service import Ask, Service
from dlite_agent.api.stored import Stored
from dlite_agent.api.stream import comment, respond
from dlite_agent.api.turns import Answer, Chunk, Run, Waiting
from dlite_agent.api.usage import dlite_block
from dlite_agent.errors import DliteError, InvalidRequest, NotFound
from dlite_agent.session.messages import Message, normalise

router = APIRouter()


class TextOptions(Strict):
    format: Annotated[dict[str, Any], WithJsonSchema(shapes.FLAT_FORMAT)] | None = None
    verbosity: Literal["low", "medium", "high"] | None = None


class ReasoningOptions(Strict):
    effort: Literal["none", "minimal", "low", "medium", "high", "xhigh"] | None = None
    summary: Literal["auto", "concise", "detailed"] | None = None


class ResponsesStreamOptions(Strict):
    include_obfuscation: Off | None = None


class ResponsesRequest(TurnRequest):
    """A responses request; fields that are not listed are refused."""

    input: Annotated[str | list[Any], WithJsonSchema(shapes.INPUT)]
    instructions: str | None = None
    previous_response_id: str | None = None
    max_output_tokens: TokenCount | None = None
    tools: Annotated[list[dict[str, Any]], WithJsonSchema(shapes.FLAT_TOOLS)] | None = None
    tool_choice: Annotated[Any, WithJsonSchema(shapes.FLAT_CHOICE)] = None
    parallel_tool_calls: bool | None = None
    text: TextOptions | None = None
    reasoning: ReasoningOptions | None = None
    store: bool | None = None
    stream_options: ResponsesStreamOptions | None = None
    background: Off | None = None
    truncation: Literal["disabled"] | None = None
    include: list[str] | None = None
    metadata: dict[str, Annotated[str, Field(max_length=512)]] | None = None
    max_tool_calls: Annotated[Int, Field(ge=1)] | None = None
    user: str | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_retention: str | None = None
    client_metadata: dict[str, Any] | None = None


_NO_EFFECT = ("include", "max_tool_calls", "service_tier", "safety_identifier", "prompt_cache_retention")


async def _session_of(service: Service, stored: Stored) -> str | None:
    """The session in which a stored response is continued: its own, or a fork if that one has gone on or is busy."""
    try:
        session = await service.session(stored.owner, stored.session)
    except NotFound:
        return None
    if session.turns == stored.turns and not session.in_flight:
        return session.id
    return (await service.fork(session, turn=min(stored.turns, len(session.history.turns)), name="")).id


async def _ask(request: Request, service: Service, fields: ResponsesRequest) -> tuple[Ask, list[Message]]:
    """The request in common terms, and its conversation without instructions. Raises DliteError."""
    said = normalise(openai_messages(fields.input))
    ask = begin("responses", request, fields, _NO_EFFECT)
    name, session = ask.name, None
    if fields.previous_response_id is not None:
        stored = service.responses.get(caller_of(request).owner, fields.previous_response_id, "previous_response_id")
        said = [*stored.messages, *said]
        name, session = None, await _session_of(service, stored)
    instructions = [Message("system", fields.instructions)] if fields.instructions else []
    if not said and not instructions:
        raise InvalidRequest("The input is empty.", param="input")
    tools = flat_tools(fields.tools)
    effort = fields.reasoning.effort if fields.reasoning else None
    ask = replace(
        ask,
        messages=instructions + said,
        tools=tools.functions,
        tool_choice=nested_choice(fields.tool_choice),
        parallel=fields.parallel_tool_calls is not False,
        answer_schema=_schema(fields.text),
        max_tokens=fields.max_output_tokens,
        thinking=None if effort is None else effort != "none",
        name=name,
        session=session,
        warnings=tools.warnings + ask.warnings,
    )
    return ask, said


def _schema(text: TextOptions | None) -> dict[str, Any] | None:
    """The answer's schema; its definition stands beside the type here, one level down in chat."""
    form = None if text is None else text.format
    if form is not None and form.get("type") == "json_schema":
        form = {"type": "json_schema", "json_schema": form}
    return answer_schema(form)


@router.post("/v1/responses")
async def responses(request: Request) -> Response:
    """Create a response."""
    service = service_of(request)
    fields = await read_served(request, ResponsesRequest)
    ask, said = await _ask(request, service, fields)
    run = await service.open(ask, caller_of(request))
    head = _head(service, run, fields, ask)

    def complete(answer: Answer, items: list[dict[str, Any]]) -> dict[str, Any]:
        body = _finished(service, run, head, answer) | {"output": items}
        if fields.store is not False:
            messages = (*said, answer.message)
            service.responses.put(Stored(run.session.owner, body, messages, run.session.id, run.session.turns))
        return body

    frames = None
    if ask.stream:
        frames = _frames(run, Output(run.request_id, head, complete), service.settings.server.keepalive_seconds)

    def whole(answers: list[Answer]) -> dict[str, Any]:
        return complete(answers[0], output_items(answers[0], run.request_id))

    return await respond(request, run, frames, whole)


@router.get("/v1/responses/{response_id}")
async def get_response(request: Request, response_id: str) -> Response:
    """A stored response."""
    return problems.Json(service_of(request).responses.get(caller_of(request).owner, response_id, "response_id").body)


@router.delete("/v1/responses/{response_id}")
async def delete_response(request: Request, response_id: str) -> Response:
    """Forget a stored response; its session stays."""
    store = service_of(request).responses
    store.get(caller_of(request).owner, response_id, "response_id")
    store.drop(response_id)
    return problems.Json({"id": response_id, "object": "response", "deleted": True})


async def _frames(run: Run, output: Output, pause: float) -> AsyncIterator[bytes]:
    try:
        for data in output.start():
            yield data
        async for event in run.events(pause):
            if isinstance(event, Waiting):
                yield comment(event)
            elif isinstance(event, Chunk):
                for item in event.deltas:
                    for data in output.take(item):
                        yield data
            else:
                for data in output.finish(event):
                    yield data
    except DliteError as error:
        yield output.fail(error)


def _head(service: Service, run: Run, fields: ResponsesRequest, ask: Ask) -> dict[str, Any]:
    tools = [{"type": "function", "strict": None, **tool["function"]} for tool in ask.tools]
    return {
        "id": f"resp_{run.request_id}",
        "object": "response",
        "created_at": int(run.started),
        "status": "in_progress",
        "background": False,
        "error": None,
        "incomplete_details": None,
        "instructions": fields.instructions,
        "max_output_tokens": fields.max_output_tokens,
        "metadata": fields.metadata or {},
        "model": service.model,
        "output": [],
        "parallel_tool_calls": ask.parallel,
        "previous_response_id": fields.previous_response_id,
        "reasoning": {"effort": fields.reasoning.effort if fields.reasoning else None, "summary": None},
        "store": fields.store is not False,
        "temperature": ask.params.temperature,
        "text": {"format": (fields.text.format if fields.text else None) or {"type": "text"}},
        "tool_choice": fields.tool_choice or "auto",
        "tools": tools,
        "top_p": ask.params.top_p,
        "truncation": "disabled",
        "usage": None,
        "user": fields.user,
    }


def _finished(service: Service, run: Run, head: dict[str, Any], answer: Answer) -> dict[str, Any]:
    cut = answer.finish == "length"
    prompt = len(run.prompt_ids)
    return {
        **head,
        "status": "incomplete" if cut else "completed",
        "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
        "usage": {
            "input_tokens": prompt,
            "input_tokens_details": {"cached_tokens": answer.figures.cached_tokens, "cache_write_tokens": 0},
            "output_tokens": answer.tokens,
            "output_tokens_details": {"reasoning_tokens": service.count(answer.message.reasoning)},
            "total_tokens": prompt + answer.tokens,
            "dlite": dlite_block(run, answer),
        },
    }
