"""`dlite-agent watch` in a terminal of its own, against a real server."""

from __future__ import annotations

import io
import os
import subprocess
import sys

import pytest
from rich.console import Console

from dlite_agent.cli_watch import received, screen
from dlite_agent.trace.events import SessionStart
from tests.serving import Live
from tests.trace.sample import calibration, events
from tests.viewer.browser import KEY, say
from tests.viewer.sample import hostile_session


def drawn(width: int = 140, turns: int = 12, **options: object) -> str:
    out = io.StringIO()
    Console(file=out, width=width, force_terminal=False).print(screen(**options, turns=turns))  # type: ignore[arg-type]
    return out.getvalue()


def run(server: Live, *arguments: str, key: str = KEY) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "dlite_agent.cli", "watch", "--url", server.url, "--once", *arguments]
    environment = os.environ | {"DLITE_API_KEY": key, "COLUMNS": "140"}
    return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=120, check=False)


def test_a_session_is_shown_with_its_phases_and_turns() -> None:
    text = drawn(events=[*events("by-hand"), calibration()])
    assert "by-hand" in text
    assert "2 turns" in text
    for figure in ("decode 4.00 s", "tool 3.00 s", "f 0.571", "tau 4.00", "T_AR 10.00"):
        assert figure in text, figure
    assert "disk" in text
    assert "tool_calls" in text


def test_only_the_latest_turns_are_shown_and_missing_ones_are_told() -> None:
    late = [event for event in events() if not isinstance(event, SessionStart)]
    text = drawn(events=late, turns=1)
    assert "only the latest turns are known" in text
    assert "stop" in text
    assert "tool_calls" not in text
    assert "Nothing has happened" in drawn(events=[])


def test_recorded_text_cannot_steer_the_terminal() -> None:
    text = drawn(events=hostile_session())
    assert "\x1b" not in text
    assert "\u202e" not in text


def test_comments_and_events_are_told_apart() -> None:
    stream = [": idle", "", "event: note", 'data: {"kind": "note", "segment": "g", "t": 1.0, "text": "x"}', ""]
    found = list(received(iter(stream)))
    assert found[0] is None
    assert getattr(found[1], "text", None) == "x"
    assert len(found) == 2


def test_the_command_finds_the_latest_session_of_a_server(server: Live) -> None:
    say(server, "Watch me.", "in-a-terminal", max_tokens=5)
    latest = run(server)
    assert latest.returncode == 0, latest.stderr
    assert "1 turns" in latest.stdout
    named = run(server, "in-a-terminal")
    assert named.stdout == latest.stdout


@pytest.mark.parametrize(
    ("arguments", "key", "words"),
    [
        (["no-such-session"], KEY, "There is no session 'no-such-session'."),
        ([], "wrong-key-here", "Send a valid API key"),
        (["--url", "http://127.0.0.1:9"], KEY, "is the server running?"),
        (["--turns", "0"], KEY, "turns must be at least 1"),
    ],
)
def test_what_goes_wrong_is_one_line(server: Live, arguments: list[str], key: str, words: str) -> None:
    failed = run(server, *arguments, key=key)
    assert failed.returncode == 1
    assert words in failed.stderr
    assert failed.stderr.count("\n") == 1
