"""The report as one HTML page: no script, no request, all text escaped, plots as inline SVG."""

from __future__ import annotations

import html
import math
from collections.abc import Mapping, Sequence

from dlite_agent.trace.amdahl import workflow_speedup
from dlite_agent.trace.comparison import Comparison, measured_lines
from dlite_agent.trace.phases import PHASES
from dlite_agent.trace.summary import Report, SessionSummary
from dlite_agent.trace.wording import figures, printable, spread_line, times

COLOURS = {
    "queue": "#9a6700",
    "restore": "#0f766e",
    "prefill": "#2563eb",
    "decode": "#7c3aed",
    "mask": "#be185d",
    "stream": "#0891b2",
    "model": "#6d5bd0",
    "tool": "#c2410c",
    "client": "#8b95a1",
    "outage": "#b91c1c",
    "other": "#4b5563",
}
_SHOWN_TURNS = 400
_STYLE = """
:root{color-scheme:light dark;--ink:#1b1f24;--soft:#57606a;--paper:#fff;--line:#d0d7de}
@media (prefers-color-scheme:dark){:root{--ink:#e6edf3;--soft:#9aa5b1;--paper:#0d1117;--line:#30363d}}
body{font:15px/1.5 system-ui,sans-serif;color:var(--ink);background:var(--paper)}
body{margin:0 auto;max-width:72rem;padding:1rem}
table{border-collapse:collapse;font-variant-numeric:tabular-nums;display:block;overflow-x:auto}
th,td{text-align:right;padding:.15rem .6rem;border-bottom:1px solid var(--line)}
th:first-child,td:first-child{text-align:left}
svg{max-width:100%;height:auto;display:block}svg text{fill:var(--ink);font-size:11px}
.axis{stroke:var(--line)}.curve{fill:none;stroke:#7c3aed;stroke-width:2}.bound{stroke:#c2410c;stroke-dasharray:4 3}
.key span{display:inline-block;margin-right:1rem;white-space:nowrap}
.key i{display:inline-block;width:.8em;height:.8em;margin-right:.3em}
.soft{color:var(--soft)}section{border-top:1px solid var(--line);margin-top:1.5rem}
"""


def _e(text: object) -> str:
    return html.escape(printable(str(text)), quote=True)


def to_html(report: Report, replays: Sequence[Comparison] = ()) -> str:
    """The report as a page that opens without a network."""
    fleet = report.fleet
    parts = [
        "<!doctype html>\n<html lang=en><head><meta charset=utf-8>",
        "<meta name=viewport content='width=device-width, initial-scale=1'>",
        "<meta http-equiv=Content-Security-Policy content=\"default-src 'none'; style-src 'unsafe-inline'\">",
        f"<title>Where the time went</title><style>{_STYLE}</style></head><body>",
        f"<h1>Where the time went</h1><p>{fleet.sessions} sessions, {fleet.wall:.2f} s in sum. "
        "Client idle and outages count for no share.</p>",
        _key(),
        _bar(fleet.seconds, "all sessions"),
        _lines(figures(fleet.amdahl, fleet.means, fleet.ceiling_pooled)),
    ]
    spreads = [("f", fleet.f), ("bound", fleet.bound), ("ceiling of the bound", fleet.ceiling)]
    parts.append(_lines([spread_line(name, spread) for name, spread in spreads if spread is not None]))
    if len(report.sessions) > 1:
        parts.append(_distribution(report.sessions))
    if report.t_ar_source is not None:
        parts.append(f"<p class=soft>T_AR from: {_e(report.t_ar_source)}</p>")
    measured = [f"replay of {item.original}, {line}" for item in replays for line in measured_lines(item)]
    parts.append(_lines(measured))
    parts += [_session(session) for session in report.sessions]
    parts.append(_lines(report.problems))
    parts.append("</body></html>\n")
    return "\n".join(part for part in parts if part)


def _session(session: SessionSummary) -> str:
    head = f"{session.source}, {len(session.turns)} turns, {session.wall:.2f} s"
    if session.target:
        head += f", {session.target}"
    rows = [
        [phase, f"{seconds:.3f}", f"{100 * seconds / session.wall:.1f} %", f"{session.inferred[phase]:.3f}"]
        for phase, seconds in session.seconds.items()
        if seconds > 0 and session.wall > 0
    ]
    rows += [[f"decode: {part}", f"{s:.3f}", "", ""] for part, s in session.parts.items() if s > 0]
    rows.append(["sum", f"{sum(session.seconds.values()):.3f}", "", ""])
    levers = [[lever.name, f"{lever.saved:.3f}", times(lever.speedup)] for lever in session.levers if lever.saved > 0]
    tools = [
        [t.name, str(t.calls), f"{t.seconds:.3f}", f"{t.longest:.3f}", str(t.measured), str(t.failed)]
        for t in session.tools
    ]
    return "\n".join(
        [
            f"<section><h2>{_e(session.session)}</h2><p class=soft>{_e(head)}</p>",
            _bar(session.seconds, "session"),
            _lines(figures(session.amdahl, session.means, session.ceiling)),
            _table(["phase", "seconds", "share", "inferred"], rows),
            _curve(session),
            _table(["change", "seconds saved", "speed-up from here"], levers),
            _turns(session),
            _table(["tool", "calls", "seconds", "longest", "measured", "failed"], tools),
            _lines([*session.divergences, *session.unknown]),
            "</section>",
        ]
    )


def _lines(lines: Sequence[str]) -> str:
    return "<ul>" + "".join(f"<li>{_e(line)}</li>" for line in lines) + "</ul>" if lines else ""


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    if not rows:
        return ""
    cells = "".join(f"<th>{_e(cell)}</th>" for cell in head)
    body = "".join("<tr>" + "".join(f"<td>{_e(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return f"<table><thead><tr>{cells}</tr></thead><tbody>{body}</tbody></table>"


def _key() -> str:
    items = (f"<span><i style='background:{COLOURS[phase]}'></i>{phase}</span>" for phase in PHASES)
    return f"<p class=key>{''.join(items)}</p>"


def _segments(seconds: Mapping[str, float], scale: float, left: float, y: float, height: float) -> str:
    """Rectangles of one stacked bar, `scale` in units a second."""
    shapes = []
    for phase in PHASES:
        width = seconds.get(phase, 0.0) * scale
        if width > 0:
            shapes.append(
                f"<rect x='{left:.2f}' y='{y:.1f}' width='{max(width, 0.3):.2f}' height='{height}' "
                f"fill='{COLOURS[phase]}'><title>{phase} {seconds[phase]:.3f} s</title></rect>"
            )
            left += width
    return "".join(shapes)


def _bar(seconds: Mapping[str, float], name: str) -> str:
    total = sum(seconds.values())
    if total <= 0:
        return ""
    return (
        f"<svg viewBox='0 0 1000 34' role=img aria-label='{_e(name)}: seconds by phase'>"
        f"{_segments(seconds, 1000 / total, 0.0, 4, 26)}</svg>"
    )


def _turns(session: SessionSummary) -> str:
    """One stacked bar a turn, all on one scale, without client idle and outages."""
    turns = session.turns[:_SHOWN_TURNS]
    kept = [{p: s for p, s in turn.seconds.items() if p not in ("client", "outage")} for turn in turns]
    longest = max((sum(seconds.values()) for seconds in kept), default=0.0)
    if longest <= 0:
        return ""
    rows = []
    for number, (turn, seconds) in enumerate(zip(turns, kept, strict=True)):
        y = number * 14
        rows.append(f"<text x='0' y='{y + 10}'>{turn.turn}</text>{_segments(seconds, 900 / longest, 40.0, y, 11)}")
        if turn.ttft is not None and turn.seconds:
            x = 40 + turn.ttft * 900 / longest
            rows.append(
                f"<line x1='{x:.2f}' x2='{x:.2f}' y1='{y}' y2='{y + 11}' stroke='#fff' stroke-width='2'>"
                f"<title>first token {turn.ttft:.3f} s</title></line>"
            )
    note = ""
    if len(session.turns) > len(turns):
        note = f"<p class=soft>the first {len(turns)} of {len(session.turns)} turns</p>"
    label = "seconds by phase of each turn"
    return f"<svg viewBox='0 0 960 {len(turns) * 14}' role=img aria-label='{label}'>{''.join(rows)}</svg>{note}"


def _curve(session: SessionSummary) -> str:
    """Workflow speed-up against S_D, with this session's point and its bound."""
    amdahl = session.amdahl
    if amdahl is None or amdahl.s_d is None:
        return ""
    f, s_d, limit = amdahl.f.value, amdahl.s_d.value, amdahl.bound.value
    left, right = min(1.0, s_d), max(8.0, 2.0 * s_d)
    steps = [left * (right / left) ** (i / 60) for i in range(61)]
    curve = [workflow_speedup(f, step) for step in steps]
    top = 1.05 * (limit if limit <= 3 * curve[-1] else curve[-1])
    bottom = min(1.0, curve[0]) - 0.05 * (top - 1.0)

    def x(value: float) -> float:
        return 40 + 440 * math.log(value / left) / math.log(right / left)

    def y(value: float) -> float:
        return 190 - 165 * (value - bottom) / (top - bottom)

    points = " ".join(f"{x(step):.1f},{y(value):.1f}" for step, value in zip(steps, curve, strict=True))
    bound_line = f"<line class=bound x1='40' x2='480' y1='{y(limit):.1f}' y2='{y(limit):.1f}'/>" if limit <= top else ""
    ticks = "".join(
        f"<text x='{x(s):.1f}' y='204' text-anchor='middle'>{s:g}</text>" for s in (1, 2, 4, 8, 16, 32) if s <= right
    )
    label = f"S_D {s_d:.2f}: workflow {amdahl.workflow.value:.2f}x, bound {times(limit)}"
    return (
        "<svg viewBox='0 0 500 222' style='max-width:32rem' role=img aria-label='workflow speed-up against S_D'>"
        "<line class=axis x1='40' x2='480' y1='190' y2='190'/><line class=axis x1='40' x2='40' y1='20' y2='190'/>"
        f"<polyline class=curve points='{points}'/>{bound_line}{ticks}"
        f"<circle cx='{x(s_d):.1f}' cy='{y(amdahl.workflow.value):.1f}' r='4' fill='#c2410c'/>"
        f"<text x='40' y='12'>{label}</text><text x='480' y='219' text-anchor='end'>decode speed-up S_D</text>"
        f"<text x='30' y='{y(1.0) + 4:.1f}' text-anchor='end'>1x</text></svg>"
    )


def _distribution(sessions: Sequence[SessionSummary]) -> str:
    """Bound of each session in rising order; hollow where only its ceiling is known."""
    found = [(s.amdahl.bound.value, True) for s in sessions if s.amdahl is not None]
    found += [(s.ceiling, False) for s in sessions if s.amdahl is None and s.ceiling is not None]
    found = sorted((value, known) for value, known in found if math.isfinite(value))
    if not found:
        return ""
    top = max(1.5, found[-1][0])
    dots = []
    for number, (value, known) in enumerate(found):
        cx = 40 + 900 * (number + 0.5) / len(found)
        cy = 150 - 130 * math.log(value) / math.log(top)
        fill = "#7c3aed" if known else "none"
        dots.append(
            f"<circle cx='{cx:.1f}' cy='{cy:.1f}' r='4' fill='{fill}' stroke='#7c3aed'>"
            f"<title>{value:.2f}</title></circle>"
        )
    return (
        "<svg viewBox='0 0 960 170' role=img aria-label='bound of each session, in rising order'>"
        f"<line class=axis x1='40' x2='940' y1='150' y2='150'/>{''.join(dots)}"
        f"<text x='4' y='154'>1</text><text x='4' y='24'>{top:.2f}</text>"
        "<text x='40' y='167'>bound of each session, rising; hollow: at most</text></svg>"
    )
