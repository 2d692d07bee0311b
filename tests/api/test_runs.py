"""/v1/agents/runs over HTTP: one run from its start to its end, seen through its state, its events and its errors."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from dlite_agent.agent.runs import Runs, RunsSettings
from tests.agent.scripted import SUBMIT, Scripted, shell
from tests.serving import Live, live, tiny

PATH = "/v1/agents/runs"
Serve = Callable[[list[str]], Live]
BODY = {"task": "Do it.", "workspace": "work", "bundles": ["shell", "submit"], "protect_git": False}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    """A server whose own model is not asked for anything here."""
    with live(tiny(tmp_path_factory.mktemp("tiny"))) as served:
        yield served


@pytest.fixture
def serve(server: Live, tmp_path: Path) -> Iterator[Serve]:
    """The server with runs whose model says what the test gives."""
    state = server.server.config.app.state  # type: ignore[union-attr]
    before = state.runs
    (tmp_path / "work").mkdir()

    def start(turns: list[str]) -> Live:
        state.runs = Runs(RunsSettings(roots=(tmp_path,)), lambda run, owner: Scripted(turns), tmp_path / "data")
        return server

    yield start
    runs, state.runs = state.runs, before
    loops = {run.task.get_loop() for run in runs.list("") if run.task is not None}
    for loop in loops:
        asyncio.run_coroutine_threadsafe(runs.close(), loop).result(60)
    if not loops:
        asyncio.run(runs.close())


def start(served: Live, **fields: Any) -> dict[str, Any]:
    answer = served.post(PATH, BODY | fields)
    assert answer.status_code == 201, answer.text
    run: dict[str, Any] = answer.json()
    assert answer.headers["location"] == f"{PATH}/{run['id']}"
    return run


def state(served: Live, run: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = served.get(f"{PATH}/{run['id']}").json()
    return found


def frames(text: str) -> list[tuple[str, str, dict[str, Any]]]:
    """(id, event, data) of each frame."""
    out = []
    for block in text.split("\n\n"):
        fields = dict(line.split(": ", 1) for line in block.splitlines() if not line.startswith(":"))
        if "data" in fields:
            out.append((fields.get("id", ""), fields["event"], json.loads(fields["data"])))
    return out


def test_a_run_and_its_events(serve: Serve, tmp_path: Path) -> None:
    served = serve(["Look.\n" + shell("echo hello > new"), SUBMIT])
    run = start(served)
    live_frames = frames(served.get(f"{PATH}/{run['id']}/events").text)
    ended = state(served, run)
    assert (ended["state"], ended["turns"], ended["tool_calls"], ended["answer"]) == ("submitted", 2, 2, "done")
    assert ended["sandbox"]["level"]
    assert [one["id"] for one in served.get(PATH).json()["data"]] == [run["id"]]
    kinds = [kind for _, kind, _ in live_frames]
    assert kinds[0] == "state"
    assert {"turn_start", "tool_start", "tool_end", "turn_end", "session_end"} <= set(kinds)
    logged = [(at, data) for at, _, data in live_frames if at]
    again = frames(served.get(f"{PATH}/{run['id']}/events?follow=false").text)
    assert [(at, data) for at, _, data in again if at] == logged
    behind = served.get(f"{PATH}/{run['id']}/events", headers={"last-event-id": logged[3][0]}).text
    assert [(at, data) for at, _, data in frames(behind) if at] == logged[4:]
    assert (tmp_path / "work" / "new").read_text() == "hello\n"


def test_pause_message_resume(serve: Serve) -> None:
    served = serve([shell("sleep 1"), shell("true"), SUBMIT])
    run = start(served)
    paused = served.post(f"{PATH}/{run['id']}/pause", None).json()
    assert paused["state"] in ("pausing", "paused")
    served.wait_until("the pause", lambda: state(served, run)["state"] == "paused")
    said = served.post(f"{PATH}/{run['id']}/messages", {"content": "And quickly."})
    assert (said.status_code, said.json()["waiting_messages"]) == (200, 1)
    assert served.post(f"{PATH}/{run['id']}/resume", None).json()["state"] == "running"
    served.wait_until("the end", lambda: state(served, run)["state"] == "submitted")
    assert state(served, run)["waiting_messages"] == 0


def test_cancel_and_what_is_not_possible_then(serve: Serve) -> None:
    served = serve([shell("sleep 60"), SUBMIT])
    run = start(served)
    assert served.post(f"{PATH}/{run['id']}/cancel", None).json()["state"] == "cancelled"
    assert served.post(f"{PATH}/{run['id']}/cancel", None).status_code == 200
    for path, body in (("pause", None), ("resume", None), ("messages", {"content": "More."})):
        assert served.post(f"{PATH}/{run['id']}/{path}", body).status_code == 409


def test_the_same_key_begins_one_run(serve: Serve) -> None:
    served = serve([SUBMIT])
    headers = {"idempotency-key": "k1"}
    first, second = (served.post(PATH, BODY, headers=headers).json()["id"] for _ in range(2))
    assert first == second
    assert served.post(PATH, BODY | {"task": "Else."}, headers=headers).status_code == 409


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"task": ""}, "task"),
        ({"workspace": "/etc"}, "workspace"),
        ({"bundles": []}, "bundles"),
        ({"bundles": ["nothing"]}, "bundles"),
        ({"limits": {"turns": 0}}, "limits.turns"),
        ({"limits": {"turns": "5"}}, "limits.turns"),
        ({"limits": {"turn": 1}}, "limits.turn"),
        ({"protect_git": "no"}, "protect_git"),
        ({"model": {"temperature": 3}}, "model.temperature"),
        ({"model": {"tool_choice": "none"}}, "model.tool_choice"),
        ({"sandbox": "docker"}, "sandbox"),
        ({"extra": 1}, "extra"),
    ],
)
def test_fields_are_refused_by_name(serve: Serve, fields: dict[str, Any], param: str) -> None:
    answer = serve([]).post(PATH, BODY | fields)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)


def test_unknown_runs_and_places(serve: Serve) -> None:
    served = serve([SUBMIT])
    run = start(served)
    assert served.get(f"{PATH}/run_none").status_code == 404
    wrong = served.get(f"{PATH}/{run['id']}/events", headers={"last-event-id": "x"})
    assert (wrong.status_code, wrong.json()["error"]["param"]) == (400, "last-event-id")
