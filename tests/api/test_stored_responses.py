"""Stored responses: kept with the data folder, bounded, their owner's only."""

from __future__ import annotations

from pathlib import Path

import pytest

from dlite_agent.api.stored import FILE, ResponseStore, Stored
from dlite_agent.errors import NotFound
from dlite_agent.session.messages import Message, ToolCall
from dlite_agent.session.store.base import StoreUnavailable

SAID = (Message("user", "Größe?\ud800"), Message("assistant", "", "hm", (ToolCall("call_1", "f", '{"a": 1}'),)))


def response(number: int, session: str = "sess_1", owner: str = "alice") -> Stored:
    return Stored(owner, {"id": f"resp_{number}", "output": [number]}, SAID, session, number)


def test_what_is_stored_comes_back_from_another_process(tmp_path: Path) -> None:
    store = ResponseStore(8, tmp_path)
    store.put(response(1))
    store.close()
    again = ResponseStore(8, tmp_path)
    assert again.get("alice", "resp_1", "p") == response(1)
    again.close()


def test_what_was_written_is_there_after_a_kill(tmp_path: Path) -> None:
    """Nothing waits for a close: another connection sees it at once."""
    store, other = ResponseStore(8, tmp_path), ResponseStore(8, tmp_path)
    store.put(response(1))
    assert other.get("alice", "resp_1", "p") == response(1)
    store.close()
    other.close()


@pytest.mark.parametrize("on_disk", [False, True])
def test_the_oldest_gives_way(tmp_path: Path, on_disk: bool) -> None:
    store = ResponseStore(2, tmp_path if on_disk else None)
    for number in range(1, 4):
        store.put(response(number))
    with pytest.raises(NotFound, match="send the conversation's items") as missing:
        store.get("alice", "resp_1", "previous_response_id")
    assert missing.value.param == "previous_response_id"
    assert [store.get("alice", f"resp_{number}", "p").turns for number in (2, 3)] == [2, 3]
    store.close()


def test_others_get_nothing_and_dropped_ones_are_gone() -> None:
    store = ResponseStore(8)
    for number, session in ((1, "sess_1"), (2, "sess_1"), (3, "sess_2"), (4, "sess_2")):
        store.put(response(number, session))
    store.drop("resp_4")
    store.drop_session("sess_1")
    assert store.get("alice", "resp_3", "p").session == "sess_2"
    for owner, name in (("bob", "resp_3"), ("alice", "resp_1"), ("alice", "resp_4"), ("alice", "\ud800"), ("", "")):
        with pytest.raises(NotFound):
            store.get(owner, name, "p")
    store.close()


def test_a_damaged_file_is_refused_with_its_name(tmp_path: Path) -> None:
    (tmp_path / FILE).write_bytes(b"no database " * 500)
    with pytest.raises(StoreUnavailable, match=FILE):
        ResponseStore(8, tmp_path)
