"""Sessions over HTTP: names, forks, conflicts, divergence, owners' events."""

from __future__ import annotations

import threading
import uuid
from typing import Any

import httpx

from tests.serving import MODEL, Live, events


def say(*texts: str) -> list[dict[str, Any]]:
    """User messages with fixed answers between them."""
    out: list[dict[str, Any]] = []
    for text in texts:
        out += [{"role": "user", "content": text}, {"role": "assistant", "content": "Yes."}]
    return out[:-1]


def new_name() -> str:
    return f"test-{uuid.uuid4().hex[:8]}"


def test_a_named_session_is_found_by_name_and_id(server: Live) -> None:
    name = new_name()
    made = server.chat(say("Good day."), session_id=name, max_tokens=3)["usage"]["dlite"]["session_id"]
    for reference in (name, made):
        card = server.get(f"/v1/sessions/{reference}").json()
        assert card["id"] == made
        assert card["name"] == name
        assert card["turns"] == 1
        assert card["device_tokens"] == card["tokens"] - 1
    assert made in [card["id"] for card in server.get("/v1/sessions").json()["data"]]
    assert server.get(f"/v1/sessions/{new_name()}").status_code == 404


def test_every_header_convention_names_a_session(server: Live) -> None:
    for header in ("x-session-id", "session-id", "x-claude-code-session-id", "x-dynamo-session-id"):
        name = new_name()
        body = {"model": MODEL, "messages": say("Hi."), "max_tokens": 1}
        response = server.post("/v1/chat/completions", body, headers={header: name})
        assert server.get(f"/v1/sessions/{name}").json()["id"] == response.headers["x-session-id"]


def test_a_system_change_is_reported_with_its_place(server: Live) -> None:
    name = new_name()
    opening = {"role": "system", "content": "Be brief."}
    first = server.chat([opening, *say("Count to three.")], session_id=name, max_tokens=3)
    answer = first["choices"][0]["message"]
    changed = [{"role": "system", "content": "Be long."}, *say("Count to three."), answer, *say("Go on.")]
    second = server.chat(changed, session_id=name, max_tokens=2)
    assert second["usage"]["dlite"]["divergence"] == {"reason": "system_changed", "message": 0, "position": 0}
    assert server.get(f"/v1/sessions/{name}").json()["last_divergence"] == "system_changed"


def test_a_fork_continues_apart(server: Live) -> None:
    name = new_name()
    messages = say("Name an animal.")
    first = server.chat(messages, session_id=name, max_tokens=3)
    fork = server.post(f"/v1/sessions/{name}/fork", {"session_id": f"{name}-fork"})
    assert fork.status_code == 201
    assert fork.json()["parent"] == first["usage"]["dlite"]["session_id"]
    messages = [*messages, first["choices"][0]["message"], *say("Another one, please, but a smaller animal.")]
    original = server.chat(messages, session_id=name, max_tokens=3)
    forked = server.chat(messages, session_id=f"{name}-fork", max_tokens=3)
    assert forked["choices"][0]["message"] == original["choices"][0]["message"]
    assert forked["usage"]["dlite"]["session_id"] != original["usage"]["dlite"]["session_id"]
    taken = server.post(f"/v1/sessions/{name}/fork", {"session_id": name})
    assert taken.status_code == 409
    assert server.post(f"/v1/sessions/{name}/fork", {"turn": 9}).json()["error"]["param"] == "turn"


def test_deleting_gives_the_memory_back(server: Live) -> None:
    server.wait_until("the engine to be idle", server.idle)
    before = server.service.engine.stats.kv_reserved
    name = new_name()
    server.chat(say("Hello."), session_id=name, max_tokens=2)
    assert server.service.engine.stats.kv_reserved > before
    assert httpx.delete(f"{server.url}/v1/sessions/{name}").json()["deleted"] is True
    assert server.get(f"/v1/sessions/{name}").status_code == 404
    server.wait_until("the memory to be given back", lambda: server.service.engine.stats.kv_reserved == before)


def test_a_second_turn_conflicts_or_waits(server: Live) -> None:
    name = new_name()
    body = {"model": MODEL, "messages": say("Tell a story."), "session_id": name, "max_tokens": 40, "stream": True}
    with httpx.stream("POST", f"{server.url}/v1/chat/completions", json=body, timeout=300) as running:
        lines = running.iter_lines()
        next(lines)
        other = {"model": MODEL, "messages": say("Sing."), "session_id": name, "max_tokens": 1}
        refused = server.post("/v1/chat/completions", other)
        assert refused.status_code == 409
        assert refused.json()["error"]["code"] == "conflict"
        busy = httpx.delete(f"{server.url}/v1/sessions/{name}")
        assert busy.status_code == 409
        waited: list[httpx.Response] = []
        waiting = other | {"dlite": {"on_conflict": "wait"}}
        thread = threading.Thread(target=lambda: waited.append(server.post("/v1/chat/completions", waiting)))
        thread.start()
        for _ in lines:
            pass
    thread.join(300)
    assert waited[0].status_code == 200
    assert waited[0].json()["usage"]["dlite"]["turn"] == 1


def test_without_a_name_the_conversation_decides(server: Live) -> None:
    opening = say(f"Remember {uuid.uuid4().hex}.")
    first = server.chat(opening, max_tokens=3)
    longer = [*opening, first["choices"][0]["message"], *say("And now?")]
    second = server.chat(longer, max_tokens=3)
    session = first["usage"]["dlite"]["session_id"]
    assert second["usage"]["dlite"]["session_id"] == session
    # Another continuation of the first answer is a fork: the session has gone on.
    other = server.chat([*longer[:2], *say("Something else?")], max_tokens=3)
    assert other["usage"]["dlite"]["session_id"] != session
    assert server.get(f"/v1/sessions/{other['usage']['dlite']['session_id']}").json()["parent"] == session


def test_tolerated_changes_in_history_are_no_divergence(server: Live) -> None:
    opening = say(f"Say {uuid.uuid4().hex[:6]}.")
    first = server.chat(opening, max_tokens=4)
    text = first["choices"][0]["message"]["content"]
    rewritten = {"content": [{"type": "text", "text": text}], "tool_calls": None, "role": "assistant"}
    second = server.chat([*opening, rewritten, *say("More.")], max_tokens=2)
    assert second["usage"]["dlite"]["divergence"] is None
    assert second["usage"]["prompt_tokens_details"]["cached_tokens"] == first["usage"]["total_tokens"] - 1


def test_events_tell_the_turn(server: Live) -> None:
    name = new_name()
    server.chat(say("Hello there."), session_id=name, max_tokens=3)
    seen = events(server.get(f"/v1/sessions/{name}/events?follow=false").text)
    told = {event["kind"]: event for event in seen}
    order = ["segment", "session_start", "turn_start", "queue", "restore", "prefill", "rounds", "turn_end"]
    # Calibration points and the time around the phases may come in between.
    assert [kind for kind in told if kind in order] == order
    assert told["turn_end"]["output_tokens"] == 3
    assert sum(told["rounds"]["advance"]) == 2
    assert "messages" not in told["turn_start"]


def test_events_arrive_while_they_happen(server: Live) -> None:
    name = new_name()
    server.chat(say("One."), session_id=name, max_tokens=1)
    with httpx.stream("GET", f"{server.url}/v1/sessions/{name}/events", timeout=60) as live:
        lines = live.iter_lines()
        while "turn_end" not in next(lines):
            pass
        httpx.delete(f"{server.url}/v1/sessions/{name}")
        while "session_end" not in next(lines):
            pass
