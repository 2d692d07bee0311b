"""What `dlite-agent sessions` does: show, verify, export and import. An exported session is one file of frames, the
blocks first and the record last, as in a segment."""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from dlite_agent.errors import InvalidRequest, NotFound
from dlite_agent.session.record import KINDS, BlockKeys, BlockRef, Refused, SessionRecord, decode
from dlite_agent.session.store import frames
from dlite_agent.session.store.base import SessionStore
from dlite_agent.session.store.segments import record_frame

_OWNER = "dlite-agent sessions"
_LEASE_S = 60.0


@dataclass(frozen=True)
class Shown:
    """One session, for people."""

    session: str
    tier: str
    turns: int
    tokens: int
    boundaries: tuple[int, ...]
    kv_tokens: int
    bytes: dict[str, int]
    epoch: int
    divergence: str | None
    model: str


@dataclass(frozen=True)
class Verdict:
    """A verified session: blocks read, and what is wrong with it, nothing if it is sound."""

    session: str
    blocks: int
    problems: tuple[str, ...]


def record_of(store: SessionStore, session: str) -> SessionRecord:
    """A session's record. Raises NotFound or Refused."""
    data = store.load(session)
    if data is None:
        raise NotFound(f"There is no session {session!r} in the {store.tier} store.", param="session")
    return decode(data, session)


def show(store: SessionStore, session: str) -> Shown:
    """Tokens, boundaries, bytes by kind, last divergence. Raises NotFound or Refused."""
    record = record_of(store, session)
    return Shown(
        session=session,
        tier=store.tier,
        turns=len(record.history.turns),
        tokens=record.length,
        boundaries=tuple(ref.stop for ref in record.refs("features")),
        kv_tokens=max((ref.stop for ref in record.refs("kv")), default=0),
        bytes={kind: sum(ref.size for ref in record.refs(kind)) for kind in KINDS},
        epoch=record.epoch,
        divergence=record.divergence,
        model=record.fingerprint.target,
    )


def verify(store: SessionStore, session: str) -> Verdict:
    """Read all of a session and check every checksum and key; changes nothing."""
    try:
        record = record_of(store, session)
    except Refused as error:
        return Verdict(session, 0, (error.message,))
    problems: list[str] = []
    ids: list[int] = []
    blocks = 0
    for ref, data in _frames(store, record):
        place = f"{ref.kind} {ref.start}..{ref.stop}"
        try:
            if data is None:
                raise Refused("The block is missing.", param="block")
            tensors = frames.unpack_tensors(data, ref.key)
        except Refused as error:
            problems.append(f"{place}: {error.message}")
            continue
        blocks += 1
        if ref.kind == "ids" and "ids" in tensors:
            ids += tensors["ids"].tolist()
    if len(ids) == record.length:
        keys = BlockKeys(record.fingerprint, ids, {ref.stop for ref in record.blocks})
        wrong = [ref for ref in record.blocks if not keys.matches(ref)]
        problems += [f"{ref.kind} {ref.start}..{ref.stop}: The block belongs to other ids." for ref in wrong]
    elif not problems:
        problems.append(f"The record has {record.length} ids, its blocks {len(ids)}.")
    return Verdict(session, blocks, tuple(problems))


def _frames(store: SessionStore, record: SessionRecord) -> Iterator[tuple[BlockRef, bytes | None]]:
    keys = [ref.key for ref in record.blocks]
    return zip(record.blocks, store.fetch(record.session, keys), strict=True)


def export(store: SessionStore, session: str, path: Path) -> int:
    """Write a session to one file; returns its bytes. Raises NotFound, or Refused if anything of it is damaged."""
    verdict = verify(store, session)
    if verdict.problems:
        raise Refused(f"The session is damaged and cannot be exported whole: {verdict.problems[0]}", param="session")
    record = record_of(store, session)
    done: set[str] = set()
    with path.open("wb") as file:
        for ref, data in _frames(store, record):
            if data is not None and ref.key not in done:
                done.add(ref.key)
                file.write(data)
        file.write(record_frame(record))
        return file.tell()


def load_export(store: SessionStore, path: Path, *, name: str | None = None) -> SessionRecord:
    """Read an exported session into a store, under another name if one is given; returns its record there.

    Raises:
        InvalidRequest: the file is no export, or the session exists already.
        Refused: the file is damaged.
    """
    blocks, record = _read(path)
    session = name or record.session
    if store.load(session) is not None:
        raise InvalidRequest(f"The session {session!r} exists already: import it under another name.", param="name")
    if missing := [ref for ref in record.blocks if ref.key not in blocks]:
        raise Refused(
            f"The export lacks {len(missing)} of {len(record.blocks)} blocks or they are damaged.", param="path"
        )
    lease = store.acquire(session, _OWNER, _LEASE_S)
    try:
        taken = replace(record, session=session, epoch=lease.epoch)
        there = store.held(session, taken.keys)
        store.commit(lease, taken, {key: data for key, data in blocks.items() if key not in there})
    finally:
        store.release(lease)
    return taken


def _read(path: Path) -> tuple[dict[str, bytes], SessionRecord]:
    blocks: dict[str, bytes] = {}
    record: SessionRecord | None = None
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            for frame in frames.scan(data):
                if frame.type == frames.BLOCK:
                    blocks[frame.key] = data[frame.offset : frame.offset + frame.length]
                elif frame.type == frames.RECORD:
                    record = decode(frame.payload)
    except (OSError, ValueError) as error:
        raise InvalidRequest(f"{path} cannot be read as an exported session: {error}", param="path") from error
    if record is None:
        raise Refused(f"{path} is not an exported session, or its record is damaged.", param="path")
    return blocks, record
