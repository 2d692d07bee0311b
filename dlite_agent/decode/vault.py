"""What the engine asks of whoever keeps states while they are not on the device; the session floor provides it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch

from dlite_agent.decode.jobs import Generation, Tier
from dlite_agent.decode.kv import SequenceKV
from dlite_agent.decode.rounds import StepFigures
from dlite_agent.decode.state import DecodeState

if TYPE_CHECKING:
    from dlite_agent.decode.states import States


class Stored(Protocol):
    """A state that is not on the device, read and checked."""

    @property
    def ids(self) -> Sequence[int]: ...

    @property
    def tokens(self) -> int:
        """Positions of KV."""
        ...

    def apply(self, kv: SequenceKV, device: torch.device) -> DecodeState:
        """The state on an empty sequence. Raises KVExhausted, then nothing has changed."""
        ...


@dataclass(frozen=True)
class Fetched:
    """What a look-up brought: a state and its tier, or none; and why not more."""

    state: Stored | None
    tier: Tier
    reason: str | None


Read = Callable[[], Fetched]
"""Reads and checks a state; for a worker thread, since it may take long."""


class Vault(Protocol):
    """Keeps states off the device and says which go there. All methods are called on the engine's thread."""

    def attach(self, states: States, post: Callable[[Callable[[], None]], None]) -> None:
        """Called once. `post` hands work to the engine's thread from any other."""
        ...

    def here(self, generation: Generation, have: int) -> Fetched | None:
        """A state in host memory that brings the generation more KV than the `have` positions the device holds."""
        ...

    def read(self, generation: Generation, have: int) -> Read | None:
        """How to read a stored state that brings more."""
        ...

    def began(self, key: str, at: float) -> None:
        """A turn of the session arrived at a time (monotonic): its pause is over."""
        ...

    def placed(self, key: str, fetched: Fetched, seconds: float) -> None:
        """What was fetched is on the device now, copied in so many seconds."""
        ...

    def paused(self, key: str, tool: str) -> None:
        """The session waits for a tool, or for its user."""
        ...

    def dropped(self, key: str) -> None:
        """The session is gone."""
        ...

    def reclaim(self) -> bool:
        """Free some KV of a paused session; False when none has any."""
        ...

    def next_due(self) -> float:
        """When `tick` has something to do (monotonic); infinite if never."""
        ...

    def tick(self) -> None: ...

    def observe(self, step: StepFigures) -> None:
        """A step was made: what it says about the cost of a prefill."""
        ...
