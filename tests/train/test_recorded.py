"""Session logs and chats as training data: what is taken, how it is split into spans, and what is refused."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from dlite_agent.errors import InvalidRequest
from dlite_agent.model.target import Target
from dlite_agent.trace.events import KnownEvent, SessionStart, TurnEnd, TurnStart
from dlite_agent.trace.log import EventLog
from dlite_agent.train.collect import Collector
from dlite_agent.train.data import Plan, make_plan, read_plan, recorded_requests, with_thinking, write_plan
from dlite_agent.train.recorded import Recording, read_recordings
from tests.train.conftest import TAPS, encode, requests


def turns(session: str, *parts: tuple[int, list[int], list[int] | None], target: str = "tiny") -> list[KnownEvent]:
    """Events of a session: ids known before each prompt, new ids, and the answer's ids (None: it failed)."""
    events: list[KnownEvent] = [SessionStart(segment="s", session=session, t=0.0, target=target)]
    for turn, (known, new, answer) in enumerate(parts):
        place = {"segment": "s", "session": session, "turn": turn, "t": float(turn)}
        events.append(TurnStart(**place, prompt_tokens=known + len(new), new_ids=new))  # type: ignore[arg-type]
        error = None if answer is not None else "cancelled"
        message = None if answer is None else {"role": "assistant", "content": "x"}
        events.append(TurnEnd(**place, output_ids=answer, error=error, message=message))  # type: ignore[arg-type]
    return events


def write_log(path: Path, *events: KnownEvent) -> Path:
    with EventLog(path) as log:
        for event in events:
            log.write(event.model_copy(update={"segment": log.segment, "t": time.monotonic()}))
    return path


def _read(*paths: Path) -> list[Recording]:
    return read_recordings(paths, same_target=lambda name: name == "tiny")


def test_answers_are_spans_and_tool_outputs_context(tmp_path: Path) -> None:
    write_log(tmp_path / "a.jsonl", *turns("one", (0, [1, 2, 3], [4, 5]), (5, [6, 7], [8]), (8, [9], None)))
    (recording,) = _read(tmp_path)
    assert recording.key == "session: one"
    assert recording.branches == [([1, 2, 3, 4, 5, 6, 7, 8], [(3, 5), (7, 8)])]
    assert recording.prompts == []


def test_going_back_makes_a_branch_and_supervises_no_answer_twice(tmp_path: Path) -> None:
    log = turns("one", (0, [1, 2], [3]), (3, [4], [5, 6]), (3, [7, 8], [9]), (0, [2, 1], [3]))
    write_log(tmp_path / "a.jsonl", *log)
    (recording,) = _read(tmp_path)
    assert recording.branches == [
        ([1, 2, 3, 4, 5, 6], [(4, 6)]),
        ([1, 2, 3, 7, 8, 9], [(2, 3), (5, 6)]),
        ([2, 1, 3], [(2, 3)]),
    ]


def test_a_session_ends_where_its_ids_are_missing(tmp_path: Path) -> None:
    events = turns("one", (0, [1, 2], [3]), (5, [6], [7]), (7, [8], [9]))
    write_log(tmp_path / "a.jsonl", *events)
    (recording,) = _read(tmp_path)
    assert recording.branches == [([1, 2, 3], [(2, 3)])]


def test_chats_give_one_prompt_a_turn(tmp_path: Path) -> None:
    chat = [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "", "tool_calls": [_call("run")]},
        {"role": "tool", "tool_call_id": "c1", "content": "ok"},
        {"role": "assistant", "content": "done"},
    ]
    (tmp_path / "chats.jsonl").write_text(json.dumps({"id": "c", "messages": chat}) + "\n")
    (recording,) = _read(tmp_path / "chats.jsonl")
    assert recording.key == "session: chats/c"
    assert [[m["role"] for m in prompt] for prompt in recording.prompts] == [
        ["system", "user"],
        ["system", "user", "assistant", "tool"],
    ]
    kinds = [request.kind for request in recorded_requests(recording, "train")]
    assert kinds == ["chat", "after-tool"]


def _call(name: str) -> dict[str, object]:
    return {"id": "c1", "type": "function", "function": {"name": name, "arguments": "{}"}}


def test_what_cannot_be_used_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match=r"no-such.jsonl cannot be read"):
        _read(tmp_path / "no-such.jsonl")
    (tmp_path / "empty").mkdir()
    with pytest.raises(InvalidRequest, match="holds no log"):
        _read(tmp_path / "empty")
    (tmp_path / "torn.jsonl").write_bytes(b"\xff\xfe{")
    with pytest.raises(InvalidRequest, match=r"torn.jsonl cannot be read"):
        _read(tmp_path / "torn.jsonl")
    with EventLog(tmp_path / "bare.jsonl", content=False) as log:
        for event in turns("one", (0, [1], [2])):
            log.write(event)
    with pytest.raises(InvalidRequest, match="holds no recorded answers"):
        _read(tmp_path / "bare.jsonl")
    other = write_log(tmp_path / "other.jsonl", *turns("one", (0, [1], [2]), target="another"))
    with pytest.raises(InvalidRequest, match="recorded with target another") as refusal:
        _read(other)
    assert refusal.value.param == "sessions"


def test_recorded_sessions_enter_the_plan_on_one_side_each(tmp_path: Path) -> None:
    recordings = [Recording(f"s{i}", float(i), [([i, 2, 3, 4], [(2, 3)])]) for i in range(40)]
    plan = Plan(roots=(), sources=0, recorded=("logs",), with_questions=False, held_out_share=0.3)
    planned = make_plan(plan, recordings)
    assert {r.split for r in planned} == {"train", "held_out"}
    assert [r.ids for r in planned] == [recording.branches[0][0] for recording in recordings]
    write_plan(tmp_path / "corpus", plan, planned)
    assert read_plan(tmp_path / "corpus") == planned
    with pytest.raises(InvalidRequest, match="no source is left"):
        make_plan(plan)


def test_thinking_is_set_for_a_share_of_the_prompts_and_never_for_recordings() -> None:
    asked = requests(200, name="think")
    recorded = recorded_requests(Recording("s", 0.0, [([1, 2, 3], [(1, 3)])]), "train")
    labelled = with_thinking([*asked, *recorded], 0.25, seed=1)
    assert labelled[-1] == recorded[0]
    assert 0.15 < sum(bool(r.thinking) for r in labelled) / 200 < 0.35
    assert all(r.thinking is not None for r in labelled[:-1])
    assert labelled == with_thinking([*asked, *recorded], 0.25, seed=1)


def test_recorded_ids_are_read_in_pieces_and_known_to_be_greedy_or_not(
    target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    from dlite_agent.train import collect

    answering = Collector(target, encode, tap_layers=TAPS, eos=(2,), slots=1, max_new=12)
    (answer,) = answering.run(requests(1, name="recorded", temperature=0.0))
    ids = [*answer.ids.tolist(), 30, 31, 32]
    spans = [(answer.prompt, len(answer.ids))]
    greedy, other = (
        recorded_requests(Recording("s", 0.0, [(ids, found)]), "train")[0] for found in (spans, [(2, len(ids))])
    )
    monkeypatch.setattr(collect, "LONG_ROWS", 7)
    reading = Collector(target, encode, tap_layers=TAPS, eos=(2,), slots=1, max_new=0)
    (ours,) = reading.run([greedy])
    assert ours.ids.tolist() == ids
    assert ours.spans == tuple(spans)
    assert ours.labels.temperature == 0
    assert (ours.top_ids[: len(answer.ids), 0] == answer.top_ids[:, 0]).all()
    assert ours.taps.shape[0] == len(ids)
    (theirs,) = reading.run([other])
    assert theirs.labels.temperature == 1
    assert greedy.cut(len(answer.ids) - 2).spans == [(answer.prompt, len(answer.ids) - 2)]


def test_sessions_come_in_the_order_in_which_they_began(tmp_path: Path) -> None:
    for name, session in (("b", "first"), ("a", "second"), ("c", "third")):
        write_log(tmp_path / f"{name}.jsonl", *turns(session, (0, [1, 2], [3])))
    assert [recording.session for recording in _read(tmp_path)] == ["first", "second", "third"]
