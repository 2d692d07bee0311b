"""Where paused sessions' KV goes and comes back from: the retention policy's moves, carried out on the live engine.

Everything runs on the engine's thread except reading from a store. A session leaves the device for host memory (a
copy) or for the store, which has every committed turn already (then its KV is only freed). Holding KV on the device
costs nothing while the device has room, and the full price when it is nearly full: in between the price rises.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import cast

from dlite_agent.decode.jobs import Generation
from dlite_agent.decode.jobs import Tier as JobTier
from dlite_agent.decode.rounds import StepFigures
from dlite_agent.decode.states import SHARE_FROM, States, common_prefix
from dlite_agent.decode.vault import Fetched, Read
from dlite_agent.errors import KVExhausted
from dlite_agent.session.measured import MeasuredCosts
from dlite_agent.session.persist import Persister
from dlite_agent.session.restore import Restore
from dlite_agent.session.retention import Move, Retention, Tier
from dlite_agent.session.store.host import HostTier

IDLE_BELOW, FULL_FROM = 0.5, 0.85
"""Shares of the KV budget in use: below the first holding is free, from the second on it costs the full price."""
_WORTH_MEASURING = 32
"""Prompt rows from which a step says something about the cost of a prefill."""


class Tiers:
    """The engine's vault.

    Args:
        persister: where committed sessions are; None: nothing outlives host memory.

    Attributes:
        counts: spills (copies to host memory), spilled_bytes, host hits.
    """

    def __init__(self, retention: Retention, persister: Persister | None) -> None:
        self.retention = retention
        self.host = HostTier()
        self.counts: Counter[str] = Counter()
        self._measured = MeasuredCosts(retention.costs)
        self._persister = persister
        self._states: States
        self._post: Callable[[Callable[[], None]], None]
        self._prefetcher = ThreadPoolExecutor(1, thread_name_prefix="dlite-prefetch")

    def attach(self, states: States, post: Callable[[Callable[[], None]], None]) -> None:
        self._states = states
        self._post = post

    def close(self) -> None:
        """Wait for no prefetch."""
        self._prefetcher.shutdown(wait=False, cancel_futures=True)

    def host_tokens(self, key: str) -> int:
        """Tokens of a session whose KV is in host memory. Any thread."""
        copy = self.host.get(key)
        return 0 if copy is None else copy.tokens

    def paused_bytes(self) -> int:
        """KV of paused sessions on the device, about. Any thread."""
        waiting = list(self.retention.paused.values())
        tokens = sum(paused.tokens for paused in waiting if paused.tier == Tier.DEVICE)
        return int(tokens * self.retention.costs.bytes_per_token)

    # A turn begins.

    def began(self, key: str, at: float) -> None:
        self.retention.resume(key, at)

    def here(self, generation: Generation, have: int) -> Fetched | None:
        copy = self.host.get(generation.key)
        if copy is None or min(common_prefix(copy.ids, generation.ids), copy.tokens) <= have:
            return None
        return Fetched(copy, "host", None)

    def read(self, generation: Generation, have: int) -> Read | None:
        name = generation.stored
        if self._persister is None or not name:
            return None
        stored = self._persister.stored_positions(name)
        # What a store has is not read for the sake of a few tokens: these are computed sooner.
        if have and stored - have < SHARE_FROM:
            return None
        return lambda: self._fetch(name)

    def _fetch(self, name: str) -> Fetched:
        """On a reader's thread."""
        assert self._persister is not None
        found = self._persister.read(name)
        if isinstance(found, Restore):
            return Fetched(None, "none", found.reason)
        report = found.report
        self._post(lambda: self._measured.disk(report.bytes, report.seconds))
        if not report.tokens:
            return Fetched(None, "none", report.reason)
        return Fetched(found, cast("JobTier", report.tier), report.reason)

    def placed(self, key: str, fetched: Fetched, seconds: float) -> None:
        if fetched.tier == "host" and fetched.state is not None:
            self.counts["host.hits"] += 1
            size = fetched.state.tokens * self.retention.costs.bytes_per_token
            self._measured.host(int(size), seconds)
        self.host.drop(key)

    def observe(self, step: StepFigures) -> None:
        if step.batch == 1 and step.rows[0].prefilled >= _WORTH_MEASURING:
            self._measured.prefill(step.rows[0].prefilled, step.rows[0].context, step.seconds.wall)

    # A turn ends.

    def paused(self, key: str, tool: str) -> None:
        held = self._states.held(key)
        self.host.drop(key)
        if held:
            self._price()
            self._carry_out(self.retention.pause(key, held, tool, time.monotonic()))

    def dropped(self, key: str) -> None:
        self.retention.close(key)
        self.host.drop(key)

    # Between turns.

    def next_due(self) -> float:
        return self.retention.next_due()

    def tick(self) -> None:
        self._price()
        self._carry_out(self.retention.tick(time.monotonic()))

    def reclaim(self) -> bool:
        self._price()
        now = time.monotonic()
        moves = self.retention.reclaim(1.0, now)
        self._carry_out([*moves, *self.retention.tick(now)])
        return bool(moves)

    def _price(self) -> None:
        share = (self._states.used_share - IDLE_BELOW) / (FULL_FROM - IDLE_BELOW)
        self.retention.costs = replace(self._measured.costs, device_price=min(max(share, 0.0), 1.0))

    def _carry_out(self, moves: Sequence[Move]) -> None:
        for move in moves:
            if move.target == Tier.DEVICE:
                self._prefetch(move)
                continue
            if move.source == Tier.DEVICE:
                state = self._states.get(move.session)
                if state is None or not state.boundary:
                    continue
                if move.target == Tier.HOST:
                    self.host.put(move.session, state)
                    self.counts["spills"] += 1
                    self.counts["spilled_bytes"] += state.boundary * int(self.retention.costs.bytes_per_token)
                self._states.unload(move.session)
            elif move.source == Tier.HOST:
                self.host.drop(move.session)

    def _prefetch(self, move: Move) -> None:
        copy = self.host.get(move.session)
        if copy is not None:
            self._bring(move, Fetched(copy, "host", None))
            return
        name = move.session.rpartition("/")[2]

        def read() -> None:
            fetched = self._fetch(name)
            self._post(lambda: self._bring(move, fetched))

        self._prefetcher.submit(read)

    def _bring(self, move: Move, fetched: Fetched) -> None:
        """Put a paused session back on the device before it is asked for; without room it stays where it was."""
        paused = self.retention.paused.get(move.session)
        if paused is None or paused.tier != Tier.DEVICE or self._states.held(move.session):
            return
        try:
            if fetched.state is None:
                raise KVExhausted(fetched.reason or "nothing to bring")
            self._states.place(move.session, fetched.state)
        except KVExhausted:
            self.retention.not_brought(move.session, move.source, time.monotonic())
            return
        self.host.drop(move.session)
