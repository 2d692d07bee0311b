"""Running the application: uvicorn, a drain on SIGTERM, and one JSON object a log line."""

from __future__ import annotations

import json
import logging
import os
import signal
import socket
import sys
import time
from collections.abc import Callable
from types import FrameType

import uvicorn

from dlite_agent.agent.runs import RunsSettings
from dlite_agent.api.app import NO_RUNS, build_app
from dlite_agent.config import Settings
from dlite_agent.errors import InvalidRequest

log = logging.getLogger("dlite_agent.server")


class JsonLines(logging.Formatter):
    """A log record as one JSON object; the record's `dlite` dict is merged in."""

    def format(self, record: logging.LogRecord) -> str:
        line = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **getattr(record, "dlite", {}),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


class Server(uvicorn.Server):
    """Tells the application at once that a signal has come, so that it stops being ready while it drains.

    A drained server ends with exit code 0; uvicorn itself would die of the signal in the end. So does one that is still
    loading its model: nothing has been taken that could be lost, and loading cannot be interrupted otherwise.
    """

    def __init__(self, config: uvicorn.Config, on_exit: Callable[[], None]) -> None:
        super().__init__(config)
        self._on_exit = on_exit

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if not self.started:
            log.info("ended before it was ready")
            os._exit(0)
        self._on_exit()
        self.force_exit = self.should_exit and sig == signal.SIGINT
        self.should_exit = True


def make_server(settings: Settings, agents: RunsSettings = NO_RUNS) -> Server:
    """A server for the settings, not yet running."""
    app = build_app(settings, agents)
    config = uvicorn.Config(
        app,
        host=settings.server.host,
        port=settings.server.port,
        log_config=None,
        access_log=False,
        server_header=False,
        lifespan="on",
        timeout_graceful_shutdown=max(1, round(settings.server.drain_seconds)),
        h11_max_incomplete_event_size=2 * settings.server.max_header_bytes,
        http="h11",
        ws="none",
    )

    def leave() -> None:
        app.state.draining = True
        if hasattr(app.state, "service"):
            app.state.service.recorder.stop_streams()
        if hasattr(app.state, "runs"):
            app.state.runs.stop_streams()

    return Server(config, leave)


def serve(settings: Settings, agents: RunsSettings = NO_RUNS) -> None:
    """Run until SIGINT or SIGTERM; requests in flight then have `drain_seconds` to end.

    Raises:
        InvalidRequest: the address cannot be listened on.
        ModelError, CheckpointError: the model cannot be loaded.
    """
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonLines())
    logging.basicConfig(level=logging.INFO, handlers=[handler], force=True)
    server = make_server(settings, agents)
    address = (settings.server.host, settings.server.port)
    family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind(address)
            listener.listen()  # who comes while the model loads waits instead of being refused
        except OSError as error:
            raise InvalidRequest(
                f"cannot listen on {address[0]}:{address[1]}: {error.strerror}", param="port"
            ) from error
        host, port = listener.getsockname()[:2]
        log.info("listening", extra={"dlite": {"host": host, "port": port}})
        server.run(sockets=[listener])
    failure: Exception | None = server.config.app.state.failure  # type: ignore[union-attr]
    if failure is not None:
        raise failure
