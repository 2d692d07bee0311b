"""`bench retention-live`: a scaled-down workload on a real model, to check that the simulator's ranking is real.

Policies drive a real device: KV is copied to host memory, committed to disk, read back or computed again, and every
such second is measured. Only the waits pass on the workload's clock instead of a wall. KV rows of a turn that no return
shares are written blank, since no policy's cost depends on them.
"""

from __future__ import annotations

import random
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from dlite_agent.bench.retention import (
    POLICIES,
    Outcome,
    Pause,
    clairvoyant,
    peak_bytes,
    simulate,
)
from dlite_agent.decode.generate import generate
from dlite_agent.decode.load import Runtime
from dlite_agent.decode.sampling import SamplingParams
from dlite_agent.decode.state import DecodeState
from dlite_agent.session.history import History, Turn
from dlite_agent.session.opening import fingerprint_of
from dlite_agent.session.persist import Persister
from dlite_agent.session.restore import Loaded
from dlite_agent.session.retention import Costs, Move, Tier
from dlite_agent.session.snapshot import Facts
from dlite_agent.session.store.disk import DiskStore
from dlite_agent.session.store.host import HostTier

_SAMPLES = (512, 1536)
"""Tokens at which prefill and transfers are timed for the costs that policies and simulator are given."""


class LiveDevice:
    """Sessions of a real runtime, in every tier, one at a time on the device's thread."""

    def __init__(self, runtime: Runtime, folder: Path) -> None:
        self._decoder = runtime.decoder
        self._host = HostTier()
        self._keeper = Persister(
            DiskStore(folder),
            fingerprint_of(runtime),
            bytes_per_position=self._decoder.pool.bytes_per_position,
            owner="bench",
        )
        self._ids: dict[str, list[int]] = {}
        self._states: dict[str, DecodeState] = {}

    def pause(self, session: str, tokens: int) -> None:
        """Bring the session to `tokens` positions, and commit it as every turn's end is."""
        state = self._states.setdefault(session, self._decoder.open())
        ids = self._ids_of(session, tokens + 1)
        state.kv.truncate(min(state.kv.length, tokens))
        state.kv.load(self._decoder.pool.buffer(tokens - state.kv.length).zero_())
        width = self._decoder.target.spec.hidden_size
        state.ids, state.kept = ids, {}
        state.features = torch.zeros(len(self._decoder.taps), width, dtype=self._decoder.target.dtype)
        state.keep()
        self._keeper.hold(session)
        turn = Turn(("user", "assistant"), ("", ""), tokens, tokens + 1)
        self._keeper.commit(self._keeper.snapshot(session, state, Facts(History("", (turn,)))))

    def move(self, move: Move, tokens: int) -> float:
        session = move.session
        if move.target == Tier.DEVICE:
            return self.restore(session, tokens, move.source)
        if move.source != Tier.DEVICE:
            self._host.drop(session)
            return 0.0
        state, seconds = self._states.pop(session), 0.0
        if move.target == Tier.HOST:
            start = time.perf_counter()
            self._host.put(session, state)
            seconds = time.perf_counter() - start
        state.kv.free()
        return seconds

    def restore(self, session: str, useful: int, tier: Tier) -> float:
        start = time.perf_counter()
        if tier == Tier.DEVICE:
            state = self._states[session]
        elif tier == Tier.HOST:
            copy = self._host.get(session)
            assert copy is not None
            state = copy.apply(self._decoder.open().kv, self._decoder.target.device)
            self._host.drop(session)
        elif tier == Tier.DISK:
            found = self._keeper.read(session)
            assert isinstance(found, Loaded)
            state = found.apply(self._decoder.open().kv, self._decoder.target.device)
        else:
            state = self._computed(self._ids_of(session, useful))
        seconds = 0.0 if tier == Tier.DEVICE else time.perf_counter() - start
        state.kv.truncate(min(useful, state.kv.length))
        self._states[session] = state
        return seconds

    def _computed(self, ids: Sequence[int]) -> DecodeState:
        state = self._decoder.open()
        if ids:
            generate(self._decoder, state, ids, SamplingParams(), max_new_tokens=1, mode="ar")
        return state

    def _ids_of(self, session: str, count: int) -> list[int]:
        """The session's ids; random, but the same however often they are asked for."""
        vocab = self._decoder.target.spec.vocab_size
        known = self._ids.setdefault(session, [])
        if len(known) < count:
            dice = random.Random(session)
            known[:] = [dice.randrange(vocab) for _ in range(2 * count)]
        return known[:count]

    def close(self) -> None:
        for state in self._states.values():
            state.kv.free()
        self._keeper.close()


def bench_live(
    runtime: Runtime,
    pauses: Sequence[Pause],
    *,
    divide: int = 40,
    conversations: int = 4,
    budget: float = 0.1,
    host_factor: float = 4.0,
    on_policy: Callable[[str, Outcome, Outcome], None] | None = None,
) -> dict[str, Any]:
    """Every policy on the first conversations of a workload, lengths divided by `divide`: simulated, then live.

    Costs are measured first, on this runtime; both the policies and the simulator are given the same.

    Returns:
        The costs, and by policy the simulated and the live outcome; `same_order`: whether both rank the policies alike.
    """
    chosen = set(list(dict.fromkeys(pause.session for pause in pauses))[:conversations])
    scaled = [
        replace(pause, tokens=max(pause.tokens // divide, 1), useful=pause.useful // divide)
        for pause in pauses
        if pause.session in chosen
    ]
    costs = measured_costs(runtime)
    device_cap = budget * peak_bytes(scaled, costs)
    rows: dict[str, dict[str, Any]] = {}
    for name, make in POLICIES.items():
        simulated = simulate(make(costs, device_cap, host_factor * device_cap), scaled, costs)
        with tempfile.TemporaryDirectory() as folder:
            device = LiveDevice(runtime, Path(folder))
            try:
                live = simulate(make(costs, device_cap, host_factor * device_cap), scaled, costs, device)
            finally:
                device.close()
        rows[name] = {"simulated": asdict(simulated), "live": asdict(live)}
        if on_policy is not None:
            on_policy(name, simulated, live)
    orders = [sorted(rows, key=lambda name: rows[name][side]["waste"]) for side in ("simulated", "live")]
    return {
        "pauses": len(scaled),
        "conversations": len(chosen),
        "longest": max(pause.tokens for pause in scaled),
        "device_bytes": device_cap,
        "costs": asdict(costs),
        "clairvoyant": clairvoyant(scaled, costs),
        "policies": rows,
        "orders": orders,
        "same_order": orders[0] == orders[1],
    }


def measured_costs(runtime: Runtime) -> Costs:
    """Prefill and transfers timed at two lengths; the device's memory is the KV budget."""
    pool = runtime.decoder.pool
    prefills: list[float] = []
    host: list[float] = []
    disk: list[float] = []
    with tempfile.TemporaryDirectory() as folder:
        device = LiveDevice(runtime, Path(folder))
        try:
            for tokens in (_SAMPLES[0], *_SAMPLES):  # the first one warms up
                size, name = tokens * pool.bytes_per_position, f"{len(prefills)}"
                prefills.append(device.restore(name, tokens, Tier.DROPPED))
                device.pause(name, tokens)
                device.move(Move(name, Tier.DEVICE, Tier.HOST, "plan"), tokens)
                host.append(size / device.restore(name, tokens, Tier.HOST))
                device.move(Move(name, Tier.DEVICE, Tier.DISK, "plan"), tokens)
                disk.append(size / device.restore(name, tokens, Tier.DISK))
        finally:
            device.close()
    (few, many), (short, long) = _SAMPLES, prefills[1:]
    square = max((long / many - short / few) / (many - few), 0.0)
    return Costs(
        bytes_per_token=pool.bytes_per_position,
        prefill_s=max(short / few - square * few, 1e-9),
        prefill_s2=square,
        host_bytes_s=host[-1],
        disk_bytes_s=disk[-1],
        device_gb=pool.capacity * pool.bytes_per_position / 1e9,
    )
