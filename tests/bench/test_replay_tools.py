"""Recorded tool calls run again in the sandbox, and a session shown."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from dlite_agent.agent.run_spec import RunLimits
from dlite_agent.bench.replay_commands import present, read_changes, read_scripts, replay_all_tools
from dlite_agent.config import ModelSettings
from dlite_agent.errors import InvalidRequest
from dlite_agent.trace.comparison import tool_replays
from dlite_agent.trace.events import AnyEvent, Segment, SessionStart, ToolEnd, ToolStart, TurnEnd, TurnStart
from dlite_agent.trace.log import dump_lines
from dlite_agent.trace.phases import timelines
from dlite_agent.trace.replay_view import show
from dlite_agent.trace.script import NotReplayable
from tests.trace import sample

CALLS = [
    ({"command": "cat a.txt && touch made"}, "one"),
    ({"command": "ls"}, "a.txt\nmade"),
    ({"command": "cat a.txt; exit 3"}, "two\n[exit code 3]"),
]


def session(path: Path, *, content: bool = True) -> Path:
    """Three turns, each with one shell call; the last one's observation is not what the workspace gives."""
    events: list[AnyEvent] = [Segment(segment="g", t=0.0, wall=1.8e9), SessionStart(segment="g", t=0.0, session="s")]
    for turn, (arguments, output) in enumerate(CALLS):
        place: dict[str, Any] = {"segment": "g", "session": "s", "turn": turn}
        call = {"id": f"c{turn}", "type": "function", "function": {"name": "shell", "arguments": "{}"}}
        message = {"role": "assistant", "content": "I look.", "tool_calls": [call]}
        asked = [{"role": "user", "content": "Look at \x1b[31mred"}]
        events += [
            TurnStart(**place, t=10.0 * turn, messages=asked),
            TurnEnd(**place, t=10.0 * turn + 2, finish_reason="tool_calls", output_tokens=5, message=message),
            ToolStart(**place, t=10.0 * turn + 2, call_id=f"c{turn}", name="shell", arguments=arguments),
            ToolEnd(**place, t=10.0 * turn + 3, call_id=f"c{turn}", output=output, exit_code=0),
        ]
    if not content:
        events = [event if isinstance(event, (Segment, type(None))) else event.without_content() for event in events]  # type: ignore[union-attr]
    path.write_text(dump_lines(events))
    return path


def test_calls_run_again_on_a_copy_and_differences_are_located(tmp_path: Path) -> None:
    workspace = tmp_path / "workspace"
    workspace.mkdir()
    (workspace / "a.txt").write_text("one\n")
    found = read_scripts([session(tmp_path / "s.jsonl")])
    log = asyncio.run(replay_all_tools(found, workspace, RunLimits()))
    assert sorted(path.name for path in workspace.iterdir()) == ["a.txt"]
    (replay,) = tool_replays(found, timelines(log))
    assert replay.recorded_wait == pytest.approx(3.0)
    assert replay.tool_wait > 0
    assert [call.mismatch is None for call in replay.calls] == [True, True, False]
    wrong = replay.calls[2].mismatch
    assert wrong is not None
    assert (wrong.turn, wrong.call_id, wrong.position) == (2, "c2", 0)
    assert (str(wrong.expected)[:3], str(wrong.found)[:3]) == ("two", "one")
    assert (replay.calls[2].recorded_exit, replay.calls[2].exit_code) == (0, 3)
    text = present(log, found, "tools", "table")
    assert "1 of 3 observations differ" in text
    assert '"position": 0' in present(log, found, "tools", "json")


def test_what_cannot_be_replayed_is_said(tmp_path: Path) -> None:
    bare = read_scripts([session(tmp_path / "s.jsonl", content=False)])
    with pytest.raises(NotReplayable, match="turn 0, call c0 of shell: the recording holds no arguments"):
        asyncio.run(replay_all_tools(bare, None, RunLimits()))
    with pytest.raises(InvalidRequest, match="no folder"):
        asyncio.run(replay_all_tools(read_scripts([session(tmp_path / "t.jsonl")]), tmp_path / "none", RunLimits()))
    with pytest.raises(NotReplayable, match="no session 'x'; there are: s"):
        read_scripts([tmp_path / "t.jsonl"], "x")
    (tmp_path / "empty.jsonl").write_text(dump_lines(sample.events()[:1]))
    with pytest.raises(NotReplayable, match="no session with an answered turn"):
        read_scripts([tmp_path / "empty.jsonl"])


def test_copies_have_names_of_their_own(tmp_path: Path) -> None:
    path = session(tmp_path / "s.jsonl")
    assert [script.session for script in read_scripts([path], copies=2)] == ["s#1", "s#2"]
    with pytest.raises(InvalidRequest, match="at least 1"):
        read_scripts([path], copies=0)


def test_settings_are_checked_by_name() -> None:
    changes = read_changes(["temperature=0.5", "max_running=2", "kv_budget=1000", "dtype=fp32"], ModelSettings())
    assert changes.sampling == {"temperature": 0.5}
    assert (changes.scheduler.max_running, changes.model.kv_budget, changes.model.dtype) == (2, 1000, "fp32")
    for text, message in (
        ("temperature", "key=value"),
        ("heat=1", "no setting 'heat'"),
        ("temperature=-1", "temperature"),
        ("max_running=0", "max_running"),
        ("max_running=x", "another kind"),
    ):
        with pytest.raises(InvalidRequest, match=message):
            read_changes([text], ModelSettings())


def test_a_session_is_shown_at_the_asked_pace(tmp_path: Path) -> None:
    (script,) = read_scripts([session(tmp_path / "s.jsonl")])
    for wait, speed, total in (("none", 1.0, 0.0), ("original", 1.0, 23.0), ("scaled", 2.0, 11.5)):
        said: list[str] = []
        slept: list[float] = []
        show(script, said.append, wait=wait, speed=speed, sleep=slept.append)
        assert sum(slept) == pytest.approx(total)
    text = "\n".join(said)
    assert "turn 0:" in text
    assert '[calls shell] {"command": "cat a.txt && touch made"}' in text
    assert "[shell, 1.00 s measured, exit 0] one" in text
