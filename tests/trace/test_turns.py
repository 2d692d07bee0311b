from __future__ import annotations

import pytest

from dlite_agent.decode.jobs import PrefillFact, RoundFact, TurnFigures
from dlite_agent.trace.events import Mask, Queue, Restore, Rounds, Segment, TurnEnd, TurnStart
from dlite_agent.trace.log import Log
from dlite_agent.trace.phases import timelines
from dlite_agent.trace.turns import TurnFacts, turn_events
from tests.trace import sample

FACTS = TurnFacts(sample.SEGMENT, "s", 0, request_id="r", trigger="user", finish_reason="stop", output_tokens=13)


def figures() -> TurnFigures:
    """Queue 1.0, restore 0.5, prefill 1.0, three rounds of 0.5 with a pre-emption of 2.0 and a rebuild of 0.5."""
    return TurnFigures(
        queued=10.0,
        prompt_tokens=100,
        mode="dlite",
        admitted=11.0,
        restored=11.5,
        first_token=12.5,
        finished=16.5,
        cached_tokens=60,
        tier="shared",
        reason="evicted",
        waits=[(13.0, 15.0)],
        prefills=[PrefillFact(11.5, 1.0, 40, 60, 2), PrefillFact(15.0, 0.5, 104, 0, 1)],
        rounds=[
            RoundFact(12.5, 0.5, 0.1, 0.3, 0.1, 4, 7, 8, 100, 1),
            RoundFact(15.5, 0.5, 0.1, 0.3, 0.1, 4, 7, 8, 104, 2),
            RoundFact(16.0, 0.5, 0.1, 0.3, 0.1, 4, 7, 8, 107, 2),
        ],
    )


def test_every_figure_becomes_an_event_and_every_second_a_phase() -> None:
    events = turn_events(FACTS, figures())
    assert [event.t for event in events] == sorted(event.t for event in events)
    (view,) = timelines(Log([Segment(segment=sample.SEGMENT, t=0.0, wall=sample.WALL), *events]))
    seconds = {phase: value for phase, value in view.seconds().items() if value}
    assert seconds == pytest.approx({"queue": 3.0, "restore": 0.5, "prefill": 1.5, "decode": 1.5})
    assert view.parts() == pytest.approx({"draft": 0.3, "verify": 0.9, "commit": 0.3})
    (turn,) = view.turns
    assert turn.ttft == pytest.approx(2.5)
    assert [tuple(row)[1:] for row in turn.rounds] == [tuple(fact)[1:] for fact in figures().rounds]
    assert (turn.cached_tokens, turn.new_tokens, turn.output_tokens, turn.mode) == (60, 40, 13, "dlite")
    # The context jumped back between the last two rounds, so they are packed apart.
    assert len([event for event in events if isinstance(event, Rounds)]) == 2
    (restore,) = [event for event in events if isinstance(event, Restore)]
    assert (restore.tier, restore.tokens, restore.wanted, restore.reason) == ("shared", 60, 100, "evicted")


def test_a_turn_that_failed_in_the_queue() -> None:
    facts = TurnFacts(sample.SEGMENT, "s", 0, error="not done after 5.0 s")
    events = turn_events(facts, TurnFigures(queued=10.0, prompt_tokens=100, finished=15.0))
    start, queue, end = events
    assert isinstance(start, TurnStart)
    assert start.cached_tokens is None
    assert isinstance(queue, Queue)
    assert (queue.t, queue.end) == (10.0, 15.0)
    assert isinstance(end, TurnEnd)
    assert end.error == "not done after 5.0 s"


def test_masks_are_a_phase_of_their_own_inside_rounds() -> None:
    facts = TurnFacts(sample.SEGMENT, "s", 0, masks=[(12.6, 0.05), (15.6, 0.1)])
    events = turn_events(facts, figures())
    (mask,) = [event for event in events if isinstance(event, Mask)]
    assert (mask.t, mask.end) == pytest.approx((12.6, 15.7))
    (view,) = timelines(Log([Segment(segment=sample.SEGMENT, t=0.0, wall=sample.WALL), *events]))
    assert view.seconds()["mask"] == pytest.approx(0.15)
    assert view.seconds()["decode"] == pytest.approx(1.5 - 0.15)
    assert sum(view.seconds().values()) == pytest.approx(view.wall)


def test_nothing_between_arrival_and_the_end_of_the_response_is_unexplained() -> None:
    facts = TurnFacts(sample.SEGMENT, "s", 0, arrived=9.0, ended=17.5)
    events = turn_events(facts, figures())
    assert [event.t for event in events] == sorted(event.t for event in events)
    (view,) = timelines(Log([Segment(segment=sample.SEGMENT, t=0.0, wall=sample.WALL), *events]))
    seconds = {phase: value for phase, value in view.seconds().items() if value}
    assert seconds == pytest.approx({"queue": 4.0, "restore": 0.5, "prefill": 1.5, "decode": 1.5, "stream": 1.0})
    (turn,) = view.turns
    assert turn.ttft == pytest.approx(3.5)
    assert view.wall == pytest.approx(8.5)
