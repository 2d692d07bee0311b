"""Mixed traffic in every shape that must leave no trace in memory: answers, aborts in each phase, errors, overflows."""

from __future__ import annotations

import ctypes
import gc
import os
import random
import threading
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.serving import Live

TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
SHAPES = ("chat", "completions", "responses", "messages")
POOL = min(32, (os.cpu_count() or 1) + 4)
"""Threads of asyncio's own pool, which it starts one by one, however many requests there are."""
KINDS = ("plain", "stream", "abort", "leave", "overflow", "error", "tool", "several", "session")


def _body(model: str, shape: str, text: str, tokens: int) -> tuple[str, dict[str, Any]]:
    """Path and body of a small request."""
    said = [{"role": "user", "content": text}]
    if shape == "chat":
        return "/v1/chat/completions", {"model": model, "messages": said, "max_tokens": tokens}
    if shape == "completions":
        return "/v1/completions", {"model": model, "prompt": text, "max_tokens": tokens}
    if shape == "responses":
        return "/v1/responses", {"model": model, "input": text, "max_output_tokens": tokens}
    return "/v1/messages", {"model": model, "messages": said, "max_tokens": tokens}


class Traffic:
    """Requests by number, the same for the same number; `ends` counts what became of them."""

    def __init__(self, server: Live) -> None:
        self.server = server
        self.model = server.service.model
        self.ends: Counter[str] = Counter()
        self._client = httpx.Client(timeout=600, limits=httpx.Limits(max_connections=64))

    def one(self, number: int) -> None:
        dice = random.Random(number)
        kind, shape = dice.choice(KINDS), dice.choice(SHAPES)
        text = f"Request {number}. " + "word " * dice.randrange(120)
        path, body = _body(self.model, shape, text, dice.randrange(1, 8))
        url = self.server.url + path
        if kind == "stream":
            with self._client.stream("POST", url, json=body | {"stream": True}) as stream:
                self.ends[f"{kind} {stream.status_code}"] += 1
                assert stream.status_code in (200, 429)
                stream.read()
        elif kind == "abort":
            # Not asking for the first line leaves in the queue or in prefill, asking for some leaves while decoding.
            lines = dice.choice((0, 1, 4, 12))
            _, body = _body(self.model, shape, text, 200)
            with self._client.stream("POST", url, json=body | {"stream": True}) as stream:
                for count, _line in enumerate(stream.iter_lines()):
                    if count >= lines:
                        break
            self.ends[kind] += 1
        elif kind == "leave":
            _, body = _body(self.model, shape, text, 200)
            try:
                self._client.post(url, json=body, timeout=dice.choice((0.001, 0.03, 0.2)))
                self.ends["leave too late"] += 1
            except httpx.TimeoutException:
                self.ends[kind] += 1
        else:
            self._whole(kind, dice, text, url, body)

    def _whole(self, kind: str, dice: random.Random, text: str, url: str, body: dict[str, Any]) -> None:
        fine: tuple[int, ...] = (200, 429)
        if kind == "overflow":
            _, body = _body(self.model, "chat", text, 100_000)
            url, fine = f"{self.server.url}/v1/chat/completions", (400,)
        elif kind == "error":
            body, fine = body | {"temperature": -1}, (400,)
        elif kind in ("tool", "several"):
            more = {"tools": [TOOL], "tool_choice": "required"} if kind == "tool" else {"n": 2}
            _, body = _body(self.model, "chat", text, 24)
            url, body = f"{self.server.url}/v1/chat/completions", body | more
        elif kind == "session":
            fine = (200, 409, 429)
            body |= {"session_id": f"soak-{dice.randrange(6)}"}
        response = self._client.post(url, json=body)
        self.ends[f"{kind} {response.status_code}"] += 1
        assert response.status_code in fine, response.text

    def run(self, numbers: range) -> None:
        """All of them, eight at a time; then everything is forgotten, and the engine must be as it was at its start."""
        work: Callable[[int], None] = self.one
        with ThreadPoolExecutor(8) as pool:
            list(pool.map(work, numbers))
        self.server.wait_until("the engine to be idle", self.server.idle)
        # A request whose client has left may be let in after the last answer, so deleting takes more than one look.
        self.server.wait_until("all sessions to be gone", self._forgotten)
        engine = self.server.service.engine
        self.server.wait_until("all memory to be back", lambda: engine.stats.states == 0)
        assert engine.stats.kv_reserved == 0

    def _forgotten(self) -> bool:
        cards = self._client.get(f"{self.server.url}/v1/sessions").json()["data"]
        for card in cards:
            self._client.delete(f"{self.server.url}/v1/sessions/{card['id']}")
        return not cards and self.server.idle()

    def close(self) -> None:
        self._client.close()


def soak(server: Live, count: int, rounds: int) -> None:
    """A round of `count` requests to warm up, and `rounds` more; memory after each is compared, so that a leak adds up
    while the peak of a round, which fragments the heap, is the same in all."""
    traffic = Traffic(server)
    try:
        traffic.run(range(count))
        baseline, threads = _rss(), threading.active_count()
        traffic.ends.clear()
        after = []
        for first in range(count, (rounds + 1) * count, count):
            traffic.run(range(first, first + count))
            after.append(_rss())
    finally:
        traffic.close()
    print(f"\n{rounds * count} requests: {dict(sorted(traffic.ends.items()))}")
    sizes = ", ".join(f"{size >> 20}" for size in after)
    print(f"KV positions and states back to 0; resident memory {baseline >> 20} MiB, then after each round {sizes}")
    assert threading.active_count() <= threads + POOL
    assert max(after) <= baseline * 1.05


def _rss() -> int:
    """Resident memory, without what the allocator has free and keeps for later."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    fields = Path("/proc/self/statm").read_text().split()
    return int(fields[1]) * 4096


def test_a_little_mixed_traffic_leaves_no_memory_held(tiny_server: Live) -> None:
    traffic = Traffic(tiny_server)
    try:
        traffic.run(range(60))
    finally:
        traffic.close()


@pytest.mark.soak
def test_two_thousand_mixed_requests_leave_memory_as_it_was(tiny_server: Live) -> None:
    soak(tiny_server, 400, 5)


@pytest.mark.soak
def test_mixed_requests_to_the_default_model_leave_memory_as_it_was(server: Live) -> None:
    soak(server, 50, 3)


@pytest.mark.soak
def test_what_a_session_holds(server: Live) -> None:
    """Resident memory of idle sessions is their KV, and little beside it."""
    traffic = Traffic(server)
    traffic.run(range(0))
    engine, budget = server.service.engine, server.service.settings.model.kv_budget
    count, before = 24, _rss()
    for number in range(count):
        server.chat([{"role": "user", "content": f"{number} " + "word " * 400}], max_tokens=4)
    server.wait_until("the engine to be idle", server.idle)
    tokens, grown = engine.stats.kv_reserved, _rss() - before
    kv = tokens * budget / engine.stats.kv_capacity
    print(f"\n{count} sessions of {tokens // count} tokens, MiB each: {grown / count / 2**20:.2f}")
    print(f"of that KV: {kv / count / 2**20:.2f}, {budget // engine.stats.kv_capacity} bytes a token")
    traffic.run(range(0))
    traffic.close()
    assert kv * 0.9 <= grown <= kv * 1.2
