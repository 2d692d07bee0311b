"""The default limits, filled to the brim: so many turns run, so many wait, and the next is told to come back."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import httpx

from dlite_agent.config import SchedulerSettings
from tests.serving import Live, live, tiny

BEYOND = 5


async def crowd(server: Live, fits: int, running: int) -> tuple[Counter[int], tuple[int, int]]:
    """As many streams as fit and `BEYOND` more, which go on until all are answered.

    The batch is filled before the queue: requests that come at once may find the queue full while the batch is not.

    Returns:
        How often each status came; how many turns ran, and how many waited, when all were answered.
    """
    engine, seen = server.service.engine, Counter[int]()
    fields = {"model": server.service.model, "max_tokens": 1500, "ignore_eos": True, "stream": True}
    counted = asyncio.Event()

    async def one(client: httpx.AsyncClient, number: int) -> None:
        messages = [{"role": "user", "content": f"Request {number}."}]
        url = f"{server.url}/v1/chat/completions"
        async with client.stream("POST", url, json={**fields, "messages": messages}) as stream:
            seen[stream.status_code] += 1
            if stream.status_code == 429:
                assert int(stream.headers["retry-after"]) > 0
            await counted.wait()

    async def reach(reached: Callable[[], bool]) -> None:
        async with asyncio.timeout(240):
            while not reached():
                await asyncio.sleep(0.02)

    limits = httpx.Limits(max_connections=fits + BEYOND)
    async with httpx.AsyncClient(timeout=300, limits=limits) as client:
        work = [asyncio.ensure_future(one(client, number)) for number in range(running)]
        await reach(lambda: engine.stats.running == running)
        work += [asyncio.ensure_future(one(client, number)) for number in range(running, fits + BEYOND)]
        await reach(lambda: seen.total() == fits + BEYOND)
        load = (engine.stats.running, engine.waiting()[0])
        counted.set()
        await asyncio.gather(*work)
    return seen, load


def test_default_limits_hold_when_more_come(tmp_path: Path) -> None:
    limits = SchedulerSettings()
    fits = limits.max_running + limits.max_queued
    with live(replace(tiny(tmp_path, context_limit=1600), scheduler=limits)) as server:
        seen, load = asyncio.run(crowd(server, fits, limits.max_running))
        assert load == (limits.max_running, limits.max_queued)
        assert seen == {200: fits, 429: BEYOND}
        server.wait_until("all turns to be undone", server.idle)
        server.wait_until("memory to be back", lambda: server.service.engine.stats.kv_reserved == 0)
    print(f"\n{load[0]} turns in the batch, {load[1]} in the queue, {seen[429]} more refused")
