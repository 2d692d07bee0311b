"""What a process tree uses: a snapshot of /proc, shared by all commands that run at the same time."""

from __future__ import annotations

import os
import time
from collections import defaultdict
from dataclasses import dataclass

_PAGE = os.sysconf("SC_PAGE_SIZE")
_MAX_AGE_S = 0.05


@dataclass(frozen=True, slots=True)
class Usage:
    """Tasks (threads) of a tree and the memory resident in it, in bytes."""

    tasks: int
    memory_bytes: int


class ProcessTable:
    """Parent and thread count of every process, re-read at most every 50 ms."""

    def __init__(self) -> None:
        self._read_at = float("-inf")
        self._children: dict[int, list[int]] = {}
        self._threads: dict[int, int] = {}

    def descendants(self, root: int) -> list[int]:
        """`root` and all below it. Orphans stay below the init of their PID namespace or their subreaper."""
        self._refresh()
        found = [root]
        for pid in found:
            found.extend(self._children.get(pid, ()))
        return found

    def usage(self, root: int, memory_limit: int) -> Usage:
        """Resident memory counts a page once per process; shared pages are divided only if that exceeds the limit."""
        tree = self.descendants(root)
        memory = sum(_resident(pid) for pid in tree)
        if memory > memory_limit:
            memory = sum(_proportional(pid) for pid in tree)
        return Usage(sum(self._threads.get(pid, 1) for pid in tree), memory)

    def _refresh(self) -> None:
        now = time.monotonic()
        if now - self._read_at < _MAX_AGE_S:
            return
        children: dict[int, list[int]] = defaultdict(list)
        threads: dict[int, int] = {}
        for entry in os.scandir("/proc"):
            if entry.name.isdigit():
                fields = _stat_fields(entry.name)
                if fields:
                    pid = int(entry.name)
                    children[int(fields[1])].append(pid)
                    threads[pid] = int(fields[17])
        self._children, self._threads, self._read_at = children, threads, time.monotonic()


def _stat_fields(pid: str) -> list[bytes]:
    try:
        with open(f"/proc/{pid}/stat", "rb", buffering=0) as file:  # noqa: PTH123 - a hot loop
            # The command's name may hold spaces and brackets; fields begin after its last bracket.
            return file.read(1024).rpartition(b") ")[2].split()
    except OSError:
        return []


def _resident(pid: int) -> int:
    try:
        with open(f"/proc/{pid}/statm", "rb", buffering=0) as file:  # noqa: PTH123 - a hot loop
            return int(file.read(128).split()[1]) * _PAGE
    except (OSError, IndexError):
        return 0


def _proportional(pid: int) -> int:
    try:
        with open(f"/proc/{pid}/smaps_rollup", "rb") as file:  # noqa: PTH123 - beside its siblings
            return next(int(line.split()[1]) * 1024 for line in file if line.startswith(b"Pss:"))
    except (OSError, StopIteration):
        return _resident(pid)
