"""Look at a tree of files: a window of one, names in it, text in it. Output is bounded and in a fixed order."""

import argparse
import fnmatch
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path

MAX_LINES = 400
MAX_WIDTH = 500
MAX_LINE = 1 << 20
MAX_FOUND = 200
MAX_ENTRIES = 300
SKIPPED = {".git", ".hg", "node_modules", "__pycache__", ".venv", ".mypy_cache", ".pytest_cache", ".ruff_cache"}


def fail(message: str) -> int:
    print(message)
    return 1


def walk(folder: Path, depth: int | None = None) -> Iterator[Path]:
    """Everything below `folder` in name order, without caches and version control; links are not entered."""
    try:
        entries = sorted(os.scandir(folder), key=lambda entry: entry.name)
    except OSError:
        return
    for entry in entries:
        if entry.name in SKIPPED:
            continue
        path = folder / entry.name
        yield path
        if entry.is_dir(follow_symlinks=False) and depth != 1:
            yield from walk(path, None if depth is None else depth - 1)


def is_binary(path: Path) -> bool:
    with path.open("rb") as file:
        return b"\0" in file.read(4096)


def clip(line: str) -> str:
    line = line.rstrip("\r\n")
    return line if len(line) <= MAX_WIDTH else f"{line[:MAX_WIDTH]} [... {len(line) - MAX_WIDTH} more characters]"


def lines_of(path: Path) -> Iterator[str]:
    """The lines of a file; of one that is longer than `MAX_LINE` only that much, so that no file fills the memory."""
    with path.open(encoding="utf-8", errors="replace", newline="\n") as file:
        while line := file.readline(MAX_LINE):
            yield line
            while not line.endswith("\n") and line:
                line = file.readline(MAX_LINE)


def view() -> int:
    parser = argparse.ArgumentParser(prog="view_file")
    parser.add_argument("--path", required=True)
    parser.add_argument("--start", type=int, default=1)
    parser.add_argument("--lines", type=int, default=100)
    options = parser.parse_args()
    path = Path(options.path)
    if path.is_dir():
        return list_folder(path)
    if not path.exists():
        return fail(f"{path} does not exist.{suggest(path)}")
    if not path.is_file():
        return fail(f"{path} is neither a file nor a folder.")
    if options.start < 1 or not 1 <= options.lines <= MAX_LINES:
        return fail(f"start counts from 1, and lines is 1 to {MAX_LINES}.")
    if is_binary(path):
        return fail(f"{path} is binary ({path.stat().st_size} bytes).")
    shown, total = [], 0
    for total, line in enumerate(lines_of(path), 1):
        if options.start <= total < options.start + options.lines:
            shown.append(f"{total:6}  {clip(line)}")
    if not shown and total:
        return fail(f"{path} has only {total} lines.")
    last = options.start + len(shown) - 1
    print(f"[{path}: {f'lines {options.start} to {last} of {total}' if total else 'empty'}]")
    print("\n".join(shown))
    if last < total:
        print(f"[{total - last} more lines]")
    return 0


def suggest(path: Path) -> str:
    """Names like the one asked for, in case only the folder was wrong."""
    found = [str(other) for other in walk(Path()) if other.name == path.name][:5]
    return f" Found: {', '.join(found)}." if found else ""


def list_folder(folder: Path) -> int:
    entries = []
    for path in walk(folder, 2):
        entries.append(f"{path.relative_to(folder)}{'/' if path.is_dir() else ''}")
        if len(entries) > MAX_ENTRIES:
            entries[-1] = "[more entries]"
            break
    print(f"[{folder}/: two levels]")
    print("\n".join(entries) or "(empty)")
    return 0


def find() -> int:
    parser = argparse.ArgumentParser(prog="find_files")
    parser.add_argument("--pattern", required=True)
    parser.add_argument("--path", default=".")
    options = parser.parse_args()
    folder = Path(options.path)
    if not folder.is_dir():
        return fail(f"{folder} is not a folder.")
    by_path = "/" in options.pattern
    count = 0
    for path in walk(folder):
        name = str(path.relative_to(folder)) if by_path else path.name
        if fnmatch.fnmatchcase(name, options.pattern):
            count += 1
            if count <= MAX_FOUND:
                print(f"{path}{'/' if path.is_dir() else ''}")
    print(f"[{count} found{f', {MAX_FOUND} shown' if count > MAX_FOUND else ''}]")
    return 0


def grep() -> int:
    parser = argparse.ArgumentParser(prog="grep_files")
    parser.add_argument("--pattern", required=True)
    parser.add_argument("--path", default=".")
    parser.add_argument("--include", default="*")
    options = parser.parse_args()
    try:
        pattern = re.compile(options.pattern)
    except re.error as error:
        return fail(f"The pattern is no regular expression: {error}.")
    start = Path(options.path)
    if not start.exists():
        return fail(f"{start} does not exist.")
    count, files = 0, 0
    for path in [start] if start.is_file() else walk(start):
        if not path.is_file() or not fnmatch.fnmatchcase(path.name, options.include):
            continue
        before = count
        try:
            if is_binary(path):
                continue
            for number, line in enumerate(lines_of(path), 1):
                if pattern.search(line):
                    count += 1
                    if count <= MAX_FOUND:
                        print(f"{path}:{number}:{clip(line)}")
        except OSError as error:
            print(f"{path}: {error.strerror}")
        files += count > before
    print(f"[{count} matches in {files} files{f', {MAX_FOUND} shown' if count > MAX_FOUND else ''}]")
    return 0


if __name__ == "__main__":
    sys.exit({"view": view, "find": find, "grep": grep}[sys.argv.pop(1)]())
