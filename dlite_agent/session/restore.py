"""Reading a session back: the newest record, every block checked against its ids, and the minimum that all agree on.

A block is used only if its checksum holds, if it lies under its own key, and if that key is the one these very ids,
under this process's fingerprint, ask for. Blocks may come from any store, since keys say what they contain.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from dlite_agent.decode.kv import SequenceKV
from dlite_agent.decode.planner import Odds
from dlite_agent.decode.state import DecodeState
from dlite_agent.session.history import History
from dlite_agent.session.record import BlockKeys, BlockKind, BlockRef, Fingerprint, Refused, SessionRecord, decode
from dlite_agent.session.store import frames
from dlite_agent.session.store.base import SessionStore, StoreUnavailable


@dataclass(frozen=True)
class Restore:
    """What a restore has brought back.

    Attributes:
        tier: where the KV came from, or the record if there was no KV; "none" if there was nothing to be used.
        tokens: positions of target KV; `of`: ids known, so that of - tokens are left to prefill.
        features: whether drafting can start without a target forward.
        reason: why not everything came back; None if it did.
        bytes: of the blocks read.
    """

    tier: str
    tokens: int
    of: int
    features: bool
    reason: str | None
    bytes: int
    seconds: float


@dataclass(frozen=True)
class Loaded:
    """A session read and checked, not yet on the device. `record` is cut to what was usable."""

    record: SessionRecord
    ids: list[int]
    kept: dict[int, Tensor]
    rows: list[Tensor]
    report: Restore

    @property
    def tokens(self) -> int:
        """Positions of KV."""
        return self.report.tokens

    def apply(self, kv: SequenceKV, device: torch.device) -> DecodeState:
        """The decoder's state on an empty sequence. Raises KVExhausted, then nothing has changed."""
        kv.reserve(sum(rows.shape[3] for rows in self.rows))
        for rows in self.rows:
            kv.load(rows.to(device))
        kv.truncate(self.report.tokens)
        kept = {n: row.to(device) for n, row in self.kept.items()}
        odds = None if self.record.odds is None else Odds.from_counts(self.record.odds)
        return DecodeState(kv, list(self.ids), kept.get(kv.length), kept, odds=odds)


def read_session(
    stores: Sequence[SessionStore], fingerprint: Fingerprint, session: str, *, kv: bool = True
) -> Loaded | Restore:
    """The newest state of a session that can be had, or a Restore that says why there is none.

    Args:
        stores: nearest first.
        kv: False reads the record and the ids only.

    Raises:
        StoreUnavailable: no store has a usable record, and one could not be asked.
    """
    return _Reader(stores, fingerprint, session).read(kv=kv)


class _Reader:
    def __init__(self, stores: Sequence[SessionStore], fingerprint: Fingerprint, session: str) -> None:
        self._began = time.monotonic()
        self._stores = stores
        self._fingerprint = fingerprint
        self._session = session
        self._why: list[str] = []
        self._bytes = 0

    def read(self, *, kv: bool) -> Loaded | Restore:
        records = self._records()
        if not records:
            return self._report("none", 0, 0, features=False)
        home, best = max(records, key=lambda found: found[1].version)
        order = [home, *(store for store in self._stores if store is not home)]
        ids = self._ids(best, order)
        if len(ids) < best.length:
            turns = tuple(turn for turn in best.history.turns if turn.end <= len(ids))
            if not turns:
                self._why.append("no whole turn is left")
                return self._report("none", 0, 0, features=False)
            del ids[turns[-1].end :]
            self._why.append(f"cut to {len(turns)} of {len(best.history.turns)} turns")
            best = replace(best, length=len(ids), history=History(best.history.tools, turns), divergence=None)
        if not kv:
            return Loaded(best, ids, {}, [], self._report(home.tier, 0, len(ids), features=False))
        refs = [(store, ref) for store, record in records for ref in record.blocks if ref.stop <= len(ids)]
        keys = BlockKeys(self._fingerprint, ids, {ref.stop for _, ref in refs})
        sound = [(store, ref) for store, ref in refs if keys.matches(ref)]
        kept = self._features(sound)
        tier, rows = self._kv(sound, best.boundary)
        tokens = sum(part.shape[3] for part in rows)
        if tokens == len(ids) and tokens not in kept:
            tokens -= 1
            self._why.append("the last token is computed again for its features")
        boundary = min(best.boundary, len(ids))
        anchor = ids[boundary] if boundary < len(ids) else None
        best = replace(best, boundary=boundary, anchor=anchor, blocks=self._blocks(best, len(ids)))
        report = self._report(tier or home.tier, tokens, len(ids), features=tokens in kept)
        return Loaded(best, ids, kept, rows, report)

    def _report(self, tier: str, tokens: int, of: int, *, features: bool) -> Restore:
        reason = "; ".join(dict.fromkeys(self._why)) or ("no such session" if tier == "none" else None)
        return Restore(tier, tokens, of, features, reason, self._bytes, time.monotonic() - self._began)

    def _records(self) -> list[tuple[SessionStore, SessionRecord]]:
        found: list[tuple[SessionStore, SessionRecord]] = []
        away: StoreUnavailable | None = None
        for store in self._stores:
            try:
                data = store.load(self._session)
                if data is None:
                    continue
                record = decode(data, self._session)
            except StoreUnavailable as error:
                away = error
                self._why.append(f"{store.tier}: {error.message}")
                continue
            except Refused as error:
                self._why.append(f"{store.tier}: {error.message}")
                continue
            if wrong := record.fingerprint.differences(self._fingerprint):
                self._why.append(f"{store.tier}: the record was made with another {', '.join(wrong)}")
                continue
            found.append((store, record))
        if not found and away is not None:
            raise away
        return found

    def _fetch(self, store: SessionStore, refs: Sequence[BlockRef], name: BlockKind) -> Iterator[Tensor | None]:
        """The tensor of each block, None where it is missing or refused."""
        try:
            for ref, data in zip(refs, store.fetch(self._session, [ref.key for ref in refs]), strict=True):
                yield None if data is None else self._open(store, ref, data, name)
        except StoreUnavailable as error:
            self._why.append(f"{store.tier}: {error.message}")

    def _open(self, store: SessionStore, ref: BlockRef, data: bytes, name: BlockKind) -> Tensor | None:
        try:
            tensor = frames.unpack_tensors(data, ref.key).get(name)
            rows = {"ids": 0, "features": None, "kv": 3}[name]
            if tensor is None or (
                rows is not None and (tensor.ndim <= rows or tensor.shape[rows] != ref.stop - ref.start)
            ):
                raise Refused("A stored block has not the shape its record says.", param="block")
        except Refused as error:
            self._why.append(f"{store.tier}: {name} {ref.start}..{ref.stop}: {error.message}")
            store.discard(self._session, [ref.key])
            return None
        self._bytes += len(data)
        return tensor

    def _any(
        self, stores: Sequence[SessionStore], refs: Sequence[BlockRef], name: BlockKind
    ) -> Iterator[Tensor | None]:
        """As `_fetch` from the first store; whatever it lacks is asked of the others."""
        got = self._fetch(stores[0], refs, name)
        for ref in refs:
            tensor = next(got, None)
            for store in stores[1:]:
                if tensor is None:
                    tensor = next(self._fetch(store, [ref], name), None)
            yield tensor

    def _ids(self, record: SessionRecord, stores: Sequence[SessionStore]) -> list[int]:
        refs = record.refs("ids")
        ids: list[int] = []
        for ref, tensor in zip(refs, self._any(stores, refs, "ids"), strict=True):
            if tensor is None or ref.start != len(ids):
                self._why.append(f"ids from {ref.start} on are missing")
                break
            ids += tensor.tolist()
        keys = BlockKeys(self._fingerprint, ids, {ref.stop for ref in refs})
        for ref in refs:
            if ref.stop <= len(ids) and not keys.matches(ref):
                self._why.append(f"ids from {ref.start} on are not those of the record")
                return ids[: ref.start]
        return ids[: record.length]

    def _features(self, sound: Sequence[tuple[SessionStore, BlockRef]]) -> dict[int, Tensor]:
        kept: dict[int, Tensor] = {}
        for store in self._stores:
            refs = [ref for at, ref in sound if at is store and ref.kind == "features" and ref.stop not in kept]
            for ref, tensor in zip(refs, self._fetch(store, refs, "features"), strict=False):
                if tensor is not None:
                    kept[ref.stop] = tensor
        if lost := {ref.stop for _, ref in sound if ref.kind == "features"} - kept.keys():
            self._why.append(f"features of {len(lost)} boundaries are missing or refused")
        return kept

    def _kv(self, sound: Sequence[tuple[SessionStore, BlockRef]], boundary: int) -> tuple[str | None, list[Tensor]]:
        """Rows of consecutive blocks from position 0, as far as they go, and the tier most of them came from."""
        chain = _chain([(store, ref) for store, ref in sound if ref.kind == "kv"])
        rows: list[Tensor] = []
        tiers: dict[str, int] = {}
        at = 0
        for stores, refs in chain:
            for ref, tensor in zip(refs, self._any(stores, refs, "kv"), strict=True):
                if tensor is None:
                    self._why.append(f"KV from {at} on is missing or refused")
                    return max(tiers, key=tiers.__getitem__, default=None), rows
                rows.append(tensor)
                at = ref.stop
                tiers[stores[0].tier] = tiers.get(stores[0].tier, 0) + ref.stop - ref.start
        if at < boundary:
            kept = "is not kept in this tier" if not at else f"is kept up to {at} only"
            self._why.append(f"KV {kept}: what is missing is computed again from the ids")
        return max(tiers, key=tiers.__getitem__, default=None), rows

    def _blocks(self, record: SessionRecord, length: int) -> tuple[BlockRef, ...]:
        return tuple(ref for ref in record.blocks if ref.stop <= length)


def _chain(found: Sequence[tuple[SessionStore, BlockRef]]) -> list[tuple[list[SessionStore], list[BlockRef]]]:
    """Consecutive blocks from position 0, the longest at each start, in runs that the same stores have."""
    best: dict[int, tuple[list[SessionStore], BlockRef]] = {}
    for store, ref in found:
        known = best.get(ref.start)
        if known is None or ref.stop > known[1].stop:
            best[ref.start] = [store], ref
        elif ref.key == known[1].key:
            known[0].append(store)
    runs: list[tuple[list[SessionStore], list[BlockRef]]] = []
    at = 0
    while at in best:
        stores, ref = best[at]
        if runs and [id(s) for s in runs[-1][0]] == [id(s) for s in stores]:
            runs[-1][1].append(ref)
        else:
            runs.append((stores, [ref]))
        at = ref.stop
    return runs
