"""The suffix index finds the longest earlier occurrence, whatever is added and taken back."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from dlite_agent.decode.suffix import CANDIDATES, LONGEST, SHORTEST, Match, SuffixIndex, continuation

small = st.lists(st.integers(0, 3), max_size=CANDIDATES)


def longest_by_hand(ids: list[int]) -> Match | None:
    best = None
    for end in range(len(ids) - 2, -1, -1):
        length = 0
        while length < LONGEST and length <= end and ids[end - length] == ids[len(ids) - 1 - length]:
            length += 1
        if length >= SHORTEST and (best is None or length > best.length):
            best = Match(end + 1, length)
    return best


@given(small)
def test_the_longest_earlier_occurrence_is_found(ids: list[int]) -> None:
    index = SuffixIndex()
    index.grow(ids)
    assert index.match(ids) == longest_by_hand(ids)


@given(st.lists(st.tuples(small, st.integers(0, CANDIDATES)), max_size=4))
def test_adding_and_taking_back_leaves_what_a_new_index_has(edits: list[tuple[list[int], int]]) -> None:
    index, ids = SuffixIndex(), list[int]()
    for added, kept in edits:
        ids += added
        index.grow(ids)
        index.cut(ids, kept)
        del ids[kept:]
    index.grow(ids)
    fresh = SuffixIndex()
    fresh.grow(ids)
    assert index.match(ids) == fresh.match(ids)
    assert vars(index) == vars(fresh)


def test_a_copy_goes_on_where_the_match_ended() -> None:
    ids = [1, 2, 3, 4, 9, 1, 2]
    index = SuffixIndex()
    index.grow(ids)
    match = index.match(ids)
    assert match == Match(2, 2)
    assert continuation(ids, match, 3) == [3, 4, 9]


def test_a_copy_of_a_loop_goes_on_looping() -> None:
    ids = [7, 1, 2, 3, 1, 2, 3]
    index = SuffixIndex()
    index.grow(ids)
    match = index.match(ids)
    assert match is not None
    assert continuation(ids, match, 7) == [1, 2, 3, 1, 2, 3, 1]
