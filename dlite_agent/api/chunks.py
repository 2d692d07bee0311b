"""How chat and text completions stream: chunks of one choice each, the usage in the last, an error in their midst."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterable
from typing import Any

from dlite_agent.api import problems
from dlite_agent.api.service import Service
from dlite_agent.api.stream import comment, frame
from dlite_agent.api.turns import Answer, Chunk, Run, Waiting
from dlite_agent.api.usage import openai_usage
from dlite_agent.errors import DliteError

JSON = dict[str, Any]


def head(service: Service, run: Run, prefix: str, kind: str) -> JSON:
    """What every chunk, and the whole completion, begins with."""
    return {
        "id": f"{prefix}-{run.request_id}",
        "object": kind,
        "created": int(run.started),
        "model": service.model,
        "system_fingerprint": service.fingerprint,
    }


async def chunks(
    run: Run,
    start: JSON,
    *,
    pause: float,
    usage: bool | None,
    opening: Iterable[JSON] = (),
    pieces: Callable[[Chunk], Iterable[JSON]],
    last: Callable[[Answer], JSON],
) -> AsyncIterator[bytes]:
    """The stream of a completion.

    Usage comes in a chunk without choices where the client asked for it (as OpenAI does), and with the last finish
    reason where it said nothing: clients that do not ask often expect a choice in every chunk.

    Args:
        start: from `head`.
        pause: seconds after which a comment keeps the connection alive.
        usage: `stream_options.include_usage`.
        opening, pieces, last: the choices to send at first, for new deltas, and at the end of an answer.
    """

    def chunk(choice: JSON, **more: Any) -> bytes:
        return frame({**start, "choices": [choice], **more})

    answers: list[Answer] = []
    try:
        for choice in opening:
            yield chunk(choice)
        async for event in run.events(pause):
            if isinstance(event, Waiting):
                yield comment(event)
            elif isinstance(event, Chunk):
                for choice in pieces(event):
                    yield chunk(choice)
            else:
                answers = sorted([*answers, event], key=lambda answer: answer.index)
                told = usage is None and len(answers) == len(run.choices)
                yield chunk(last(event), **({"usage": openai_usage(run, answers)} if told else {}))
        if usage:
            yield frame({**start, "choices": [], "usage": openai_usage(run, answers)})
    except DliteError as error:
        yield frame(problems.body(error, "openai", run.request_id))
    yield frame("[DONE]")
