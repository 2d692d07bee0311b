"""The last program before a sandboxed command: sets up what its level needs, then becomes the command.

Run as a script (`python -I -S sandbox_launch.py SPEC ARGV...`) so that it starts in milliseconds: it imports nothing of
the package and little of the standard library. SPEC is a marshalled dict in hex, see `sandbox_levels`.

A process of ours watches over the command, out of its reach: PID 1 of its namespace, or its subreaper. It ends the
tree when the command ends, or when the lifeline, a pipe that only the server can write to, is closed: by the server's
wish or by its death, however early. A parent-death signal cannot do that, as a parent already dead sends none.

On the status descriptor comes `R` right before the command starts; a status without `R` means that the sandbox, not the
command, has failed. The watcher holds it open, so its end is the watcher's.
"""

from __future__ import annotations

import ctypes
import marshal
import os
import resource
import select
import signal
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:  # typing alone would double the start-up time
    from collections.abc import Callable
    from typing import Any, NoReturn

libc = ctypes.CDLL(None, use_errno=True)

MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC = 1, 2, 4, 8
MS_REMOUNT, MS_BIND, MS_REC, MS_PRIVATE = 32, 4096, 16384, 1 << 18
MNT_DETACH = 2
CLONE_NEWNS, CLONE_NEWUTS, CLONE_NEWIPC = 0x20000, 0x4000000, 0x8000000
CLONE_NEWUSER, CLONE_NEWPID, CLONE_NEWNET = 0x10000000, 0x20000000, 0x40000000
PR_SET_DUMPABLE, PR_SET_SECCOMP, PR_SET_CHILD_SUBREAPER, PR_SET_NO_NEW_PRIVS = 4, 22, 36, 38
# Numbers that x86-64 and arm64 share.
SYS_MOUNT_SETATTR, SYS_LANDLOCK_CREATE, SYS_LANDLOCK_ADD, SYS_LANDLOCK_RESTRICT = 442, 444, 445, 446
SYS_IO_URING_SETUP = 425
# Per machine: audit architecture, then pivot_root, capset and socket.
MACHINES = {"x86_64": (0xC000003E, 155, 126, 41), "aarch64": (0xC00000B7, 41, 91, 198)}
# Landlock rights: all of a folder, those that make sense on a file, and those that only read.
FS_ALL = (1 << 16) - 1
FS_FILE = 1 << 0 | 1 << 1 | 1 << 2 | 1 << 14 | 1 << 15
FS_READ = 1 << 0 | 1 << 2 | 1 << 3
NET_ALL, SCOPE_ALL = 3, 3
LANDLOCK_MIN_ABI = 6
# pid_max belongs to the PID namespace only from here on; before, writing it would change the host's.
PID_MAX_KERNEL = (6, 14)
RESERVED_PIDS = 300


class Failed(Exception):
    pass


def check(result: int, what: str) -> int:
    if result < 0:
        raise Failed(f"{what}: {os.strerror(ctypes.get_errno())}")
    return result


def machine() -> tuple[int, int, int, int]:
    name = os.uname().machine
    if name not in MACHINES:
        raise Failed(f"machine {name} is not supported")
    return MACHINES[name]


def mount(source: str | None, target: str, kind: str | None = None, flags: int = 0, data: str | None = None) -> None:
    def encode(text: str | None) -> bytes | None:
        return None if text is None else os.fsencode(text)

    arguments = (encode(source), encode(target), encode(kind), ctypes.c_ulong(flags), encode(data))
    check(libc.mount(*arguments), f"mount {target}")


def prctl(option: int, value: int, pointer: Any = 0) -> None:
    check(libc.prctl(option, ctypes.c_ulong(value), pointer, 0, 0), f"prctl {option}")


def limit_pids(proc: str, most: int) -> None:
    release = os.uname().release.split("-")[0].split(".")[:2]
    if tuple(int("".join(filter(str.isdigit, part))) for part in release) >= PID_MAX_KERNEL:
        # Numbers below RESERVED_PIDS are not handed out again after the first wrap.
        with open(f"{proc}/sys/kernel/pid_max", "w") as file:  # noqa: PTH123
            file.write(str(RESERVED_PIDS + most))


def drop_privileges() -> None:
    prctl(PR_SET_NO_NEW_PRIVS, 1)
    header = (ctypes.c_uint32 * 2)(0x20080522, 0)
    check(libc.syscall(machine()[2], header, (ctypes.c_uint32 * 6)()), "capset")


def start(spec: dict[str, Any], argv: list[str]) -> NoReturn:
    """Apply the resource limits, say that the sandbox stands, and become the command."""
    for number, value in spec["limits"]:
        _, hard = resource.getrlimit(number)
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(number, (value, value))
    for number in (signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(number, signal.SIG_DFL)
    os.write(spec["status"], b"R")
    os.close(spec["status"])
    os.close(spec["lifeline"])
    try:
        os.execvp(argv[0], argv)
    except OSError as error:
        os.write(2, f"{argv[0]}: {error.strerror}\n".encode())
        os._exit(127)


def become_init(spec: dict[str, Any], argv: list[str]) -> NoReturn:
    """PID 1 of the namespace: when it ends, the kernel ends all others."""
    os._exit(watch(spec, start, argv))


def watch(spec: dict[str, Any], action: Callable[[dict[str, Any], list[str]], NoReturn], argv: list[str]) -> int:
    """Run `action` in a child and reap whatever ends, until the child ends or the lifeline is closed; its exit code."""
    wake, write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(write, warn_on_full_buffer=False)
    # Or a command of the same user could trace us, or open our end of the lifeline for writing.
    prctl(PR_SET_DUMPABLE, 0)
    command = os.fork()
    if command == 0:
        os.setsid()
        guarded(spec, action, argv)
    for descriptor in (0, 1, 2):
        os.close(descriptor)
    events = select.poll()
    events.register(wake, select.POLLIN)
    events.register(spec["lifeline"], select.POLLIN)
    while True:
        if any(descriptor != wake for descriptor, _ in events.poll()):
            return 128 + signal.SIGKILL
        os.read(wake, 4096)
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            if ended[0] == command:
                return exit_code(ended[1])


def exit_code(status: int) -> int:
    code = os.waitstatus_to_exitcode(status)
    return code if code >= 0 else 128 - code


# --- namespaces -------------------------------------------------------------------------------------------------


def enter_namespaces(spec: dict[str, Any], argv: list[str]) -> NoReturn:
    uid, gid = os.getuid(), os.getgid()
    flags = CLONE_NEWUSER | CLONE_NEWNS | CLONE_NEWPID | CLONE_NEWIPC | CLONE_NEWUTS
    check(libc.unshare(flags | (0 if spec["network"] else CLONE_NEWNET)), "unshare")
    for name, line in (("setgroups", "deny"), ("uid_map", f"{uid} {uid} 1"), ("gid_map", f"{gid} {gid} 1")):
        with open(f"/proc/self/{name}", "w") as file:  # noqa: PTH123
            file.write(line)
    init = os.fork()
    if init == 0:
        guarded(spec, inside_namespaces, argv)
    for descriptor in (0, 1, 2, spec["status"], spec["lifeline"]):
        os.close(descriptor)
    os._exit(exit_code(os.waitpid(init, 0)[1]))


def inside_namespaces(spec: dict[str, Any], argv: list[str]) -> NoReturn:
    build_root(spec)
    drop_privileges()
    become_init(spec, argv)


def build_root(spec: dict[str, Any]) -> None:
    root = spec["root"]
    mount(None, "/", None, MS_REC | MS_PRIVATE)
    mount("tmpfs", root, "tmpfs", MS_NOSUID | MS_NODEV, "mode=755,size=16m")
    for operation, source, target in spec["mounts"]:
        place(operation, source, root + target)
        if operation == "proc":
            limit_pids(root + target, spec["pids"])
    if not spec["network"]:
        raise_loopback()
    os.chdir(root)
    check(libc.syscall(machine()[1], b".", b"."), "pivot_root")
    check(libc.umount2(b".", MNT_DETACH), "umount")
    mount(None, "/", None, MS_REMOUNT | MS_BIND | MS_RDONLY | MS_NOSUID | MS_NODEV)
    os.chdir(spec["cwd"])


def place(operation: str, source: str, target: str) -> None:
    if operation == "symlink":
        os.makedirs(os.path.dirname(target), exist_ok=True)  # noqa: PTH120, PTH103
        os.symlink(source, target)  # noqa: PTH211
    elif operation in ("ro", "rw"):
        make_point(target, os.path.isdir(source))  # noqa: PTH112
        bind(source, target, read_only=operation == "ro")
    elif operation == "tmpfs":
        make_point(target, True)
        mount("tmpfs", target, "tmpfs", MS_NOSUID | MS_NODEV, f"mode=1777,size={source}")
    elif operation == "proc":
        make_point(target, True)
        mount("proc", target, "proc", MS_NOSUID | MS_NODEV | MS_NOEXEC)
    elif operation == "dev":
        make_devices(target)
    elif operation == "remount-ro":
        mount(None, target, None, MS_REMOUNT | MS_BIND | MS_RDONLY | MS_NOSUID)
    else:
        raise Failed(f"unknown mount {operation}")


def make_point(target: str, folder: bool) -> None:
    os.makedirs(target if folder else os.path.dirname(target), exist_ok=True)  # noqa: PTH120, PTH103
    if not folder and not os.path.exists(target):  # noqa: PTH110
        os.close(os.open(target, os.O_CREAT | os.O_WRONLY, 0o644))


def bind(source: str, target: str, read_only: bool, devices: bool = False) -> None:
    mount(source, target, None, MS_BIND | MS_REC)
    attributes = (MS_RDONLY if read_only else 0) | MS_NOSUID | (0 if devices else MS_NODEV)
    # struct mount_attr {attr_set, attr_clr, propagation, userns_fd}; the flags have the values of their MS_ twins.
    request = (ctypes.c_uint64 * 4)(attributes, 0, 0, 0)
    result = libc.syscall(SYS_MOUNT_SETATTR, -100, os.fsencode(target), 0x8000, request, ctypes.sizeof(request))
    check(result, f"protect {target}")


def make_devices(target: str) -> None:
    make_point(target, True)
    mount("tmpfs", target, "tmpfs", MS_NOSUID, "mode=755,size=64k")
    for name in ("null", "zero", "full", "random", "urandom", "tty"):
        make_point(f"{target}/{name}", False)
        bind(f"/dev/{name}", f"{target}/{name}", read_only=False, devices=True)
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        os.symlink(f"/proc/self/fd/{number}", f"{target}/{name}")  # noqa: PTH211
    os.symlink("/proc/self/fd", f"{target}/fd")  # noqa: PTH211
    os.makedirs(f"{target}/shm")  # noqa: PTH103


def raise_loopback() -> None:
    # struct ifreq {name[16], short flags}: IFF_UP | IFF_RUNNING on "lo", by SIOCSIFFLAGS.
    descriptor = check(libc.socket(2, 2, 0), "socket")
    request = ctypes.create_string_buffer(b"lo".ljust(16, b"\0") + (0x41).to_bytes(2, sys.byteorder), 40)
    check(libc.ioctl(descriptor, ctypes.c_ulong(0x8914), request), "raise loopback")
    os.close(descriptor)


# --- Landlock and plain -----------------------------------------------------------------------------------------


def supervise(spec: dict[str, Any], argv: list[str]) -> NoReturn:
    """Stay outside as the subreaper of the command: whatever it leaves behind becomes our child and is killed."""
    prctl(PR_SET_CHILD_SUBREAPER, 1)
    sweep_and_exit(watch(spec, inside_restrictions, argv))


def sweep_and_exit(code: int) -> NoReturn:
    while True:
        found = below(os.getpid())
        # A group dies at once, however fast it forks; single processes are for those that left every group we know.
        for kill, number in [(os.killpg, group) for group in {group for _, group in found} - {os.getpgrp()}] + [
            (os.kill, pid) for pid, _ in found
        ]:
            try:
                kill(number, signal.SIGKILL)
            except ProcessLookupError:
                continue
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            os._exit(code)


def below(root: int) -> list[tuple[int, int]]:
    """(pid, group) of every descendant of `root`; none of them can be in our own group."""
    children: dict[int, list[tuple[int, int]]] = {}
    for name in os.listdir("/proc"):  # noqa: PTH208
        if name.isdigit():
            try:
                with open(f"/proc/{name}/stat", "rb") as file:  # noqa: PTH123
                    fields = file.read().rpartition(b") ")[2].split()
            except OSError:
                continue
            children.setdefault(int(fields[1]), []).append((int(name), int(fields[2])))
    found = [(root, 0)]
    for pid, _ in found:
        found.extend(children.get(pid, ()))
    return found[1:]


def inside_restrictions(spec: dict[str, Any], argv: list[str]) -> NoReturn:
    os.chdir(spec["cwd"])
    prctl(PR_SET_NO_NEW_PRIVS, 1)
    if spec["level"] == "landlock":
        drop_privileges()
        confine_files(spec)
        filter_sockets(spec["network"])
    start(spec, argv)


def landlock_abi() -> int:
    """Version of the kernel's Landlock, 0 if there is none."""
    return max(0, int(libc.syscall(SYS_LANDLOCK_CREATE, None, ctypes.c_size_t(0), 1)))


def confine_files(spec: dict[str, Any]) -> None:
    abi = landlock_abi()
    if abi < LANDLOCK_MIN_ABI:
        raise Failed(f"Landlock ABI {abi} is below {LANDLOCK_MIN_ABI}, which first keeps signals inside")
    attributes = (ctypes.c_uint64 * 3)(FS_ALL, 0 if spec["network"] else NET_ALL, SCOPE_ALL)
    size = ctypes.c_size_t(ctypes.sizeof(attributes))
    ruleset = check(libc.syscall(SYS_LANDLOCK_CREATE, attributes, size, 0), "create ruleset")
    for rights, paths in ((FS_READ, spec["readable"]), (FS_ALL, spec["writable"])):
        for path in paths:
            descriptor = os.open(path, os.O_PATH)
            allowed = rights if os.path.isdir(path) else rights & FS_FILE  # noqa: PTH112
            packed = allowed.to_bytes(8, sys.byteorder) + descriptor.to_bytes(4, sys.byteorder)
            rule = ctypes.create_string_buffer(packed)
            check(libc.syscall(SYS_LANDLOCK_ADD, ruleset, 1, rule, 0), f"allow {path}")
            os.close(descriptor)
    check(libc.syscall(SYS_LANDLOCK_RESTRICT, ruleset, 0), "restrict")
    os.close(ruleset)


def filter_sockets(network: bool) -> None:
    """Refuse sockets Landlock does not cover: all of them without a network, else those of named Unix services.

    socketpair stays, which event loops and pools live on. io_uring goes, as it opens sockets behind the filter.
    """
    audit, _, _, socket = machine()
    load, equal, above, give = 0x20, 0x15, 0x35, 0x06
    allow, kill, refuse = 0x7FFF0000, 0x80000000, 0x00050000
    # Offsets in struct seccomp_data: 0 the call's number, 4 the architecture, 16 the low half of the first argument.
    first_argument = 16 if sys.byteorder == "little" else 20
    program = [
        (load, 0, 0, 4),
        (equal, 1, 0, audit),
        (give, 0, 0, kill),
        (load, 0, 0, 0),
        (above, 5, 0, 0x40000000),  # x32 calls
        (equal, 4, 0, SYS_IO_URING_SETUP),
        (equal, 0, 2, socket),
        (load, 0, 0, first_argument),
        (equal, 1, 0 if network else 1, 1),  # AF_UNIX
        (give, 0, 0, allow),
        (give, 0, 0, refuse | 13),
    ]
    packed = b"".join(
        code.to_bytes(2, sys.byteorder) + bytes((yes, no)) + value.to_bytes(4, sys.byteorder)
        for code, yes, no, value in program
    )
    code = ctypes.create_string_buffer(packed, len(packed))

    class Program(ctypes.Structure):
        _fields_ = (("length", ctypes.c_ushort), ("code", ctypes.c_void_p))

    prctl(PR_SET_SECCOMP, 2, ctypes.byref(Program(len(program), ctypes.addressof(code))))


# --- entry ------------------------------------------------------------------------------------------------------


def inside_bubblewrap(spec: dict[str, Any], argv: list[str]) -> NoReturn:
    if os.getuid() == 0:
        # RLIMIT_NPROC does not bind root: cap the PID namespace while we still have CAP_SYS_ADMIN.
        mount("proc", "/proc", "proc", MS_NOSUID | MS_NODEV | MS_NOEXEC)
        limit_pids("/proc", spec["pids"])
        check(libc.umount2(b"/proc", MNT_DETACH), "umount /proc")
    drop_privileges()
    become_init(spec, argv)


def guarded(spec: dict[str, Any], action: Callable[[dict[str, Any], list[str]], NoReturn], argv: list[str]) -> NoReturn:
    try:
        action(spec, argv)
    except (Failed, OSError) as error:
        os.write(spec["status"], f"!{error}\n".encode())
        os._exit(125)


def main() -> None:
    spec, argv = marshal.loads(bytes.fromhex(sys.argv[1])), sys.argv[2:]
    enter = {
        "bubblewrap": inside_bubblewrap,
        "unshare": enter_namespaces,
        "landlock": supervise,
        "plain": supervise,
    }[spec["level"]]
    guarded(spec, enter, argv)


if __name__ == "__main__":
    main()
