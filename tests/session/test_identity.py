"""Which session a request belongs to, by name and by content."""

from __future__ import annotations

from typing import Any

import pytest

from dlite_agent.errors import InvalidRequest
from dlite_agent.session.history import History, Turn
from dlite_agent.session.identity import CONVENTIONS, Found, SessionIndex, SessionName, session_name
from dlite_agent.session.messages import JSON, digest, normalise, tools_digest
from tests.session.talk import WEATHER, assistant, system, user


@pytest.mark.parametrize("rank", range(len(CONVENTIONS)))
def test_each_convention_is_read_and_yields_to_those_before_it(rank: int) -> None:
    headers: dict[str, str] = {}
    body: dict[str, Any] = {}
    for row in CONVENTIONS[rank:]:
        (body if row.place == "body" else headers)[row.name] = f"from {row.name}"
    row = CONVENTIONS[rank]
    assert session_name(headers, body) == SessionName(f"from {row.name}", f"{row.place} {row.name}")


def test_agents_inside_a_session_are_told_apart() -> None:
    sent = {"X-Claude-Code-Session-Id": "s", "X-Claude-Code-Agent-Id": "a2", "X-Claude-Code-Parent-Agent-Id": "a1"}
    found = session_name(sent, {})
    assert found == SessionName("s/a2", "header x-claude-code-session-id", parent="s/a1")
    del sent["X-Claude-Code-Parent-Agent-Id"]
    assert session_name(sent, {}) == SessionName("s/a2", "header x-claude-code-session-id", parent="s")
    main_thread = {"session_id": "s", "thread_id": "s"}
    assert session_name(main_thread, {}) == SessionName("s", "header session-id")
    assert session_name({"Session-Id": "s", "Thread-Id": "t"}, {}) == SessionName(
        "s/t", "header session-id", parent="s"
    )


def test_parents_and_the_last_request_are_noted() -> None:
    dynamo = {"x-dynamo-session-id": "c", "x-dynamo-parent-session-id": "p", "x-dynamo-session-final": "True"}
    assert session_name(dynamo, {}) == SessionName("c", "header x-dynamo-session-id", parent="p", final=True)
    opencode = {"x-session-id": "c", "x-parent-session-id": "p"}
    assert session_name(opencode, {}) == SessionName("c", "header x-session-id", parent="p")


def test_no_name_and_empty_names_are_none() -> None:
    assert session_name({}, {}) is None
    assert session_name({"x-session-id": " "}, {"session_id": None, "prompt_cache_key": ""}) is None


@pytest.mark.parametrize("value", [3, ["s"], "x" * 257, "a\nb"])
def test_bad_names_are_refused_by_field(value: object) -> None:
    with pytest.raises(InvalidRequest) as caught:
        session_name({}, {"session_id": value})
    assert caught.value.param == "session_id"


def history(*turns: list[JSON], tools: list[JSON] | None = None) -> History:
    rows = []
    for i, turn in enumerate(turns):
        messages = normalise(turn)
        roles = tuple(m.role for m in messages)
        rows.append(Turn(roles, tuple(digest(m) for m in messages), 10 * i, 10 * i + 5))
    return History(tools_digest(tools), tuple(rows))


FIRST: list[JSON] = [system("S"), user("one"), assistant("A")]
SECOND: list[JSON] = [user("two"), assistant("B")]


def find(index: SessionIndex, *said: JSON, owner: str = "me", tools: list[JSON] | None = None) -> Found | None:
    return index.find(owner, normalise(said), tools)


def test_the_longest_conversation_wins_and_says_whether_it_ends_there() -> None:
    index = SessionIndex()
    index.put("me", "short", history(FIRST))
    index.put("me", "long", history(FIRST, SECOND))
    assert find(index, *FIRST, *SECOND, user("x")) == Found("long", 5, True)
    assert find(index, *FIRST, user("x")) == Found("short", 3, True)
    index.drop("short")
    assert find(index, *FIRST, user("x")) == Found("long", 3, False)
    index.drop("long")
    assert find(index, *FIRST, user("x")) is None


def test_the_latest_of_equals_is_taken() -> None:
    index = SessionIndex()
    for name in ("a", "b", "c"):
        index.put("me", name, history(FIRST))
    index.put("me", "b", history(FIRST))
    assert find(index, *FIRST, user("x")) == Found("b", 3, True)


def test_an_opening_other_tools_or_another_owner_do_not_match() -> None:
    index = SessionIndex()
    index.put("me", "s", history(FIRST, tools=[WEATHER]))
    assert find(index, *FIRST, tools=[WEATHER]) == Found("s", 3, True)
    assert find(index, *FIRST[:2], tools=[WEATHER]) is None
    assert find(index, *FIRST) is None
    assert find(index, *FIRST, owner="you", tools=[WEATHER]) is None


def test_a_session_that_grew_or_was_cut_back_is_found_by_what_it_holds_now() -> None:
    index = SessionIndex()
    index.put("me", "s", history(FIRST, SECOND))
    index.put("me", "s", history(FIRST))
    assert find(index, *FIRST, *SECOND, user("x")) == Found("s", 3, True)
    index.put("me", "s", History())
    assert find(index, *FIRST, user("x")) is None
