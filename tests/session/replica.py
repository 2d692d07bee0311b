"""One replica without HTTP: engine, tiers and stores on a tiny model, driven as the server drives them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dlite_agent.config import SchedulerSettings
from dlite_agent.decode.engine import Engine
from dlite_agent.decode.jobs import Finished
from dlite_agent.decode.load import Runtime
from dlite_agent.decode.rounds import Decoder
from dlite_agent.session.history import History, Turn
from dlite_agent.session.persist import Committed, Persister
from dlite_agent.session.record import Fingerprint, kv_layout
from dlite_agent.session.restore import Loaded
from dlite_agent.session.retention import Costs, Move, Retention, Tier
from dlite_agent.session.snapshot import Facts
from dlite_agent.session.store.base import SessionStore
from dlite_agent.session.tiers import Tiers
from tests.decode.test_engine import Client, Letters

LEASE_S = 1e-3
"""So short that a takeover needs no waiting."""


def history(ends: Sequence[int]) -> History:
    turns = [Turn(("user", "assistant"), (f"u{end}", f"a{end}"), max(end - 1, 0), end) for end in ends]
    return History("tools", tuple(turns))


@dataclass
class Replica:
    """A process in small. `close` is a crash: no lease is handed over and nothing is written."""

    decoder: Decoder
    local: SessionStore | None
    shared: SessionStore | None = None
    owner: str = "one"
    device_cap: float = 1e12
    host_cap: float = 1e12
    settings: dict[str, Any] = field(default_factory=dict)
    costs: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        pool, target, spec = self.decoder.pool, self.decoder.target, self.decoder.target.spec
        layout = kv_layout(spec.num_layers, spec.num_kv_heads, spec.head_dim)
        fingerprint = Fingerprint(target.fingerprint, "drafter", "letters", "none", "fp32", layout)
        self.persister = None
        if self.local is not None:
            self.persister = Persister(
                self.local,
                fingerprint,
                bytes_per_position=pool.bytes_per_position,
                owner=self.owner,
                shared=self.shared,
                lease_ttl_s=LEASE_S,
            )
        costs = Costs(pool.bytes_per_position, 1e-3, **self.costs)
        self.tiers = Tiers(Retention(costs, self.device_cap, self.host_cap), self.persister)
        self.engine = Engine(SchedulerSettings(**self.settings), lambda: Runtime(self.decoder, Letters(), Path()))
        self.engine.start()
        self.engine.attach(self.tiers)
        self.client = Client(self.engine)

    def hold(self, name: str) -> None:
        if self.persister is not None:
            self.persister.hold(name)

    def open(self, name: str) -> Loaded:
        """What a stored session is, as a process learns it that does not know it."""
        assert self.persister is not None
        self.persister.hold(name)
        found = self.persister.open(name)
        assert isinstance(found, Loaded), found
        return found

    def turn(
        self,
        name: str,
        ids: list[int],
        ends: Sequence[int] = (),
        *,
        stored: str = "",
        tool: str = "user",
        **options: Any,
    ) -> Finished:
        """One turn on a prompt, durable when it returns; `ends` are those of the turns before it."""
        self.hold(name)
        done = self.client.run(ids, f"/{name}", stored=stored or name, **options)
        if self.persister is not None:
            self.commit(name, [*ids, *done.generated], ends, done)
        self.engine.pause(f"/{name}", tool)
        return done

    def commit(self, name: str, ids: list[int], ends: Sequence[int], done: Finished) -> Committed:
        assert self.persister is not None
        facts = Facts(history([*ends, len(ids)]), odds=done.odds)
        draft = self.persister.prepare(name, ids, done.boundary, done.features, facts)
        rows = None if draft.first is None else self.engine.export(f"/{name}", draft.first).result(30)
        return self.persister.commit(draft.complete(rows))

    def on_engine(self, work: Callable[[], Any]) -> Any:
        """Run something between two steps."""
        return self.engine._call(work).result(30)

    def move(self, name: str, target: Tier) -> None:
        """Move a paused session down as the policy might, and leave it there."""

        def carry_out() -> None:
            paused = self.tiers.retention.paused.get(f"/{name}")
            if paused is not None and paused.tier < target:
                source, paused.tier, paused.due = paused.tier, target, math.inf
                self.tiers._carry_out([Move(f"/{name}", source, target, "plan")])

        self.on_engine(carry_out)

    def held(self, name: str) -> tuple[int, int]:
        """Positions on the device and in host memory."""
        self.on_engine(lambda: None)
        return self.engine.held(f"/{name}"), self.tiers.host_tokens(f"/{name}")

    def close(self) -> None:
        self.engine.close()
        self.tiers.close()
        if self.local is not None:
            self.local.close()
