"""Chrome trace JSON, to be opened in Perfetto.

One process a session and one thread a lane. Complete events of one thread must nest or not touch, so every lane holds
the slices of a partition, and overlapping tool calls get lanes of their own.
"""

from __future__ import annotations

from typing import Any

from dlite_agent.trace.intervals import joined
from dlite_agent.trace.log import Log
from dlite_agent.trace.phases import PHASES, Timeline, timelines

NAME = "chrome"
_LANES = ("turn", *PHASES[:4], "rounds", *PHASES[4:])
_TOOL_LANE = 100


def to_chrome(log: Log) -> dict[str, Any]:
    """All sessions of the log; times in whole microseconds since the earliest session's start."""
    views = timelines(log)
    walls = [view.start_wall for view in views if view.start_wall is not None]
    origin = min(walls, default=0.0)
    events: list[dict[str, Any]] = []
    for pid, view in enumerate(views, 1):
        events += _session(pid, view, (view.start_wall - origin) if view.start_wall is not None else 0.0)
    return {"displayTimeUnit": "ms", "traceEvents": events}


def _session(pid: int, view: Timeline, shift: float) -> list[dict[str, Any]]:
    lanes = {name: number for number, name in enumerate(_LANES)}
    names: dict[int, str] = {}
    events: list[dict[str, Any]] = []

    def micro(at: float) -> int:
        return round((at + shift) * 1e6)

    def complete(lane: int, lane_name: str, name: str, start: float, end: float, args: dict[str, Any]) -> None:
        names.setdefault(lane, lane_name)
        begin = micro(start)
        events.append(
            {"ph": "X", "pid": pid, "tid": lane, "name": name, "cat": lane_name, "ts": begin, "dur": micro(end) - begin}
            | {"args": args}
        )

    for turn in view.turns:
        args = {
            "prompt_tokens": turn.prompt_tokens,
            "cached_tokens": turn.cached_tokens,
            "output_tokens": turn.output_tokens,
            "finish_reason": turn.finish_reason,
        }
        end = min(turn.end, turn.window_end)
        complete(lanes["turn"], "turn", f"turn {turn.turn}", turn.start, end, args)
        if turn.ttft is not None:
            at = micro(turn.start + turn.ttft)
            events.append(
                {"ph": "i", "s": "t", "pid": pid, "tid": lanes["turn"], "name": "first token", "ts": at, "args": {}}
            )
        if turn.prompt_tokens is not None:
            size = turn.prompt_tokens + (turn.output_tokens or 0)
            events.append(
                {
                    "ph": "C",
                    "pid": pid,
                    "tid": 0,
                    "name": "context",
                    "cat": "tokens",
                    "ts": micro(turn.end),
                    "args": {"tokens": size},
                }
            )
    called = {call.turn for call in view.tools}
    for piece in joined(view.slices):
        if piece.phase != "tool" or piece.turn not in called:
            args = {"turn": piece.turn, "inferred": piece.inferred}
            complete(lanes[piece.phase], piece.phase, piece.phase, piece.start, piece.end, args)
    for piece in view.slices:
        if piece.part is not None:
            complete(lanes["rounds"], "rounds", piece.part, piece.start, piece.end, {"turn": piece.turn})
    free: list[int] = []
    for call in sorted(view.tools, key=lambda call: (call.start, call.end)):
        slot = next((i for i, end in enumerate(free) if end <= micro(call.start)), len(free))
        if slot == len(free):
            free.append(0)
        free[slot] = micro(call.end)
        args = {"call_id": call.call_id, "turn": call.turn, "measured": call.measured, "exit_code": call.exit_code}
        lane_name = f"tool call {slot + 1}"
        complete(_TOOL_LANE + slot, lane_name, call.name, call.start, call.end, args | {"finished": call.finished})
    meta = [{"ph": "M", "pid": pid, "tid": 0, "name": "process_name", "args": {"name": f"session {view.session}"}}]
    for lane, lane_name in sorted(names.items()):
        for key, value in (("thread_name", {"name": lane_name}), ("thread_sort_index", {"sort_index": lane})):
            meta.append({"ph": "M", "pid": pid, "tid": lane, "name": key, "args": value})
    return meta + events
