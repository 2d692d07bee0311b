"""What to do with a paused session's KV: hold it on the device, move it to the host, leave it to the disk, or drop it.

One currency decides, as in InferCept (arXiv 2402.01869): GB·s of device memory. Holding costs bytes times time;
computing again costs the whole device for as long as the prefill takes; a transfer costs a share of it, more when a
session stands waiting for it. How long a pause lasts is known only as a distribution, from the tool's own history, so
a plan is the cheapest sequence of tiers over that distribution (a finite-horizon dynamic program over its quantiles),
made anew whenever something happens. Under pressure goes first whatever loses least a byte. Nothing here is a lock:
every hold ends by plan, by time to live, by cap, or on demand.

All functions take the time as an argument; the engine drives them with its clock, the simulator with that of a trace.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter, deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Literal

import numpy as np
from numpy.typing import NDArray

GB = 1e9
_INSTANT = 1e-3
"""Seconds that are not worth waiting for."""
_AGAIN = 1.0
"""Seconds after which a session that was pushed out is planned anew."""
FOREVER = 1e5
"""Seconds that stand for a session that never returned."""

Cause = Literal["plan", "prefetch", "ttl", "cap", "pressure"]


class Tier(IntEnum):
    """Where a paused session's KV is. Ids and boundary features stay in every tier."""

    DEVICE = 0
    HOST = 1
    DISK = 2
    DROPPED = 3


@dataclass(frozen=True)
class Costs:
    """Prices in GB·s of device memory, from measured figures.

    Attributes:
        bytes_per_token: of KV.
        prefill_s, prefill_s2: prefilling n tokens takes prefill_s * n + prefill_s2 * n² seconds.
        host_bytes_s, disk_bytes_s: measured rates to the device; 0: there is no such tier.
        device_gb: memory of the device: what a second of all of it is worth.
        copy_share: share of the device that a transfer takes from others while it runs.
        wait_share: added to it while the returning session stands waiting.
        device_price: of holding a GB on the device for a second: 1 where others want it, 0 where it would lie idle.
        host_price, disk_price: GB·s of these for one of the device.
    """

    bytes_per_token: float
    prefill_s: float
    prefill_s2: float = 0.0
    host_bytes_s: float = 25e9
    disk_bytes_s: float = 3e9
    device_gb: float = 80.0
    copy_share: float = 0.1
    wait_share: float = 0.1
    device_price: float = 1.0
    host_price: float = 0.05
    disk_price: float = 0.0005

    def gigabytes(self, tokens: int) -> float:
        return tokens * self.bytes_per_token / GB

    def prefill(self, tokens: int) -> float:
        """Seconds."""
        return self.prefill_s * tokens + self.prefill_s2 * tokens * tokens

    def holding(self, tokens: int) -> NDArray[np.float64]:
        """Cost a second by tier."""
        return self.gigabytes(tokens) * np.array([self.device_price, self.host_price, self.disk_price, 0.0])

    def transfer(self, tokens: int, tier: Tier) -> float:
        """Seconds from a tier to the device."""
        rate = {Tier.HOST: self.host_bytes_s, Tier.DISK: self.disk_bytes_s}.get(tier, math.inf)
        return tokens * self.bytes_per_token / rate if rate else math.inf

    def restoring(self, tokens: int, *, waiting: bool = True) -> NDArray[np.float64]:
        """Cost of having tokens on the device again, by tier; with `waiting` a session waits for it."""
        share = self.copy_share + (self.wait_share if waiting else 0.0)
        whole = 1.0 + (self.wait_share if waiting else 0.0)
        return self.device_gb * np.array(
            [
                0.0,
                share * self.transfer(tokens, Tier.HOST),
                share * self.transfer(tokens, Tier.DISK),
                whole * self.prefill(tokens),
            ]
        )

    def moving(self, tokens: int) -> NDArray[np.float64]:
        """Cost [from, to] of a change of tier during a pause. Every turn is on disk already, so downward only the host
        needs a copy; upward there is prefetching to the device."""
        cost = np.full((4, 4), math.inf)
        np.fill_diagonal(cost, 0.0)
        out = self.device_gb * self.copy_share * self.transfer(tokens, Tier.HOST)
        cost[Tier.DEVICE, Tier.HOST] = out
        no_disk = math.inf if not self.disk_bytes_s else 0.0
        cost[Tier.DEVICE, Tier.DISK] = cost[Tier.HOST, Tier.DISK] = no_disk
        cost[: Tier.DROPPED, Tier.DROPPED] = 0.0
        cost[Tier.HOST : Tier.DROPPED, Tier.DEVICE] = self.restoring(tokens, waiting=False)[Tier.HOST : Tier.DROPPED]
        return cost


class Waits:
    """How long tools take: the last waits of each name, and a prior for names not seen yet.

    Args:
        prior: seconds at equally spaced quantiles; forgotten as a tool's own waits come in.
        window: waits remembered a name.
    """

    POINTS = 16
    PRIOR = (0.05, 0.2, 1.0, 4.0, 6.0, 10.0, 30.0, 300.0)

    def __init__(self, prior: Iterable[float] = PRIOR, *, window: int = 256) -> None:
        self._prior = sorted(prior)
        self._window = window
        self._seen: dict[str, deque[float]] = {}

    def observe(self, tool: str, wait_s: float) -> None:
        """A wait has ended; infinite for a session that was given up."""
        self._seen.setdefault(tool, deque(maxlen=self._window)).append(min(wait_s, FOREVER))

    def quantile(self, tool: str, q: float, elapsed_s: float = 0.0) -> float:
        """Expected rest of a wait that has lasted elapsed_s, at a quantile."""
        return float(np.quantile(self.rest(tool, elapsed_s), q))

    def rest(self, tool: str, elapsed_s: float = 0.0) -> NDArray[np.float64]:
        """Equally likely rests of a wait that has lasted elapsed_s, ascending, at most POINTS of them.

        Beyond all that was seen the rest is taken to be of the order of what has passed (a Pareto tail).
        """
        seen = self._seen.get(tool, ())
        fades = self._prior if len(seen) < 4 * len(self._prior) else ()
        waits = np.sort(np.array([*seen, *fades]))
        rest = waits[waits > elapsed_s] - elapsed_s
        if len(rest) < 3:
            tail = max(elapsed_s, 1.0) * np.array([0.1, 0.4, 1.0, 2.5, 10.0])
            rest = np.sort(np.concatenate((rest, tail)))
        if len(rest) > self.POINTS:
            rest = np.quantile(rest, (np.arange(self.POINTS) + 0.5) / self.POINTS)
        return rest


@dataclass(frozen=True)
class Plan:
    """Expected cost of a pause from each tier it may be in now, and from one of them the moves in time order.

    Attributes:
        cost: by present tier, the moves that follow included.
        stay: likewise, without a move at once.
        moves: (seconds from now, tier).
    """

    cost: NDArray[np.float64]
    stay: NDArray[np.float64]
    moves: tuple[tuple[float, Tier], ...]


def plan(costs: Costs, tokens: int, tier: Tier, rest: NDArray[np.float64]) -> Plan:
    """The cheapest sequence of tiers for a pause whose rest is one of `rest`, equally likely.

    Choices are made at the possible returns and a transfer's time before each.
    """
    lead = costs.transfer(tokens, Tier.HOST) if costs.host_bytes_s else 0.0
    early = rest - 1.5 * lead
    grid = np.unique(np.concatenate(([0.0], rest, early[early > 0])))
    alive = len(rest) - np.searchsorted(rest, grid, side="right")
    alive[0] = len(rest)
    holding, restoring, moving = costs.holding(tokens), costs.restoring(tokens), costs.moving(tokens)
    value = stay = np.zeros(4)
    choices = np.zeros((len(grid) - 1, 4), dtype=np.int64)
    for step in range(len(grid) - 2, -1, -1):
        returns = (alive[step] - alive[step + 1]) / alive[step]
        span = grid[step + 1] - grid[step]
        stay = holding * span + returns * np.nan_to_num(restoring, posinf=1e30) + (1 - returns) * value
        total = moving + stay[np.newaxis, :]
        choices[step] = total.argmin(1)
        value = total.min(1)
    moves, at = [], int(tier)
    for step in range(len(grid) - 1):
        if choices[step, at] != at:
            at = int(choices[step, at])
            moves.append((float(grid[step]), Tier(at)))
    return Plan(value, stay, tuple(moves))


@dataclass(frozen=True)
class Move:
    """An instruction to whoever holds the memory."""

    session: str
    source: Tier
    target: Tier
    cause: Cause


@dataclass
class Paused:
    """A session between two turns."""

    session: str
    tokens: int
    tool: str
    since: float
    tier: Tier = Tier.DEVICE
    due: float = math.inf
    prefetched: bool = False
    priced: tuple[float, Plan] | None = None


@dataclass
class Retention:
    """The policy over all paused sessions.

    Args:
        device_cap, host_cap: bytes that paused sessions together may hold there.
        ttl: seconds after the pause began at which a tier is left at the latest; every turn starts it anew.

    Attributes:
        counts: moves by "tier.cause", prefetches by "prefetch.used" and "prefetch.wasted".
    """

    costs: Costs
    device_cap: float
    host_cap: float
    waits: Waits = field(default_factory=Waits)
    ttl: dict[Tier, float] = field(default_factory=lambda: {Tier.DEVICE: 600.0, Tier.HOST: 3600.0, Tier.DISK: 86_400.0})
    counts: Counter[str] = field(default_factory=Counter)
    paused: dict[str, Paused] = field(default_factory=dict)
    _tokens: Counter[Tier] = field(default_factory=Counter, init=False)
    _due: list[tuple[float, str]] = field(default_factory=list, init=False)
    """A heap of times; one that is no longer its session's is stale."""

    def pause(self, session: str, tokens: int, tool: str, now: float) -> list[Move]:
        """A turn has ended with a call of a tool (or "user"); its KV is on the device."""
        self._forget(session)
        self.paused[session] = Paused(session, tokens, tool, now)
        self._tokens[Tier.DEVICE] += tokens
        return self._settle([session], now)

    def resume(self, session: str, now: float) -> Paused | None:
        """A session is back, or its turn begins for another reason; says in which tier it is. None if not paused."""
        found = self._forget(session)
        if found is not None:
            self.waits.observe(found.tool, max(now - found.since, 0.0))
            if found.prefetched:
                self.counts["prefetch.used"] += 1
        return found

    def close(self, session: str, *, given_up: bool = False) -> None:
        """A session has ended; given_up counts it as a wait without end."""
        found = self._forget(session)
        if found is not None and given_up:
            self.waits.observe(found.tool, math.inf)

    def next_due(self) -> float:
        """When `tick` has something to do; infinite if never."""
        while self._due:
            at, session = self._due[0]
            paused = self.paused.get(session)
            if paused is not None and paused.due == at:
                return at
            heapq.heappop(self._due)
        return math.inf

    def tick(self, now: float) -> list[Move]:
        """Carry out what is due."""
        sessions = []
        while self.next_due() <= now:
            sessions.append(heapq.heappop(self._due)[1])
        return self._settle(list(dict.fromkeys(sessions)), now)

    def not_brought(self, session: str, source: Tier, now: float) -> None:
        """A session that was to come back to the device could not, and is where it was."""
        paused = self.paused.get(session)
        if paused is None:
            return
        self._place(paused, source)
        paused.prefetched = False
        self._wake(paused, max(paused.since + self._limit(source), now + _INSTANT))

    def reclaim(self, need: float, now: float) -> list[Move]:
        """Free at least `need` bytes of the device, or all that paused sessions hold there."""
        return self._shed(Tier.DEVICE, max(self.held(Tier.DEVICE) - need, 0.0), now, "pressure")

    def held(self, tier: Tier) -> float:
        """Bytes of paused sessions in a tier."""
        return self._tokens[tier] * self.costs.bytes_per_token

    def _forget(self, session: str) -> Paused | None:
        paused = self.paused.pop(session, None)
        if paused is not None:
            self._tokens[paused.tier] -= paused.tokens
        return paused

    def _place(self, paused: Paused, tier: Tier) -> None:
        self._tokens[paused.tier] -= paused.tokens
        self._tokens[tier] += paused.tokens
        paused.tier = tier

    def _wake(self, paused: Paused, at: float) -> None:
        """Plan the session anew then."""
        paused.due = at
        if at < math.inf:
            heapq.heappush(self._due, (at, paused.session))

    def _settle(self, sessions: list[str], now: float) -> list[Move]:
        moves: list[Move] = []
        for session in sessions:
            moves += self._follow(self.paused[session], now)
        moves += self._shed(Tier.DEVICE, self.device_cap, now, "cap")
        moves += self._shed(Tier.HOST, self.host_cap, now, "cap")
        return moves

    def _follow(self, paused: Paused, now: float) -> list[Move]:
        """Plan a session and make the moves that are due at once."""
        elapsed = now - paused.since
        limit = self._limit(paused.tier)
        if elapsed > limit - _INSTANT:
            there = self.costs.moving(paused.tokens)[paused.tier]
            lower = next(
                (t for t in Tier if t > paused.tier and there[t] < math.inf and elapsed < self._limit(t) - _INSTANT),
                Tier.DROPPED,
            )
            move = self._move(paused, lower, "ttl")
            return [move, *self._follow(paused, now)]
        made = plan(self.costs, paused.tokens, paused.tier, self.waits.rest(paused.tool, elapsed))
        paused.priced = now, made
        after, tier = made.moves[0] if made.moves else (math.inf, paused.tier)
        if after > _INSTANT:
            self._wake(paused, now + min(after, limit - elapsed))
            return []
        if tier < paused.tier and not (elapsed < self._limit(tier) - _INSTANT and self._fits(paused, tier)):
            self._wake(paused, now + limit - elapsed)
            return []
        following = min([self._limit(tier) - elapsed, *(at for at, _ in made.moves[1:2])])
        self._wake(paused, now + max(following, _INSTANT))
        return [self._move(paused, tier, "prefetch" if tier < paused.tier else "plan")]

    def _price(self, paused: Paused, now: float) -> Plan:
        """A plan from not long ago: estimates age slowly when a pause has lasted long."""
        known = paused.priced
        if known is None or now - known[0] > 1.0 + 0.1 * (now - paused.since):
            rest = self.waits.rest(paused.tool, now - paused.since)
            known = paused.priced = now, plan(self.costs, paused.tokens, paused.tier, rest)
        return known[1]

    def _limit(self, tier: Tier) -> float:
        return self.ttl.get(tier, math.inf)

    def _fits(self, paused: Paused, tier: Tier) -> bool:
        return self.held(tier) + paused.tokens * self.costs.bytes_per_token <= self.device_cap

    def _move(self, paused: Paused, tier: Tier, cause: Cause) -> Move:
        move = Move(paused.session, paused.tier, tier, cause)
        if paused.prefetched:
            self.counts["prefetch.wasted"] += 1
        paused.prefetched = cause == "prefetch"
        self._place(paused, tier)
        self.counts[f"{move.source.name.lower()}.{cause}"] += 1
        return move

    def _shed(self, tier: Tier, cap: float, now: float, cause: Cause) -> list[Move]:
        """Move sessions down until a tier is within its cap, those first that lose least a byte."""
        excess = self.held(tier) - cap
        if excess <= 0:
            return []
        ranked = []
        for paused in self.paused.values():
            if paused.tier == tier and paused.tokens:
                made = self._price(paused, now)
                down = self.costs.moving(paused.tokens)[tier] + made.stay
                lower = Tier(tier + 1 + int(down[tier + 1 :].argmin()))
                loss = float(down[lower] - made.cost[tier]) / paused.tokens
                ranked.append((loss, paused.since, paused, lower))
        moves = []
        for _, _, paused, lower in sorted(ranked, key=lambda entry: entry[:2]):
            if excess <= 0:
                break
            excess -= paused.tokens * self.costs.bytes_per_token
            moves.append(self._move(paused, lower, cause))
            self._wake(paused, now + _AGAIN)
        return moves
