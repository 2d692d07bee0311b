"""Plain prompt lookup, simulated on a finished greedy answer: what copying from the text so far would have accepted."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

LONGEST_MATCH = 3
"""Ids of the tail that are looked for first; then fewer, down to one."""


def propose(known: Sequence[int], drafts: int) -> list[int]:
    """The ids after the latest earlier place that ends like `known`, `drafts` at most."""
    for size in range(min(LONGEST_MATCH, len(known) - 1), 0, -1):
        tail = list(known[-size:])
        for at in range(len(known) - size - 1, -1, -1):
            if known[at] == tail[0] and list(known[at : at + size]) == tail:
                return list(known[at + size : at + size + drafts])
    return []


def lookup_rounds(prompt: Sequence[int], answer: Sequence[int], drafts: int) -> Iterator[tuple[int, int, int]]:
    """Rounds over an answer whose first id the prefill gave: (ids emitted before, accepted, drafts that could be).

    A round emits what it accepts and one id more, as a drafter's does.
    """
    at = 1
    while at < len(answer):
        proposal = propose([*prompt, *answer[:at]], drafts)
        possible = min(len(proposal), len(answer) - at)
        hits = 0
        while hits < possible and proposal[hits] == answer[at + hits]:
            hits += 1
        yield at, min(hits, len(answer) - at - 1), possible
        at += hits + 1
