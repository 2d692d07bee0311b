"""The application: settings in, a FastAPI app with thin routes out; its lifespan owns the engine."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.routing import Match, Route

from dlite_agent import __doc__ as about
from dlite_agent.agent.runs import Runs, RunsSettings
from dlite_agent.api import chat, completions, messages, ops, problems, responses, runs, sessions, viewer
from dlite_agent.api.agent_model import EngineModel
from dlite_agent.api.document import describe
from dlite_agent.api.metrics import Metrics
from dlite_agent.api.recorder import Recorder
from dlite_agent.api.security import Gate, middleware_options
from dlite_agent.api.service import Service
from dlite_agent.api.viewer_library import Library
from dlite_agent.config import Settings
from dlite_agent.decode.engine import Engine
from dlite_agent.decode.load import Runtime, load_runtime
from dlite_agent.decode.rounds import StepFigures
from dlite_agent.decode.step_times import Probe, remembered
from dlite_agent.errors import DliteError, InvalidRequest, NotFound
from dlite_agent.paths import content_dir
from dlite_agent.trace.calibration import StepTimeKeeper

log = logging.getLogger("dlite_agent.server")

NO_RUNS = RunsSettings()
_PARTS = (chat, completions, messages, responses, sessions, runs, ops, viewer)


def build_app(settings: Settings, agents: RunsSettings = NO_RUNS) -> FastAPI:
    """An application that loads its model when its lifespan starts and drains when it ends.

    `agents` says where the server's own agent runs may work; by default nowhere.

    `app.state.draining` may be set to make /ready fail before that; `app.state.failure` says why loading failed.
    """

    @contextlib.asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        log.info("loading", extra={"dlite": {"target": settings.model.target, "drafter": settings.model.drafter}})
        keeper, probe = StepTimeKeeper(), Probe()

        def load() -> Runtime:
            runtime = _load(settings)
            keeper.start(remembered(runtime.decoder, runtime.decoder.target.fingerprint))
            return runtime

        def observe(step: StepFigures) -> None:
            keeper.observe(step)
            probe(step)

        engine = Engine(settings.scheduler, load, observer=observe)
        try:
            runtime = await asyncio.to_thread(engine.start)
        except Exception as error:
            app.state.failure = error
            raise
        drafter = runtime.decoder.drafter
        path = None
        if settings.data_dir is not None:
            settings.data_dir.mkdir(parents=True, exist_ok=True)
            path = settings.data_dir / "events.jsonl"
        recorder = Recorder(
            Metrics(engine),
            log_path=path,
            content=settings.server.log_content,
            target=settings.model.target,
            drafter=None if drafter is None else settings.model.drafter,
            calibration=keeper.event,
        )
        try:
            service = Service(settings, engine, runtime, recorder)
        except Exception as error:
            app.state.failure = error
            await asyncio.to_thread(engine.close)
            recorder.close()
            raise
        app.state.service = service
        log.info("ready", extra={"dlite": {"model": service.model, "context": service.context_limit}})
        app.state.runs = Runs(agents, lambda run, owner: EngineModel(service, run, owner), settings.data_dir)
        await app.state.runs.recover()
        app.state.library = Library(service, app.state.runs, log_path=path, shipped=content_dir("sessions"))
        try:
            yield
        finally:
            app.state.draining = True
            await app.state.runs.close()
            await service.close()
            recorder.close()

    app = FastAPI(title="DLite Agent", description=str(about), lifespan=lifespan, docs_url=None, redoc_url=None)
    app.state.draining = False
    app.state.failure = None
    for part in _PARTS:
        app.include_router(part.router)
    if settings.server.allowed_origins:
        app.user_middleware.append(Middleware(CORSMiddleware, **middleware_options(settings.server.allowed_origins)))
    app.user_middleware.append(Middleware(Gate, settings=settings.server))
    describe(app)
    _handle_errors(app)
    return app


def _load(settings: Settings) -> Runtime:
    model = settings.model
    return load_runtime(
        target=model.target,
        drafter=model.drafter,
        dtype=model.dtype,
        device=model.device,
        threads=model.threads,
        kv_budget=model.kv_budget,
        context_limit=model.context_limit,
        anchor_group_size=model.anchor_group_size,
    )


def _methods(app: FastAPI, request: Request) -> set[str]:
    """The methods that a path takes; starlette itself names only those of the first route that fits.

    A session's name may hold slashes, so that `/fork` fits the routes of a session too: the longest template counts.
    """
    routes = [*app.routes, *(route for part in _PARTS for route in part.router.routes)]
    fits = [r for r in routes if isinstance(r, Route) and r.matches(request.scope)[0] != Match.NONE]
    longest = max((len(route.path) for route in fits), default=0)
    return {name for route in fits if len(route.path) == longest for name in route.methods or ()}


def _handle_errors(app: FastAPI) -> None:
    def answer(request: Request, error: DliteError) -> Response:
        request_id = getattr(request.state, "request_id", "")
        if request.method == "POST" and not getattr(request.state, "recorded", False):
            app.state.service.recorder.refused(request.url.path, request_id, error)
        return problems.response(error, problems.envelope_of(request.url.path), request_id)

    async def typed(request: Request, error: Exception) -> Response:
        assert isinstance(error, DliteError)
        return answer(request, error)

    async def http(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        path = request.url.path
        known: dict[int, DliteError] = {
            404: NotFound(f"There is nothing at {path}."),
            405: problems.MethodNotAllowed(f"{request.method} is not allowed at {path}."),
        }
        response = answer(request, known.get(error.status_code, DliteError(str(error.detail))))
        if error.status_code == 405:
            response.headers["allow"] = ", ".join(sorted(_methods(app, request)))
        return response

    async def invalid(request: Request, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError)
        return answer(request, problems.from_validation(list(error.errors())))

    async def deep(request: Request, error: Exception) -> Response:
        return answer(request, InvalidRequest("The body is nested too deeply."))

    async def unforeseen(request: Request, error: Exception) -> Response:
        log.error("unforeseen error", exc_info=error, extra={"dlite": {"request": request.state.request_id}})
        return answer(request, DliteError("The server failed; the request id finds the reason in its log."))

    handlers: dict[Any, Any] = {
        DliteError: typed,
        HTTPException: http,
        RequestValidationError: invalid,
        RecursionError: deep,
        Exception: unforeseen,
    }
    for kind, handler in handlers.items():
        app.add_exception_handler(kind, handler)
