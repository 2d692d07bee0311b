"""Host memory between device and disk: exported rows of paused sessions, as tensors, without a copy on disk's way."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from dlite_agent.decode.kv import SequenceKV
from dlite_agent.decode.planner import Odds
from dlite_agent.decode.state import DecodeState


@dataclass(frozen=True)
class HostCopy:
    """A session off the device. Its KV is worth what its ids are: compare them, whatever has happened since."""

    ids: list[int]
    rows: Tensor
    features: Tensor | None
    kept: dict[int, Tensor]
    odds: Odds | None

    @property
    def tokens(self) -> int:
        """Positions of KV."""
        return self.rows.shape[3]

    @property
    def bytes(self) -> int:
        return self.rows.nbytes + sum(row.nbytes for row in self.kept.values())

    def apply(self, kv: SequenceKV, device: torch.device) -> DecodeState:
        """The state again, on an empty sequence. Raises KVExhausted, then nothing has changed."""
        if self.rows.shape[3]:
            kv.load(self.rows.to(device))
        last = None if self.features is None else self.features.to(device)
        kept = {n: row.to(device) for n, row in self.kept.items()}
        return DecodeState(kv, list(self.ids), last, kept, odds=self.odds)


class HostTier:
    """Copies by session. What to keep here is the retention policy's choice, not this class's. One thread.

    Attributes:
        bytes: held by all copies.
    """

    def __init__(self) -> None:
        self._copies: dict[str, HostCopy] = {}
        self.bytes = 0

    def put(self, session: str, state: DecodeState) -> None:
        """Copy a session's state off the device. Its KV is left for the caller to free."""
        self.drop(session)
        copy = HostCopy(
            list(state.ids),
            state.kv.export().to("cpu"),
            None if state.features is None else state.features.to("cpu"),
            {n: row.to("cpu") for n, row in state.kept.items()},
            state.odds,
        )
        self._copies[session] = copy
        self.bytes += copy.bytes

    def get(self, session: str) -> HostCopy | None:
        return self._copies.get(session)

    def drop(self, session: str) -> None:
        """Forget a copy; an unknown one is fine."""
        copy = self._copies.pop(session, None)
        if copy is not None:
            self.bytes -= copy.bytes
