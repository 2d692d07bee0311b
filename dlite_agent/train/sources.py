"""Text sources of a training corpus: files of code, prose, logs and data, found in folders and told apart by suffix."""

from __future__ import annotations

import gzip
import hashlib
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from dlite_agent.errors import InvalidRequest

KINDS: dict[str, frozenset[str]] = {
    "code": frozenset(["py", "js", "mjs", "c", "h", "cpp", "hpp", "sh", "sql", "rs", "go", "rb", "java", "ts"]),
    "prose": frozenset(["md", "rst", "txt"]),
    "data": frozenset(["json", "toml", "yaml", "yml", "cfg", "ini", "csv", "xml"]),
    "log": frozenset(["log", "out", "err", "traceback"]),
    "diff": frozenset(["diff", "patch"]),
}
PROSE_NAMES = frozenset(("METADATA", "README", "NEWS", "changelog", "copyright"))
PRUNED = frozenset((".git", "__pycache__", "site-packages", "node_modules"))
"""Folders passed over inside a root; each may be a root itself."""
SMALLEST, LARGEST = 200, 400_000
"""Characters a source must have, and bytes a file may have."""


@dataclass(frozen=True)
class Source:
    """One text. `key` names where it came from and is the unit of the train / held-out split."""

    key: str
    kind: str
    text: str


def kind_of(path: Path) -> str | None:
    """Kind of text a file holds, by its name; None where it is none of ours. `.gz` is looked through."""
    name = path.name.removesuffix(".gz")
    suffix = name.rpartition(".")[2].lower() if "." in name else ""
    for kind, suffixes in KINDS.items():
        if suffix in suffixes:
            return kind
    return "prose" if name in PROSE_NAMES else None


def read_source(path: Path, key: str) -> Source:
    """Read one file.

    Raises:
        InvalidRequest: it is missing, of no known kind, not UTF-8 text, or empty.
    """
    kind = kind_of(path)
    if kind is None:
        raise InvalidRequest(f"{path} is of no known kind of text; rename it (.txt, .py, .log)", param="sources")
    try:
        raw = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
        text = raw.decode("utf-8")
    except (OSError, EOFError, UnicodeDecodeError) as error:
        raise InvalidRequest(f"{path} cannot be read as UTF-8 text: {error}", param="sources") from error
    if len(text.strip()) < SMALLEST:
        raise InvalidRequest(f"{path} is empty or under {SMALLEST} characters; leave it out", param="sources")
    return Source(key, kind, text)


def scan(roots: Iterable[Path], *, limit: int, seed: int) -> list[Source]:
    """Up to `limit` distinct sources of a set of files and folders, in an order that only `seed` decides.

    Files inside a folder that are binary, too large, too small or of another kind are passed over; a root given by
    name is not: it must exist, be readable and yield something.

    A key is the path relative to its root, so that the same module of two installations is one source.

    Raises:
        InvalidRequest: a root is missing, unreadable or yields no source.
    """
    candidates: dict[str, Path] = {}
    for root in roots:
        found = _candidates(root)
        if not found:
            raise InvalidRequest(f"{root} holds no file that could be a source", param="sources")
        for key, path in found.items():
            candidates.setdefault(key, path)
    order = sorted(candidates, key=lambda key: hashlib.sha256(f"{seed} {key}".encode()).digest())
    sources: list[Source] = []
    seen: set[bytes] = set()
    for key in order:
        if len(sources) == limit:
            break
        try:
            source = read_source(candidates[key], key)
        except InvalidRequest:
            if candidates[key] in roots:
                raise
            continue
        digest = hashlib.sha256(" ".join(source.text.split()).encode()).digest()
        if digest not in seen:
            seen.add(digest)
            sources.append(source)
    return sources


def _candidates(root: Path) -> dict[str, Path]:
    if root.is_file():
        return {root.name: root}
    if not root.is_dir():
        raise InvalidRequest(f"{root} does not exist", param="sources")
    return {str(path.relative_to(root)): path for path in _files(root)}


def _files(root: Path) -> Iterator[Path]:
    def refuse(error: OSError) -> None:
        raise InvalidRequest(f"{error.filename} cannot be read: {error.strerror}", param="sources") from error

    for folder, subfolders, names in os.walk(root, onerror=refuse):
        subfolders[:] = sorted(name for name in subfolders if name not in PRUNED)
        for name in sorted(names):
            path = Path(folder) / name
            if kind_of(path) and not path.is_symlink() and path.stat().st_size <= LARGEST:
                yield path


def held_out(key: str, share: float) -> bool:
    """Whether a source belongs to the held-out side: decided by its key alone, so that it never changes sides."""
    number = int.from_bytes(hashlib.sha256(f"split {key}".encode()).digest()[:8], "big")
    return number / 2**64 < share
