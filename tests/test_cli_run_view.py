"""What `dlite-agent run` shows, fed with the stream of a run that took place."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console

from dlite_agent.agent.runs import Runs
from dlite_agent.api.runs import card, follow
from dlite_agent.cli_run_view import RunView
from tests.agent.scripted import SUBMIT, Scripted, shell, spec, with_runs, workspace_in


def test_lines_and_table_of_a_run(tmp_path: Path) -> None:
    lines: list[str] = []
    plain, live = RunView(lines.append), RunView()

    async def work(runs: Runs) -> None:
        run = await runs.start(spec(), "")
        async for kind, data, _ in follow(run, 0, 5.0):
            plain.feed(kind, data)
            live.feed(kind, data)
        plain.feed("state", card(run))

    workspace_in(tmp_path)
    with_runs(tmp_path, Scripted(["I look.\n" + shell("exit 3"), SUBMIT]), work)
    text = "\n".join(lines)
    assert "running (sandbox " in lines[0]
    assert lines[-1].endswith(f": submitted (sandbox {plain.card['sandbox']['level']})")
    for part in ("turn 0: prompt", "  tool shell exit 3 ", "turn 1: prompt", "  tool submit ok "):
        assert part in text
    assert [turn.number for turn in live.turns] == [0, 1]
    assert live.turns[0].phases["tool"] > 0
    console = Console(width=200, record=True, file=(tmp_path / "shown").open("w"))
    with console.file:
        console.print(live.render())
        shown = console.export_text()
    assert "shell exit 3" in shown
    assert "Do it." in shown


def test_speed_and_tau_are_those_of_the_rounds() -> None:
    view = RunView()
    place = {"segment": "s", "session": "r", "turn": 0}
    view.feed("turn_start", {**place, "t": 0.0, "prompt_tokens": 100, "cached_tokens": 60})
    view.feed("prefill", {**place, "t": 0.0, "end": 0.5})
    view.feed("rounds", {**place, "t": 0.5, "end": 1.5, "advance": [1, 3, 2]})
    view.feed("turn_end", {**place, "t": 1.5, "output_tokens": 7, "finish_reason": "stop"})
    (turn,) = view.turns
    assert (turn.prompt, turn.cached, turn.tokens, turn.tau, turn.speed) == (100, 60, 7, 2.0, 6.0)
    assert turn.phases["prefill"] == 0.5
