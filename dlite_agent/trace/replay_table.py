"""A comparison of replays as tables for the terminal and as JSON: phases side by side, ratios, speed-ups."""

from __future__ import annotations

import dataclasses
import io
import json
import math
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from dlite_agent.trace.comparison import RECORDING, Comparison, ToolReplay, measured_lines
from dlite_agent.trace.events import Mismatch
from dlite_agent.trace.phases import DECODE_PARTS, PHASES
from dlite_agent.trace.wording import figures, printable


def tools_json(found: Sequence[ToolReplay]) -> str:
    """Replays of tools as JSON."""
    return json.dumps([_plain(item) for item in found], indent=1, allow_nan=False) + "\n"


def tools_table(found: Sequence[ToolReplay], *, width: int = 120) -> str:
    """Replays of tools as text."""
    text = io.StringIO()
    console = Console(file=text, width=width, force_terminal=False, color_system=None, markup=False)
    for item in found:
        waits = f"{item.recorded_wait:.3f} s with a tool at work as recorded, {item.tool_wait:.3f} s now"
        console.print(Text(printable(f"session {item.original}: {len(item.calls)} calls, {waits}")))
        table = Table()
        for column in ("turn", "call", "recorded s", "now s", "recorded exit", "exit", "observation"):
            table.add_column(column, justify="left" if column in ("call", "observation") else "right")
        for call in item.calls:
            wrong = call.mismatch
            verdict = "equal" if wrong is None else f"differs at {wrong.position}, {wrong.count} places"
            codes = ("" if code is None else str(code) for code in (call.recorded_exit, call.exit_code))
            seconds = (f"{call.recorded:.3f}", f"{call.seconds:.3f}")
            table.add_row(str(call.turn), Text(printable(call.name)), *seconds, *codes, verdict)
        console.print(table)
        console.print(Text(f"{item.mismatches} of {len(item.calls)} observations differ"))
        for call in item.calls:
            if call.mismatch is not None:
                expected, got = call.mismatch.expected, call.mismatch.found
                line = f"- turn {call.turn}, {call.call_id}: {expected!r} became {got!r}"
                console.print(Text(printable(line)))
    return text.getvalue()


def replay_json(found: Sequence[Comparison]) -> str:
    """All figures as JSON; null is not known, "inf" has no limit."""
    return json.dumps([_plain(item) for item in found], indent=1, allow_nan=False) + "\n"


def _plain(value: Any) -> Any:
    if isinstance(value, Mismatch):
        return value.model_dump(exclude_none=True)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {item.name: _plain(getattr(value, item.name)) for item in dataclasses.fields(value)}
    if hasattr(value, "_asdict"):
        return _plain(value._asdict())
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return "inf" if isinstance(value, float) and math.isinf(value) else value


def replay_table(found: Sequence[Comparison], *, width: int = 120) -> str:
    """The comparisons as text."""
    text = io.StringIO()
    console = Console(file=text, width=width, force_terminal=False, color_system=None, markup=False)
    for item in found:
        count = len(item.sides[0].turns)
        console.print(Text(printable(f"session {item.original}: {count} turns, {item.tokens} tokens a side")))
        console.print(_phases(item))
        console.print(_turns(item))
        for side in item.sides:
            for line in figures(side.summary.amdahl, side.summary.means, None):
                console.print(Text(f"{side.side}: {line}"))
        for line in measured_lines(item):
            console.print(Text(line))
        for line in mismatch_lines(item):
            console.print(Text(f"- {line}"))
        console.print()
    return text.getvalue()


def _phases(item: Comparison) -> Table:
    table = Table(title="seconds of each phase", title_justify="left")
    table.add_column("phase")
    for side in item.sides:
        table.add_column(side.side, justify="right")
    for phase in PHASES:
        if any(side.summary.seconds[phase] > 0 for side in item.sides):
            table.add_row(phase, *(f"{side.summary.seconds[phase]:.3f}" for side in item.sides))
        if phase == "decode":
            for part in DECODE_PARTS:
                table.add_row(f"  {part}", *(f"{side.summary.parts[part]:.3f}" for side in item.sides))
    table.add_row("sum", *(f"{sum(side.summary.seconds.values()):.3f}" for side in item.sides))
    return table


def _turns(item: Comparison) -> Table:
    base = next(side for side in item.sides if side.side == item.base)
    others = [side for side in item.sides if side is not base]
    table = Table(title=f"each turn: seconds, and how much faster than {item.base}", title_justify="left")
    for column in ("turn", "output", item.base):
        table.add_column(column, justify="right")
    for side in others:
        table.add_column(side.side, justify="right")
        table.add_column("whole", justify="right")
        table.add_column("decode", justify="right")
    for number, turn in enumerate(base.turns):
        cells = [str(turn.turn), str(turn.output_tokens), f"{turn.seconds:.3f}"]
        for side in others:
            other = side.turns[number]
            cells += [
                f"{other.seconds:.3f}",
                _ratio(turn.seconds, other.seconds),
                _ratio(turn.decode, other.decode),
            ]
        table.add_row(*cells)
    return table


def _ratio(base: float, other: float) -> str:
    return f"{base / other:.2f}x" if base > 0 and other > 0 else ""


def mismatch_lines(item: Comparison) -> list[str]:
    """Which answers and observations differ, and where; one line says so where none does."""
    wrong = [(side.side, mismatch) for side in item.sides for mismatch in side.mismatches]
    if not wrong:
        return ["no mismatch: every side gave what was recorded"]
    lines = []
    for side, found in wrong:
        what = f"call {found.call_id}" if found.what == "observation" else "answer"
        against = "recording" if found.against == RECORDING else found.against
        shown = "" if found.found is None and found.expected is None else f": {found.expected!r} became {found.found!r}"
        lines.append(
            printable(
                f"{side}, turn {found.turn}, {what} differs from {against} at {found.position}{shown}"
                f" ({found.count} places in all)"
            )
        )
    return lines
