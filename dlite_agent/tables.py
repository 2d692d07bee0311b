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


def retention_live_table(result: dict[str, Any]) -> Table:
    """The result of `bench retention-live`."""
    title = (
        f"{result['pauses']} pauses of {result['conversations']} conversations, {result['longest']} tokens at most, "
        f"device {result['device_bytes'] / 1e6:.0f} MB; clairvoyant {result['clairvoyant']:.1f} GB·s; "
        f"{'the same order' if result['same_order'] else 'another order'} live"
    )
    table = Table(title=title, title_justify="left")
    for name in ("policy", "simulated GB·s", "live GB·s", "live / simulated", "held", "recomputed s", "moved s"):
        table.add_column(name, justify="left" if name == "policy" else "right")
    for name in result["orders"][1]:
        simulated, live = (result["policies"][name][side] for side in ("simulated", "live"))
        table.add_row(
            name,
            f"{simulated['waste']:.1f}",
            f"{live['waste']:.1f}",
            f"{live['waste'] / simulated['waste']:.2f}",
            *(f"{live[part]:.1f}" for part in ("held_gbs", "recompute_s", "transfer_s")),
        )
    return table


def batch_bench_table(result: dict[str, Any]) -> Table:
    """The result of `bench batch`."""
    title = f"tokens a second of full batches, {result['dtype']} ({result['kernel']}), median of {result['repeats']}"
    table = Table(title=title, title_justify="left")
    parts = ("T_AR ms", "T_D ms", "T_V ms", "T_S ms")
    for name in ("batch", "context", "mode", "tokens/s", "against AR", "tau", *parts, "same"):
        table.add_column(name, justify="left" if name == "mode" else "right")
    for row in result["rows"]:
        context = "-".join(str(n) for n in row["context"])
        for mode, found in row["modes"].items():
            table.add_row(
                str(row["batch"]),
                context,
                mode,
                f"{found['tokens_a_second']:.0f}",
                f"{found['speedup']:.2f}x ({found['speedup_min']:.2f}-{found['speedup_max']:.2f})",
                f"{found['tau']:.2f}",
                f"{1e3 * row['t_ar']:.1f}",
                *(f"{1e3 * found[part]:.1f}" for part in ("t_d", "t_v", "t_s")),
                "yes" if found["same_tokens"] else "no",
            )
    return table


def gate_bench_table(result: dict[str, Any]) -> Table:
    """The result of `bench gate`."""
    table = Table(title=f"mixed mode, {result['seconds']:g} s at each load", title_justify="left")
    for name in ("sessions", "rounds", "drafted a session", "seconds to settle", "source changes a round and session"):
        table.add_column(name, justify="right")
    for row in result["stretches"]:
        numbers = (f"{row[name]:.2f}" for name in ("drafted", "seconds_to_settle", "changes_a_round"))
        table.add_row(str(row["load"]), str(row["rounds"]), *numbers)
    return table


def floor_bench_table(result: dict[str, Any]) -> Table:
    """The result of `bench floor`."""
    title = (
        f"{result['dtype']} ({result['kernel']}), {result['threads']} threads, context {result['context']}, batch 1, "
        f"{result['bandwidth'] / 1e9:.1f} GB/s"
    )
    table = Table(title=title, title_justify="left")
    for name in ("figure", "measured ms", "limit ms", "limit / measured"):
        table.add_column(name, justify="right")
    for row in result["rows"]:
        table.add_row(row["figure"], f"{1e3 * row['seconds']:.2f}", f"{1e3 * row['floor']:.2f}", f"{row['share']:.2f}")
    return table


def peers_bench_table(result: dict[str, Any]) -> Table:
    """The result of `bench peers`; ratios are our time over the peer's."""
    context = "-".join(str(n) for n in result["context"])
    title = (
        f"session {result['session']}: {result['turns']} turns, context {context}, {result['new_tokens']} new tokens, "
        f"median of {result['repeats']}"
    )
    table = Table(title=title, title_justify="left")
    for name in ("peer", "first token s", "later turns s", "ms/token", "session s", "same ids"):
        table.add_column(name, justify="left" if name == "peer" else "right")
    for name in ("first token", "ms/token", "session"):
        table.add_column(f"ours / its {name}", justify="right")
    for name, found in result["peers"].items():
        ratios = (found["ours_to_it"][key] for key in ("first_later", "token", "session"))
        table.add_row(
            name,
            f"{found['first_turn']:.2f}",
            f"{found['first_later']:.2f}",
            f"{1e3 * found['token']:.1f}",
            f"{found['session']:.1f}",
            f"{100 * found['same_ids']:.0f} %",
            *(f"{ratio['median']:.2f} ({ratio['min']:.2f}-{ratio['max']:.2f})" for ratio in ratios),
        )
    return table
