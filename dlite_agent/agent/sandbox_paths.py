"""Path containment: every path a tool or a client names is walked below one root, component by component.

The walk holds a descriptor for each folder it has entered and never asks the kernel to follow a link, so swapping a
folder for a symlink between check and use changes nothing (the idea of openat2's RESOLVE_BENEATH, in user space).
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from dataclasses import dataclass
from pathlib import Path

from dlite_agent.errors import InvalidRequest, NotFound

MAX_LINKS = 40
_FOLDER = os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


class PathEscape(InvalidRequest):
    """A path leads, or could lead, out of the folder it must stay below."""

    code = "path_outside_root"


@dataclass(slots=True)
class _Place:
    """Where a walk ended: the folders entered (name, descriptor), then what was not entered."""

    entered: list[tuple[str, int]]
    leaf: str = "."
    rest: tuple[str, ...] = ()

    @property
    def folder(self) -> int:
        return self.entered[-1][1]

    def __enter__(self) -> _Place:
        return self

    def __exit__(self, *_: object) -> None:
        while self.entered:
            self.leave()

    def leave(self) -> None:
        os.close(self.entered.pop()[1])


class Contained:
    """Opens paths that stay below `root`, whatever links and `..` they hold.

    Relative links inside the root are followed; absolute ones only if they name a path below the root.
    """

    def __init__(self, root: Path) -> None:
        self._given = root.absolute()
        try:
            self.root = root.resolve(strict=True)
        except (OSError, RuntimeError) as error:
            raise NotFound(f"The folder {root} cannot be used: {error}.", param="root") from error
        if not self.root.is_dir():
            raise InvalidRequest(f"{self.root} is not a folder; name an existing one.", param="root")

    def resolve(self, path: str | Path) -> Path:
        """The link-free absolute path of `path`, which need not exist yet. Raises PathEscape, InvalidRequest."""
        with self._walk(path) as place:
            return self.root.joinpath(*(name for name, _ in place.entered[1:]), *place.rest)

    def open(self, path: str | Path, flags: int, mode: int = 0o644) -> int:
        """A descriptor for `path`, opened without following a link. Raises PathEscape, NotFound, InvalidRequest."""
        with self._walk(path) as place:
            if len(place.rest) > 1:
                raise NotFound(f"{path}: its folder does not exist.", param="path")
            try:
                return os.open(place.leaf, flags | os.O_NOFOLLOW | os.O_CLOEXEC, mode, dir_fd=place.folder)
            except FileNotFoundError as error:
                raise NotFound(f"{path} does not exist.", param="path") from error
            except OSError as error:
                raise InvalidRequest(f"{path} cannot be opened: {error.strerror}.", param="path") from error

    def read_bytes(self, path: str | Path, limit: int) -> bytes:
        """The content of a regular file of at most `limit` bytes; devices and pipes are refused unread."""
        descriptor = self.open(path, os.O_RDONLY | os.O_NONBLOCK)
        with os.fdopen(descriptor, "rb", closefd=True) as file:
            _require_regular(descriptor, path)
            content = file.read(limit + 1)
        if len(content) > limit:
            raise InvalidRequest(f"{path} has more than {limit} bytes; read a part of it.", param="path")
        return content

    def write_bytes(self, path: str | Path, content: bytes) -> None:
        """Create or replace a regular file whose folder exists."""
        descriptor = self.open(path, os.O_WRONLY | os.O_CREAT | os.O_NONBLOCK)
        with os.fdopen(descriptor, "wb") as file:
            _require_regular(descriptor, path)
            file.truncate(0)
            file.write(content)

    def remove(self, path: str | Path) -> None:
        """Delete a file, or a link itself; one that does not exist is no error."""
        with self._walk(path, follow_last=False) as place, contextlib.suppress(FileNotFoundError):
            os.unlink(place.leaf, dir_fd=place.folder)

    def _walk(self, path: str | Path, follow_last: bool = True) -> _Place:
        place = _Place([])
        try:
            place.entered.append(("", os.open(self.root, _FOLDER)))
            self._descend(place, path, follow_last)
        except OSError as error:
            place.__exit__()
            raise InvalidRequest(f"{path} cannot be reached: {error.strerror}.", param="path") from error
        except BaseException:
            place.__exit__()
            raise
        return place

    def _descend(self, place: _Place, path: str | Path, follow_last: bool) -> None:
        pending = self._parts(Path(path), path)
        links = 0
        while pending:
            name = pending.pop(0)
            if name == "..":
                if len(place.entered) == 1:
                    raise PathEscape(f"{path} leaves {self.root}; stay below it.", param="path")
                place.leave()
                continue
            link = _link(name, place.folder) if pending or follow_last else None
            if link is not None:
                links += 1
                if links > MAX_LINKS:
                    raise PathEscape(f"{path} goes through too many links.", param="path")
                if link.is_absolute():
                    while len(place.entered) > 1:
                        place.leave()
                pending = self._parts(link, path) + pending
            elif not pending:
                place.leaf, place.rest = name, (name,)
            else:
                try:
                    place.entered.append((name, os.open(name, _FOLDER, dir_fd=place.folder)))
                except FileNotFoundError:
                    # Nothing below a missing folder can be a link, but `..` there has no defined meaning.
                    if ".." in pending:
                        raise PathEscape(f"{path} climbs out of {name}, which does not exist.", param="path") from None
                    place.rest = (name, *pending)
                    return

    def _parts(self, path: Path, shown: str | Path) -> list[str]:
        if "\0" in str(path):
            raise InvalidRequest("A path cannot hold a NUL byte.", param="path")
        if not path.is_absolute():
            return list(path.parts)
        for root in (self.root, self._given):
            if path.is_relative_to(root):
                return list(path.relative_to(root).parts)
        raise PathEscape(f"{shown} is outside {self.root}; stay below it.", param="path")


def _link(name: str, folder: int) -> Path | None:
    try:
        return Path(os.readlink(name, dir_fd=folder))
    except OSError as error:
        if error.errno in (errno.EINVAL, errno.ENOENT):
            return None
        raise


def _require_regular(descriptor: int, path: str | Path) -> None:
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        raise InvalidRequest(f"{path} is not a regular file.", param="path")
