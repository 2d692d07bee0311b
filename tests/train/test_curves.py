"""The bar and the picture of a run."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from dlite_agent.errors import InvalidRequest
from dlite_agent.train.checkpoint import cut_metrics
from dlite_agent.train.curves import Bar, plot, read_metrics

TRAIN = {"loss": 2.5, "prefix": 1.75, "ce": 3.0, "l1": 1.1, "tv": [0.5, 0.6], "tokens_per_s": 321.0, "eta_s": 65}
HELD_OUT = {"held_out_prefix": 1.5, "held_out_ce": 3.3, "held_out_l1": 1.2, "held_out_tau": 1.444}


def _write(run: Path, *rows: dict[str, Any]) -> None:
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_the_bar_shows_loss_variation_prefix_pace_and_time_left() -> None:
    out = io.StringIO()
    with Bar(100, Console(file=out, width=200, force_terminal=True)) as bar:
        bar.report({"step": 50, **HELD_OUT})
        bar.report({"step": 50, **TRAIN})
    shown = out.getvalue()
    for text in ("50/100", "loss 2.500", "prefix 1.75", "TV 0.50 0.60", "321 tokens/s", "1:05 left", "tau 1.444"):
        assert text in shown


def test_training_and_held_out_curves_are_in_one_picture(tmp_path: Path) -> None:
    _write(tmp_path, *({"step": i, **TRAIN} for i in (1, 26)), *({"step": i, **HELD_OUT} for i in (10, 20)))
    with (tmp_path / "metrics.jsonl").open("a") as log:
        log.write('{"step": 51, "lo')
    assert len(read_metrics(tmp_path)) == 4
    plot(tmp_path, tmp_path / "curves.png")
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(InvalidRequest, match="cannot write"):
        plot(tmp_path, tmp_path / "absent" / "curves.png")


def test_a_run_without_metrics_has_no_picture(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="holds no metrics"):
        plot(tmp_path, tmp_path / "curves.png")
    _write(tmp_path)
    with pytest.raises(InvalidRequest, match="no metrics yet"):
        plot(tmp_path, tmp_path / "curves.png")


def test_rows_after_the_last_checkpoint_are_cut(tmp_path: Path) -> None:
    _write(tmp_path, {"step": 1}, {"step": 26}, {"step": 51})
    with (tmp_path / "metrics.jsonl").open("a") as log:
        log.write('{"step": 7')
    cut_metrics(tmp_path, 30)
    assert [row["step"] for row in read_metrics(tmp_path)] == [1, 26]
