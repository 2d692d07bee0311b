"""Reports of sessions: as a table for the terminal, as JSON, as one HTML page."""

from __future__ import annotations

import dataclasses
import io
import json
import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from dlite_agent.errors import InvalidRequest
from dlite_agent.trace.amdahl import Estimate, StepTimes
from dlite_agent.trace.comparison import Comparison, comparisons, measured_lines
from dlite_agent.trace.formats import load
from dlite_agent.trace.phases import PHASES, Timeline, timelines
from dlite_agent.trace.report_html import to_html
from dlite_agent.trace.summary import Report, SessionSummary, summarise
from dlite_agent.trace.wording import figures, printable, spread_line, times

FORMATS = ("table", "json", "html")


def report_command(
    paths: Sequence[Path], fmt: str, out: Path | None = None, *, step_times: StepTimes | None = None
) -> str:
    """Report on session files of any importable format.

    Args:
        paths: the files; every session in them is reported.
        fmt: one of `FORMATS`.
        out: file to write; None writes none.
        step_times: T_AR to use in place of what the logs hold.

    Returns the report's text. Raises InvalidRequest for an unknown format, NotFound for a missing file.
    """
    if fmt not in FORMATS:
        raise InvalidRequest(f"There is no report format {fmt!r}; choose one of {', '.join(FORMATS)}.", param="fmt")
    if not paths:
        raise InvalidRequest("Name at least one session file to report on.", param="paths")
    views: list[Timeline] = []
    problems: list[str] = []
    for path in paths:
        log = load(path)
        views += timelines(log)
        problems += [f"{path.name}: {problem}" for problem in log.problems]
        if log.cut_bytes:
            problems.append(f"{path.name}: the last line was half written; {log.cut_bytes} bytes left out")
    report = summarise(views, step_times, problems)
    replays = comparisons(views)
    text = {"table": to_table, "json": to_json, "html": to_html}[fmt](report, replays)
    if out is not None:
        try:
            out.write_text(text, encoding="utf-8")
        except OSError as error:
            raise InvalidRequest(f"Cannot write {out.name!r}: {error.strerror}.", param="out") from error
    return text


def to_json(report: Report, replays: Sequence[Comparison] = ()) -> str:
    """The whole report as JSON. A bound without limit is the text "inf"; null means not known."""
    whole = dataclasses.asdict(report) | {"replays": [_measured(item) for item in replays]}
    return json.dumps(_plain(whole), indent=1, allow_nan=False) + "\n"


def _measured(item: Comparison) -> dict[str, Any]:
    """What a replay measured; the sides' own figures stand among the sessions, by name."""
    sides = [
        {
            "side": side.side,
            "session": side.session,
            "measured": None if side.measured is None else dataclasses.asdict(side.measured),
            "predicted": side.predicted,
            "predicted_to_measured": side.predicted_to_measured,
            "mismatches": len(side.mismatches),
        }
        for side in item.sides
    ]
    return {"original": item.original, "base": item.base, "tokens": item.tokens, "sides": sides}


def _plain(value: Any) -> Any:
    if isinstance(value, Estimate):
        return _plain(value._asdict())
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return "inf" if isinstance(value, float) and math.isinf(value) else value


def to_table(report: Report, replays: Sequence[Comparison] = (), *, width: int = 120) -> str:
    """The report as text tables."""
    text = io.StringIO()
    console = Console(file=text, width=width, force_terminal=False, color_system=None, markup=False)
    for session in report.sessions:
        _session(console, session)
    _fleet(console, report)
    for item in replays:
        for line in measured_lines(item):
            console.print(Text(printable(f"replay of {item.original}, {line}")))
    for problem in report.problems:
        console.print(Text(f"! {printable(problem)}"))
    return text.getvalue()


def _session(console: Console, session: SessionSummary) -> None:
    head = f"session {session.session} ({session.source}, {len(session.turns)} turns, {session.wall:.2f} s)"
    console.print(Text(printable(head)))
    table = Table()
    for column in ("phase", "seconds", "share", "inferred"):
        table.add_column(column, justify="left" if column == "phase" else "right")
    for phase in PHASES:
        if session.seconds[phase] > 0:
            table.add_row(*_phase_row(phase, session.seconds[phase], session.wall, session.inferred[phase]))
        if phase == "decode" and session.seconds[phase] > 0:
            for part, seconds in session.parts.items():
                table.add_row(*_phase_row(f"  {part}", seconds, session.wall, 0.0))
    table.add_row("sum", f"{sum(session.seconds.values()):.3f}", "", "")
    console.print(table)
    if session.tool_busy > session.tool_union * (1 + 1e-9):
        overlap = session.tool_busy - session.tool_union
        console.print(Text(f"tool calls overlap: {session.tool_busy:.3f} s in sum, {overlap:.3f} s of them at once"))
    for line in figures(session.amdahl, session.means, session.ceiling):
        console.print(Text(line))
    for lever in session.levers:
        if lever.saved > 0:
            console.print(Text(f"  {lever.name}: saves {lever.saved:.3f} s, {times(lever.speedup)} from here"))
    if len(session.turns) > 1:
        console.print(_turn_table(session))
        speeds = _speed_table(session)
        if speeds is not None:
            console.print(speeds)
    if session.tools:
        console.print(_tool_table(session))
    for line in (*session.divergences, *session.unknown):
        console.print(Text(f"- {printable(line)}"))
    console.print()


def _phase_row(name: str, seconds: float, wall: float, inferred: float) -> tuple[str, str, str, str]:
    share = f"{100 * seconds / wall:.1f} %" if wall > 0 else ""
    return name, f"{seconds:.3f}", share, f"{inferred:.3f}" if inferred > 0 else ""


def _turn_table(session: SessionSummary) -> Table:
    shown = [phase for phase in PHASES if session.seconds[phase] > 0]
    table = Table(title="seconds of each turn", title_justify="left")
    for column in ("turn", *shown, "prompt", "cached", "output", "bound"):
        table.add_column(column, justify="right")
    for turn in session.turns:
        ceiling = f"<= {times(turn.ceiling)}" if turn.ceiling is not None else None
        cells: Iterable[Any] = (
            turn.turn,
            *(f"{turn.seconds[phase]:.3f}" for phase in shown),
            turn.prompt_tokens,
            turn.cached_tokens,
            turn.output_tokens,
            times(turn.amdahl.bound.value) if turn.amdahl else ceiling,
        )
        table.add_row(*("" if cell is None else str(cell) for cell in cells))
    return table


def _speed_table(session: SessionSummary) -> Table | None:
    table = Table(title="decoding of each turn", title_justify="left")
    for column in ("turn", "f", "S_D", "workflow", "tau", "T_AR ms", "T_D ms", "T_V ms", "T_S ms", "context", "batch"):
        table.add_column(column, justify="right")
    for turn in session.turns:
        amdahl, means = turn.amdahl, turn.means
        if means is None:
            continue
        t_ar = amdahl.ar.t_ar if amdahl else None
        table.add_row(
            str(turn.turn),
            f"{amdahl.f.value:.2f}" if amdahl else "",
            times(amdahl.s_d.value) if amdahl and amdahl.s_d else "",
            times(amdahl.workflow.value) if amdahl else "",
            f"{means.tau:.2f}",
            f"{t_ar * 1e3:.2f}" if t_ar is not None else "",
            *(f"{seconds * 1e3:.2f}" for seconds in (means.t_d, means.t_v, means.t_s)),
            f"{means.context:.0f}",
            f"{means.batch:.1f}",
        )
    return table if table.row_count else None


def _tool_table(session: SessionSummary) -> Table:
    table = Table(title="tools", title_justify="left")
    for column in ("tool", "calls", "seconds", "longest", "measured", "failed"):
        table.add_column(column, justify="left" if column == "tool" else "right")
    for tool in session.tools:
        row = (f"{tool.seconds:.3f}", f"{tool.longest:.3f}", str(tool.measured), str(tool.failed))
        table.add_row(Text(printable(tool.name)), str(tool.calls), *row)
    return table


def _fleet(console: Console, report: Report) -> None:
    fleet = report.fleet
    console.print(
        Text(f"all {fleet.sessions} sessions, {fleet.wall:.2f} s in sum (client idle and outages count for no share)")
    )
    for line in figures(fleet.amdahl, fleet.means, fleet.ceiling_pooled):
        console.print(Text(line))
    for name, spread in (("f", fleet.f), ("bound", fleet.bound), ("ceiling of the bound", fleet.ceiling)):
        if spread is not None and spread.n > 1:
            console.print(Text(spread_line(name, spread)))
    if report.t_ar_source is not None:
        console.print(Text(f"T_AR from: {report.t_ar_source}"))
