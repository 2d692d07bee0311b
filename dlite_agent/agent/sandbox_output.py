"""The bounded buffer of one command's output: the head, the tail, a count of what is between, and all of it on disk."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import BinaryIO

HEAD_SHARE = 0.2


class BoundedOutput:
    """Keeps the first fifth and the last four fifths of `limit` bytes; memory never exceeds twice `limit`.

    Once something is elided, everything is in `spool` (up to `spool_limit` bytes); before that no file is made.
    """

    def __init__(self, limit: int, spool: Path, spool_limit: int) -> None:
        self._head_limit = int(limit * HEAD_SHARE)
        self._tail_limit = limit - self._head_limit
        self._head = bytearray()
        self._tail = bytearray()
        self._path = spool
        self._spool_limit = spool_limit
        self._spool: BinaryIO | None = None
        self.total = 0

    @property
    def elided(self) -> int:
        """Bytes that `text` leaves out."""
        return max(0, self.total - self._head_limit - self._tail_limit)

    @property
    def overflowing(self) -> bool:
        """Whether more came than may be kept on disk."""
        return self.total > self._spool_limit

    @property
    def full_path(self) -> Path | None:
        return self._path if self.elided else None

    def write(self, chunk: bytes) -> None:
        if self.total + len(chunk) > self._head_limit + self._tail_limit:
            self._write_spool(chunk)
        self.total += len(chunk)
        room = self._head_limit - len(self._head)
        if room > 0:
            self._head += chunk[:room]
            chunk = chunk[room:]
        self._tail += chunk
        if len(self._tail) > 2 * self._tail_limit:
            del self._tail[: -self._tail_limit]

    def text(self) -> str:
        """Head and tail as text; bytes that are not UTF-8, or cut by the elision, become U+FFFD."""
        if not self.elided:
            return (self._head + self._tail).decode("utf-8", "replace")
        tail = self._tail[-self._tail_limit :]
        mark = f"\n[... {self.elided} bytes elided ...]\n"
        return self._head.decode("utf-8", "replace") + mark + tail.decode("utf-8", "replace")

    def close(self) -> None:
        if self._spool is not None:
            self._spool.close()
            self._spool = None

    def _write_spool(self, chunk: bytes) -> None:
        written = self.total
        if self._spool is None:
            # Nothing was elided yet, so head and tail still hold everything that came before.
            self._spool = self._path.open("wb", buffering=0)
            chunk, written = bytes(self._head + self._tail) + chunk, 0
        room = self._spool_limit - written
        if room > 0:
            # A full disk must not end the run; the bounded text is still right.
            with contextlib.suppress(OSError):
                self._spool.write(chunk[:room])
