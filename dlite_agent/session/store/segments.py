"""Segment files: everything a session has committed, as frames one after another, one append-only file a session.

A commit appends the new blocks and then the record, and is durable with the fsync that follows. Whatever stands behind
the last whole record was never committed and is cut when the segment is next opened.
"""

from __future__ import annotations

import contextlib
import hashlib
import mmap
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from dlite_agent.errors import Conflict
from dlite_agent.session.record import Refused, SessionRecord, decode
from dlite_agent.session.store import frames
from dlite_agent.session.store.base import StoreUnavailable


@dataclass(frozen=True)
class Place:
    """Where a block's frame is."""

    segment: str
    offset: int
    length: int


@dataclass(frozen=True)
class Contents:
    """What a scan has found: end of the last whole commit, its record (None: removed or none), blocks by key."""

    end: int
    record: bytes | None
    blocks: dict[str, Place]


class Segments:
    """A folder of segment files, named by a digest of the session's name."""

    def __init__(self, folder: Path, *, writable: bool) -> None:
        self._folder = folder
        self._writable = writable
        if writable:
            folder.mkdir(parents=True, exist_ok=True)

    @staticmethod
    def name(session: str) -> str:
        return hashlib.sha256(session.encode()).hexdigest()[:32]

    def names(self) -> list[str]:
        return sorted(path.stem for path in self._folder.glob("*.seg"))

    def path(self, segment: str) -> Path:
        return self._folder / f"{segment}.seg"

    def size(self, segment: str) -> int:
        """Bytes, 0 where there is no such file."""
        try:
            return self.path(segment).stat().st_size
        except FileNotFoundError:
            return 0

    def append(self, segment: str, parts: Sequence[bytes], *, end: int) -> list[int]:
        """Write frames behind `end` durably and return their offsets.

        Raises:
            StoreUnavailable: the disk is full or failing; the file is as long as before.
            Conflict: the store was opened for reading.
        """
        if not self._writable:
            raise Conflict("This store is open for reading only: stop the process that serves it first.", param="store")
        path = self.path(segment)
        try:
            with path.open("r+b" if path.exists() else "xb", buffering=0) as file:
                try:
                    file.truncate(end)
                    file.seek(end)
                    offsets = []
                    for part in parts:
                        offsets.append(file.tell())
                        _write(file.fileno(), part)
                    os.fsync(file.fileno())
                except OSError:
                    with contextlib.suppress(OSError):
                        file.truncate(end)
                    raise
            if end == 0:
                self._sync_folder()
        except OSError as error:
            raise StoreUnavailable(
                f"The session could not be written to disk ({error.strerror}): free some space and send the request "
                "again. Everything committed before is intact.",
                param="store",
            ) from error
        return offsets

    def scan(self, segment: str, start: int) -> Contents:
        """Read commits behind `start`, which is the end of a commit, and cut what was not committed."""
        path = self.path(segment)
        record: bytes | None = None
        blocks: dict[str, Place] = {}
        pending: dict[str, Place] = {}
        end = start
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            for frame in frames.scan(data, start):
                if frame.type == frames.BLOCK:
                    pending[frame.key] = Place(segment, frame.offset, frame.length)
                    continue
                if frame.type == frames.RECORD and self._owner(frame.payload) != segment:
                    continue
                record = frame.payload if frame.type == frames.RECORD else None
                blocks |= pending
                pending = {}
                end = frame.offset + frame.length
            whole = len(data)
        if end < whole and self._writable:
            with path.open("r+b") as torn:
                torn.truncate(end)
                os.fsync(torn.fileno())
        return Contents(end, record, blocks)

    def _owner(self, data: bytes) -> str | None:
        try:
            return self.name(decode(data).session)
        except Refused:
            return None

    def read(self, places: Sequence[Place | None]) -> Iterator[bytes | None]:
        """Bytes at places, in order; None where the file or part of it is gone."""
        opened: tuple[str, int] | None = None
        try:
            for place in places:
                if place is None:
                    yield None
                    continue
                if opened is None or opened[0] != place.segment:
                    if opened is not None:
                        os.close(opened[1])
                        opened = None
                    try:
                        opened = place.segment, os.open(self.path(place.segment), os.O_RDONLY)
                    except FileNotFoundError:
                        yield None
                        continue
                yield os.pread(opened[1], place.length, place.offset)
        finally:
            if opened is not None:
                os.close(opened[1])

    def rewrite(self, segment: str, record: SessionRecord | None, places: Sequence[Place]) -> None:
        """Keep only a record (None: a removal mark) and some blocks.

        The new file replaces the old one whole. Raises StoreUnavailable, then the old one stands.
        """
        parts = [data for data in self.read(places) if data is not None]
        spare = f"{segment}.new"
        self.path(spare).unlink(missing_ok=True)
        self.append(spare, [*parts, record_frame(record)], end=0)
        self.path(spare).replace(self.path(segment))
        self._sync_folder()

    def remove(self, segment: str) -> int:
        """Delete a file; returns the bytes it had."""
        size = self.size(segment)
        self.path(segment).unlink(missing_ok=True)
        return size

    def _sync_folder(self) -> None:
        handle = os.open(self._folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def record_frame(record: SessionRecord | None) -> bytes:
    """Frame of a record, or the mark that the session has been removed."""
    if record is None:
        return frames.pack(frames.REMOVED, frames.NO_KEY, b"")
    return frames.pack(frames.RECORD, frames.NO_KEY, record.encode())


def _write(handle: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(handle, view) :]
