"""POST /v1/messages and /v1/messages/count_tokens, as Anthropic's clients speak."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Request, Response
from pydantic import Field, WithJsonSchema

from dlite_agent.api import problems, shapes
from dlite_agent.api.blocks import client_tools, openai_choice, openai_messages
from dlite_agent.api.fields import (
    ModelRequest,
    Texts,
    TokenCount,
    TurnRequest,
    begin,
    caller_of,
    read_served,
    service_of,
)
from dlite_agent.api.service import Ask
from dlite_agent.api.stream import frame, respond
from dlite_agent.api.turns import Answer, Chunk, Run, Waiting
from dlite_agent.api.usage import dlite_block
from dlite_agent.errors import DliteError, InvalidRequest
from dlite_agent.session.deltas import ArgumentsDelta, CallStart, Delta, ParsedCall, ReasoningDelta, TextDelta
from dlite_agent.session.history import History
from dlite_agent.session.messages import normalise

router = APIRouter()


class CountRequest(ModelRequest):
    """What count_tokens takes, and what both requests share."""

    messages: Annotated[list[dict[str, Any]], Field(min_length=1), WithJsonSchema(shapes.CLIENT_MESSAGES)]
    system: Annotated[str | list[dict[str, Any]] | None, WithJsonSchema(shapes.SYSTEM)] = None
    tools: Annotated[list[dict[str, Any]], WithJsonSchema(shapes.CLIENT_TOOLS)] | None = None
    tool_choice: Annotated[dict[str, Any], WithJsonSchema(shapes.CLIENT_CHOICE)] | None = None
    thinking: Annotated[dict[str, Any], WithJsonSchema(shapes.THINKING)] | None = None
    output_config: Annotated[dict[str, Any], WithJsonSchema(shapes.CLIENT_FORMAT)] | None = None
    cache_control: dict[str, Any] | None = None
    context_management: dict[str, Any] | None = None


class MessagesRequest(CountRequest, TurnRequest):
    """A messages request; fields that are not listed are refused."""

    max_tokens: TokenCount
    stop_sequences: Texts | None = None
    metadata: dict[str, Any] | None = None
    service_tier: Literal["auto", "standard_only"] | None = None


_NO_EFFECT = ("metadata", "service_tier", "context_management")


def _thinking(given: dict[str, Any] | None) -> bool | None:
    if given is None:
        return None
    if given.get("type") not in ("enabled", "disabled", "adaptive"):
        raise InvalidRequest("thinking.type must be enabled, disabled or adaptive.", param="thinking.type")
    return bool(given["type"] != "disabled")


def _answer_schema(given: dict[str, Any] | None) -> dict[str, Any] | None:
    if given is None or given.get("format") is None:
        return None
    form = given["format"]
    if not isinstance(form, dict) or form.get("type") != "json_schema" or not isinstance(form.get("schema"), dict):
        raise InvalidRequest("output_config.format must be a json_schema with a schema.", param="output_config.format")
    schema: dict[str, Any] = form["schema"]
    return schema


def ask_of(request: Request, fields: MessagesRequest) -> Ask:
    """The request in common terms. Raises InvalidRequest."""
    tools, (choice, parallel) = client_tools(fields.tools), openai_choice(fields.tool_choice)
    ask = begin("messages", request, fields, _NO_EFFECT)
    return replace(
        ask,
        messages=normalise(openai_messages(fields.system, fields.messages)),
        tools=tools.functions,
        tool_choice=choice,
        parallel=parallel,
        answer_schema=_answer_schema(fields.output_config),
        max_tokens=fields.max_tokens,
        clamp=True,
        stop=tuple(fields.stop_sequences or ()),
        thinking=_thinking(fields.thinking),
        warnings=tools.warnings + ask.warnings,
    )


@router.post("/v1/messages")
async def messages(request: Request) -> Response:
    """Create a message."""
    service = service_of(request)
    fields = await read_served(request, MessagesRequest)
    ask = ask_of(request, fields)
    run = await service.open(ask, caller_of(request))
    frames = _frames(run, fields.model, service.settings.server.keepalive_seconds) if ask.stream else None
    headers = {"request-id": run.request_id}
    return await respond(request, run, frames, lambda answers: _whole(run, fields.model, answers[0]), **headers)


@router.post("/v1/messages/count_tokens")
async def count_tokens(request: Request) -> Response:
    """How many tokens the prompt of a message would have."""
    service = service_of(request)
    fields = await read_served(request, CountRequest)
    conversation = normalise(openai_messages(fields.system, fields.messages))
    tools, thinking = client_tools(fields.tools), _thinking(fields.thinking)
    prepared = await asyncio.to_thread(service.render, History(), [], conversation, tools.functions, thinking)
    return problems.Json({"input_tokens": len(prepared.ids)})


def _usage(run: Run, answer: Answer) -> dict[str, Any]:
    cached = answer.figures.cached_tokens
    return {
        "input_tokens": len(run.prompt_ids) - cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached,
        "output_tokens": answer.tokens,
        "dlite": dlite_block(run, answer),
    }


def _stop_reason(answer: Answer) -> str:
    if answer.reason == "context" and answer.finish == "length":
        return "model_context_window_exceeded"
    if answer.finish == "stop" and answer.stop is not None:
        return "stop_sequence"
    return {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}[answer.finish]


def _input(call: ParsedCall) -> dict[str, Any]:
    """A call's arguments as an object; text that is none comes whole under `raw`."""
    if call.status == "complete":
        value: dict[str, Any] = json.loads(call.arguments)
        return value
    return {"raw": call.arguments}


def _whole(run: Run, model: str, answer: Answer) -> dict[str, Any]:
    content: list[dict[str, Any]] = []
    if answer.message.reasoning:
        content.append({"type": "thinking", "thinking": answer.message.reasoning, "signature": ""})
    if answer.message.content or not (answer.calls or content):
        content.append({"type": "text", "text": answer.message.content, "citations": None})
    content += [{"type": "tool_use", "id": call.id, "name": call.name, "input": _input(call)} for call in answer.calls]
    return {
        "id": f"msg_{run.request_id}",
        "type": "message",
        "role": "assistant",
        "model": model,
        "content": content,
        "stop_reason": _stop_reason(answer),
        "stop_sequence": answer.stop,
        "usage": _usage(run, answer),
    }


class _Blocks:
    """Content blocks of a stream: one open at a time, numbered as they open."""

    def __init__(self) -> None:
        self._count = 0
        self._open: str | None = None

    def close(self) -> list[bytes]:
        if self._open is None:
            return []
        self._open = None
        return [_event("content_block_stop", index=self._count - 1)]

    def _start(self, key: str, block: dict[str, Any]) -> list[bytes]:
        if self._open == key:
            return []
        ended = self.close()
        self._open = key
        self._count += 1
        return [*ended, _event("content_block_start", index=self._count - 1, content_block=block)]

    def _delta(self, delta: dict[str, Any]) -> bytes:
        return _event("content_block_delta", index=self._count - 1, delta=delta)

    def take(self, item: Delta) -> list[bytes]:
        if isinstance(item, TextDelta):
            out = self._start("text", {"type": "text", "text": "", "citations": None})
            return [*out, self._delta({"type": "text_delta", "text": item.text})]
        if isinstance(item, ReasoningDelta):
            out = self._start("thinking", {"type": "thinking", "thinking": "", "signature": ""})
            return [*out, self._delta({"type": "thinking_delta", "thinking": item.text})]
        if isinstance(item, CallStart):
            block = {"type": "tool_use", "id": item.id, "name": item.name, "input": {}}
            return self._start(f"call {item.index}", block)
        if isinstance(item, ArgumentsDelta):
            return [self._delta({"type": "input_json_delta", "partial_json": item.text})]
        return self.close()


def _event(kind: str, **fields: Any) -> bytes:
    return frame({"type": kind, **fields}, kind)


async def _frames(run: Run, model: str, pause: float) -> AsyncIterator[bytes]:
    cached = 0 if run.spliced is None else run.spliced.shared
    usage = {"input_tokens": len(run.prompt_ids) - cached, "cache_read_input_tokens": cached, "output_tokens": 0}
    start: dict[str, Any] = {
        "id": f"msg_{run.request_id}",
        "type": "message",
        "role": "assistant",
        "model": model,
        "content": [],
        "stop_reason": None,
        "stop_sequence": None,
        "usage": {**usage, "cache_creation_input_tokens": 0},
    }
    blocks = _Blocks()
    try:
        yield _event("message_start", message=start)
        async for event in run.events(pause):
            if isinstance(event, Waiting):
                yield _event("ping")
            elif isinstance(event, Chunk):
                for item in event.deltas:
                    for data in blocks.take(item):
                        yield data
            else:
                for data in blocks.close():
                    yield data
                delta = {"stop_reason": _stop_reason(event), "stop_sequence": event.stop}
                yield _event("message_delta", delta=delta, usage=_usage(run, event))
        yield _event("message_stop")
    except DliteError as error:
        yield frame(problems.body(error, "anthropic", run.request_id), "error")
