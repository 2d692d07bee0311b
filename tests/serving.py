"""A real server on a real socket, in this process: uvicorn on a thread of its own."""

from __future__ import annotations

import contextlib
import functools
import json
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from dlite_agent.agent.runs import RunsSettings
from dlite_agent.api.app import NO_RUNS
from dlite_agent.api.serve import Server, make_server
from dlite_agent.api.service import Service
from dlite_agent.config import ModelSettings, SchedulerSettings, ServerSettings, Settings
from tests import tokenizers
from tests.helpers import CONTEXT, load_tiny, make_drafter, save_model, tiny_model

MODEL = "smollm2-135m"
HI = [{"role": "user", "content": "Say hi."}]

SERVED = Settings(
    model=ModelSettings(dtype="fp32", threads=1),
    scheduler=SchedulerSettings(max_running=8, max_queued=16),
    server=ServerSettings(keepalive_seconds=0.2, max_body_bytes=12 << 20),
)


@dataclass
class Live:
    """A running server."""

    url: str
    server: Server

    @property
    def service(self) -> Service:
        service: Service = self.server.config.app.state.service  # type: ignore[union-attr]
        return service

    def post(self, path: str, body: Any, **options: Any) -> httpx.Response:
        return httpx.post(self.url + path, json=body, timeout=300, **options)

    def post_raw(self, path: str, body: bytes, **headers: str) -> httpx.Response:
        """POST bytes as they are."""
        sent = {"content-type": "application/json"} | headers
        return httpx.post(self.url + path, content=body, headers=sent, timeout=300)

    def get(self, path: str, **options: Any) -> httpx.Response:
        return httpx.get(self.url + path, timeout=300, **options)

    def chat(self, messages: list[dict[str, Any]], **fields: Any) -> dict[str, Any]:
        """A greedy chat completion that must succeed."""
        body = {"model": MODEL, "messages": messages, "temperature": 0, "max_tokens": 6} | fields
        response = self.post("/v1/chat/completions", body)
        assert response.status_code == 200, response.text
        answer: dict[str, Any] = response.json()
        return answer

    def wait_until(self, what: str, check: Any, seconds: float = 120.0) -> None:
        """Wait for a condition."""
        end = time.monotonic() + seconds
        while not check():
            assert time.monotonic() < end, f"{what} did not come about in {seconds} s"
            time.sleep(0.02)

    def idle(self) -> bool:
        """Nothing runs or waits."""
        return self.service.engine.stats.running == 0 and self.service.engine.waiting()[0] == 0


@contextlib.contextmanager
def live(settings: Settings, agents: RunsSettings = NO_RUNS) -> Iterator[Live]:
    """Serve until the block ends."""
    server = make_server(settings, agents)
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
        thread.start()
        while not server.started:
            assert thread.is_alive(), server.config.app.state.failure  # type: ignore[union-attr]
            time.sleep(0.02)
        try:
            yield Live(f"http://127.0.0.1:{listener.getsockname()[1]}", server)
        finally:
            server.should_exit = True
            thread.join(60)


def tiny(folder: Path, *, context_limit: int = CONTEXT, **server: Any) -> Settings:
    """Settings of a random model of a few layers, with a drafter of its own and the default target's tokenizer.

    For traffic whose answers do not matter: a step takes a small part of the default target's time.
    """
    tokenizer = tokenizers.load("smollm2")
    model = tiny_model("llama", vocab_size=len(tokenizer), eos_token_id=tokenizer.eos_token_id)
    save_model(model, folder / "target")
    tokenizer.save_pretrained(folder / "target")
    drafter = make_drafter(load_tiny(folder / "target").spec, mask_token_id=0)
    drafter.save(folder / "drafter", {})
    return Settings(
        model=ModelSettings(
            target=str(folder / "target"),
            drafter=str(folder / "drafter"),
            dtype="fp32",
            threads=1,
            context_limit=context_limit,
        ),
        scheduler=SchedulerSettings(max_running=8, max_queued=16),
        server=ServerSettings(keepalive_seconds=0.2, **server),
    )


_SHARED = contextlib.ExitStack()


@functools.cache
def shared() -> Live:
    """The default model, served once for all tests of a process, until `close_shared`."""
    return _SHARED.enter_context(live(SERVED))


def close_shared() -> None:
    """Stop the shared server; to be called when the last test is over."""
    _SHARED.close()


def events(text: str) -> list[dict[str, Any]]:
    """The JSON data of a stream's events."""
    data = [line[6:] for line in text.split("\n") if line.startswith("data: ")]
    return [json.loads(item) for item in data if item != "[DONE]"]
