"""Sessions under any order of turns, spills, forks, edits, crashes and takeovers, against a plain dictionary."""

from __future__ import annotations

import shutil
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, rule

from dlite_agent.decode.state import DecodeState
from dlite_agent.session.persist import Persister
from dlite_agent.session.restore import Loaded
from dlite_agent.session.store.base import StaleLease
from dlite_agent.session.store.disk import DiskStore
from dlite_agent.session.store.host import HostTier
from dlite_agent.session.store.memory import MemoryStore
from tests.session.stored import CPU, check, facts, features_for, grow, persister, pool, rows_for

TOKENS = st.lists(st.integers(0, 3), min_size=1, max_size=300)


@dataclass
class Truth:
    """What a session must be: ids and turn ends when last committed, and what this process has of it now."""

    ids: list[int] = field(default_factory=list)
    ends: list[int] = field(default_factory=list)
    version: tuple[int, int] | None = None
    live: DecodeState | None = None


class Sessions(RuleBasedStateMachine):
    names = Bundle("names")

    def __init__(self) -> None:
        super().__init__()
        self.root = Path(tempfile.mkdtemp())
        self.shared = MemoryStore()
        self.shared.kv_limit = 0
        self.truth: dict[str, Truth] = {}
        self.process = 0
        self.start()

    def start(self) -> None:
        self.process += 1
        self.keeper: Persister = persister(DiskStore(self.root), self.shared, owner=f"process {self.process}")
        self.host = HostTier()

    def teardown(self) -> None:
        self.keeper.close()
        shutil.rmtree(self.root)

    def commit(self, name: str, state: DecodeState) -> None:
        truth = self.truth[name]
        self.keeper.hold(name)
        done = self.keeper.commit(self.keeper.snapshot(name, state, facts(*truth.ends)))
        assert done.shared is None
        assert truth.version is None or done.version > truth.version
        truth.ids, truth.version, truth.live = list(state.ids), done.version, state

    def resume(self, name: str) -> DecodeState:
        """As a server does: the live state, else the host's copy, else the store's, and prefill what is missing."""
        truth = self.truth[name]
        self.keeper.hold(name)
        newest = self.keeper.newest(name)
        assert newest == truth.version
        if truth.live is not None:
            return truth.live
        copy = self.host.get(name)
        if copy is not None and copy.ids == truth.ids:
            state = copy.apply(pool().sequence(), CPU)
        else:
            found = self.keeper.read(name)
            assert isinstance(found, Loaded), found
            state = check(found, truth.ids)
            assert [turn.end for turn in found.record.history.turns] == truth.ends
        assert state.ids == truth.ids
        missing = rows_for(state.ids[:-1])[:, :, :, state.boundary :]
        if missing.shape[3]:
            state.kv.load(missing)
            state.features = features_for(state.ids, state.boundary)
            state.keep()
        truth.live = state
        return state

    @rule(target=names, tokens=TOKENS)
    def open(self, tokens: list[int]) -> str:
        name = f"session {len(self.truth)}"
        self.truth[name] = Truth(ends=[len(tokens)])
        state = DecodeState(pool().sequence())
        grow(state, tokens)
        self.commit(name, state)
        return name

    @rule(name=names, tokens=TOKENS)
    def extend(self, name: str, tokens: list[int]) -> None:
        state = self.resume(name)
        grow(state, tokens)
        self.truth[name].ends.append(len(state.ids))
        self.commit(name, state)

    @rule(name=names, keep=st.integers(1, 600), tokens=TOKENS)
    def edit(self, name: str, keep: int, tokens: list[int]) -> None:
        """Go back and go on differently. Turns that the cut goes through end there."""
        state = self.resume(name)
        keep = min(keep, len(state.ids))
        state.truncate(keep)
        grow(state, tokens)
        truth = self.truth[name]
        truth.ends = [*(end for end in truth.ends if end <= keep), len(state.ids)]
        self.commit(name, state)

    @rule(target=names, name=names)
    def fork(self, name: str) -> str:
        state = self.resume(name).fork()
        other = f"session {len(self.truth)}"
        self.truth[other] = Truth(ends=list(self.truth[name].ends))
        self.commit(other, state)
        return other

    @rule(name=names)
    def drop(self, name: str) -> None:
        self.truth[name].live = None

    @rule(name=names)
    def spill(self, name: str) -> None:
        truth = self.truth[name]
        if truth.live is not None and truth.version is not None:
            self.host.put(name, truth.live)
            truth.live = None

    @rule(name=names, tokens=TOKENS)
    def fail(self, name: str, tokens: list[int]) -> None:
        """A turn that is never committed."""
        grow(self.resume(name), tokens)
        self.truth[name].live = None
        self.host.drop(name)

    @rule(lose_index=st.booleans(), tail=st.binary(max_size=80))
    def crash(self, lose_index: bool, tail: bytes) -> None:
        """The process ends; its leases are handed over; a torn write and a lost index may be what it leaves."""
        for name, truth in self.truth.items():
            self.keeper.release(name)
            truth.live = None
        self.keeper.close()
        for segment in (self.root / "segments").glob("*.seg"):
            with segment.open("ab") as file:
                file.write(tail)
        if lose_index:
            for path in self.root.glob("index.sqlite*"):
                path.unlink()
        self.start()

    @rule(name=names, tokens=TOKENS)
    def overtake(self, name: str, tokens: list[int]) -> None:
        """Another replica, with nothing but the shared store, adds a turn; what this one has is then stale."""
        mine = self.resume(name)
        snapshot = self.keeper.snapshot(name, mine, facts(*self.truth[name].ends))
        lease = self.shared.acquire(name, f"process {self.process}", 30)
        self.shared.release(lease)
        here, self.keeper = self.keeper, persister(MemoryStore(), self.shared, owner="elsewhere")
        self.truth[name].live = None
        try:
            self.extend(name, tokens)
            self.keeper.release(name)
        finally:
            self.keeper = here
        self.truth[name].live = None
        with pytest.raises(StaleLease):
            self.keeper.commit(snapshot)

    @rule(name=consumes(names))
    def remove(self, name: str) -> None:
        self.keeper.hold(name)
        self.shared.delete(name)
        if self.keeper.local.load(name) is not None:
            self.keeper.local.delete(name)
        self.keeper.release(name)
        self.host.drop(name)
        self.truth[name] = Truth()

    @rule()
    def collect(self) -> None:
        assert isinstance(self.keeper.local, DiskStore)
        assert self.keeper.local.gc().sessions == 0


TestSessions = Sessions.TestCase
TestSessions.settings = settings(
    max_examples=8, stateful_step_count=15, deadline=None, suppress_health_check=list(HealthCheck)
)
