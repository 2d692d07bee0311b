"""Drafts copied from the session itself: what followed the longest earlier occurrence of its present end.

An agent repeats file text, tool output and its own edits, and there copying beats any model (prompt lookup; suffix
decoding, arXiv 2411.04975). The index is over all ids of one session and of no other, so nothing leaks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

SHORTEST = 2
"""Ids that must agree before anything is copied."""
LONGEST = 32
"""Agreement beyond it makes no difference."""
CANDIDATES = 24
"""Occurrences that are compared, the latest first."""


@dataclass(frozen=True)
class Match:
    """The session's last `length` ids also stand just before `start`."""

    start: int
    length: int


class SuffixIndex:
    """Where each pair of ids of a session has ended. Grows with the ids; a truncated session takes its tail back."""

    def __init__(self) -> None:
        self._ends: dict[tuple[int, int], list[int]] = {}
        self._length = 0

    def grow(self, ids: Sequence[int]) -> None:
        """Take up the ids that are new since the last call."""
        for end in range(max(self._length, SHORTEST - 1), len(ids)):
            self._ends.setdefault((ids[end - 1], ids[end]), []).append(end)
        self._length = max(self._length, len(ids))

    def cut(self, ids: Sequence[int], length: int) -> None:
        """Forget positions from `length` on; `ids` still hold them."""
        for end in range(self._length - 1, max(length, SHORTEST - 1) - 1, -1):
            pair = (ids[end - 1], ids[end])
            ends = self._ends[pair]
            ends.pop()
            if not ends:
                del self._ends[pair]
        self._length = min(self._length, length)

    def match(self, ids: Sequence[int]) -> Match | None:
        """The longest earlier occurrence of the end of `ids`, which `grow` has seen; the latest of equals."""
        if len(ids) <= SHORTEST:
            return None
        best: Match | None = None
        last = len(ids) - 1
        for end in reversed(self._ends.get((ids[last - 1], ids[last]), [])[-CANDIDATES - 1 :]):
            if end == last:
                continue
            length = SHORTEST
            while length < LONGEST and length <= end and ids[end - length] == ids[last - length]:
                length += 1
            if best is None or length > best.length:
                best = Match(end + 1, length)
        return best


def continuation(ids: Sequence[int], match: Match, count: int) -> list[int]:
    """`count` ids from the match on; a match that runs into the end goes on periodically."""
    period = len(ids) - match.start
    return [ids[match.start + i % period] for i in range(count)]
