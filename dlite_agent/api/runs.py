"""/v1/agents/runs: tasks that the server works on itself, with tools in a sandbox."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Annotated, Any

from fastapi import APIRouter, Query, Request, Response
from pydantic import Field

from dlite_agent.agent.run_log import Signal
from dlite_agent.agent.run_spec import RunSpec, Text
from dlite_agent.agent.runs import AgentRun, Runs
from dlite_agent.api import problems
from dlite_agent.api.fields import Strict, caller_of, read, service_of
from dlite_agent.api.stream import EventStream
from dlite_agent.errors import InvalidRequest

router = APIRouter()

_LONGEST_KEY = 256


class FollowUp(Strict):
    """A further message of the user's."""

    content: Annotated[Text, Field(description="What the user says next.")]


def runs_of(request: Request) -> Runs:
    """What the application's lifespan made."""
    runs: Runs = request.app.state.runs
    return runs


def _key(request: Request) -> str:
    key = request.headers.get("idempotency-key", "")
    if len(key) > _LONGEST_KEY:
        raise InvalidRequest(f"An idempotency key has at most {_LONGEST_KEY} characters.", param="idempotency-key")
    return key


def card(run: AgentRun, *, whole: bool = True) -> dict[str, Any]:
    """What a client sees of a run; `whole` with its answer and patch."""
    at = run.progress
    about: dict[str, Any] = {
        "id": run.id,
        "object": "agent.run",
        "state": run.state,
        "created": int(run.created),
        "task": run.spec.task,
        "workspace": run.spec.workspace,
        "sandbox": {"level": run.level or None, "refused": dict(run.refused)},
        "session_id": run.id,
        "turns": at.turns,
        "tool_calls": at.calls,
        "tokens": at.tokens,
        "tool_seconds": round(at.tool_seconds, 6),
        "seconds": round(at.seconds, 6),
        "restarts": at.restarts,
        "waiting_messages": len(at.waiting),
        "error": at.error,
    }
    if whole:
        about |= {"answer": at.answer, "patch": run.patch, "spec": run.spec.model_dump(mode="json")}
    return about


@router.post("/v1/agents/runs", status_code=201)
async def start_run(request: Request) -> Response:
    """Begin a run; the same Idempotency-Key gives the run it began before."""
    spec = await read(request, RunSpec)
    run = await runs_of(request).start(spec, caller_of(request).owner, _key(request))
    return problems.Json(card(run), status_code=201, headers={"location": f"/v1/agents/runs/{run.id}"})


@router.get("/v1/agents/runs")
async def list_runs(request: Request) -> Response:
    """The caller's runs, the latest first."""
    runs = runs_of(request).list(caller_of(request).owner)
    return problems.Json({"object": "list", "data": [card(run, whole=False) for run in runs]})


@router.get("/v1/agents/runs/{run_id}")
async def get_run(request: Request, run_id: str) -> Response:
    """One run: its state, what it has used, and its answer and patch once there."""
    return problems.Json(card(runs_of(request).get(caller_of(request).owner, run_id)))


@router.get("/v1/agents/runs/{run_id}/events")
async def run_events(
    request: Request,
    run_id: str,
    stay: Annotated[
        bool, Query(alias="follow", description="Stay until the run ends, and send coming events too.")
    ] = True,
) -> Response:
    """The run's trace as server-sent events, from the start or behind `Last-Event-ID`; live, also what the model says
    as it says it."""
    run = runs_of(request).get(caller_of(request).owner, run_id)
    given = request.headers.get("last-event-id", "0")
    if not (given.isascii() and given.isdigit()):
        raise InvalidRequest("Last-Event-ID is not one of this stream's.", param="last-event-id")
    watcher = run.log.watch()

    def leave() -> None:
        run.log.leave(watcher)

    pause = service_of(request).settings.server.keepalive_seconds
    return EventStream(_frames(run, int(given), watcher, pause, stay), leave, {})


async def follow(
    run: AgentRun, at: int, pause: float, watcher: asyncio.Queue[Signal | None] | None = None, *, stay: bool = True
) -> AsyncGenerator[tuple[str, dict[str, Any], int | None], None]:
    """The state, the log from an offset on, then what comes, until the run ends: kind, data and, for events of the log,
    the offset behind them. Empty data of kind `idle` says that nothing came for `pause` seconds."""
    own = watcher is None
    watcher = watcher or run.log.watch()
    try:
        yield "state", card(run, whole=False), None
        signal: Signal | None = Signal("log", {})
        while signal is not None:
            if signal.kind == "log":
                for line in run.log.lines(at):
                    at = line.end
                    yield str(line.record["kind"]), line.record, at
            elif signal.kind == "state":
                yield "state", card(run, whole=False), None
            else:
                yield signal.kind, signal.data, None
            if not stay or (run.at_rest and watcher.empty()):
                return
            try:
                async with asyncio.timeout(pause):
                    signal = await watcher.get()
            except TimeoutError:
                signal = Signal("idle", {})
    finally:
        if own:
            run.log.leave(watcher)


async def _frames(
    run: AgentRun, at: int, watcher: asyncio.Queue[Signal | None], pause: float, stay: bool
) -> AsyncIterator[bytes]:
    async for kind, data, end in follow(run, at, pause, watcher, stay=stay):
        yield b": idle\n\n" if kind == "idle" else _frame(kind, data, end)


def _frame(kind: str, data: dict[str, Any], identity: int | None = None) -> bytes:
    mark = b"" if identity is None else f"id: {identity}\n".encode()
    return mark + f"event: {kind}\n".encode() + b"data: " + problems.encode(data) + b"\n\n"


@router.post("/v1/agents/runs/{run_id}/pause")
async def pause_run(request: Request, run_id: str) -> Response:
    """Stop before the next turn; tools that run come to their end."""
    run = runs_of(request).get(caller_of(request).owner, run_id)
    await runs_of(request).pause(run)
    return problems.Json(card(run))


@router.post("/v1/agents/runs/{run_id}/resume")
async def resume_run(request: Request, run_id: str) -> Response:
    """Go on with a paused run."""
    run = runs_of(request).get(caller_of(request).owner, run_id)
    await runs_of(request).resume(run)
    return problems.Json(card(run))


@router.post("/v1/agents/runs/{run_id}/cancel")
async def cancel_run(request: Request, run_id: str) -> Response:
    """End a run now."""
    run = runs_of(request).get(caller_of(request).owner, run_id)
    await runs_of(request).cancel(run)
    return problems.Json(card(run))


@router.post("/v1/agents/runs/{run_id}/messages")
async def follow_up(request: Request, run_id: str) -> Response:
    """Say more to a run: taken up before its next turn; a run that had submitted or answered goes on."""
    fields = await read(request, FollowUp)
    run = runs_of(request).get(caller_of(request).owner, run_id)
    await runs_of(request).follow_up(run, fields.content, _key(request))
    return problems.Json(card(run))
