"""What a run looks like: its metrics as a bar while it goes on, and as one picture of training and held-out curves."""

from __future__ import annotations

import json
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from dlite_agent.errors import InvalidRequest
from dlite_agent.train.checkpoint import METRICS

PANELS = (("l1", "L1 distance to the target"), ("ce", "cross-entropy"), ("prefix", "mean advance, teacher-forced"))


class Bar:
    """A progress bar on stderr: loss, prefix accuracy, TV per position, tokens/s, time left, and the held-out tau."""

    def __init__(self, steps: int, console: Console | None = None) -> None:
        columns = (BarColumn(24), MofNCompleteColumn(), TextColumn("{task.fields[figures]}"))
        self._progress = Progress(*columns, console=console or Console(stderr=True))
        self._task = self._progress.add_task("", total=steps, figures="")
        self._tau = ""

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.stop()

    def report(self, row: dict[str, Any]) -> None:
        """Show a row of the metrics."""
        if "held_out_prefix" in row:
            self._tau = f" | held-out prefix {row['held_out_prefix']:.2f}"
            if "held_out_tau" in row:
                self._tau += f", tau {row['held_out_tau']:.3f}"
            return
        left = divmod(round(row["eta_s"]), 60)
        tv = " ".join(f"{value:.2f}" for value in row["tv"])
        figures = (
            f"loss {row['loss']:.3f}, prefix {row['prefix']:.2f}, TV {tv}, {row['tokens_per_s']:.0f} tokens/s, "
            f"{left[0]}:{left[1]:02d} left{self._tau}"
        )
        self._progress.update(self._task, completed=row["step"], figures=figures)


def read_metrics(run: Path) -> list[dict[str, Any]]:
    """Rows of a run's `metrics.jsonl`; a torn last line is left out.

    Raises:
        InvalidRequest: there are none.
    """
    rows = []
    try:
        for line in (run / METRICS).read_text().splitlines():
            try:
                rows.append(json.loads(line))
            except ValueError:
                continue
    except OSError as error:
        raise InvalidRequest(f"{run} holds no metrics: {error.strerror}", param="run") from error
    if not rows:
        raise InvalidRequest(f"{run} holds no metrics yet", param="run")
    return rows


def plot(run: Path, picture: Path) -> None:
    """Draw a run's curves to a PNG: each measure for training batches and for held-out anchors, and the held-out tau.

    Raises:
        InvalidRequest: there are no metrics, or matplotlib is not installed.
    """
    rows = read_metrics(run)
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise InvalidRequest("plots need matplotlib: pip install 'dlite-agent[train]'", param="plot") from error
    figure = Figure(figsize=(4.2 * len(PANELS), 3.6), layout="constrained")
    for axes, (name, title) in zip(figure.subplots(1, len(PANELS)), PANELS, strict=True):
        for key, label in ((name, "training batches"), (f"held_out_{name}", "held-out anchors")):
            points = [(row["step"], row[key]) for row in rows if key in row]
            if points:
                axes.plot(*zip(*points, strict=True), label=label, marker="." if key != name else None)
        if name == "prefix" and (taus := [(row["step"], row["held_out_tau"]) for row in rows if "held_out_tau" in row]):
            axes.plot(*zip(*taus, strict=True), label="held-out tau, replayed", marker=".", linestyle="--")
        axes.set_title(title)
        axes.set_xlabel("step")
        axes.legend()
    try:
        figure.savefig(picture, dpi=110)
    except OSError as error:
        raise InvalidRequest(f"cannot write {picture}: {error.strerror}", param="plot") from error
