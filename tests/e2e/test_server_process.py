"""The server as a process of its own: start, drain on SIGTERM, keys, and what is logged."""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from dlite_agent.trace.events import TurnEnd
from dlite_agent.trace.log import read_log
from tests.e2e.processes import Logged, Served
from tests.serving import MODEL

_START = """
import sys
from pathlib import Path
from dlite_agent.api.serve import serve
from dlite_agent.config import ModelSettings, ServerSettings, Settings
serve(Settings(
    model=ModelSettings(dtype="fp32", threads=1),
    server=ServerSettings(port=0, api_keys=("key-of-alice", "key-of-bobby"), drain_seconds=60, keepalive_seconds=0.5),
    data_dir=Path(sys.argv[1]),
))
"""
ALICE, BOB = {"authorization": "Bearer key-of-alice"}, {"x-api-key": "key-of-bobby"}


class Process(Logged):
    def __init__(self, data: Path) -> None:
        self.data = data
        super().__init__([sys.executable, "-c", _START, str(data)], 120)

    def begin_to_end(self) -> None:
        """SIGTERM, without waiting for what it does."""
        self._process.send_signal(signal.SIGTERM)


@pytest.fixture
def process(tmp_path: Path) -> Iterator[Process]:
    running = Process(tmp_path)
    yield running
    running.kill()


def test_keys_separate_and_sigterm_drains(process: Process) -> None:
    def ask(fields: dict[str, Any], headers: dict[str, str]) -> httpx.Response:
        body = {"model": MODEL, "messages": [{"role": "user", "content": "A secret word."}], **fields}
        return httpx.post(f"{process.url}/v1/chat/completions", json=body, headers=headers, timeout=120)

    assert ask({}, {}).status_code == 401
    made = ask({"max_tokens": 2, "session_id": "mine"}, ALICE).json()["usage"]["dlite"]["session_id"]
    for path in ("mine", made, f"{made}/events"):
        assert httpx.get(f"{process.url}/v1/sessions/{path}", headers=BOB).status_code == 404
    assert httpx.delete(f"{process.url}/v1/sessions/{made}", headers=BOB).status_code == 404
    assert httpx.get(f"{process.url}/v1/sessions", headers=BOB).json()["data"] == []
    other = ask({"max_tokens": 2, "session_id": "mine"}, BOB).json()["usage"]
    assert other["prompt_tokens_details"]["cached_tokens"] == 0
    assert other["dlite"]["session_id"] != made

    body = {"model": MODEL, "messages": [{"role": "user", "content": "Go on."}], "max_tokens": 30, "ignore_eos": True}
    url = f"{process.url}/v1/chat/completions"
    with httpx.stream("POST", url, json=body | {"stream": True}, headers=ALICE, timeout=120) as stream:
        lines = stream.iter_lines()
        next(lines)
        process.begin_to_end()
        rest = list(lines)
    assert rest[-2] == "data: [DONE]"
    assert json.loads(rest[-4].removeprefix("data: "))["usage"]["completion_tokens"] == 30
    assert process.wait() == 0

    turns = [line for line in process.lines if line["message"] == "turn"]
    assert [turn["state"] for turn in turns] == ["answered"] * 3
    assert "secret" not in json.dumps(process.lines)
    log = read_log(process.data / "events.jsonl")
    assert not log.problems
    assert [event.finish_reason for event in log.events if isinstance(event, TurnEnd)] == ["length"] * 3
    assert "secret" not in (process.data / "events.jsonl").read_text()


def test_sigterm_ends_a_server_that_still_loads(tmp_path: Path) -> None:
    with Served(tmp_path, until="loading") as server:
        assert server.terminate() == 0
        assert [line["message"] for line in server.lines][-1] == "ended before it was ready"
