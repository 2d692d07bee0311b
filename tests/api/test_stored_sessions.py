"""Stored sessions over HTTP: found again after a restart, by their owner only, and refused or cut when not sound."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from dlite_agent.api.app import build_app
from dlite_agent.config import ModelSettings, ServerSettings, Settings
from dlite_agent.errors import Conflict
from dlite_agent.session.record import BlockKind, SessionRecord, decode
from dlite_agent.session.store.disk import DiskStore
from dlite_agent.session.store.segments import Segments
from tests.serving import MODEL, Live, live
from tests.session.test_store_disk import file_limit

ALICE, BOB = "key-of-alice", "key-of-bobby"


def stored(data: Path) -> Settings:
    return Settings(
        model=ModelSettings(dtype="fp32", threads=1),
        server=ServerSettings(api_keys=(ALICE, BOB), keepalive_seconds=0.2),
        data_dir=data,
    )


def ask(server: Live, messages: list[dict[str, Any]], key: str = ALICE, **fields: Any) -> httpx.Response:
    body = {"model": MODEL, "messages": messages, "temperature": 0, "max_tokens": 4, "ignore_eos": True} | fields
    return server.post("/v1/chat/completions", body, headers={"authorization": f"Bearer {key}"})


def told(server: Live, messages: list[dict[str, Any]], **fields: Any) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """The conversation with its answer, and the answer's usage."""
    response = ask(server, messages, **fields)
    assert response.status_code == 200, response.text
    answer = response.json()
    return [*messages, answer["choices"][0]["message"]], answer["usage"]


def say(text: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": text}]


def api(server: Live, method: str, path: str, key: str = ALICE, **options: Any) -> httpx.Response:
    headers = {"authorization": f"Bearer {key}"}
    return httpx.request(method, f"{server.url}{path}", headers=headers, timeout=120, **options)


def test_a_restart_forgets_nothing_and_tells_nobody_else(tmp_path: Path) -> None:
    with live(stored(tmp_path)) as server:
        one, first = told(server, say("Name an animal."), session_id="one")
        two, second = told(server, say("Name a colour, please."))
        fork = api(server, "POST", "/v1/sessions/one/fork", json={"session_id": "fork"}).json()
        gone = told(server, say("Forget me."), session_id="gone")[1]["dlite"]["session_id"]
        assert api(server, "DELETE", "/v1/sessions/gone").status_code == 200
    with live(stored(tmp_path)) as server:
        listed = {card["id"]: card for card in api(server, "GET", "/v1/sessions").json()["data"]}
        assert listed.keys() == {first["dlite"]["session_id"], second["dlite"]["session_id"], fork["id"]}
        assert all(card["stored"] for card in listed.values())
        assert api(server, "GET", "/v1/sessions", BOB).json()["data"] == []
        for path in ("one", "fork", first["dlite"]["session_id"], second["dlite"]["session_id"]):
            assert api(server, "GET", f"/v1/sessions/{path}", BOB).status_code == 404
            assert api(server, "DELETE", f"/v1/sessions/{path}", BOB).status_code == 404
        for path in ("gone", gone):
            assert api(server, "GET", f"/v1/sessions/{path}").status_code == 404
        theirs = ask(server, [*one, *say("Another.")], BOB, session_id="one").json()["usage"]
        assert theirs["dlite"]["session_id"] != first["dlite"]["session_id"]
        assert theirs["prompt_tokens_details"]["cached_tokens"] == 0
        card = api(server, "GET", "/v1/sessions/fork").json()
        assert (card["parent"], card["tokens"]) == (first["dlite"]["session_id"], first["total_tokens"])
        forked, usage = told(server, [*one, *say("Another.")], session_id="fork")
        assert usage["dlite"]["restored_from"] == "disk"
        assert usage["prompt_tokens_details"]["cached_tokens"] == first["total_tokens"] - 1
        again, usage = told(server, [*one, *say("Another.")], session_id="one")
        assert again[-1] == forked[-1]
        # Nobody names the second one: what was said in it finds it.
        _, usage = told(server, [*two, *say("Another.")])
        assert usage["dlite"]["session_id"] == second["dlite"]["session_id"]
        assert usage["prompt_tokens_details"]["cached_tokens"] == second["total_tokens"] - 1
        lines = server.service.recorder.metrics.text().decode()
        assert 'dlite:tier_hits_total{tier="disk"}' in lines
        assert 'dlite:tier_bytes{tier="disk"}' in lines
        assert api(server, "DELETE", "/v1/sessions/fork").status_code == 200


@contextlib.contextmanager
def opened(data: Path) -> Iterator[DiskStore]:
    store = DiskStore(data / "sessions")
    try:
        yield store
    finally:
        store.close()


def flip(data: Path, session: str, kind: BlockKind) -> None:
    """Flip a bit in the first block of a kind."""
    with opened(data) as store:
        key = decode(store.load(session) or b"").refs(kind)[0].key
        (frame,) = store.fetch(session, [key])
    assert frame is not None
    path = data / "sessions" / "segments" / f"{Segments.name(session)}.seg"
    content = bytearray(path.read_bytes())
    content[content.index(frame) + len(frame) // 2] ^= 1
    path.write_bytes(content)


def commit_as(data: Path, session: str, **changes: Any) -> None:
    """Write a session's record anew, changed."""
    with opened(data) as store:
        record: SessionRecord = decode(store.load(session) or b"")
        lease = store.acquire(session, "test", 30)
        store.commit(lease, replace(record, epoch=lease.epoch, **changes), {})


def test_what_is_not_sound_is_refused_or_cut_and_said(tmp_path: Path) -> None:
    names = ("kv", "ids", "features", "model", "planted", "canary")
    with live(stored(tmp_path)) as server:
        talks = {name: told(server, say(f"Tell me about {name}, please."), session_id=name) for name in names}
    ids = {name: usage["dlite"]["session_id"] for name, (_, usage) in talks.items()}
    flip(tmp_path, ids["kv"], "kv")
    flip(tmp_path, ids["ids"], "ids")
    flip(tmp_path, ids["features"], "features")
    with opened(tmp_path) as store:
        wrong = replace(decode(store.load(ids["model"]) or b"").fingerprint, target="another")
    commit_as(tmp_path, ids["model"], fingerprint=wrong)
    segments = tmp_path / "sessions" / "segments"
    mine, other = (segments / f"{Segments.name(ids[name])}.seg" for name in ("planted", "canary"))
    mine.write_bytes(other.read_bytes())
    for index in (tmp_path / "sessions").glob("index.sqlite*"):
        index.unlink()
    with live(stored(tmp_path)) as server:
        usage = {}
        for name, (messages, before) in talks.items():
            after, usage[name] = told(server, [*messages, *say("Go on.")], session_id=name)
            # Whatever was lost, the answer is what an undisturbed conversation gets.
            fresh, _ = told(server, [*messages, *say("Go on.")], key=BOB)
            assert after[-1] == fresh[-1], name
            whole = before["total_tokens"] - 1
            cached = usage[name]["prompt_tokens_details"]["cached_tokens"]
            assert cached == (whole if name in ("features", "canary") else 0), name
    for name, said in (
        ("kv", "missing or refused"),
        ("ids", "ids from 0 on are missing"),
        ("features", "features"),
        ("model", "another target"),
    ):
        assert said in (usage[name]["dlite"]["restore_reason"] or ""), (name, usage[name])
    for name in ("ids", "model", "planted"):
        assert usage[name]["dlite"]["session_id"] != ids[name], "a new session, under the same name"


def test_on_a_full_disk_the_turn_is_refused_and_the_last_one_stands(tmp_path: Path) -> None:
    with live(stored(tmp_path)) as server:
        messages, first = told(server, say("Name an animal."), session_id="one")
        largest = max(path.stat().st_size for path in (tmp_path / "sessions" / "segments").iterdir())
        longer = [*messages, *say("Another one, if you please.")]
        with file_limit(largest + 1000):
            refused = ask(server, longer, session_id="one")
        assert refused.status_code == 503
        assert refused.json()["error"]["code"] == "store_unavailable"
        assert "retry-after" in refused.headers
        card = api(server, "GET", "/v1/sessions/one").json()
        assert (card["turns"], card["tokens"]) == (1, first["total_tokens"])
        _, usage = told(server, longer, session_id="one")
        assert usage["dlite"]["turn"] == 1
        assert usage["dlite"]["divergence"] is None


def test_a_folder_that_is_served_already_is_refused(tmp_path: Path) -> None:
    app = build_app(stored(tmp_path))

    async def start() -> None:
        async with app.router.lifespan_context(app):
            pass

    with opened(tmp_path), pytest.raises(Conflict, match="serves this session folder"):
        asyncio.run(start())
    assert isinstance(app.state.failure, Conflict)
