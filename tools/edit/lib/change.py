"""Change one file at a time, show the diff, keep what is needed to undo it.

Bytes that are not UTF-8, line ends and file modes survive. Paths are resolved before use and must stay in the
workspace and out of `.git`; what the file system allows beyond that is the sandbox's part.
"""

import argparse
import contextlib
import difflib
import fcntl
import hashlib
import os
import re
import stat
import sys
from collections.abc import Iterator
from pathlib import Path

MAX_BYTES = 10 << 20
MAX_DIFF_LINES = 200
ABSENT = b"\0absent"


class Refused(Exception):
    """The change cannot be made; the text says why and what to do."""


class Target:
    """The file to change and its undo stack, which lives in the agent's home."""

    def __init__(self, given: str) -> None:
        root = Path(os.environ.get("DLITE_WORKSPACE", ".")).resolve()
        self.path = Path(given).resolve()
        self.shown = given
        if not self.path.is_relative_to(root) or self.path == root:
            raise Refused(f"{given} is outside the workspace {root}.")
        if ".git" in self.path.relative_to(root).parts:
            raise Refused(f"{given} is inside .git, which is not edited by hand.")
        name = hashlib.sha256(os.fsencode(self.path)).hexdigest()[:24]
        self.history = Path(os.environ.get("HOME", "/root")) / ".dlite" / "undo" / name

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        """Calls of one turn run together; two of them that change one file do so one after the other."""
        self.history.mkdir(parents=True, exist_ok=True)
        with (self.history / "lock").open("wb") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield

    def read(self) -> bytes | None:
        try:
            descriptor = os.open(self.path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        except FileNotFoundError:
            return None
        except OSError as error:
            raise Refused(f"{self.shown} cannot be read: {error.strerror}.") from error
        with os.fdopen(descriptor, "rb") as file:
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                raise Refused(f"{self.shown} is not a regular file.")
            content = file.read(MAX_BYTES + 1)
        if len(content) > MAX_BYTES:
            raise Refused(f"{self.shown} is larger than {MAX_BYTES} bytes; use the shell.")
        return content

    def require(self) -> bytes:
        content = self.read()
        if content is None:
            raise Refused(f"{self.shown} does not exist; create_file makes new files.")
        if b"\0" in content[:4096]:
            raise Refused(f"{self.shown} is binary.")
        return content

    def write(self, before: bytes | None, after: bytes) -> None:
        """Change the file, and remember how it was and what it became."""
        self.store(after)
        number = len(list(self.history.glob("*.before")))
        (self.history / f"{number:06}.before").write_bytes(ABSENT if before is None else before)
        (self.history / f"{number:06}.after").write_bytes(after)

    def store(self, content: bytes) -> None:
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK, 0o644)
        except OSError as error:
            raise Refused(f"{self.shown} cannot be written: {error.strerror}.") from error
        with os.fdopen(descriptor, "wb") as file:
            file.truncate(0)
            file.write(content)


def decode(content: bytes) -> str:
    return content.decode("utf-8", "surrogateescape")


def encode(text: str) -> bytes:
    return text.encode("utf-8", "surrogateescape")


def with_line_ends_of(content: str, text: str) -> str:
    """`text` with CRLF if that is what the file uses throughout."""
    if "\r\n" in content and content.count("\r\n") == content.count("\n"):
        return text.replace("\r\n", "\n").replace("\n", "\r\n")
    return text


def show(path: str, before: str, after: str) -> None:
    old, new = before.splitlines(), after.splitlines()
    lines = list(difflib.unified_diff(old, new, f"a/{path}", f"b/{path}", lineterm=""))
    text = "\n".join(lines[:MAX_DIFF_LINES])
    if len(lines) > MAX_DIFF_LINES:
        text += f"\n[{len(lines) - MAX_DIFF_LINES} more lines of diff]"
    sys.stdout.buffer.write(text.encode("utf-8", "replace") + b"\n")


def replace(target: Target, options: argparse.Namespace) -> None:
    before = target.require()
    content = decode(before)
    old, new = (with_line_ends_of(content, text) for text in (options.old, options.new))
    if not old:
        raise Refused("old is empty; insert_text adds lines.")
    if old == new:
        raise Refused("old and new are the same.")
    places = occurrences(content, old)
    if not places:
        raise Refused(f"The old text is not in {options.path}.{near_miss(content, old)}")
    if len(places) > 1:
        lines = ", ".join(map(str, places[:20]))
        raise Refused(
            f"The old text is {len(places)} times in {options.path}, at lines {lines}. Include more around it."
        )
    after = content.replace(old, new, 1)
    target.write(before, encode(after))
    show(options.path, content, after)


def occurrences(content: str, old: str) -> list[int]:
    """Line numbers where `old` begins, overlaps included: with those, too, it is unclear which one is meant."""
    found, at = [], content.find(old)
    while at >= 0:
        found.append(content.count("\n", 0, at) + 1)
        at = content.find(old, at + 1)
    return found


def near_miss(content: str, old: str) -> str:
    """Where the old text would be if blanks did not count."""
    wanted = [line.split() for line in old.strip().splitlines()]
    lines = [line.split() for line in content.splitlines()]
    for number in range(len(lines) - len(wanted) + 1):
        if wanted and lines[number : number + len(wanted)] == wanted:
            return f" Line {number + 1} differs from it only in blanks; view it and copy it exactly."
    return ""


def insert(target: Target, options: argparse.Namespace) -> None:
    before = target.require()
    content = decode(before)
    # Not splitlines, which would also split at form feeds and the like.
    lines = [line for line in re.split(r"(?<=\n)", content) if line]
    if not 0 <= options.after <= len(lines):
        raise Refused(f"after must be 0 to {len(lines)}, the number of lines in {options.path}.")
    text = with_line_ends_of(content, options.text)
    end = "\r\n" if with_line_ends_of(content, "\n") == "\r\n" else "\n"
    if not text.endswith("\n"):
        text += end
    if options.after and not lines[options.after - 1].endswith("\n"):
        lines[options.after - 1] += end
    after = "".join([*lines[: options.after], text, *lines[options.after :]])
    target.write(before, encode(after))
    show(options.path, content, after)


def create(target: Target, options: argparse.Namespace) -> None:
    if target.path.is_dir() or target.read() is not None:
        raise Refused(f"{options.path} exists; replace_text and insert_text change files.")
    target.write(None, encode(options.text))
    show(options.path, "", options.text)


def undo(target: Target, options: argparse.Namespace) -> None:
    kept = sorted(target.history.glob("*.before"))
    if not kept:
        raise Refused(f"There is no change to {options.path} to undo.")
    before_file, after_file = kept[-1], kept[-1].with_suffix(".after")
    now = target.read()
    if now is None or now != after_file.read_bytes():
        raise Refused(f"{options.path} was changed by something else since; undo would lose that.")
    before = before_file.read_bytes()
    if before == ABSENT:
        target.path.unlink()
        show(options.path, decode(now), "")
    else:
        target.store(before)
        show(options.path, decode(now), decode(before))
    before_file.unlink()
    after_file.unlink()


COMMANDS = {
    "replace": (replace, ("path", "old", "new")),
    "insert": (insert, ("path", "after", "text")),
    "create": (create, ("path", "text")),
    "undo": (undo, ("path",)),
}


def main() -> int:
    run, names = COMMANDS[sys.argv[1]]
    parser = argparse.ArgumentParser(prog=sys.argv[1])
    for name in names:
        parser.add_argument(f"--{name}", required=True, type=int if name == "after" else str)
    try:
        options = parser.parse_args(sys.argv[2:])
        target = Target(options.path)
        with target.alone():
            run(target, options)
    except Refused as refusal:
        print(f"Refused: {refusal}")
        return 1
    except OSError as error:
        print(f"Failed: {error}")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
