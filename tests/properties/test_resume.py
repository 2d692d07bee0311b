"""Live sessions under any order of turns, forks, truncations, spills, crashes and takeovers, on a tiny model, against
computing everything again: the same greedy tokens, and log-probabilities within 1e-4."""

from __future__ import annotations

import functools
import shutil
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis.stateful import Bundle, RuleBasedStateMachine, rule, run_state_machine_as_test

from dlite_agent.decode.jobs import Piece
from dlite_agent.decode.rounds import Decoder
from dlite_agent.decode.state import TokenScore
from dlite_agent.model.drafter import Drafter
from dlite_agent.model.target import Target
from dlite_agent.session.retention import Tier
from dlite_agent.session.store.disk import DiskStore
from dlite_agent.session.store.memory import MemoryStore
from tests.decode.test_engine import drain
from tests.helpers import GREEDY, VOCAB, load_tiny, pool_for, save_model, successor_drafter, tiny_model
from tests.session.replica import LEASE_S, Replica

IDS = st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=90)
NEW = 6


@functools.cache
def model() -> tuple[Target, Drafter]:
    folder = Path(tempfile.mkdtemp())
    try:
        target = load_tiny(save_model(tiny_model("qwen3"), folder))
        return target, successor_drafter(target, group_size=6)
    finally:
        shutil.rmtree(folder)


def decoder(positions: int) -> Decoder:
    target, drafter = model()
    return Decoder(target, drafter, pool_for(target, positions=positions))


def recomputed(ids: list[int]) -> tuple[list[int], list[TokenScore]]:
    """Greedy tokens of a prompt and their scores, everything computed in one process from nothing."""
    made = decoder(600)
    turn = made.begin(made.open(), ids, GREEDY, max_new_tokens=NEW, mode="ar", top_scores=3)
    while turn.finish is None:
        made.step([turn])
    return turn.generated, turn.scores


@dataclass
class Truth:
    ids: list[int] = field(default_factory=list)
    ends: list[int] = field(default_factory=list)


class LiveSessions(RuleBasedStateMachine):
    names = Bundle("names")

    def __init__(self) -> None:
        super().__init__()
        self.root = Path(tempfile.mkdtemp())
        self.shared = MemoryStore(kv_limit=0)
        self.truth: dict[str, Truth] = {}
        self.started = 0
        self.replicas = [self.start(0), self.start(1)]

    def start(self, place: int) -> Replica:
        """Each replica has a disk of its own; its device holds about three sessions."""
        self.started += 1
        store = DiskStore(self.root / str(place))
        return Replica(decoder(900), store, self.shared, owner=f"process {self.started}", settings={"headroom": 8})

    def teardown(self) -> None:
        for replica in self.replicas:
            replica.close()
        shutil.rmtree(self.root)

    def run(self, name: str, place: int, ids: list[int], ends: list[int], source: str = "") -> None:
        replica, truth = self.replicas[place], self.truth[name]
        time.sleep(2 * LEASE_S)  # whoever had the session has let its lease run out
        if truth.ids:
            assert replica.open(name).ids == truth.ids
        else:
            replica.hold(name)
        generation, replies = replica.client.generation(
            ids, f"/{name}", stored=source or name, max_new_tokens=NEW, top_scores=3
        )
        replica.engine.submit(generation)
        answered = drain(replies)
        done: Any = answered[-1]
        scores = [score for reply in answered if isinstance(reply, Piece) for score in reply.scores]
        tokens, wanted = recomputed(ids)
        assert list(done.generated) == tokens
        for found, true in zip(scores, wanted, strict=True):
            assert [token for token, _ in found.top] == [token for token, _ in true.top]
            both = torch.tensor([[p for _, p in score.top] for score in (found, true)])
            torch.testing.assert_close(both[0], both[1], atol=1e-4, rtol=0)
        whole = [*ids, *tokens]
        assert replica.commit(name, whole, ends, done).shared is None
        replica.engine.pause(f"/{name}", "user")
        truth.ids, truth.ends = whole, [*ends, len(whole)]

    @rule(target=names, place=st.integers(0, 1), ids=IDS)
    def open(self, place: int, ids: list[int]) -> str:
        name = f"s{len(self.truth)}"
        self.truth[name] = Truth()
        self.run(name, place, ids, [])
        return name

    @rule(name=names, place=st.integers(0, 1), ids=IDS)
    def extend(self, name: str, place: int, ids: list[int]) -> None:
        """On either replica: the other one's copy is then out of date."""
        truth = self.truth[name]
        if len(truth.ids) + len(ids) < 300:
            self.run(name, place, [*truth.ids, *ids], truth.ends)

    @rule(name=names, place=st.integers(0, 1))
    def go_on(self, name: str, place: int) -> None:
        """Nothing new: the answer is simply continued."""
        truth = self.truth[name]
        if len(truth.ids) < 300:
            self.run(name, place, list(truth.ids), truth.ends)

    @rule(name=names, place=st.integers(0, 1), keep=st.integers(1, 300), ids=st.lists(st.integers(0, VOCAB - 1)))
    def truncate(self, name: str, place: int, keep: int, ids: list[int]) -> None:
        truth = self.truth[name]
        keep = min(keep, len(truth.ids))
        self.run(name, place, [*truth.ids[:keep], *ids[:50]], [end for end in truth.ends if end <= keep])

    @rule(target=names, name=names, place=st.integers(0, 1), keep=st.integers(1, 300), ids=IDS)
    def fork(self, name: str, place: int, keep: int, ids: list[int]) -> str:
        other, truth = f"s{len(self.truth)}", self.truth[name]
        time.sleep(2 * LEASE_S)
        self.replicas[place].open(name)
        self.truth[other] = Truth()
        keep = min(keep, len(truth.ids))
        self.run(other, place, [*truth.ids[:keep], *ids], [end for end in truth.ends if end <= keep], name)
        return other

    @rule(name=names, place=st.integers(0, 1), tier=st.sampled_from([Tier.HOST, Tier.DISK, Tier.DROPPED]))
    def leave(self, name: str, place: int, tier: Tier) -> None:
        self.replicas[place].move(name, tier)

    @rule(place=st.integers(0, 1), tail=st.binary(max_size=40))
    def crash(self, place: int, tail: bytes) -> None:
        self.replicas[place].close()
        for segment in (self.root / str(place) / "segments").glob("*.seg"):
            with segment.open("ab") as file:
                file.write(tail)
        self.replicas[place] = self.start(place)


LIMITS: dict[str, Any] = {"deadline": None, "suppress_health_check": list(HealthCheck)}
TestLiveSessions = LiveSessions.TestCase
TestLiveSessions.settings = settings(max_examples=3, stateful_step_count=8, **LIMITS)


@pytest.mark.soak
def test_many_more() -> None:
    run_state_machine_as_test(LiveSessions, settings=settings(max_examples=100, stateful_step_count=25, **LIMITS))
