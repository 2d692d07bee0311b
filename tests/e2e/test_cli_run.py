"""`dlite-agent run` in a process of its own, on a tiny random model: the grammar alone makes its calls valid."""

from __future__ import annotations

import asyncio
import fcntl
import os
import pty
import re
import signal
import struct
import subprocess
import sys
import termios
from pathlib import Path

import pytest
from typer.testing import CliRunner

from dlite_agent.cli import app
from dlite_agent.errors import InvalidRequest
from dlite_agent.trace.events import ToolStart, TurnEnd
from dlite_agent.trace.log import read_log
from examples.task_suite import tasks
from tests.serving import tiny

COMMAND = [sys.executable, "-W", "ignore", "-m", "dlite_agent.cli", "run"]
_ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


class Terminal:
    """`dlite-agent run` on a terminal of 80 columns."""

    def __init__(self, *options: str) -> None:
        self._ours, theirs = pty.openpty()
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 80, 0, 0))
        environment = os.environ | {"TERM": "xterm-256color"}

        def log_in() -> None:
            # A shell starts what it runs in the background with Ctrl-C ignored, these tests for one; no terminal does.
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            os.login_tty(theirs)

        self._process = subprocess.Popen([*COMMAND, *options], env=environment, preexec_fn=log_in)
        os.close(theirs)
        self.written = ""

    def read(self) -> bool:
        """Take what has been written; False once the program has ended."""
        try:
            self.written += os.read(self._ours, 1 << 16).decode("utf-8", "replace")
        except OSError:  # Linux's way to say that nobody holds the other end.
            return False
        return True

    def read_until(self, text: str) -> None:
        while text not in self.written:
            assert self.read(), self.written[-3000:]

    def press(self, keys: str) -> None:
        os.write(self._ours, keys.encode())

    def end(self) -> int:
        """Read to the end; the exit code."""
        while self.read():
            pass
        os.close(self._ours)
        return self._process.wait(60)

    @property
    def text(self) -> str:
        return _ESCAPES.sub("", self.written)


def run(*options: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*COMMAND, *options], capture_output=True, text=True, timeout=540, env=os.environ, check=False
    )


def tiny_run(folder: Path, *more: str) -> list[str]:
    """Options of a short run on the random model; its data is in `folder / "data"`."""
    model = tiny(folder / "model").model
    (folder / "work").mkdir()
    options = ["--target", model.target, "--drafter", model.drafter, "--dtype", "fp32", "--threads", "1"]
    options += ["--task", "Hand in.", "--repo", str(folder / "work"), "--data-dir", str(folder / "data")]
    return [*options, "--max-tokens", "60", "--argument-characters", "8", "--max-turns", "2", *more]


def test_run_in_this_process(tmp_path: Path) -> None:
    data = tmp_path / "data"
    done = run(*tiny_run(tmp_path, "--bundle", "submit"))
    assert done.returncode == 0, done.stderr[-3000:]
    assert "turn 0: prompt " in done.stdout
    assert "  calls submit " in done.stdout
    assert "  tool submit ok " in done.stdout
    (log,) = data.glob("runs/*/events.jsonl")
    events = read_log(log).events
    (call,) = [event for event in events if isinstance(event, ToolStart)]
    (turn,) = [event for event in events if isinstance(event, TurnEnd)]
    assert call.t <= turn.t
    assert turn.output_ids


def test_a_terminal_shows_the_run_as_it_goes(tmp_path: Path) -> None:
    terminal = Terminal(*tiny_run(tmp_path, "--bundle", "submit"))
    assert terminal.end() == 0, terminal.text[-3000:]
    assert terminal.written.count("\x1b[2K") > 10, "drawn once, not as it went"
    assert terminal.written.rindex("\x1b[?25h") > terminal.written.rindex("\x1b[?25l"), "the cursor was not given back"
    lines = [line.rstrip() for line in terminal.text.splitlines()]
    (last,) = [line for line in lines if line.startswith("submitted: 1 turns, 1 calls, ")]
    heads = [line.split() for line in lines if line.startswith(" turn ")]
    assert heads[-1][:6] == ["turn", "prompt", "restored", "tokens", "tok/s", "tau"]
    assert heads[-1][-1] == "tools"
    frame = "\n".join(lines[: lines.index(last)])
    assert "Hand in." in frame
    assert "submitted  sandbox " in frame
    assert "submit ok" in frame
    assert '-> submit {"answer"' in frame
    assert max(map(len, lines[: lines.index(last)])) <= 80


@pytest.mark.parametrize("shown", ["\x1b[?25l", "  running  ", "-> submit"], ids=["loading", "running", "calling"])
def test_ctrl_c_gives_the_terminal_back_and_says_how_to_go_on(tmp_path: Path, shown: str) -> None:
    """One press, at whatever moment."""
    terminal = Terminal(*tiny_run(tmp_path, "--bundle", "submit"))
    terminal.read_until(shown)
    terminal.press("\x03")
    assert terminal.end() == 130, terminal.text[-3000:]
    assert f"interrupted; go on with: dlite-agent run --data-dir {tmp_path / 'data'}" in terminal.text.replace(
        "\r\n", ""
    )
    assert terminal.written.rindex("\x1b[?25h") > terminal.written.rindex("\x1b[?25l")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--task", "t"], "--task together with --repo"),
        ([], "--data-dir of an interrupted run"),
        (["--task", "t", "--repo", ".", "--server", "http://127.0.0.1:1", "--mcp", "x"], "runs in this process"),
        (["--task", "t", "--repo", ".", "--tool-choice", "never"], "tool_choice"),
    ],
)
def test_what_does_not_go_together_is_refused(options: list[str], words: str) -> None:
    result = CliRunner().invoke(app, ["run", *options])
    assert isinstance(result.exception, InvalidRequest)
    assert words in result.exception.message


def test_the_default_model_solves_the_demo_task(tmp_path: Path) -> None:
    """Greedy, with the command that the documents show."""
    (demo,) = [task for task in tasks() if task.name == "greeting"]
    workspace = tmp_path / "greeting"
    demo.prepare(workspace)
    options = ["--task", demo.text, "--repo", str(workspace), "--data-dir", str(tmp_path / "data"), "--threads", "1"]
    for bundle in demo.bundles:
        options += ["--bundle", bundle]
    for tool in demo.plan:
        options += ["--plan", tool]
    done = run(*options)
    assert done.returncode == 0, done.stderr[-3000:]
    assert asyncio.run(demo.solved(workspace, None)), done.stdout
