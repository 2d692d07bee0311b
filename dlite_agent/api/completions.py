"""POST /v1/completions: text or token ids in, text out, with no template between."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Request, Response
from pydantic import Field, WithJsonSchema

from dlite_agent.api import shapes
from dlite_agent.api.chat import StreamOptions, stops
from dlite_agent.api.chunks import chunks, head
from dlite_agent.api.fields import (
    MAX_CHOICES,
    Int,
    Off,
    Penalties,
    Texts,
    TokenCount,
    TurnRequest,
    begin,
    caller_of,
    read_served,
    service_of,
)
from dlite_agent.api.service import Service
from dlite_agent.api.stream import respond
from dlite_agent.api.turns import Answer, Chunk, Run
from dlite_agent.api.usage import openai_usage
from dlite_agent.decode.state import TokenScore
from dlite_agent.errors import InvalidRequest
from dlite_agent.session.deltas import TextDelta

router = APIRouter()

DEFAULT_MAX_TOKENS = 16
"""What this API has always generated when `max_tokens` is missing."""


class CompletionRequest(TurnRequest, Penalties):
    """A text completion request; fields that are not listed are refused."""

    prompt: Annotated[str | list[Int] | list[str] | list[list[Int]], WithJsonSchema(shapes.PROMPT)]
    max_tokens: TokenCount | None = None
    stop: str | Texts | None = None
    n: Annotated[Int, Field(ge=1, le=MAX_CHOICES)] | None = None
    best_of: Literal[1] | None = None
    echo: Off | None = None
    suffix: None = None
    stream_options: StreamOptions | None = None
    logprobs: Annotated[Int, Field(ge=0, le=5)] | None = None
    ignore_eos: bool | None = None
    user: str | None = None


def _prompt(given: str | list[int] | list[str] | list[list[int]], vocab: int) -> str | list[int]:
    if isinstance(given, list) and given and not isinstance(given[0], int):
        if len(given) > 1:
            raise InvalidRequest("Send one prompt a request; several are not supported.", param="prompt")
        given = given[0]
    if not given:
        raise InvalidRequest("The prompt is empty.", param="prompt")
    if isinstance(given, list) and any(not isinstance(token, int) or not 0 <= token < vocab for token in given):
        raise InvalidRequest(f"Token ids must be 0..{vocab - 1}.", param="prompt")
    return given  # type: ignore[return-value]  # a list of ints by now


@router.post("/v1/completions")
async def completions(request: Request) -> Response:
    """Continue a text."""
    service = service_of(request)
    fields = await read_served(request, CompletionRequest)
    ask = replace(
        begin("completions", request, fields, ("user",)),
        prompt=_prompt(fields.prompt, service.vocab_size),
        max_tokens=fields.max_tokens or DEFAULT_MAX_TOKENS,
        clamp=fields.max_tokens is None,
        stop=stops(fields.stop),
        n=fields.n or 1,
        top_scores=fields.logprobs,
        ignore_eos=bool(fields.ignore_eos),
    )
    run = await service.open(ask, caller_of(request))
    start = head(service, run, "cmpl", "text_completion")
    sent = [0] * len(run.choices)

    def pieces(chunk: Chunk) -> Iterator[dict[str, Any]]:
        text = "".join(delta.text for delta in chunk.deltas if isinstance(delta, TextDelta))
        logprobs = _logprobs(service, chunk.scores, sent[chunk.index])
        sent[chunk.index] += len(text)
        yield {"index": chunk.index, "text": text, "logprobs": logprobs, "finish_reason": None}

    frames = None
    if ask.stream:
        frames = chunks(
            run,
            start,
            pause=service.settings.server.keepalive_seconds,
            usage=None if fields.stream_options is None else fields.stream_options.include_usage,
            pieces=pieces,
            last=lambda answer: {"index": answer.index, "text": "", "logprobs": None, "finish_reason": answer.finish},
        )
    return await respond(request, run, frames, lambda answers: start | _whole(service, run, answers))


def _whole(service: Service, run: Run, answers: list[Answer]) -> dict[str, Any]:
    choices = [
        {
            "index": answer.index,
            "text": answer.message.content,
            "finish_reason": answer.finish,
            "logprobs": _logprobs(service, answer.scores, 0),
        }
        for answer in answers
    ]
    return {"choices": choices, "usage": openai_usage(run, answers)}


def _logprobs(service: Service, scores: tuple[TokenScore, ...], offset: int) -> dict[str, Any] | None:
    if not scores:
        return None
    tokens = [service.token_text(score.token) for score in scores]
    offsets = []
    for token in tokens:
        offsets.append(offset)
        offset += len(token)
    return {
        "tokens": tokens,
        "token_logprobs": [max(score.logprob, -9999.0) for score in scores],
        "top_logprobs": [
            {service.token_text(token): max(logprob, -9999.0) for token, logprob in score.top} for score in scores
        ],
        "text_offset": offsets,
    }
