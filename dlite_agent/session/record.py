"""The session record: what a paused session is, as bytes that outlive the process.

A record holds the small things itself (history, sampler, acceptance, epoch, fingerprint) and names the large ones by
key: blocks of ids, boundary features and target KV. A block's key is a digest of the fingerprint, its kind, its range
and *all ids up to its end*, so a key says what a block must contain: blocks of equal prefixes are shared, and a block
of another conversation or another model can never stand under a key that this record asks for.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field, fields
from itertools import pairwise
from typing import Any, Literal

import numpy as np
import torch

from dlite_agent.decode.planner import OddsCounts
from dlite_agent.decode.sampling import Sampler, SamplingParams
from dlite_agent.errors import InvalidRequest
from dlite_agent.session.history import History
from dlite_agent.session.identity import name_label, turn_labels

FORMAT = 2
"""Written. Format 1 had no odds and is read as one without any."""
_READ = (b"1", b"2")
BlockKind = Literal["ids", "features", "kv"]
KINDS: tuple[BlockKind, ...] = ("ids", "features", "kv")
_MAGIC = "dlite-session"


class Refused(InvalidRequest):
    """Stored state that is damaged, of another session, of another model or of another format. Never served."""

    code = "stored_state_refused"


@dataclass(frozen=True)
class Fingerprint:
    """All that stored state depends on; `drafter` is empty where there is none."""

    target: str
    drafter: str
    tokenizer: str
    template: str
    dtype: str
    kv_layout: str

    def differences(self, other: Fingerprint) -> list[str]:
        """Names of the parts that differ."""
        return [part.name for part in fields(self) if getattr(self, part.name) != getattr(other, part.name)]

    @property
    def digest(self) -> bytes:
        return hashlib.sha256(json.dumps(asdict(self), sort_keys=True).encode()).digest()


def kv_layout(layers: int, kv_heads: int, head_dim: int) -> str:
    """Name of the layout of exported rows [2, layers, kv_heads, n, head_dim]."""
    return f"kv-2x{layers}x{kv_heads}xNx{head_dim}"


@dataclass(frozen=True)
class BlockRef:
    """A block of a session: `kind` for positions start..stop-1, stored as `size` bytes under `key`.

    Features of boundary n are the row n - 1: start n - 1, stop n.
    """

    kind: BlockKind
    start: int
    stop: int
    key: str
    size: int


@dataclass(frozen=True)
class Acceptance:
    """Rounds decoded in this session, and their sums: drafts proposed, drafts accepted, ids emitted."""

    rounds: int = 0
    drafted: int = 0
    accepted: int = 0
    emitted: int = 0


@dataclass(frozen=True)
class SamplerState:
    """The last request's sampler: its parameters, seed resolved, and the position of its first generated id.

    Randomness depends on seed and position alone, and penalty counts on the ids, so nothing else is needed.
    """

    params: SamplingParams
    start: int

    def sampler(self, ids: Sequence[int], *, vocab_size: int, device: torch.device) -> Sampler:
        """The sampler as it was after ids, for a request that goes on where it stopped."""
        sampler = Sampler(self.params, prompt=ids[: self.start], vocab_size=vocab_size, device=device)
        sampler.commit(ids[self.start :])
        return sampler


@dataclass(frozen=True)
class SessionRecord:
    """One committed state of a session.

    Attributes:
        epoch: fencing epoch of the lease under which it was written.
        turn: commits so far; (epoch, turn) orders the records of a session.
        length: number of ids.
        boundary: positions that the target KV covered; `anchor` is ids[boundary], or None where that is not decided.
        history: the turns with roles, message digests and positions.
        odds: how often drafts were right, for the planner; None where that is not known.
        divergence: why the last request did not simply continue, for people; or None.
        owner, name, parent, created: as in the registry's `Session`; created is Unix seconds.
        blocks: all blocks, in order of kind and position. A store that keeps no KV lists none of that kind.
    """

    session: str
    epoch: int
    turn: int
    fingerprint: Fingerprint
    length: int
    boundary: int
    anchor: int | None
    history: History
    blocks: tuple[BlockRef, ...]
    sampler: SamplerState | None = None
    acceptance: Acceptance = field(default_factory=Acceptance)
    odds: OddsCounts | None = None
    divergence: str | None = None
    owner: str = ""
    name: str = ""
    parent: str = ""
    created: float = 0.0

    @property
    def labels(self) -> list[str]:
        """What the session is found by beside its id: its turns' ends, oldest first, then its name."""
        named = [name_label(self.owner, self.name)] if self.name else []
        return turn_labels(self.owner, self.history) + named

    @property
    def version(self) -> tuple[int, int]:
        return self.epoch, self.turn

    def refs(self, kind: BlockKind) -> list[BlockRef]:
        return [ref for ref in self.blocks if ref.kind == kind]

    @property
    def keys(self) -> list[str]:
        """Keys of all blocks, each once."""
        return list(dict.fromkeys(ref.key for ref in self.blocks))

    @property
    def size(self) -> int:
        """Bytes of all blocks."""
        return sum(ref.size for ref in self.blocks)

    def encode(self) -> bytes:
        """Bytes with format, checksum and body."""
        value = asdict(self) | {
            "history": self.history.to_json(),
            "blocks": [[KINDS.index(r.kind), r.start, r.stop, r.key, r.size] for r in self.blocks],
        }
        body = json.dumps(value, sort_keys=True, separators=(",", ":")).encode()
        return f"{_MAGIC} {FORMAT} {hashlib.sha256(body).hexdigest()}\n".encode() + body


def decode(data: bytes, session: str | None = None) -> SessionRecord:
    """What `encode` gave.

    Args:
        session: the session it was stored for; None where any will do.

    Raises:
        Refused: damaged, of an unknown format, or another session's.
    """
    head, _, body = data.partition(b"\n")
    words = head.split(b" ")
    if len(words) != 3 or words[0] != _MAGIC.encode():
        raise Refused("This is not a session record, or its first line is damaged.", param="record")
    if words[1] not in _READ:
        raise Refused(
            f"The record has format {words[1].decode(errors='replace')}; this version reads formats up to {FORMAT}. "
            "Start the session anew, or serve it with the version that wrote it.",
            param="format",
        )
    if hashlib.sha256(body).hexdigest().encode() != words[2]:
        raise Refused("The record does not match its checksum.", param="record")
    record = _from_json(json.loads(body))
    if session is not None and record.session != session:
        raise Refused("The record stored for this session belongs to another one.", param="session")
    return record


def _from_json(value: dict[str, Any]) -> SessionRecord:
    sampler = value["sampler"]
    if sampler is not None:
        params = sampler["params"]
        bias = {int(token): weight for token, weight in params["logit_bias"].items()}
        sampler = SamplerState(SamplingParams(**params | {"logit_bias": bias}), sampler["start"])
    return SessionRecord(
        **value
        | {
            "fingerprint": Fingerprint(**value["fingerprint"]),
            "history": History.from_json(value["history"]),
            "blocks": tuple(BlockRef(KINDS[kind], *rest) for kind, *rest in value["blocks"]),
            "sampler": sampler,
            "acceptance": Acceptance(**value["acceptance"]),
        }
    )


class BlockKeys:
    """Keys of blocks of one sequence of ids under one fingerprint.

    Args:
        stops: every `stop` that will be asked for; hashing is one pass over the ids.
    """

    def __init__(self, fingerprint: Fingerprint, ids: Sequence[int], stops: Iterable[int]) -> None:
        self._salt = fingerprint.digest
        self._prefix: dict[int, bytes] = {}
        rows = np.asarray(ids, dtype="<i4")
        hasher, at = hashlib.sha256(), 0
        for stop in sorted(set(stops)):
            if stop > len(rows):
                break
            hasher.update(rows[at:stop].tobytes())
            at = stop
            self._prefix[stop] = hasher.digest()

    def key(self, kind: BlockKind, start: int, stop: int) -> str | None:
        """32 hex digits, or None where the ids end before `stop`."""
        prefix = self._prefix.get(stop)
        if prefix is None:
            return None
        return hashlib.sha256(self._salt + f"{kind} {start} {stop} ".encode() + prefix).hexdigest()[:32]

    def matches(self, ref: BlockRef) -> bool:
        """Whether a block is what these ids ask for."""
        return self.key(ref.kind, ref.start, ref.stop) == ref.key


def cut_spans(start: int, stop: int, rows: int) -> list[tuple[int, int]]:
    """Cut start..stop-1 at every multiple of `rows`, so that equal prefixes give equal blocks."""
    cuts = [start, *range((start // rows + 1) * rows, stop, rows), stop]
    return [(a, b) for a, b in pairwise(cuts) if b > a]
