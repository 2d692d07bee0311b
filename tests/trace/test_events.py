from __future__ import annotations

import json

import pytest
from pydantic import ValidationError

from dlite_agent.errors import InvalidRequest
from dlite_agent.trace.events import (
    KINDS,
    AnyEvent,
    ClientIdle,
    Foreign,
    Mask,
    Mismatch,
    Model,
    Outage,
    Prefill,
    Replayed,
    Round,
    Rounds,
    TurnEnd,
    Unknown,
    dump,
    parse,
)
from tests.trace import sample

_MORE: list[AnyEvent] = [
    sample.calibration(),
    Mask(segment="g", t=1.0, end=2.0, session="s", turn=0, at=[0.0, 0.5], seconds=[0.1, 0.2]),
    Model(segment="g", t=1.0, end=2.0, session="s", turn=0, inferred=True),
    ClientIdle(segment="g", t=1.0, end=2.0, session="s", turn=0, waiting="user"),
    Outage(segment="g", t=1.0, previous="f", seconds=None, reason="killed"),
    Replayed(segment="g", t=1.0, session="s", original="r", side="ar", wait="none"),
    Mismatch(segment="g", t=1.0, session="s", turn=0, what="token", against="ar", position=3, expected=7, found=8),
    Foreign(segment="g", t=1.0, source="pi", raw={"type": "compaction", "deep": [None, {"x": None}]}),
]


def test_every_kind_survives_json() -> None:
    written: list[AnyEvent] = [*sample.events(), *_MORE]
    back = [parse(json.loads(json.dumps(dump(event)))) for event in written]
    assert back == written
    assert {event.kind for event in written if not isinstance(event, Unknown)} == KINDS


def test_none_inside_content_is_kept_and_none_fields_are_left_out() -> None:
    event = TurnEnd(segment="g", t=0.0, session="s", turn=0, message={"role": "assistant", "content": None})
    record = dump(event)
    assert record["message"] == {"role": "assistant", "content": None}
    assert "output_tokens" not in record


@pytest.mark.parametrize(
    ("record", "problem"),
    [
        ({"kind": "gate", "t": 1.0, "why": "load"}, "unknown kind 'gate'"),
        ({"t": 1.0}, "unknown kind None"),
        ({"kind": ["segment"]}, "unknown kind"),
        ({"kind": "session_end", "segment": "g", "t": 1e300, "session": "s"}, "session_end: field t"),
        ({"kind": "prefill", "segment": "g", "t": 1.0, "end": 2.0, "session": "s", "turn": 0}, "prefill: field tokens"),
        (
            {"kind": "queue", "segment": "g", "t": 3.0, "end": 2.0, "session": "s", "turn": 0},
            "lies before",
        ),
    ],
)
def test_unreadable_records_are_kept_verbatim(record: dict[str, object], problem: str) -> None:
    event = parse(record)
    assert isinstance(event, Unknown)
    assert problem in event.problem
    assert dump(event) == record


def test_unknown_fields_of_a_known_kind_are_kept() -> None:
    record = {"kind": "session_end", "segment": "g", "t": 1.0, "session": "s", "later": {"a": 1}}
    assert dump(parse(record)) == record


def test_a_later_schema_version_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="update it") as caught:
        parse({"kind": "segment", "segment": "g", "t": 0.0, "wall": 0.0, "version": 2})
    assert caught.value.param == "version"


def test_rounds_pack_and_unpack() -> None:
    rows = [
        Round(10.0, 0.02, 0.004, 0.012, 0.004, 4, 7, 8, 100, 1),
        Round(10.5, 0.03, 0.005, 0.02, 0.005, 1, 7, 8, 104, 3),
    ]
    packed = Rounds.of("g", "s", 0, rows)
    assert packed.end == pytest.approx(10.53)
    assert packed.rows() == rows


def test_rounds_refuse_a_context_that_does_not_follow() -> None:
    rows = [Round(0.0, 0.1, 0, 0.1, 0, 4, 7, 8, 100, 1), Round(0.1, 0.1, 0, 0.1, 0, 4, 7, 8, 103, 1)]
    with pytest.raises(InvalidRequest, match="does not continue") as caught:
        Rounds.of("g", "s", 0, rows)
    assert caught.value.param == "context"


def test_rounds_refuse_nothing_and_ragged_columns() -> None:
    with pytest.raises(InvalidRequest):
        Rounds.of("g", "s", 0, [])
    good = dump(sample.rounds(0.0, 3))
    bad = parse({**good, "advance": [1, 2]})
    assert isinstance(bad, Unknown)
    assert "one value a round" in bad.problem


def test_times_must_be_finite() -> None:
    with pytest.raises(ValidationError):
        Prefill(segment="g", t=float("nan"), end=1.0, session="s", turn=0, tokens=1)


def test_content_can_be_left_out() -> None:
    for event in sample.events():
        assert not isinstance(event, Unknown)
        bare = event.without_content()
        assert not any(getattr(bare, name) for name in event.content_fields)
        assert bare.t == event.t
