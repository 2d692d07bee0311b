"""Paths stay below the root: the four known tricks, files that do not exist yet, and links swapped during the walk."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

import pytest

from dlite_agent.agent.sandbox_paths import Contained, PathEscape
from dlite_agent.errors import InvalidRequest, NotFound


@pytest.fixture
def root(tmp_path: Path) -> Path:
    root = tmp_path / "root"
    (root / "folder").mkdir(parents=True)
    (root / "file").write_text("inside")
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "file").write_text("outside")
    (tmp_path / "root-evil").mkdir()
    return root


@pytest.mark.parametrize(
    "path",
    [
        "..",
        "../outside/file",
        "folder/../../outside/file",
        "missing/../../outside",
        "{base}/outside/file",
        "{base}/root/../outside",
        "{base}/root-evil/new",
        "../root-evil/new",
        "file-link",
        "folder-link/file",
        "folder-link/not-yet/there",
        "future-link",
        "chain/file",
        "self",
        "/etc/passwd",
    ],
)
def test_escapes_are_refused(root: Path, path: str) -> None:
    outside = root.parent / "outside"
    (root / "file-link").symlink_to(outside / "file")
    (root / "folder-link").symlink_to("../outside")
    (root / "future-link").symlink_to(outside / "not-yet")
    (root / "chain").symlink_to("folder/next")
    (root / "folder" / "next").symlink_to("../folder-link")
    (root / "self").symlink_to("self")
    contained = Contained(root)
    path = path.format(base=root.parent)
    with pytest.raises(PathEscape):
        contained.resolve(path)
    with pytest.raises(PathEscape):
        contained.write_bytes(path, b"x")
    with pytest.raises(PathEscape):
        contained.read_bytes(path, 100)
    assert (outside / "file").read_text() == "outside"
    assert [entry.name for entry in outside.iterdir()] == ["file"]


@pytest.mark.parametrize(
    ("path", "meant"),
    [
        ("file", "file"),
        (".", ""),
        ("folder/../file", "file"),
        ("{root}/folder/./new", "folder/new"),
        ("not/yet/there", "not/yet/there"),
        ("relative-link", "file"),
        ("absolute-link/new", "folder/new"),
        ("folder/up-link", "file"),
        ("..file", "..file"),
    ],
)
def test_what_stays_inside_is_resolved(root: Path, path: str, meant: str) -> None:
    (root / "relative-link").symlink_to("folder/../file")
    (root / "absolute-link").symlink_to(root / "folder")
    (root / "folder" / "up-link").symlink_to("../file")
    assert Contained(root).resolve(path.format(root=root)) == root / meant


def test_root_may_be_named_through_a_link(root: Path) -> None:
    link = root.parent / "link"
    link.symlink_to(root)
    contained = Contained(link)
    assert contained.resolve(link / "file") == root / "file"
    assert contained.resolve(root / "file") == root / "file"


def test_reading_and_writing(root: Path) -> None:
    contained = Contained(root)
    contained.write_bytes("folder/new", b"longer text")
    contained.write_bytes("folder/new", b"text")
    assert contained.read_bytes("folder/new", 4) == b"text"
    contained.remove("folder/new")
    contained.remove("folder/new")
    assert list((root / "folder").iterdir()) == []
    os.mkfifo(root / "pipe")
    for path, error in (("folder/new", NotFound), ("pipe", InvalidRequest), ("file/below", InvalidRequest)):
        with pytest.raises(error):
            contained.read_bytes(path, 100)
    with pytest.raises(InvalidRequest, match="more than 3 bytes"):
        contained.read_bytes("file", 3)
    with pytest.raises(NotFound):
        contained.write_bytes("no/folder", b"x")
    with pytest.raises(InvalidRequest, match="NUL"):
        contained.resolve("a\0b")


def test_removing_a_link_leaves_its_target(root: Path) -> None:
    (root / "link").symlink_to(root.parent / "outside" / "file")
    Contained(root).remove("link")
    assert not (root / "link").is_symlink()
    assert (root.parent / "outside" / "file").exists()


def test_links_swapped_during_the_walk_lead_nowhere(root: Path) -> None:
    """One thread turns a folder into a link to the outside and back, and a file likewise, while we write and read."""
    outside = root.parent / "outside"
    contained = Contained(root)
    stop = threading.Event()
    swaps = 0

    def swap() -> None:
        nonlocal swaps
        while not stop.is_set():
            (root / "folder").rename(root / "aside")
            (root / "folder").symlink_to(outside)
            (root / "folder").unlink()
            (root / "aside").rename(root / "folder")
            (root / "link").symlink_to(outside / "file")
            (root / "link").replace(root / "file")
            (root / "fresh").write_bytes(b"inside")
            (root / "fresh").replace(root / "file")
            swaps += 1

    thread = threading.Thread(target=swap)
    thread.start()
    outcomes = {"done": 0, "refused": 0}
    try:
        end = time.monotonic() + 10
        while (swaps < 100 or not all(outcomes.values())) and time.monotonic() < end:
            for path in ("folder/new", "file"):
                try:
                    contained.write_bytes(path, b"inside")
                    assert contained.read_bytes(path, 100) in (b"inside", b"")
                    outcomes["done"] += 1
                except InvalidRequest:
                    outcomes["refused"] += 1
                except NotFound:
                    continue
    finally:
        stop.set()
        thread.join()
    assert swaps >= 100
    assert all(outcomes.values())
    assert [entry.name for entry in outside.iterdir()] == ["file"]
    assert (outside / "file").read_text() == "outside"


def test_descriptors_are_closed(root: Path) -> None:
    contained = Contained(root)
    before = len(os.listdir("/proc/self/fd"))  # noqa: PTH208 - counts itself the same way twice
    for path in ("file", "folder/a/b", "../x", "file/below", "self/.."):
        try:
            contained.resolve(path)
        except InvalidRequest:
            continue
    assert len(os.listdir("/proc/self/fd")) == before  # noqa: PTH208


def test_root_must_be_a_folder(root: Path) -> None:
    with pytest.raises(NotFound):
        Contained(root / "missing")
    with pytest.raises(InvalidRequest):
        Contained(root / "file")
