"""The default limits, filled to the brim: so many turns run, so many wait, and the next is told to come back."""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import replace
from pathlib import Path

import httpx

from dlite_agent.config import SchedulerSettings
from tests.serving import Live, live, tiny

BEYOND = 5


async def crowd(server: Live, count: int) -> tuple[Counter[int], tuple[int, int]]:
    """Streams that go on until all are answered: how often each status came; how many ran at most, and waited then."""
    engine, seen = server.service.engine, Counter[int]()
    fields = {"model": server.service.model, "max_tokens": 1500, "ignore_eos": True, "stream": True}
    full, counted = asyncio.Event(), asyncio.Event()

    async def one(client: httpx.AsyncClient, number: int) -> None:
        messages = [{"role": "user", "content": f"Request {number}."}]
        url = f"{server.url}/v1/chat/completions"
        async with client.stream("POST", url, json={**fields, "messages": messages}) as stream:
            seen[stream.status_code] += 1
            if stream.status_code == 429:
                assert int(stream.headers["retry-after"]) > 0
            if seen.total() == count:
                full.set()
            await counted.wait()

    limits = httpx.Limits(max_connections=count)
    async with httpx.AsyncClient(timeout=300, limits=limits) as client:
        work = asyncio.gather(*(one(client, number) for number in range(count)))
        await asyncio.wait_for(full.wait(), 240)
        # A stream's status is known before its turn runs, so the batch may still be filling up.
        most = (0, 0)
        for _ in range(100):
            most = max(most, (engine.stats.running, engine.waiting()[0]))
            await asyncio.sleep(0.02)
        counted.set()
        await work
    return seen, most


def test_default_limits_hold_when_more_come(tmp_path: Path) -> None:
    limits = SchedulerSettings()
    fits = limits.max_running + limits.max_queued
    with live(replace(tiny(tmp_path, context_limit=1600), scheduler=limits)) as server:
        seen, load = asyncio.run(crowd(server, fits + BEYOND))
        assert load == (limits.max_running, limits.max_queued)
        assert seen == {200: fits, 429: BEYOND}
        server.wait_until("all turns to be undone", server.idle)
        server.wait_until("memory to be back", lambda: server.service.engine.stats.kv_reserved == 0)
    print(f"\n{load[0]} turns in the batch, {load[1]} in the queue, {seen[429]} more refused")
