"""A session as the viewer's page reads it: figures and turns in pages, rounds by time, content in pieces.

Nothing here grows with the number of rounds but `rounds_between`, which is asked for by window and limit. Times are
seconds on the session's own axis (see `trace.phases`).
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any

import numpy as np

from dlite_agent.errors import NotFound
from dlite_agent.trace.amdahl import Amdahl, Estimate
from dlite_agent.trace.events import Round, ToolEnd, ToolStart, TurnEnd, TurnStart
from dlite_agent.trace.formats.build import text_of
from dlite_agent.trace.intervals import joined
from dlite_agent.trace.log import Log
from dlite_agent.trace.phases import PHASES, Timeline, ToolCall, Turn
from dlite_agent.trace.summary import Report, SessionSummary, TurnSummary

TURNS_PER_PAGE = 500
ROUNDS_PER_PAGE = 4096
PIECE = 16_384
"""Characters of one text that come with a turn; the rest is asked for in pieces of at most `MAX_PIECE`."""
MAX_PIECE = 1 << 18
_STRIP_BINS = 48
_SPARK_BINS = 40
_LANE_GRAIN = 400


@dataclass(frozen=True)
class Part:
    """One text of a turn: an incoming message, reasoning, the answer, a call's arguments or a tool's output."""

    kind: str
    title: str
    text: str
    call_id: str | None = None


@dataclass(frozen=True)
class Shown:
    """A session ready to be shown: what was recorded, and what was computed from it."""

    log: Log
    timeline: Timeline
    report: Report

    @property
    def summary(self) -> SessionSummary:
        return next(s for s in self.report.sessions if s.session == self.timeline.session)

    @cached_property
    def rounds(self) -> tuple[list[tuple[int, Round]], Any]:
        """All rounds with their turns in order of time, and their starts as an array to search in."""
        rows = [(turn.turn, row) for turn in self.timeline.turns for row in turn.rounds]
        rows.sort(key=lambda pair: pair[1].start)
        return rows, np.array([row.start for _, row in rows])


def overview(shown: Shown, from_turn: int = 0) -> dict[str, Any]:
    """The session's figures, and a page of its turns from the `from_turn`-th on (by order, not by number)."""
    timeline, summary = shown.timeline, shown.summary
    page = timeline.turns[from_turn : from_turn + TURNS_PER_PAGE]
    following = from_turn + len(page)
    lanes = _lanes(timeline)
    calls, cuts, misses = defaultdict(list), defaultdict(list), defaultdict(list)
    for call in timeline.tools:
        calls[call.turn].append(_call(call))
    for cut in timeline.divergences:
        cuts[cut.turn].append({"reason": cut.reason, "position": cut.position})
    for miss in timeline.mismatches:
        about = ("what", "against", "position", "count", "call_id")
        misses[miss.turn].append({name: getattr(miss, name) for name in about})
    replayed = timeline.replayed
    figures = {turn.turn: turn for turn in summary.turns}
    return {
        "session": timeline.session,
        "source": timeline.source,
        "format": shown.log.format,
        "clock": timeline.clock,
        "target": timeline.target,
        "drafter": timeline.drafter,
        "parent": timeline.parent,
        "replayed": None if replayed is None else {"original": replayed.original, "side": replayed.side},
        "start_wall": timeline.start_wall,
        "wall": timeline.wall,
        "segments": timeline.segments,
        "phases": list(PHASES),
        "seconds": summary.seconds,
        "inferred": summary.inferred,
        "parts": summary.parts,
        "tool_busy": summary.tool_busy,
        "tool_union": summary.tool_union,
        "means": _plain(summary.means),
        "amdahl": _amdahl(summary.amdahl),
        "ceiling": _number(summary.ceiling),
        "levers": [_plain(lever) for lever in summary.levers],
        "unknown": summary.unknown,
        "problems": shown.report.problems[:50],
        "t_ar_source": shown.report.t_ar_source,
        "tools": [_plain(tool) for tool in summary.tools],
        "notes": [{"turn": note.turn, "text": note.text[:PIECE]} for note in timeline.notes[:200]],
        "rounds": sum(len(turn.rounds) for turn in timeline.turns),
        "turn_count": len(timeline.turns),
        "from_turn": from_turn,
        "next_turn": following if following < len(timeline.turns) else None,
        "gaps": lanes[None],
        "turns": [
            _turn(turn, figures[turn.turn], lanes[turn.turn])
            | {"tools": calls[turn.turn], "divergences": cuts[turn.turn], "mismatches": misses[turn.turn]}
            for turn in page
        ],
    }


def _turn(turn: Turn, figures: TurnSummary, lanes: list[Any]) -> dict[str, Any]:
    means = figures.means
    return {
        "turn": turn.turn,
        "start": _micro(turn.start),
        "end": _micro(turn.end),
        "window_end": _micro(turn.window_end),
        "finished": turn.finished,
        "request_id": turn.request_id,
        "trigger": turn.trigger,
        "prompt_tokens": turn.prompt_tokens,
        "cached_tokens": turn.cached_tokens,
        "output_tokens": turn.output_tokens,
        "ttft": None if turn.ttft is None else _micro(turn.ttft),
        "finish_reason": turn.finish_reason,
        "error": turn.error,
        "mode": turn.mode,
        "seconds": {phase: _micro(value) for phase, value in figures.seconds.items() if value > 0},
        "parts": {part: _micro(value) for part, value in figures.parts.items() if value > 0},
        "inferred": {phase: _micro(value) for phase, value in figures.inferred.items() if value > 0},
        "restores": [
            {"tier": r.tier, "tokens": r.tokens, "wanted": r.wanted, "reason": r.reason} for r in turn.restores
        ],
        "rounds": len(turn.rounds),
        "first_round": _micro(turn.rounds[0].start) if turn.rounds else None,
        "last_round": _micro(turn.rounds[-1].start + turn.rounds[-1].wall) if turn.rounds else None,
        "means": _plain(means),
        "strip": _strip(turn.rounds),
        "advances": {str(advance): n for advance, n in sorted(Counter(row.advance for row in turn.rounds).items())},
        "amdahl": _amdahl(figures.amdahl),
        "ceiling": _number(figures.ceiling),
        "lanes": lanes,
    }


def _call(call: ToolCall) -> dict[str, Any]:
    fields = call._asdict()
    return fields | {"start": _micro(call.start), "end": _micro(call.end)}


def _strip(rounds: Sequence[Round]) -> list[float]:
    """Mean accepted drafts of equal runs of rounds, at most `_STRIP_BINS` of them."""
    bins = min(len(rounds), _STRIP_BINS)
    edges = [len(rounds) * i // bins for i in range(bins + 1)] if bins else []
    return [round(sum(row.advance - 1 for row in rounds[low:high]) / (high - low), 2) for low, high in pairwise(edges)]


def _lanes(timeline: Timeline) -> dict[int | None, list[list[Any]]]:
    """Intervals to draw, by turn: `[phase index, start, end, inferred, covered share]`.

    Pieces of one phase are drawn as one where they are closer than a `_LANE_GRAIN`-th of their turn, and wherever
    they are if they are smaller than that: thousands of rounds and the masks between them become one bar each, whose
    share says how much of it is really there. Seconds are never taken from these.
    """
    grain = {turn.turn: (turn.window_end - turn.start) / _LANE_GRAIN for turn in timeline.turns}
    last: dict[tuple[int | None, str, bool], dict[bool, list[Any]]] = defaultdict(dict)
    lanes: dict[int | None, list[list[Any]]] = defaultdict(list)
    for piece in joined(timeline.slices):
        near = grain.get(piece.turn, 0.0) if piece.turn is not None else 0.0
        length = piece.end - piece.start
        small = length < near
        latest = last[piece.turn, piece.phase, piece.inferred]
        bar = next(
            (bar for bar in latest.values() if piece.start - bar[2] <= near), latest.get(True) if small else None
        )
        if bar is None:
            bar = latest[small] = [PHASES.index(piece.phase), piece.start, piece.end, int(piece.inferred), 0.0]
            lanes[piece.turn].append(bar)
        bar[2] = piece.end
        bar[4] += length
    for bars in lanes.values():
        for bar in bars:
            bar[4] = round(min(1.0, bar[4] / (bar[2] - bar[1])), 3) if bar[2] > bar[1] else 1.0
            bar[1], bar[2] = _micro(bar[1]), _micro(bar[2])
    return lanes


def spark(timeline: Timeline) -> list[list[float]]:
    """Seconds of model work, tools and the rest, added up over at most `_SPARK_BINS` equal runs of turns."""
    turns = timeline.turns
    bins = min(len(turns), _SPARK_BINS)
    out = []
    for i in range(bins):
        some = turns[len(turns) * i // bins : len(turns) * (i + 1) // bins]
        decode = sum(turn.seconds.get(phase, 0.0) for turn in some for phase in ("decode", "mask", "model"))
        tool = sum(turn.seconds.get("tool", 0.0) for turn in some)
        wait = sum(turn.seconds.get(phase, 0.0) for turn in some for phase in ("queue", "restore", "prefill", "other"))
        out.append([_micro(decode), _micro(tool), _micro(wait)])
    return out


def rounds_between(shown: Shown, start: float, end: float, offset: int = 0) -> dict[str, Any]:
    """Columns of the rounds that begin between two times, from the `offset`-th on, at most `ROUNDS_PER_PAGE`."""
    rows, starts = shown.rounds
    low = max(0, int(np.searchsorted(starts, start, "right")) - 1)
    high = int(np.searchsorted(starts, end, "left"))
    chosen = rows[low + offset : min(high, low + offset + ROUNDS_PER_PAGE)]
    columns: dict[str, list[Any]] = {
        name: [_micro(getattr(row, name)) for _, row in chosen] for name in ("start", "wall", "t_d", "t_v", "t_s")
    }
    for name in ("advance", "drafted", "context", "batch"):
        columns[name] = [getattr(row, name) for _, row in chosen]
    columns["turn"] = [turn for turn, _ in chosen]
    return {"total": max(0, high - low), "offset": offset, "count": len(chosen), **columns}


def parts(shown: Shown, number: int, decode: Any = None) -> list[Part]:
    """All texts of a turn. `decode` turns ids into text, for logs that keep ids where there are no messages.

    Raises NotFound when the session has no such turn.
    """
    events = [
        event
        for event in shown.log.events
        if getattr(event, "turn", None) == number and getattr(event, "session", None) == shown.timeline.session
    ]
    if not any(turn.turn == number for turn in shown.timeline.turns):
        raise NotFound(f"The session has no turn {number}.", param="turn")
    found: list[Part] = []
    started = [event for event in events if isinstance(event, TurnStart)]
    ended = [event for event in events if isinstance(event, TurnEnd)]
    for event in started:
        found += [_message(message) for message in event.messages or ()]
        if not event.messages and event.new_ids and decode is not None:
            found.append(Part("message", "new tokens of the prompt", decode(event.new_ids)))
    for end in ended:
        message = end.message or {}
        if reasoning := _text(message.get("reasoning_content") or message.get("reasoning")):
            found.append(Part("reasoning", "reasoning", reasoning))
        if answer := _text(message.get("content")):
            found.append(Part("answer", "assistant", answer))
        elif not message and end.output_ids and decode is not None:
            found.append(Part("answer", "assistant", decode(end.output_ids)))
    return found + _calls(events, ended)


def _calls(events: Iterable[Any], ended: Iterable[TurnEnd]) -> list[Part]:
    named: dict[str, tuple[str, Any]] = {}
    for end in ended:
        for call in (end.message or {}).get("tool_calls") or ():
            function = call.get("function") if isinstance(call, dict) else None
            if isinstance(function, dict):
                named[str(call.get("id"))] = (str(function.get("name") or "tool"), function.get("arguments"))
    outputs = {}
    for event in events:
        if isinstance(event, ToolStart) and (event.arguments is not None or event.call_id not in named):
            named[event.call_id] = (event.name, event.arguments)
        elif isinstance(event, ToolEnd):
            outputs[event.call_id] = event.output
    found = []
    for call_id, (name, arguments) in named.items():
        if arguments is not None:
            found.append(Part("call", name, _text(arguments), call_id))
        if outputs.get(call_id) is not None:
            found.append(Part("output", name, _text(outputs[call_id]), call_id))
    return found


def _message(message: dict[str, Any]) -> Part:
    role = str(message.get("role") or "message")
    call_id = message.get("tool_call_id")
    return Part(
        "output" if role == "tool" else "message",
        role,
        _text(message.get("content")),
        call_id if isinstance(call_id, str) else None,
    )


def _text(value: Any) -> str:
    """Any content as text: strings as they are, blocks by their text, other JSON indented."""
    if value is None or isinstance(value, str):
        return value or ""
    return text_of(value) or json.dumps(value, indent=1, ensure_ascii=False, default=str)


def content(found: Sequence[Part]) -> dict[str, Any]:
    """The texts of a turn, the beginning of each."""
    return {
        "parts": [
            {
                "kind": part.kind,
                "title": part.title[:200],
                "call_id": part.call_id,
                "text": part.text[:PIECE],
                "length": len(part.text),
            }
            for part in found
        ]
    }


def piece(found: Sequence[Part], index: int, offset: int, limit: int) -> dict[str, Any]:
    """`limit` characters of one text. Raises NotFound when there is no such text."""
    if not 0 <= index < len(found):
        raise NotFound(f"The turn has {len(found)} texts, none with index {index}.", param="part")
    text = found[index].text
    return {"offset": offset, "length": len(text), "text": text[offset : offset + min(limit, MAX_PIECE)]}


def _amdahl(figures: Amdahl | None) -> dict[str, Any] | None:
    """All figures at full precision: the page computes with them."""
    return None if figures is None else _plain(figures)


def _plain(value: Any) -> Any:
    if isinstance(value, Estimate):
        return [_plain(item) for item in value]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {item.name: _plain(getattr(value, item.name)) for item in dataclasses.fields(value)}
    return _number(value) if isinstance(value, float) else value


def _number(value: float | None) -> float | str | None:
    """A bound without limit is the text "inf": JSON has no such number."""
    return "inf" if value is not None and math.isinf(value) else value


def _micro(seconds: float) -> float:
    return round(seconds, 7)
