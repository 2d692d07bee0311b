"""Host memory between device and disk: exported rows of paused sessions, as tensors, without a copy on disk's way."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from dlite_agent.decode.kv import SequenceKV
from dlite_agent.decode.state import DecodeState


@dataclass(frozen=True)
class HostCopy:
    """A session off the device; `version` is that of the record committed for this very state."""

    version: tuple[int, int]
    ids: tuple[int, ...]
    rows: Tensor
    features: Tensor | None
    kept: dict[int, Tensor]

    @property
    def bytes(self) -> int:
        return self.rows.nbytes + sum(row.nbytes for row in self.kept.values())

    def restore(self, kv: SequenceKV, device: torch.device) -> DecodeState:
        """The state again, on an empty sequence. Raises KVExhausted, then nothing has changed."""
        if self.rows.shape[3]:
            kv.load(self.rows.to(device))
        last = None if self.features is None else self.features.to(device)
        return DecodeState(kv, list(self.ids), last, {n: row.to(device) for n, row in self.kept.items()})


class HostTier:
    """Copies by session. What to keep here is the retention policy's choice, not this class's. One thread."""

    def __init__(self) -> None:
        self._copies: dict[str, HostCopy] = {}

    @property
    def bytes(self) -> int:
        return sum(copy.bytes for copy in self._copies.values())

    def put(self, session: str, state: DecodeState, version: tuple[int, int]) -> None:
        """Copy a session's state off the device. Its KV is left for the caller to free."""
        self._copies[session] = HostCopy(
            version,
            tuple(state.ids),
            state.kv.export().to("cpu"),
            None if state.features is None else state.features.to("cpu"),
            {n: row.to("cpu") for n, row in state.kept.items()},
        )

    def get(self, session: str, version: tuple[int, int]) -> HostCopy | None:
        """The copy, if it is of that version; an older one is dropped."""
        copy = self._copies.get(session)
        if copy is not None and copy.version != version:
            del self._copies[session]
            return None
        return copy

    def drop(self, session: str) -> int:
        """Forget a copy; returns its bytes."""
        copy = self._copies.pop(session, None)
        return 0 if copy is None else copy.bytes
