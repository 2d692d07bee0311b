"""The loop: calls begin in the stream and run together, wrong ones are answered, each limit ends a run by its name."""

from __future__ import annotations

import asyncio
import json
import time
from pathlib import Path
from typing import Any

import pytest

from dlite_agent.agent.run_spec import End
from dlite_agent.agent.runs import Runs
from dlite_agent.trace.events import SessionEnd, ToolEnd, ToolStart, TurnStart
from dlite_agent.trace.log import read_log
from dlite_agent.trace.phases import timelines
from tests.agent.scripted import SUBMIT, Scripted, call, finished, results, shell, spec, with_runs, workspace_in


def test_run_ends_with_what_was_submitted(tmp_path: Path) -> None:
    model = Scripted(["I look.\n" + shell("echo hello"), SUBMIT])
    run = finished(tmp_path, model)
    assert (run.state, run.progress.answer, run.progress.turns, run.progress.calls) == ("submitted", "done", 2, 2)
    roles = [message.role for message in run.progress.messages]
    assert roles == ["system", "user", "assistant", "tool", "assistant", "tool"]
    assert results(run)[0] == "hello"
    names = [tool["function"]["name"] for tool in model.requests[0].tools]
    assert names == ["shell", "submit"]


def test_answer_without_a_call_ends_the_run_too(tmp_path: Path) -> None:
    run = finished(tmp_path, Scripted(["All is well."]), model={"tool_choice": "auto"})
    assert (run.state, run.progress.answer) == ("answered", "All is well.")


def test_failing_commands_are_told_apart(tmp_path: Path) -> None:
    calls = [shell("exit 3"), shell("true"), shell("echo out; exit 1")]
    run = finished(tmp_path, Scripted(["\n".join(calls), SUBMIT]))
    assert results(run)[:3] == ["[exit code 3]", "[no output]", "out\n[exit code 1]"]


def test_a_call_begins_while_the_turn_still_streams(tmp_path: Path) -> None:
    """The turn's end waits for what its own call writes."""
    hold = asyncio.Event()
    model = Scripted([shell("touch begun"), SUBMIT], hold={0: hold})

    async def work(runs: Runs) -> str:
        run = await runs.start(spec(), "")
        for _ in range(1000):
            if (tmp_path / "work" / "begun").exists():
                hold.set()
            await asyncio.sleep(0.02)
            if run.at_rest:
                break
        return run.state

    workspace_in(tmp_path)
    assert with_runs(tmp_path, model, work) == "submitted"


def test_parallel_calls_run_together(tmp_path: Path) -> None:
    """Each call waits for the files of both others, so one after the other none would end."""
    wait = "for i in $(seq 500); do [ $(ls | wc -l) = 3 ] && exit 0; sleep 0.02; done; exit 1"
    calls = [shell(f"touch {name}; {wait}") for name in ("a", "b", "c")]
    run = finished(tmp_path, Scripted(["\n".join(calls), SUBMIT]))
    assert results(run)[:3] == ["[no output]"] * 3


def test_sixty_four_calls_of_one_turn_and_no_more(tmp_path: Path) -> None:
    calls = [shell(f"echo {number}") for number in range(65)]
    run = finished(tmp_path, Scripted(["\n".join(calls), SUBMIT]))
    assert results(run)[:64] == [str(number) for number in range(64)]
    assert "a turn may hold 64 calls" in results(run)[64]


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (call("shel", command="ls"), "There is no tool shel; there are shell, submit."),
        (call("shell"), "shell needs the argument command."),
        (call("shell", command="ls", timeout=3), "shell has no argument timeout"),
        (call("shell", command=3), "command must be of type string."),
        ('<tool_call>\n{"name": "shell", "arguments": {"command": ls}}\n</tool_call>', "not valid JSON"),
    ],
)
def test_calls_that_do_not_fit_are_answered_with_the_reason(tmp_path: Path, text: str, problem: str) -> None:
    run = finished(tmp_path, Scripted([text, SUBMIT]))
    assert run.state == "submitted"
    assert results(run)[0].startswith("Invalid call: ")
    assert problem in results(run)[0]
    assert run.progress.calls == 1


def test_the_fourth_turn_of_invalid_calls_ends_the_run(tmp_path: Path) -> None:
    wrong = call("nothing")
    run = finished(tmp_path, Scripted([wrong, wrong, wrong, SUBMIT]))
    assert run.state == "submitted"
    again = tmp_path / "again"
    again.mkdir()
    run = finished(again, Scripted([wrong, wrong, shell("true"), wrong, wrong, wrong, wrong, SUBMIT]))
    assert (run.state, run.progress.turns) == ("invalid_calls", 7)


def test_cut_turns_are_answered(tmp_path: Path) -> None:
    half = '<tool_call>\n{"name": "shell", "arguments": {"command": "touch a'
    run = finished(tmp_path, Scripted([half, "I would like to", SUBMIT], cut=(0, 1)))
    assert run.state == "submitted"
    assert "cut off at the limit" in results(run)[0]
    assert run.progress.messages[5].content.startswith("Your answer was cut off")
    assert not (tmp_path / "work" / "a").exists()


@pytest.mark.parametrize(
    ("limits", "command", "end"),
    [
        ({"turns": 2}, "true", End.TURN_LIMIT),
        ({"tokens": 30}, "true", End.TOKEN_LIMIT),
        ({"tool_seconds": 0.5}, "sleep 20", End.TOOL_LIMIT),
        ({"seconds": 0.7}, "sleep 20", End.TIME_LIMIT),
    ],
)
def test_limits_end_a_run_by_their_names(tmp_path: Path, limits: dict[str, Any], command: str, end: End) -> None:
    began = time.monotonic()
    run = finished(tmp_path, Scripted([shell(command)] * 4), limits=limits)
    assert run.state == end
    assert time.monotonic() - began < 15
    if end is End.TOOL_LIMIT:
        assert results(run) == ["The call was ended because the run's tool seconds are used up."]
    if end is End.TURN_LIMIT:
        assert run.progress.turns == 2


def test_limits_of_a_call_are_told_to_the_model(tmp_path: Path) -> None:
    limits = {"call_seconds": 2.0, "output_bytes": 200}
    calls = [shell("echo first; sleep 60"), shell("seq 10000")]
    run = finished(tmp_path, Scripted(["\n".join(calls), SUBMIT]), limits=limits)
    first, second, _ = results(run)
    assert first.startswith("first\nThe command was ended because")
    assert "bytes elided" in second
    assert len(second) < 300


def test_log_of_a_run(tmp_path: Path) -> None:
    run = finished(
        tmp_path, Scripted([shell("cat key; exit 2"), shell("export API_KEY=sk-abcdefghijklmnop1234"), SUBMIT])
    )
    log = read_log(run.folder / "events.jsonl")
    assert log.problems == []
    assert log.sessions() == [run.id]
    starts = [event for event in log.events if isinstance(event, ToolStart)]
    assert [(event.name, event.turn, event.measured, event.sandbox) for event in starts] == [
        ("shell", 0, True, run.level),
        ("shell", 1, True, run.level),
        ("submit", 2, True, run.level),
    ]
    ends = {event.call_id: event for event in log.events if isinstance(event, ToolEnd)}
    assert [ends[start.call_id].exit_code for start in starts] == [2, 0, 0]
    turns = [event for event in log.events if isinstance(event, TurnStart)]
    assert [[message["role"] for message in turn.messages or ()] for turn in turns] == [
        ["system", "user"],
        ["tool"],
        ["tool"],
    ]
    assert [event.reason for event in log.events if isinstance(event, SessionEnd)] == ["submitted"]
    assert "sk-abcdef" not in (run.folder / "events.jsonl").read_text()
    (timeline,) = timelines(log)
    assert len(timeline.tools) == 3
    assert all(tool.measured and tool.finished for tool in timeline.tools)


def test_pause_and_resume_keep_the_clock_and_the_order(tmp_path: Path) -> None:
    async def work(runs: Runs) -> tuple[list[str], str, float]:
        run = await runs.start(spec(), "")
        await runs.pause(run)
        states = [run.state]
        while run.state == "pausing":
            await asyncio.sleep(0.02)
        states.append(run.state)
        before = run.progress.turns
        await asyncio.sleep(1.0)
        assert run.progress.turns == before
        await runs.resume(run)
        states.append(run.state)
        assert run.task is not None
        await run.task
        return states, run.state, run.progress.seconds

    workspace_in(tmp_path)
    states, end, seconds = with_runs(tmp_path, Scripted([shell("true"), SUBMIT]), work)
    assert (states[-2:], end) == (["paused", "running"], "submitted")
    record = [json.loads(line) for line in next(tmp_path.glob("data/runs/*/events.jsonl")).read_text().splitlines()]
    (idle,) = [event for event in record if event["kind"] == "client_idle"]
    assert idle["end"] - idle["t"] >= 1.0
    assert seconds == pytest.approx(
        record[-1]["t"] - min(event["t"] for event in record) - (idle["end"] - idle["t"]), abs=0.5
    )


def test_cancel_ends_tools_and_all(tmp_path: Path) -> None:
    async def work(runs: Runs) -> str:
        run = await runs.start(spec(), "")
        while not (tmp_path / "work" / "begun").exists():
            await asyncio.sleep(0.02)
        await runs.cancel(run)
        return run.state

    workspace_in(tmp_path)
    began = time.monotonic()
    assert with_runs(tmp_path, Scripted([shell("touch begun; sleep 60"), SUBMIT]), work) == "cancelled"
    assert time.monotonic() - began < 30


def test_follow_up_is_taken_up_before_the_next_turn_and_after_the_end(tmp_path: Path) -> None:
    model = Scripted([SUBMIT, shell("echo more"), SUBMIT])

    async def work(runs: Runs) -> list[str]:
        run = await runs.start(spec(), "")
        assert run.task is not None
        await run.task
        assert run.progress.answer == "done"
        await runs.follow_up(run, "And now the rest.", "key")
        await runs.follow_up(run, "And now the rest.", "key")
        await run.task
        return [run.state, *(message.content for message in run.progress.messages if message.role == "user")]

    workspace_in(tmp_path)
    assert with_runs(tmp_path, model, work) == ["submitted", "Do it.", "And now the rest."]


def test_a_follow_up_behind_the_last_turn_meets_the_limit(tmp_path: Path) -> None:
    async def work(runs: Runs) -> list[str]:
        run = await runs.start(spec(limits={"turns": 1}), "")
        assert run.task is not None
        await run.task
        states = [run.state]
        await runs.follow_up(run, "More.")
        await run.task
        return [*states, run.state]

    workspace_in(tmp_path)
    assert with_runs(tmp_path, Scripted([SUBMIT]), work) == ["submitted", "turn_limit"]
    # The next server leaves the run at its end.
    assert with_runs(tmp_path, Scripted([]), _states) == ["turn_limit"]


async def _states(runs: Runs) -> list[str]:
    return [run.state for run in runs.list("")]


def test_a_plan_names_the_tools_of_the_first_turns(tmp_path: Path) -> None:
    model = Scripted([shell("true"), shell("true"), SUBMIT])
    finished(tmp_path, model, model={"plan": ("shell", "shell")})
    assert [request.tool_choice for request in model.requests] == ["shell", "shell", "required"]
