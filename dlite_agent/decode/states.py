"""The sessions' states on the device: which one a prompt continues, whose prefix it shares, and who gives way.

A state is a cache: a prompt is compared with its ids, and what they have in common need not run again. States that
nobody runs are dropped, the longest unused first, whenever a running turn needs their memory. All on the engine's
thread, except `held` and `len`.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence, Set
from typing import TYPE_CHECKING

from dlite_agent.decode.jobs import Generation, Tier
from dlite_agent.decode.rounds import Decoder
from dlite_agent.decode.state import DecodeState
from dlite_agent.errors import KVExhausted

if TYPE_CHECKING:
    from dlite_agent.decode.vault import Stored

SHARE_FROM = 64
"""Shortest gain in tokens for which another session's prefix is copied."""


class States:
    """One `DecodeState` a key, "owner/name".

    Args:
        share_all: prefixes may be copied from another owner's states too.
    """

    def __init__(self, decoder: Decoder, *, share_all: bool) -> None:
        self.evictions = 0
        self._decoder = decoder
        self._share_all = share_all
        self._states: OrderedDict[str, DecodeState] = OrderedDict()

    def __len__(self) -> int:
        return len(self._states)

    def __getitem__(self, key: str) -> DecodeState:
        return self._states[key]

    @property
    def used_share(self) -> float:
        """Share of the KV budget that is reserved."""
        pool = self._decoder.pool
        return pool.reserved / pool.capacity if pool.capacity else 1.0

    def get(self, key: str) -> DecodeState | None:
        return self._states.get(key)

    def held(self, key: str) -> int:
        """Tokens of a state that are in KV now."""
        state = self._states.get(key)
        return 0 if state is None else state.boundary

    def put(self, key: str, state: DecodeState) -> None:
        """Add or replace a state; memory of one that is replaced is given back."""
        old = self._states.get(key)
        if old is not None and old is not state:
            old.kv.free()
        self._states[key] = state

    def used(self, key: str) -> None:
        """The state has just been used: it gives way last."""
        self._states.move_to_end(key)

    def drop(self, key: str) -> None:
        """Forget a state and give its memory back; an unknown one is fine."""
        state = self._states.pop(key, None)
        if state is not None:
            state.kv.free()

    def clear(self) -> None:
        for key in list(self._states):
            self.drop(key)

    def unload(self, key: str) -> None:
        """Give a state's memory back; its ids stay."""
        state = self._states[key]
        state.kv.free()
        state.features = None
        state.kept.clear()

    def known(self, generation: Generation) -> int:
        """Positions of the generation's prompt that are in KV here, in its own state or in one it may copy."""
        own = self._states.get(generation.key)
        have = 0 if own is None else min(common_prefix(own.ids, generation.ids), own.boundary)
        donor, best = self._donor(generation, have + SHARE_FROM)
        return have if donor is None else best

    def place(self, key: str, stored: Stored, prompt: Sequence[int] | None = None) -> None:
        """Put a state from elsewhere on the device, cut to what a prompt has of it.

        Raises KVExhausted, then nothing has changed.
        """
        state = stored.apply(self._decoder.open().kv, self._decoder.target.device)
        if prompt is not None:
            state.truncate(common_prefix(state.ids, prompt))
        self.put(key, state)

    def restore(self, generation: Generation) -> tuple[Tier, str | None]:
        """Make the state of the generation's key hold as much of its prompt as is known on the device.

        Returns:
            Where it came from, and why not more.
        """
        ids, key = generation.ids, generation.key
        own, reason = self._states.get(key), None
        have = 0 if own is None else common_prefix(own.ids, ids)
        donor, best = self._donor(generation, (0 if own is None else min(have, own.boundary)) + SHARE_FROM)
        if donor is not None:
            try:
                copy = donor.fork()
            except KVExhausted:
                reason = "no memory to copy a shared prefix"
            else:
                copy.truncate(best)
                self.put(key, copy)
                return "shared", None
        if own is None:
            self._states[key] = self._decoder.open()
            return "none", reason
        if have < len(own.ids):
            own.truncate(have)
        if own.boundary + 1 < have:
            reason = "evicted"
        return "device", reason

    def _donor(self, generation: Generation, best: int) -> tuple[DecodeState | None, int]:
        """Another state with at least `best` of the prompt in KV, and how much it has."""
        donor, ids = None, generation.ids
        for name, state in self._states.items():
            if name != generation.key and self._may_share(name, generation) and state.boundary >= best:
                found = min(common_prefix(state.ids, ids), state.boundary)
                # A copy moves the donor's whole KV, so it must be worth it.
                if found >= best and found * 4 >= state.boundary:
                    donor, best = state, found
        return donor, best

    def _may_share(self, name: str, generation: Generation) -> bool:
        return self._share_all or name.startswith(f"{generation.owner}/")

    def evict(self, busy: Set[str]) -> bool:
        """Drop the KV of the state that was used longest ago and is not busy; False when there is none."""
        for key, state in self._states.items():
            if key not in busy and state.kv.reserved:
                self.unload(key)
                self.evictions += 1
                return True
        return False


def common_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    """Length of the common prefix, by halving: slices compare at C speed, if both are of one type."""
    if type(a) is not type(b):
        a, b = list(a), list(b)
    low, high = 0, min(len(a), len(b))
    while low < high:
        middle = (low + high + 1) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low
