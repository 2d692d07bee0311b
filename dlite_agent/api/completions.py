"""POST /v1/completions: text or token ids in, text out, with no template between."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Request, Response
from pydantic import Field

from dlite_agent.api import problems
from dlite_agent.api.chat import StreamOptions, stops
from dlite_agent.api.fields import (
    MAX_CHOICES,
    DliteOptions,
    Penalties,
    Sampling,
    SessionFields,
    Texts,
    TokenCount,
    caller_of,
    check_model,
    name_of,
    no_effect,
    read,
    sampling,
    service_of,
)
from dlite_agent.api.service import Ask, Service
from dlite_agent.api.stream import EventStream, collect, comment, frame
from dlite_agent.api.turns import Answer, Chunk, Run, Waiting
from dlite_agent.api.usage import openai_usage
from dlite_agent.decode.state import TokenScore
from dlite_agent.errors import DliteError, InvalidRequest
from dlite_agent.session.deltas import TextDelta

router = APIRouter()

DEFAULT_MAX_TOKENS = 16
"""What this API has always generated when `max_tokens` is missing."""


class CompletionRequest(Sampling, Penalties, SessionFields):
    """A text completion request; fields that are not listed are refused."""

    model: str
    prompt: str | list[int] | list[str] | list[list[int]]
    max_tokens: TokenCount | None = None
    stop: str | Texts | None = None
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None
    best_of: Literal[1] | None = None
    echo: Literal[False] | None = None
    suffix: None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    logprobs: Annotated[int, Field(ge=0, le=5)] | None = None
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
    fields = await read(request, CompletionRequest)
    check_model(fields.model, service.names)
    options = fields.dlite or DliteOptions()
    ask = Ask(
        api="completions",
        prompt=_prompt(fields.prompt, service.vocab_size),
        params=sampling(fields, fields, options),
        max_tokens=fields.max_tokens or DEFAULT_MAX_TOKENS,
        clamp=fields.max_tokens is None,
        stop=stops(fields.stop),
        n=fields.n or 1,
        top_scores=fields.logprobs,
        ignore_eos=bool(fields.ignore_eos),
        name=name_of(request, fields),
        on_conflict=options.on_conflict,
        mode=options.mode,
        verify_window=options.verify_window,
        seconds=options.timeout,
        warnings=no_effect(fields, ("user",)),
    )
    run = await service.open(ask, caller_of(request))
    headers = {"x-session-id": run.session.id}
    if fields.stream:
        wanted = None if fields.stream_options is None else fields.stream_options.include_usage
        return EventStream(_frames(service, run, wanted), run.close, headers)
    answers = await collect(request, run, run.answers())
    choices = [
        {
            "index": answer.index,
            "text": answer.message.content,
            "finish_reason": answer.finish,
            "logprobs": _logprobs(service, answer.scores, 0),
        }
        for answer in answers
    ]
    return problems.Json(
        _head(service, run) | {"choices": choices, "usage": openai_usage(run, answers)}, headers=headers
    )


def _head(service: Service, run: Run) -> dict[str, Any]:
    return {
        "id": f"cmpl-{run.request_id}",
        "object": "text_completion",
        "created": int(run.started),
        "model": service.model,
        "system_fingerprint": service.fingerprint,
    }


async def _frames(service: Service, run: Run, usage: bool | None) -> AsyncIterator[bytes]:
    head = _head(service, run)
    sent = [0] * len(run.choices)
    answers: list[Answer] = []

    def chunk(index: int, text: str, scores: tuple[TokenScore, ...] = (), **more: Any) -> bytes:
        finish = more.pop("finish", None)
        logprobs = _logprobs(service, scores, sent[index])
        sent[index] += len(text)
        choice = {"index": index, "text": text, "logprobs": logprobs, "finish_reason": finish}
        return frame({**head, "choices": [choice], **more})

    try:
        async for event in run.events(service.settings.server.keepalive_seconds):
            if isinstance(event, Waiting):
                yield comment(event)
            elif isinstance(event, Chunk):
                text = "".join(delta.text for delta in event.deltas if isinstance(delta, TextDelta))
                yield chunk(event.index, text, event.scores)
            else:
                answers = sorted([*answers, event], key=lambda answer: answer.index)
                last = usage is None and len(answers) == len(run.choices)
                more: dict[str, Any] = {"usage": openai_usage(run, answers)} if last else {}
                yield chunk(event.index, "", finish=event.finish, **more)
        if usage:
            yield frame({**head, "choices": [], "usage": openai_usage(run, answers)})
    except DliteError as error:
        yield frame(problems.body(error, "openai", run.request_id))
    yield frame("[DONE]")


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
