"""Arithmetic of intervals: slices of a wall clock that never overlap."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple


class Slice(NamedTuple):
    """A piece of the session's wall clock, `start` to `end` seconds on the session's axis."""

    phase: str
    part: str | None
    start: float
    end: float
    turn: int | None
    inferred: bool


def union(intervals: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    """Sorted disjoint intervals that cover the same seconds."""
    merged: list[tuple[float, float]] = []
    for start, end in sorted(intervals):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        elif end > start:
            merged.append((start, end))
    return merged


def claim(
    free: Sequence[tuple[float, float]], wanted: Iterable[Slice]
) -> tuple[list[Slice], list[tuple[float, float]]]:
    """Give each slice what is still free of its interval, earlier starts first; the slices got and what stays free."""
    got: list[Slice] = []
    left: list[tuple[float, float]] = []
    rest = list(reversed(free))
    for piece in sorted(wanted, key=lambda piece: (piece.start, piece.end)):
        while rest and rest[-1][1] <= piece.start:
            left.append(rest.pop())
        while rest and rest[-1][0] < piece.end:
            low, high = rest.pop()
            start, end = max(low, piece.start), min(high, piece.end)
            if low < start:
                left.append((low, start))
            if start < end:
                whole = start == piece.start and end == piece.end
                got.append(piece if whole else piece._replace(start=start, end=end))
            if end < high:
                rest.append((max(start, end), high))
                break
    left.extend(reversed(rest))
    return got, left


def joined(slices: Iterable[Slice]) -> list[Slice]:
    """Neighbouring slices of one phase and turn as one, without their parts."""
    merged: list[Slice] = []
    for piece in slices:
        last = merged[-1] if merged else None
        same = last is not None and (last.phase, last.turn, last.inferred) == (piece.phase, piece.turn, piece.inferred)
        if last is not None and same and piece.start - last.end < 1e-9:
            merged[-1] = last._replace(end=piece.end)
        else:
            merged.append(piece._replace(part=None))
    return merged
