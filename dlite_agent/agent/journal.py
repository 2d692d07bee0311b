"""The journal of a run: append-only records, each on the disk before what it announces happens."""

from __future__ import annotations

import asyncio
import json
import os
from pathlib import Path
from typing import Any

from dlite_agent.errors import InvalidRequest

Record = dict[str, Any]


class Journal:
    """Appends records to one file. Opening reads it, and cuts a last line that a crash left incomplete.

    Attributes:
        records: what the file held when it was opened.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        existed = path.exists()
        self.records, whole = _read(path) if existed else ([], 0)
        self._lock = asyncio.Lock()
        self._file = path.open("ab", buffering=0)
        if existed:
            self._file.truncate(whole)
        else:
            _sync_folder(path.parent)

    async def append(self, record: Record) -> None:
        """Write one record and wait until it is on the disk. A cancelled caller does not leave half of it."""
        data = json.dumps(record, separators=(",", ":")).encode() + b"\n"
        async with self._lock:
            await asyncio.shield(asyncio.to_thread(self._write, data))

    def _write(self, data: bytes) -> None:
        view = memoryview(data)
        while view:
            view = view[self._file.write(view) :]
        os.fsync(self._file.fileno())

    def close(self) -> None:
        self._file.close()


def _read(path: Path) -> tuple[list[Record], int]:
    """The records of a file, and the length of the part they fill."""
    records: list[Record] = []
    whole = 0
    for line in path.read_bytes().splitlines(keepends=True):
        try:
            record = json.loads(line) if line.endswith(b"\n") else None
        except ValueError:
            record = None
        if not isinstance(record, dict):
            break
        records.append(record)
        whole += len(line)
    if whole < path.stat().st_size and b"\n" in path.read_bytes()[whole:-1]:
        raise InvalidRequest(
            f"{path.name} is damaged at byte {whole}: lines follow that are no record.", param="journal"
        )
    return records, whole


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
