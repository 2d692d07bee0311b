"""`dlite-agent bench retention`: the engine's own retention policy on a recorded workload, against simpler ones.

Calls and waits happen when the trace says, whatever the policy does (open loop), so all policies see the same pauses.
Waste is in GB·s of device memory: what paused sessions hold, a second of recomputation at the whole device's memory,
a second of transfer at `copy_share` of it, and `wait_share` on top while the returning session waits (see `Costs`).
The clairvoyant knows each wait and has no caps: nothing can waste less.
"""

from __future__ import annotations

import csv
import heapq
import json
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from dlite_agent.errors import InvalidRequest
from dlite_agent.session.retention import Costs, Move, Paused, Retention, Tier

_NUMBERS = ("sent_at_ms", "round_idx", "prefix_len", "input_len", "output_len", "wait_after_ms")
TTL_S = {Tier.DEVICE: 60.0, Tier.HOST: 600.0, Tier.DISK: 3600.0}
"""Of the fixed-TTL baseline: the values that shared practice starts from."""


@dataclass(frozen=True)
class Pause:
    """A session's wait from start to end (infinite: it never returns), in seconds of the simulation.

    `tokens` are in the KV at its start, the first `useful` of them are what the next call shares.
    """

    session: str
    start: float
    end: float
    tokens: int
    useful: int
    kind: str


@dataclass(frozen=True)
class Profile:
    """A model on a device, and by what the workload's lengths are divided for it."""

    name: str
    costs: Costs
    divide: int = 1


PROFILES = (
    Profile("8B bf16, 80 GB GPU", Costs(147_456, 4e-5, 7.4e-10, 25e9, 3e9, 80.0)),
    Profile("70B bf16, 8x80 GB", Costs(327_680, 4.4e-5, 4.1e-10, 50e9, 6e9, 640.0)),
    Profile("8B bf16, 24 GB GPU, lengths/4", Costs(147_456, 2.7e-4, 4.9e-9, 12e9, 2e9, 24.0), 4),
    Profile("135M fp32, CPU, lengths/20", Costs(46_080, 1.2e-3, 1.5e-7, 4e9, 1e9, 16.0), 20),
)
BUDGETS = (0.05, 0.1, 0.25, 0.5)
"""Device memory for paused sessions, as a share of what all pauses together would hold at their peak."""
TIGHT = 0.1


def load_pauses(path: Path, *, spacing_s: float = 60.0, closed: bool = True) -> list[Pause]:
    """Pauses of a workload CSV, conversations started one after another.

    Args:
        closed: conversations are closed after their last call; else they look like one more pause, which never ends.

    Raises:
        InvalidRequest: a column is missing or a value is no number; `param` names the column.
    """
    with path.open(newline="") as file:
        rows = csv.DictReader(file)
        missing = [name for name in ("session_id", *_NUMBERS, "wait_kind") if name not in (rows.fieldnames or ())]
        if missing:
            raise InvalidRequest(f"The workload lacks the columns {', '.join(missing)}.", param=missing[0])
        sessions: dict[str, list[dict[str, Any]]] = {}
        for number, row in enumerate(rows, 2):
            parsed = {name: _number(row, name, number) for name in _NUMBERS}
            sessions.setdefault(row["session_id"], []).append(parsed | {"kind": row["wait_kind"] or "user"})
    pauses = []
    for place, (name, calls) in enumerate(sessions.items()):
        calls.sort(key=lambda call: call["round_idx"])
        for index, call in enumerate(calls):
            sent = place * spacing_s + call["sent_at_ms"] / 1000
            tokens = int(call["prefix_len"] + call["input_len"] + call["output_len"])
            if index + 1 == len(calls):
                if not closed:
                    pauses.append(Pause(name, sent, math.inf, tokens, 0, call["kind"]))
                continue
            following = calls[index + 1]
            end = place * spacing_s + following["sent_at_ms"] / 1000
            start = max(end - call["wait_after_ms"] / 1000, sent)
            pauses.append(Pause(name, start, end, tokens, min(tokens, int(following["prefix_len"])), call["kind"]))
    return pauses


def _number(row: dict[str, str], column: str, line: int) -> float:
    try:
        value = float(row[column])
    except (TypeError, ValueError):
        value = -1.0
    if not 0 <= value < math.inf:
        raise InvalidRequest(f"Row {line}, column {column}: {row[column]!r} is no number from 0 on.", param=column)
    return value


class Policy(Protocol):
    """What the simulator drives: `Retention`, or a baseline."""

    def pause(self, session: str, tokens: int, tool: str, now: float) -> list[Move]: ...

    def resume(self, session: str, now: float) -> Paused | None: ...

    def tick(self, now: float) -> list[Move]: ...

    def next_due(self) -> float: ...


@dataclass
class Baseline:
    """Least recently used first, from tier to tier; variations by its fields.

    Args:
        first: tier a session goes to as soon as it pauses.
        ttl: seconds after which a tier is left for the next, if at all.
        overflow: where sessions go that do not fit on the device.
    """

    costs: Costs
    device_cap: float
    host_cap: float
    first: Tier = Tier.DEVICE
    ttl: dict[Tier, float] = field(default_factory=dict)
    overflow: Tier = Tier.HOST
    paused: dict[str, Paused] = field(default_factory=dict)

    def pause(self, session: str, tokens: int, tool: str, now: float) -> list[Move]:
        self.paused[session] = paused = Paused(session, tokens, tool, now)
        moves = [] if self.first == Tier.DEVICE else [self._move(paused, self.first)]
        moves += self._shed(Tier.DEVICE, self.device_cap, self.overflow) + self._shed(
            Tier.HOST, self.host_cap, Tier.DISK
        )
        return moves

    def resume(self, session: str, now: float) -> Paused | None:
        return self.paused.pop(session, None)

    def tick(self, now: float) -> list[Move]:
        moves = []
        for paused in self.paused.values():
            while now >= paused.since + self.ttl.get(paused.tier, math.inf):
                moves.append(self._move(paused, Tier(paused.tier + 1)))
        return moves + self._shed(Tier.HOST, self.host_cap, Tier.DISK)

    def next_due(self) -> float:
        return min((p.since + self.ttl.get(p.tier, math.inf) for p in self.paused.values()), default=math.inf)

    def _shed(self, tier: Tier, cap: float, target: Tier) -> list[Move]:
        moves = []
        here = [paused for paused in self.paused.values() if paused.tier == tier]
        held = sum(paused.tokens for paused in here) * self.costs.bytes_per_token
        for paused in sorted(here, key=lambda p: p.since):
            if held <= cap:
                break
            held -= paused.tokens * self.costs.bytes_per_token
            moves.append(self._move(paused, target))
        return moves

    def _move(self, paused: Paused, target: Tier) -> Move:
        move = Move(paused.session, paused.tier, target, "plan")
        paused.tier = target
        return move


POLICIES: dict[str, Callable[[Costs, float, float], Policy]] = {
    "planned": lambda costs, device, host: Retention(costs, device, host),
    "lru": Baseline,
    "fixed ttl": lambda costs, device, host: Baseline(costs, device, host, ttl=TTL_S),
    "keep all": lambda costs, device, host: Baseline(costs, device, host, overflow=Tier.DROPPED),
    "drop all": lambda costs, device, host: Baseline(costs, device, host, first=Tier.DROPPED),
    "spill all": lambda costs, device, host: Baseline(costs, device, host, first=Tier.HOST),
}
BASELINES = ("lru", "fixed ttl", "keep all", "drop all")
"""What the policy is measured against; "spill all" stands beside them as a stronger one."""


@dataclass
class Outcome:
    """Waste and what it is made of."""

    waste: float = 0.0
    held_gbs: float = 0.0
    recompute_s: float = 0.0
    transfer_s: float = 0.0
    waited_s: float = 0.0
    restored: dict[str, int] = field(default_factory=lambda: {tier.name.lower(): 0 for tier in Tier})


class Device(Protocol):
    """What carries moves out: a model of it, or a real one. Seconds are what transfers and recomputation take."""

    def pause(self, session: str, tokens: int) -> None:
        """A turn has ended; its KV is on the device."""

    def move(self, move: Move, tokens: int) -> float: ...

    def restore(self, session: str, useful: int, tier: Tier) -> float:
        """Have the first `useful` tokens on the device again."""


@dataclass(frozen=True)
class Modelled:
    """A device that takes what its costs say."""

    costs: Costs

    def pause(self, session: str, tokens: int) -> None:
        pass

    def move(self, move: Move, tokens: int) -> float:
        copied = move.target == Tier.DEVICE or (move.source, move.target) == (Tier.DEVICE, Tier.HOST)
        return self.costs.transfer(tokens, Tier(max(move.source, move.target))) if copied else 0.0

    def restore(self, session: str, useful: int, tier: Tier) -> float:
        if tier == Tier.DROPPED:
            return self.costs.prefill(useful)
        return 0.0 if tier == Tier.DEVICE else self.costs.transfer(useful, tier)


def simulate(policy: Policy, pauses: Iterable[Pause], costs: Costs, device: Device | None = None) -> Outcome:
    """Drive a policy through pauses until the last return, on a modelled device or a given one.

    Waits pass on the workload's clock in either case; `costs` price the seconds.
    """
    device = device or Modelled(costs)
    ordered = sorted(pauses, key=lambda pause: pause.start)
    horizon = max((pause.end for pause in ordered if pause.end < math.inf), default=0.0)
    events: list[tuple[float, int, bool]] = []
    for number, pause in enumerate(ordered):
        heapq.heappush(events, (pause.start, number, False))
        if pause.end < math.inf:
            heapq.heappush(events, (pause.end, number, True))
    where: dict[str, tuple[Tier, float, int]] = {}
    outcome = Outcome()

    def leave(session: str, now: float) -> None:
        tier, since, tokens = where.pop(session)
        outcome.held_gbs += float(costs.holding(tokens)[tier]) * (now - since)

    def apply(moves: Sequence[Move], now: float) -> None:
        for move in moves:
            tokens = where[move.session][2]
            leave(move.session, now)
            where[move.session] = move.target, now, tokens
            seconds = device.move(move, tokens)
            outcome.waste += costs.device_gb * costs.copy_share * seconds
            outcome.transfer_s += seconds

    while events:
        due = policy.next_due()
        if due < events[0][0] and due <= horizon:
            apply(policy.tick(due), due)
            continue
        now, number, returns = heapq.heappop(events)
        if now > horizon:
            break
        pause = ordered[number]
        if not returns:
            where[pause.session] = Tier.DEVICE, now, pause.tokens
            device.pause(pause.session, pause.tokens)
            apply(policy.pause(pause.session, pause.tokens, pause.kind, now), now)
            continue
        leave(pause.session, now)
        found = policy.resume(pause.session, now)
        tier = Tier.DROPPED if found is None else found.tier
        outcome.restored[tier.name.lower()] += 1
        seconds = device.restore(pause.session, pause.useful, tier)
        outcome.waited_s += seconds
        if tier == Tier.DROPPED:
            outcome.waste += costs.device_gb * (1.0 + costs.wait_share) * seconds
            outcome.recompute_s += seconds
        else:
            outcome.waste += costs.device_gb * (costs.copy_share + costs.wait_share) * seconds
            outcome.transfer_s += seconds
    for session in list(where):
        leave(session, horizon)
    outcome.waste += outcome.held_gbs
    return outcome


def clairvoyant(pauses: Iterable[Pause], costs: Costs) -> float:
    """Least waste possible: every pause in its best tier, fetched back in time, and no caps."""
    total = 0.0
    for pause in pauses:
        if pause.end == math.inf:
            continue
        wait = pause.end - pause.start
        into = costs.restoring(pause.useful, waiting=False)
        out = costs.moving(pause.useful)[Tier.DEVICE]
        total += float(np.min(costs.holding(pause.useful) * wait + into + out))
    return total


def peak_bytes(pauses: Iterable[Pause], costs: Costs) -> float:
    """What all paused sessions together hold at most, if nothing is ever moved and sessions that end are let go."""
    changes = [(p.start, p.tokens) for p in pauses if p.end < math.inf]
    changes += [(p.end, -p.tokens) for p in pauses if p.end < math.inf]
    held = np.cumsum([tokens for _, tokens in sorted(changes)])
    return float(held.max(initial=0)) * costs.bytes_per_token


@dataclass(frozen=True)
class Row:
    """One model at one budget: waste by policy, its ratio to the best baseline, and the clairvoyant's waste."""

    profile: str
    budget: float
    device_gb: float
    outcomes: dict[str, Outcome]
    best_baseline: str
    ratio: float
    clairvoyant: float

    @property
    def tight(self) -> bool:
        return self.budget <= TIGHT


def run(
    pauses: Sequence[Pause],
    *,
    profiles: Sequence[Profile] = PROFILES,
    budgets: Sequence[float] = BUDGETS,
    host_factor: float = 4.0,
) -> list[Row]:
    """Every policy on every profile and budget; the host may hold host_factor times the device's budget."""
    rows = []
    for profile in profiles:
        scaled = [
            Pause(p.session, p.start, p.end, p.tokens // profile.divide, p.useful // profile.divide, p.kind)
            for p in pauses
        ]
        peak, least = peak_bytes(scaled, profile.costs), clairvoyant(scaled, profile.costs)
        for budget in budgets:
            device = budget * peak
            outcomes = {
                name: simulate(make(profile.costs, device, host_factor * device), scaled, profile.costs)
                for name, make in POLICIES.items()
            }
            best = min(BASELINES, key=lambda name: outcomes[name].waste)
            ratio = outcomes["planned"].waste / max(outcomes[best].waste, 1e-12)
            rows.append(Row(profile.name, budget, device / 1e9, outcomes, best, ratio, least))
    return rows


def table(rows: Sequence[Row]) -> str:
    """Waste in thousands of GB·s by policy; `ratio` is planned over the best of the four baselines."""
    names = list(POLICIES)
    head = f"{'model':32} {'budget':>7} {'GB':>7} " + " ".join(f"{name:>10}" for name in names)
    lines = [f"{head} {'clairv.':>10} {'ratio':>6}  best baseline"]
    for row in rows:
        cells = " ".join(f"{row.outcomes[name].waste / 1e3:10.2f}" for name in names)
        lines.append(
            f"{row.profile:32} {row.budget:7.0%} {row.device_gb:7.1f} {cells} {row.clairvoyant / 1e3:10.2f} "
            f"{row.ratio:6.2f}  {row.best_baseline}"
        )
    return "\n".join(lines)


def main(workload: Path, *, output: Path | None = None) -> str:
    """Run all profiles and budgets on a workload, write JSON if asked to, and return the table."""
    rows = run(load_pauses(workload))
    if output is not None:
        output.write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n")
    return table(rows)
