"""Clients that go away, in every phase, streamed or not: memory comes back and the session goes on as before."""

from __future__ import annotations

import json
import socket
import time
import uuid
from typing import Any

import pytest

from tests.serving import MODEL, Live, events

LONG_PROMPT = "count " * 700
"""Several prompt chunks, so that there is time to leave while it is being read."""


def leave_early(server: Live, body: dict[str, Any], phase: str) -> None:
    """Send a request and hang up once it is in a phase."""
    raw = json.dumps(body).encode()
    head = "POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: "
    host, port = server.url.removeprefix("http://").split(":")
    engine = server.service.engine
    with socket.create_connection((host, int(port)), timeout=60) as connection:
        steps = engine.stats.steps
        connection.sendall(head.encode() + f"{len(raw)}\r\n\r\n".encode() + raw)
        if phase == "queue":
            server.wait_until("the request to wait", lambda: engine.waiting()[0] > 0)
        else:
            least = {"prefill": 1, "decode": 4}[phase]
            server.wait_until(phase, lambda: engine.stats.running > 0 and engine.stats.steps >= steps + least)


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("phase", ["prefill", "decode"])
def test_leaving_undoes_the_turn(server: Live, phase: str, stream: bool) -> None:
    server.wait_until("the engine to be idle", server.idle)
    name = uuid.uuid4().hex
    messages = [{"role": "user", "content": f"Say {name[:4]}."}]
    first = server.chat(messages, session_id=name, max_tokens=3)
    server.wait_until("the engine to be idle", server.idle)
    before = server.service.engine.stats.kv_reserved
    messages = [*messages, first["choices"][0]["message"]]
    text = LONG_PROMPT if phase == "prefill" else "Count for ever."
    body = {"model": MODEL, "messages": [*messages, {"role": "user", "content": text}], "stream": stream}
    leave_early(server, body | {"session_id": name, "max_tokens": 2000, "ignore_eos": True}, phase)
    server.wait_until("the turn to be undone", server.idle)
    server.wait_until("memory to be back", lambda: server.service.engine.stats.kv_reserved == before)
    card = server.get(f"/v1/sessions/{name}").json()
    assert card["turns"] == 1
    assert card["in_flight"] is False
    second = server.chat([*messages, {"role": "user", "content": "Thanks."}], session_id=name, max_tokens=2)
    assert second["usage"]["prompt_tokens_details"]["cached_tokens"] == first["usage"]["total_tokens"] - 1
    assert second["usage"]["dlite"]["divergence"] is None
    ends = [e for e in events(server.get(f"/v1/sessions/{name}/events?follow=false").text) if e["kind"] == "turn_end"]
    assert [end.get("error") for end in ends] == [None, "cancelled", None]


@pytest.mark.parametrize("stream", [True, False])
def test_leaving_the_queue(server: Live, stream: bool) -> None:
    server.wait_until("the engine to be idle", server.idle)
    before = server.service.engine.stats.kv_reserved
    busy = [uuid.uuid4().hex for _ in range(server.service.settings.scheduler.max_running)]
    connections = []
    host, port = server.url.removeprefix("http://").split(":")
    for name in busy:
        fields = {"session_id": name, "max_tokens": 2000, "ignore_eos": True, "stream": True}
        body = json.dumps({"model": MODEL, "messages": [{"role": "user", "content": "Go on."}], **fields}).encode()
        connection = socket.create_connection((host, int(port)), timeout=60)
        head = "POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        connection.sendall(head.encode() + f"Content-Length: {len(body)}\r\n\r\n".encode() + body)
        connections.append(connection)
    try:
        server.wait_until("a full batch", lambda: server.service.engine.stats.running == len(busy))
        queued = {"model": MODEL, "messages": [{"role": "user", "content": "Me too."}], "stream": stream}
        leave_early(server, queued, "queue")
        server.wait_until("the queue to be empty", lambda: server.service.engine.waiting()[0] == 0)
        assert server.service.engine.stats.running == len(busy)
    finally:
        for connection in connections:
            connection.close()
    server.wait_until("all turns to be undone", server.idle)
    time.sleep(0.1)
    assert server.service.engine.stats.kv_reserved == before
