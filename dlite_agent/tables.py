"""Figures as tables for a terminal. Every speed-up stands beside its tau, T_AR, T_D, T_V, T_S, context and batch."""

from __future__ import annotations

from typing import Any

from rich.table import Table

from dlite_agent.decode.figures import RunFigures


def figures_table(figures: RunFigures) -> list[Table]:
    """Phases of a run, and how often a round advanced by how much."""
    summary = figures.summary()
    phases = Table(title="phases", title_justify="left")
    for column in ("phase", "seconds", "tokens", "ms per round"):
        phases.add_column(column, justify="left" if column == "phase" else "right")
    phases.add_row("prefill", f"{summary['prefill_seconds']:.3f}", str(summary["prefilled"]), "")
    for name, part in (("draft", "draft"), ("verify", "verify"), ("commit", "rest")):
        total = sum(getattr(step.seconds, part) for step in figures.rounds)
        phases.add_row(f"decode: {name}", f"{total:.3f}", "", f"{1e3 * figures.median(part):.2f}")
    emitted = sum(figures.advances)
    phases.add_row("decode", f"{summary['decode_seconds']:.3f}", str(emitted), f"{1e3 * summary['t_round']:.2f}")
    context = "-".join(str(n) for n in summary["context"])
    advances = Table(
        title=f"tau {summary['tau']:.2f} (mean advance), {summary['rounds']} rounds, context {context}, batch "
        f"{summary['batch']}",
        title_justify="left",
    )
    advances.add_column("advance", justify="right")
    advances.add_column("rounds", justify="right")
    advances.add_column("")
    most = max(summary["advances"].values(), default=1)
    for advance, count in summary["advances"].items():
        advances.add_row(str(advance), str(count), "#" * round(30 * count / most))
    return [phases, advances]


def decode_bench_table(result: dict[str, Any]) -> list[Table]:
    """The result of `bench decode`: modes against AR, then the speed-ups by kind of text."""
    context = "-".join(str(n) for n in result["context"])
    table = Table(
        title=f"against AR: {result['prompts']} prompts, {result['dtype']} ({result['kernel']}), T_AR "
        f"{1e3 * result['t_ar']:.1f} ms, context {context}, batch {result['batch']}",
        title_justify="left",
    )
    columns = ("mode", "speed-up", "per prompt", "tau", "T_D ms", "T_V ms", "T_S ms", "same tokens", "rounds by source")
    for name in columns:
        table.add_column(name, justify="left" if name == "mode" else "right")
    for mode, found in result["modes"].items():
        spread = found["speedup_per_prompt"]
        table.add_row(
            mode,
            f"{found['speedup']:.2f}x",
            f"{spread['median']:.2f}x ({spread['min']:.2f}-{spread['max']:.2f})",
            f"{found['tau']:.2f}",
            *(f"{1e3 * found[part]:.1f}" for part in ("t_d", "t_v", "t_s")),
            f"{found['same_tokens']}/{result['prompts']}",
            ", ".join(f"{source} {count}" for source, count in found["sources"].items()),
        )
    kinds = Table(title="speed-up by kind of text", title_justify="left")
    for name in ("kind", *result["modes"]):
        kinds.add_column(name, justify="left" if name == "kind" else "right")
    for kind, ratios in result["kinds"].items():
        kinds.add_row(kind, *("-" if ratio is None else f"{ratio:.2f}x" for ratio in ratios.values()))
    return [table, kinds]


def device_bench_table(result: dict[str, Any]) -> Table:
    """The result of `bench device`."""
    title = (
        f"{result['shape']} ({result['layers']} layers), {result['dtype']}, {result['attention']}, {result['device']}"
    )
    table = Table(title=title, title_justify="left")
    for name in ("context", "batch", "T_AR ms", "T_D ms", "T_V ms", "T_S ms", "overhead"):
        table.add_column(name, justify="right")
    for row in result["rows"]:
        seconds = (f"{1e3 * row[name]:.2f}" for name in ("t_ar", "t_d", "t_v", "t_s"))
        table.add_row(str(row["context"]), str(row["batch"]), *seconds, f"{row['overhead']:.2f}")
    return table


def executor_bench_table(result: dict[str, Any]) -> Table:
    """The result of `bench executor`."""
    title = f"{result['target']}, context {result['context']}, batch 1, {result['threads']} threads"
    table = Table(title=title, title_justify="left")
    for name in ("dtype", "rows", "ours ms", "transformers ms", "ratio", "spread"):
        table.add_column(name, justify="right")
    for row in result["rows"]:
        times = (f"{1e3 * row[name]:.1f}" for name in ("ours", "transformers"))
        spread = f"{row['ratio_min']:.2f}-{row['ratio_max']:.2f}"
        table.add_row(row["dtype"], str(row["rows"]), *times, f"{row['ratio']:.2f}", spread)
    return table


def restore_bench_table(result: dict[str, Any]) -> Table:
    """The result of `bench restore`."""
    table = Table(title=f"ways back, {result['dtype']}, median of {result['repeats']}", title_justify="left")
    names = ("context", "MB", "host s", "disk s", "recompute s", "host", "disk", "tau", "tau after host/disk", "same")
    for name in names:
        table.add_column(name, justify="right")
    for row in result["rows"]:
        seconds, ratio, tau = row["seconds"], row["ratio"], row["tau"]
        table.add_row(
            str(row["context"]),
            f"{row['megabytes']:.0f}",
            *(f"{seconds[name]:.3f}" for name in ("host", "disk", "recompute")),
            *(f"{ratio[name]:.1f}x" for name in ("host", "disk")),
            f"{tau['uninterrupted']:.2f}",
            f"{tau['host']:.2f} / {tau['disk']:.2f}",
            "yes" if row["same"]["host"] and row["same"]["disk"] else "no",
        )
    return table
