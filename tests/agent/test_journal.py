"""The journal survives a cut at any byte, and is refused when it is damaged in the middle."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from dlite_agent.agent.journal import Journal, Record
from dlite_agent.errors import InvalidRequest

RECORDS: list[Record] = [{"kind": "a", "n": 1}, {"kind": "b", "text": "ü\n\ud800"}, {"kind": "c", "list": [1, 2]}]


def write(path: Path, records: list[Record]) -> None:
    async def main() -> None:
        journal = Journal(path)
        await asyncio.gather(*(journal.append(record) for record in records))
        journal.close()

    asyncio.run(main())


def read(path: Path) -> list[Record]:
    journal = Journal(path)
    journal.close()
    return journal.records


def test_cut_anywhere_keeps_the_whole_lines_and_goes_on(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    write(path, RECORDS)
    data = path.read_bytes()
    ends = [i + 1 for i, byte in enumerate(data) if byte == ord("\n")]
    for cut in range(len(data) + 1):
        path.write_bytes(data[:cut])
        whole = sum(end <= cut for end in ends)
        assert read(path) == RECORDS[:whole]
        write(path, RECORDS[whole:])
        assert path.read_bytes() == data


def test_damage_in_the_middle_is_no_cut(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    write(path, RECORDS)
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(lines[0] + b"\0\0\0\n" + lines[2])
    with pytest.raises(InvalidRequest, match="damaged at byte"):
        read(path)
