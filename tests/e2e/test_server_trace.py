"""A session over HTTP becomes a log that adds up, and that replays to the same tokens."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dlite_agent.bench.replay import parse_sides
from dlite_agent.bench.replay_commands import present, read_changes, read_scripts, replay_decode
from dlite_agent.config import Settings
from dlite_agent.trace.comparison import comparisons
from dlite_agent.trace.events import Calibration, Mask, ToolEnd, TurnStart
from dlite_agent.trace.log import read_log
from dlite_agent.trace.phases import timelines
from dlite_agent.trace.summary import summarise
from tests.serving import Live, live, tiny

PARAMETERS = {
    "type": "object",
    "properties": {"path": {"type": "string", "maxLength": 8}},
    "required": ["path"],
    "additionalProperties": False,
}
READ: Any = {"type": "function", "function": {"name": "read", "parameters": PARAMETERS}}
ASK = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Read a.txt."}]
TOOL_SECONDS = 0.4


def call_and_answer(server: Live, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """A forced call, a tool that takes a while, and a sampled answer to its result."""
    body = {"model": server.service.model, "tools": [READ], "session_id": "work"}
    forced = {"tool_choice": "required", "parallel_tool_calls": False, "temperature": 0, "max_tokens": 120}
    first = server.post("/v1/chat/completions", body | forced | {"messages": messages})
    assert first.status_code == 200, first.text
    answer = first.json()["choices"][0]["message"]
    time.sleep(TOOL_SECONDS)
    result = {"role": "tool", "tool_call_id": answer["tool_calls"][0]["id"], "content": "It says 42."}
    messages = [*messages, answer, result]
    free = {"tool_choice": "none", "temperature": 0.8, "seed": 7, "max_tokens": 40}
    second = server.post("/v1/chat/completions", body | free | {"messages": messages})
    assert second.status_code == 200, second.text
    return [*messages, second.json()["choices"][0]["message"]]


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> tuple[Settings, Path, list[tuple[float, float]]]:
    """Settings, log, and the wall clock's begin and end of what the client did, before and after a restart."""
    folder = tmp_path_factory.mktemp("traced")
    settings = replace(tiny(folder, context_limit=2000, log_content=True), data_dir=folder / "data")
    walls = []
    messages = ASK
    for _ in range(2):
        with live(settings) as server:
            begin = time.time()
            messages = call_and_answer(server, messages)
            walls.append((begin, time.time()))
            messages = [*messages, {"role": "user", "content": "And again."}]
    return settings, folder / "data" / "events.jsonl", walls


def test_phases_add_up_to_the_clients_wall_clock(
    recorded: tuple[Settings, Path, list[tuple[float, float]]],
) -> None:
    _, path, walls = recorded
    log = read_log(path)
    assert log.problems == []
    (view,) = timelines(log)
    seconds, inferred = view.seconds(), view.seconds(inferred_only=True)
    assert sum(seconds.values()) == pytest.approx(view.wall, rel=1e-6)
    whole = walls[-1][1] - walls[0][0]
    # The client's clock also holds the way there and back, and these tests share their machine.
    assert whole - 1.0 < view.wall < whole
    # The two tools ran at the client: their time is inferred, and labelled so.
    assert 2 * TOOL_SECONDS <= seconds["tool"] == inferred["tool"] < whole / 2
    assert [(call.name, call.measured) for call in view.tools] == [("read", False)] * 2
    # Between the processes lies an outage, which only wall clocks know.
    assert view.segments == 2
    assert seconds["outage"] == inferred["outage"] == pytest.approx(walls[1][0] - walls[0][1], abs=1.0)
    # What no event explains lies between the steps of the engine's thread, which shares this machine.
    assert seconds["other"] < 0.1 * view.wall
    for phase in ("prefill", "decode", "mask"):
        assert seconds[phase] > 0
    turns = [turn for turn in view.turns if turn.finished]
    assert [turn.finish_reason for turn in turns][::2] == ["tool_calls", "tool_calls"]


def test_the_log_holds_what_report_and_replay_need(
    recorded: tuple[Settings, Path, list[tuple[float, float]]],
) -> None:
    _, path, _ = recorded
    log = read_log(path)
    starts = [event for event in log.events if isinstance(event, TurnStart)]
    assert starts[0].messages == ASK
    assert starts[0].constraint is not None
    assert starts[1].constraint is None
    assert starts[1].sampling == {"temperature": 0.8, "seed": 7}
    assert starts[1].messages is not None
    assert starts[1].messages[0]["content"] == "It says 42."
    assert [event.output for event in log.events if isinstance(event, ToolEnd)] == ["It says 42."] * 2
    assert any(isinstance(event, Mask) for event in log.events)
    assert any(isinstance(event, Calibration) for event in log.events)
    report = summarise(timelines(log))
    assert report.t_ar_source == "calibration in the log"
    assert report.sessions[0].amdahl is not None
    assert report.sessions[0].amdahl.s_d is not None


def test_replay_gives_the_recorded_tokens_on_both_sides(
    recorded: tuple[Settings, Path, list[tuple[float, float]]],
) -> None:
    settings, path, _ = recorded
    found = read_scripts([path])
    log = replay_decode(found, parse_sides("ar,dlite"), read_changes([], settings.model))
    (compared,) = comparisons(timelines(log))
    assert [side.mismatches for side in compared.sides] == [[], []]
    assert compared.sides[1].predicted_to_measured is not None
    text = present(log, found, "decode", "table")
    assert "no mismatch" in text
    assert "measured against ar: workflow" in text
