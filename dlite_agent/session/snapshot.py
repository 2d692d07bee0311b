"""What a commit writes: the record of a turn's end, and those of its blocks that the store has not yet."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from dlite_agent.decode.planner import OddsCounts
from dlite_agent.session.history import History
from dlite_agent.session.record import (
    Acceptance,
    BlockKeys,
    BlockKind,
    BlockRef,
    Fingerprint,
    SamplerState,
    SessionRecord,
    cut_spans,
)
from dlite_agent.session.store.base import MAX_BLOCK_BYTES

KV_ROWS = 256
"""Positions a KV block holds at most."""
ID_ROWS = 4096
_OVERHEAD = 4096
"""Bytes a block's headers may take."""


@dataclass(frozen=True)
class Facts:
    """What a turn's end adds to the record beside the decoder's state; see `SessionRecord`."""

    history: History
    sampler: SamplerState | None = None
    acceptance: Acceptance = field(default_factory=Acceptance)
    odds: OddsCounts | None = None
    divergence: str | None = None
    owner: str = ""
    name: str = ""
    parent: str = ""
    created: float = 0.0


@dataclass(frozen=True)
class Snapshot:
    """A record to be committed and the tensors of its new blocks."""

    record: SessionRecord
    tensors: dict[str, dict[str, Tensor]]


@dataclass(frozen=True)
class Draft:
    """A record to be committed: `first` is the first position whose KV rows are wanted, None if none are.

    `kept` are the features by boundary; `held` the keys that the local store has.
    """

    record: SessionRecord
    ids: Sequence[int]
    kept: dict[int, Tensor]
    held: set[str]
    first: int | None

    def complete(self, rows: Tensor | None) -> Snapshot:
        """The draft with its KV rows [2, layers, kv_heads, n, head_dim] from `first` on.

        Without them, or with fewer than it covers, the record lists KV as far as it is there: the rest will be
        computed again.
        """
        tensors: dict[str, dict[str, Tensor]] = {}
        blocks: list[BlockRef] = []
        first = self.first or 0
        end = first + (0 if rows is None else rows.shape[3])
        for ref in self.record.blocks:
            if ref.kind == "ids" and ref.key not in self.held:
                ids = torch.tensor(self.ids[ref.start : ref.stop], dtype=torch.int32)
                tensors[ref.key] = {"ids": ids}
            elif ref.kind == "features" and ref.key not in self.held:
                tensors[ref.key] = {"features": self.kept[ref.stop]}
            elif ref.kind == "kv" and ref.key not in self.held:
                if rows is None or ref.stop > end:
                    continue
                tensors[ref.key] = {"kv": rows[:, :, :, ref.start - first : ref.stop - first]}
            blocks.append(ref)
        return Snapshot(replace(self.record, blocks=tuple(blocks)), tensors)


class Cutter:
    """Cuts sessions into blocks.

    Args:
        kv_limit: bytes of KV that the store takes of one session; None: all.
    """

    def __init__(self, fingerprint: Fingerprint, *, bytes_per_position: int, kv_limit: int | None) -> None:
        self._fingerprint = fingerprint
        self._bytes_per_position = bytes_per_position
        self._limit = kv_limit
        self._kv_rows = max(1, min(KV_ROWS, (MAX_BLOCK_BYTES - _OVERHEAD) // bytes_per_position))

    def draft(
        self,
        version: tuple[int, int],
        session: str,
        ids: Sequence[int],
        boundary: int,
        features: Mapping[int, Tensor],
        facts: Facts,
        *,
        old: Sequence[BlockRef],
        held: Callable[[Sequence[str]], set[str]],
    ) -> Draft:
        """The record of a turn's end.

        Args:
            boundary: positions that the target KV covers; features: of boundaries up to it.
            old: blocks of an earlier record, used again as far as they fit these ids.
            held: which of some keys the store has.
        """
        kept = {n: row for n, row in features.items() if 0 < n <= len(ids)}
        covered = boundary if self._limit is None else min(boundary, self._limit // self._bytes_per_position)
        stops = {ref.stop for ref in old} | {len(ids), boundary, covered} | set(kept)
        stops |= set(range(ID_ROWS, len(ids), ID_ROWS)) | set(range(self._kv_rows, boundary, self._kv_rows))
        keys = BlockKeys(self._fingerprint, ids, stops)
        earlier = {r.stop: r for r in old if r.kind == "features" and keys.matches(r) and r.stop not in kept}
        spans: list[tuple[BlockKind, int, int]] = [
            *_extend(old, "ids", keys, len(ids), ID_ROWS),
            *(("features", n - 1, n) for n in sorted({*kept, *earlier})),
            *_extend(old, "kv", keys, covered, self._kv_rows),
        ]
        named = [(kind, start, stop, keys.key(kind, start, stop) or "") for kind, start, stop in spans]
        there = held([key for *_, key in named])
        gone = {ref.key for ref in earlier.values()} - there
        missing = [start for kind, start, _, key in named if kind == "kv" and key not in there]
        record = SessionRecord(
            session=session,
            epoch=version[0],
            turn=version[1],
            fingerprint=self._fingerprint,
            length=len(ids),
            boundary=boundary,
            anchor=ids[boundary] if boundary < len(ids) else None,
            history=facts.history,
            blocks=tuple(
                earlier[stop]
                if kind == "features" and stop in earlier
                else BlockRef(kind, start, stop, key, self._size(kind, stop - start, kept.get(stop)))
                for kind, start, stop, key in named
                if key not in gone
            ),
            sampler=facts.sampler,
            acceptance=facts.acceptance,
            odds=facts.odds,
            divergence=facts.divergence,
            owner=facts.owner,
            name=facts.name,
            parent=facts.parent,
            created=facts.created,
        )
        return Draft(record, ids, kept, there, min(missing, default=None))

    def _size(self, kind: BlockKind, rows: int, features: Tensor | None) -> int:
        if kind == "features":
            return 0 if features is None else features.nbytes
        return rows * (4 if kind == "ids" else self._bytes_per_position)


def _extend(
    old: Sequence[BlockRef], kind: BlockKind, keys: BlockKeys, end: int, rows: int
) -> Iterator[tuple[BlockKind, int, int]]:
    """Spans that cover 0..end-1: old blocks while they fit these ids, then new ones."""
    at = 0
    for ref in old:
        if ref.kind == kind and ref.start == at and ref.stop <= end and keys.matches(ref):
            yield kind, ref.start, ref.stop
            at = ref.stop
    for start, stop in cut_spans(at, end, rows):
        yield kind, start, stop
