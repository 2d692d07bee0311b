"""Two replicas with one Redis: a session goes on elsewhere after a hand-over or when its lease has run out, and what
happens while Redis is down."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx

from dlite_agent.config import SessionSettings
from tests.serving import MODEL, SERVED, Live, live
from tests.session.servers import RedisServer

LEASE_S = 1.5


def settings(folder: Path, name: str, redis: RedisServer, **sessions: Any) -> Any:
    shared = SessionSettings(redis_url=redis.url, lease_ttl_s=LEASE_S, **sessions)
    return replace(SERVED, sessions=shared, data_dir=folder / name)


def say(text: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": text}]


def try_chat(server: Live, messages: list[dict[str, Any]], **fields: Any) -> httpx.Response:
    body = {"model": MODEL, "messages": messages, "temperature": 0, "max_tokens": 5, "ignore_eos": True} | fields
    return server.post("/v1/chat/completions", body)


def chat(server: Live, messages: list[dict[str, Any]], **fields: Any) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    response = try_chat(server, messages, **fields)
    assert response.status_code == 200, response.text
    answer = response.json()
    return [*messages, answer["choices"][0]["message"]], answer["usage"]


def test_takeover_after_the_lease_and_at_a_hand_over(server: Live, tmp_path: Path) -> None:
    whole = say("Name an animal.")
    for said in ("Another.", "One more.", "And a last one."):
        whole, _ = chat(server, whole, session_id=str(tmp_path))
        whole += say(said)
    with RedisServer(tmp_path / "redis", persistent=False) as redis, live(settings(tmp_path, "two", redis)) as two:
        with live(settings(tmp_path, "one", redis)) as one:
            messages, first = chat(one, say("Name an animal."), session_id="s")
            messages += say("Another.")
            held = try_chat(two, messages, session_id="s")
            assert (held.status_code, held.json()["error"]["code"]) == (409, "session_held")
            time.sleep(LEASE_S + 0.1)
            messages, second = chat(two, messages, session_id="s")
            block = second["dlite"]
            assert (block["session_id"], block["turn"]) == (first["dlite"]["session_id"], 1)
            assert (block["restored_from"], block["restored_tokens"], block["divergence"]) == ("none", 0, None)
            assert "computed again" in block["restore_reason"]
            messages += say("One more.")
            time.sleep(LEASE_S + 0.1)
            # The first replica learns of the turn it has missed; its own KV is good as far as it goes.
            messages, third = chat(one, messages, session_id="s")
            assert (third["dlite"]["turn"], third["dlite"]["divergence"]) == (2, None)
            assert third["prompt_tokens_details"]["cached_tokens"] == first["total_tokens"] - 1
            messages += say("And a last one.")
        # It has drained and handed everything over: nobody needs to wait.
        before = time.monotonic()
        _, fourth = chat(two, messages, session_id="s")
        assert fourth["dlite"]["turn"] == 3
        assert time.monotonic() - before < 60
    assert messages == whole


def test_kv_goes_along_within_its_limit(tmp_path: Path) -> None:
    with RedisServer(tmp_path / "redis", persistent=False) as redis:
        with live(settings(tmp_path, "one", redis, redis_kv_limit=1 << 30)) as one:
            messages, first = chat(one, say("Name an animal."))
        memory_only = replace(settings(tmp_path, "two", redis, redis_kv_limit=1 << 30), data_dir=None)
        with live(memory_only) as two:
            _, second = chat(two, [*messages, *say("Another.")])
    assert second["dlite"]["session_id"] == first["dlite"]["session_id"]
    assert second["dlite"]["restored_from"] == "redis"
    assert second["prompt_tokens_details"]["cached_tokens"] == first["total_tokens"] - 1


def test_while_redis_is_down(tmp_path: Path) -> None:
    with RedisServer(tmp_path / "redis", persistent=True) as redis, live(settings(tmp_path, "one", redis)) as one:
        mine, _ = chat(one, say("Name an animal."), session_id="mine")
        redis.kill()
        mine, second = chat(one, [*mine, *say("Another.")], session_id="mine")
        assert second["dlite"]["turn"] == 1
        for fields in ({"session_id": "unknown"}, {}):
            refused = try_chat(one, say("Name a colour."), **fields)
            assert (refused.status_code, refused.json()["error"]["code"]) == (503, "store_unavailable")
            assert int(refused.headers["retry-after"]) > 0
        redis.start()
        chat(one, say("Name a colour."), session_id="unknown")
        mine, third = chat(one, [*mine, *say("And another.")], session_id="mine")
        assert third["dlite"]["turn"] == 2
        time.sleep(LEASE_S + 0.1)
        with live(settings(tmp_path, "two", redis)) as two:
            _, fourth = chat(two, [*mine, *say("The last one.")], session_id="mine")
        assert (fourth["dlite"]["turn"], fourth["dlite"]["divergence"]) == (3, None)
