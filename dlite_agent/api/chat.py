"""POST /v1/chat/completions."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Request, Response
from pydantic import Field, WithJsonSchema

from dlite_agent.api import shapes
from dlite_agent.api.chunks import chunks, head
from dlite_agent.api.fields import (
    MAX_CHOICES,
    MAX_TOP_SCORES,
    Int,
    Off,
    Penalties,
    Strict,
    Texts,
    TokenCount,
    TurnRequest,
    begin,
    caller_of,
    function_tools,
    read_served,
    service_of,
)
from dlite_agent.api.recorder import message_json
from dlite_agent.api.service import Ask, Service
from dlite_agent.api.stream import respond
from dlite_agent.api.turns import Answer, Chunk, Run
from dlite_agent.api.usage import openai_usage
from dlite_agent.decode.state import TokenScore
from dlite_agent.errors import InvalidRequest
from dlite_agent.session.deltas import ArgumentsDelta, CallStart, Delta, ReasoningDelta, TextDelta
from dlite_agent.session.messages import normalise

router = APIRouter()


class StreamOptions(Strict):
    include_usage: bool | None = None
    include_obfuscation: Off | None = None
    continuous_usage_stats: Off | None = None


class TemplateOptions(Strict):
    enable_thinking: bool | None = None


class ChatRequest(TurnRequest, Penalties):
    """A chat completion request; fields that are not listed are refused."""

    messages: Annotated[list[dict[str, Any]], Field(min_length=1), WithJsonSchema(shapes.CHAT_MESSAGES)]
    max_tokens: TokenCount | None = None
    max_completion_tokens: TokenCount | None = None
    stop: str | Texts | None = None
    n: Annotated[Int, Field(ge=1, le=MAX_CHOICES)] | None = None
    stream_options: StreamOptions | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[Int, Field(ge=0, le=MAX_TOP_SCORES)] | None = None
    response_format: Annotated[dict[str, Any], WithJsonSchema(shapes.CHAT_FORMAT)] | None = None
    tools: Annotated[list[dict[str, Any]], WithJsonSchema(shapes.CHAT_TOOLS)] | None = None
    tool_choice: Annotated[Any, WithJsonSchema(shapes.CHAT_CHOICE)] = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh"] | None = None
    chat_template_kwargs: TemplateOptions | None = None
    ignore_eos: bool | None = None
    store: Off | None = None
    user: str | None = None
    metadata: dict[str, Any] | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_retention: str | None = None
    verbosity: Literal["low", "medium", "high"] | None = None


_NO_EFFECT = ("metadata", "service_tier", "safety_identifier", "prompt_cache_retention", "verbosity")


def ask_of(request: Request, fields: ChatRequest) -> Ask:
    """The request in common terms. Raises InvalidRequest."""
    if fields.max_tokens and fields.max_completion_tokens and fields.max_tokens != fields.max_completion_tokens:
        raise InvalidRequest("max_tokens and max_completion_tokens contradict each other.", param="max_tokens")
    if fields.top_logprobs and not fields.logprobs:
        raise InvalidRequest("top_logprobs needs logprobs to be true.", param="top_logprobs")
    tools = function_tools(fields.tools)
    ask = begin("chat", request, fields, _NO_EFFECT)
    return replace(
        ask,
        messages=normalise(fields.messages),
        tools=tools.functions,
        tool_choice="auto" if fields.tool_choice is None else fields.tool_choice,
        parallel=fields.parallel_tool_calls is not False,
        answer_schema=answer_schema(fields.response_format),
        max_tokens=fields.max_completion_tokens or fields.max_tokens,
        stop=stops(fields.stop),
        n=fields.n or 1,
        top_scores=(fields.top_logprobs or 0) if fields.logprobs else None,
        thinking=_thinking(fields),
        ignore_eos=bool(fields.ignore_eos),
        warnings=tools.warnings + ask.warnings,
    )


def stops(stop: str | list[str] | None) -> tuple[str, ...]:
    """Stop strings as a tuple."""
    return () if stop is None else (stop,) if isinstance(stop, str) else tuple(stop)


def answer_schema(given: dict[str, Any] | None) -> dict[str, Any] | None:
    """The schema that a `response_format` asks for: an empty one for any object, None for text."""
    if given is None or given.get("type") == "text":
        return None
    if given.get("type") == "json_object":
        return {}
    if given.get("type") != "json_schema":
        raise InvalidRequest("response_format.type must be text, json_object or json_schema.", param="response_format")
    named = given.get("json_schema")
    schema = named.get("schema") if isinstance(named, dict) else None
    if not isinstance(schema, dict):
        raise InvalidRequest(
            "response_format.json_schema.schema must be a JSON schema.", param="response_format.json_schema"
        )
    return schema


def _thinking(fields: ChatRequest) -> bool | None:
    if fields.chat_template_kwargs is not None and fields.chat_template_kwargs.enable_thinking is not None:
        return fields.chat_template_kwargs.enable_thinking
    return None if fields.reasoning_effort is None else fields.reasoning_effort != "none"


@router.post("/v1/chat/completions")
async def chat_completions(request: Request) -> Response:
    """Create a chat completion."""
    service = service_of(request)
    fields = await read_served(request, ChatRequest)
    ask = ask_of(request, fields)
    run = await service.open(ask, caller_of(request))
    frames = None
    if ask.stream:
        frames = chunks(
            run,
            head(service, run, "chatcmpl", "chat.completion.chunk"),
            pause=service.settings.server.keepalive_seconds,
            usage=None if fields.stream_options is None else fields.stream_options.include_usage,
            opening=[_choice(service, choice.index, {"role": "assistant", "content": ""}) for choice in run.choices],
            pieces=lambda chunk: _pieces(service, chunk),
            last=lambda answer: _choice(service, answer.index, {}, finish=answer.finish),
        )
    return await respond(request, run, frames, lambda answers: _whole(service, run, answers))


def _whole(service: Service, run: Run, answers: list[Answer]) -> dict[str, Any]:
    choices = [
        {
            "index": answer.index,
            "message": {**message_json(answer), "refusal": None},
            "finish_reason": answer.finish,
            "logprobs": _logprobs(service, answer.scores),
        }
        for answer in answers
    ]
    start = head(service, run, "chatcmpl", "chat.completion")
    return {**start, "choices": choices, "usage": openai_usage(run, answers)}


def _choice(
    service: Service, index: int, delta: dict[str, Any], scores: tuple[TokenScore, ...] = (), finish: str | None = None
) -> dict[str, Any]:
    return {"index": index, "delta": delta, "logprobs": _logprobs(service, scores), "finish_reason": finish}


def _pieces(service: Service, chunk: Chunk) -> Iterator[dict[str, Any]]:
    """A choice for each delta; the scores of the chunk's tokens come with the first."""
    scores = chunk.scores
    deltas = [delta for item in chunk.deltas if (delta := _delta(item)) is not None]
    for delta in deltas or ([{}] if scores else []):
        yield _choice(service, chunk.index, delta, scores)
        scores = ()


def _delta(item: Delta) -> dict[str, Any] | None:
    if isinstance(item, TextDelta):
        return {"content": item.text}
    if isinstance(item, ReasoningDelta):
        return {"reasoning_content": item.text}
    if isinstance(item, CallStart):
        function = {"name": item.name, "arguments": ""}
        return {"tool_calls": [{"index": item.index, "id": item.id, "type": "function", "function": function}]}
    if isinstance(item, ArgumentsDelta):
        return {"tool_calls": [{"index": item.index, "function": {"arguments": item.text}}]}
    return None


def _logprobs(service: Service, scores: tuple[TokenScore, ...]) -> dict[str, Any] | None:
    if not scores:
        return None
    content = []
    for score in scores:
        top = [_token(service, token, logprob) for token, logprob in score.top]
        content.append({**_token(service, score.token, score.logprob), "top_logprobs": top})
    return {"content": content, "refusal": None}


def _token(service: Service, token: int, logprob: float) -> dict[str, Any]:
    text = service.token_text(token)
    return {"token": text, "logprob": max(logprob, -9999.0), "bytes": list(text.encode("utf-8", "replace"))}
