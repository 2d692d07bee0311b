from __future__ import annotations

import asyncio

import pytest

from dlite_agent.errors import Conflict, InvalidRequest, NotFound
from dlite_agent.session.history import History, Turn
from dlite_agent.session.identity import SessionName
from dlite_agent.session.messages import Message, digest
from dlite_agent.session.registry import BINDING, Registry, Session

HEADER = "header x-session-id"


def talk(*texts: str) -> list[Message]:
    return [Message("assistant" if i % 2 else "user", text) for i, text in enumerate(texts)]


def history_of(messages: list[Message]) -> History:
    """A turn for each question and answer, ten ids each."""
    turns = []
    for i in range(0, len(messages), 2):
        pair = messages[i : i + 2]
        end = 10 * (i // 2 + 1)
        turns.append(Turn(tuple(m.role for m in pair), tuple(digest(m) for m in pair), end - 4, end))
    return History("", tuple(turns))


def commit(registry: Registry, session: Session, *texts: str) -> None:
    history = history_of(talk(*texts))
    registry.commit(session, list(range(10 * len(history.turns))), history, None)


class World:
    """A registry and what it dropped."""

    def __init__(self, max_sessions: int = 100) -> None:
        self.dropped: list[str] = []
        self.registry = Registry(max_sessions=max_sessions, on_drop=lambda session: self.dropped.append(session.id))

    def named(self, owner: str, name: str, *texts: str, source: str = BINDING) -> Session:
        return self.registry.find(owner, SessionName(name, source), talk(*texts), [])


@pytest.fixture
def world() -> World:
    return World()


def test_names_are_an_owner_s_own(world: World) -> None:
    mine, theirs = world.named("a", "n", "hi"), world.named("b", "n", "hi")
    assert mine is not theirs
    assert world.registry.get("a", "n") is mine
    assert world.registry.get("a", mine.id) is mine
    for reference in (mine.id, "nobody"):
        with pytest.raises(NotFound):
            world.registry.get("b", reference)


def test_a_conversation_finds_its_session_and_only_its_owner_s(world: World) -> None:
    session = world.registry.find("a", None, talk("hi"), [])
    commit(world.registry, session, "hi", "yes")
    assert world.registry.find("a", None, talk("hi", "yes", "more"), []) is session
    assert world.registry.find("b", None, talk("hi", "yes", "more"), []) is not session
    assert world.registry.find("a", None, talk("hi", "no", "more"), []) is not session


def test_an_older_point_of_a_conversation_is_forked(world: World) -> None:
    session = world.registry.find("a", None, talk("hi"), [])
    commit(world.registry, session, "hi", "yes", "more", "fine")
    fork = world.registry.find("a", None, talk("hi", "yes", "other"), [])
    assert fork is not session
    assert fork.parent == session.id
    assert fork.ids == list(range(10))
    assert len(fork.history.turns) == 1


def test_a_name_that_binds_is_followed_whatever_is_said(world: World) -> None:
    session = world.named("a", "n", "hi")
    commit(world.registry, session, "hi", "yes")
    assert world.named("a", "n", "quite another thing") is session


def test_a_hint_is_not_followed_into_another_conversation_or_a_busy_session(world: World) -> None:
    session = world.named("a", "n", "hi", source=HEADER)
    commit(world.registry, session, "hi", "yes")
    assert world.named("a", "n", "hi", "yes", "more", source=HEADER) is session
    assert world.named("a", "n", "title of this chat", source=HEADER) is not session

    async def busy() -> None:
        await world.registry.hold(session, "refuse")
        beside = world.named("a", "n", "hi", "yes", "more", source=HEADER)
        assert beside is not session
        assert beside.parent == session.id
        world.registry.release(session)

    asyncio.run(busy())


def test_one_turn_at_a_time(world: World) -> None:
    session = world.named("a", "n", "hi")
    order: list[str] = []

    async def second() -> None:
        await world.registry.hold(session, "wait")
        order.append("second")
        world.registry.release(session)

    async def run() -> None:
        await world.registry.hold(session, "refuse")
        with pytest.raises(Conflict):
            await world.registry.hold(session, "refuse")
        with pytest.raises(Conflict):
            world.registry.delete(session)
        waiting = asyncio.create_task(second())
        await asyncio.sleep(0)
        order.append("first")
        commit(world.registry, session, "hi", "yes")
        world.registry.release(session)
        await waiting

    asyncio.run(run())
    assert order == ["first", "second"]


def test_a_session_without_a_turn_is_forgotten(world: World) -> None:
    session = world.named("a", "n", "hi")

    async def run() -> None:
        await world.registry.hold(session, "refuse")
        world.registry.release(session)

    asyncio.run(run())
    assert world.dropped == [session.id]
    assert len(world.registry) == 0


def test_forks_name_turns_that_exist(world: World) -> None:
    session = world.named("a", "n", "hi")
    commit(world.registry, session, "hi", "yes", "more", "fine")
    assert world.registry.fork(session).ids == session.ids
    assert world.registry.fork(session, turn=0).ids == []
    with pytest.raises(InvalidRequest):
        world.registry.fork(session, turn=3)
    with pytest.raises(Conflict):
        world.registry.fork(session, name="n")


def test_the_longest_unused_session_goes_first() -> None:
    world = World(max_sessions=2)
    first, second = world.named("a", "1", "hi"), world.named("a", "2", "hi")
    commit(world.registry, second, "x", "y")
    commit(world.registry, first, "x", "y")
    world.named("a", "3", "hi")
    assert world.dropped == [second.id]
    assert world.registry.list("a")[-1] is first


def test_prompts_without_messages_continue_the_session_that_begins_them(world: World) -> None:
    session = world.registry.continues("a", None, [1, 2])
    world.registry.commit(session, [1, 2, 3], History(), None)
    assert world.registry.continues("a", None, [1, 2, 3, 4]) is session
    assert world.registry.continues("a", None, [1, 2, 4, 4]) is not session
    assert world.registry.continues("b", None, [1, 2, 3, 4]) is not session
