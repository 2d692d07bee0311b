"""The command line of training: what needs no target."""

from __future__ import annotations

import json
from pathlib import Path

from typer.testing import CliRunner

from dlite_agent.cli_train import train_app


def test_without_sessions_or_a_step_it_shows_what_there_is() -> None:
    result = CliRunner().invoke(train_app, [])
    assert result.exit_code == 2
    for name in ("--sessions", "data", "run", "evaluate", "plot"):
        assert name in result.output


def test_the_picture_of_a_run_lies_beside_its_metrics(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text(json.dumps({"step": 1, "l1": 1.0, "ce": 2.0, "prefix": 1.1}) + "\n")
    assert CliRunner().invoke(train_app, ["plot", str(tmp_path)]).exit_code == 0
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")
