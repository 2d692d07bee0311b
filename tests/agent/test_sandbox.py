"""What a command may do to this machine: nothing beyond its limits, at every level of the ladder."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dlite_agent.agent.sandbox import (
    Level,
    Limits,
    Policy,
    Reason,
    Sandbox,
    SandboxFailed,
    SandboxResult,
    SandboxUnavailable,
)
from dlite_agent.agent.sandbox_levels import command_line
from dlite_agent.agent.sandbox_paths import PathEscape
from dlite_agent.errors import InvalidRequest
from tests.agent.support import (
    ALL,
    CONFINED,
    PRIVATE,
    QUICK,
    STRONGEST,
    bash,
    marker,
    processes_with,
    wait_until,
    with_sandbox,
    workspace_in,
)

REPOSITORY = Path(__file__).parents[2]
ORPHANS = """
setsid bash -c 'exec -a {mark}-setsid sleep 600' &
(bash -c 'exec -a {mark}-fork sleep 600' & ) &
nohup bash -c 'trap "" TERM HUP; exec -a {mark}-nohup sleep 600' > /dev/null 2>&1 &
sleep 0.3; echo started
"""


@pytest.mark.parametrize("level", ALL)
def test_result_keeps_exit_code_and_text_apart(tmp_path: Path, level: Level) -> None:
    result = bash(tmp_path, level, "echo out; echo err >&2; exit 7")
    assert (result.level, result.exit_code, result.reason, result.note) == (level, 7, Reason.EXIT, "")
    assert sorted(result.output.split()) == ["err", "out"]
    assert result.setup_seconds is not None
    assert 0 < result.setup_seconds <= result.ended - result.started
    assert bash(tmp_path, level, "kill -9 $$").exit_code == 137


@pytest.mark.parametrize("level", ALL)
def test_nothing_survives_a_call(tmp_path: Path, level: Level) -> None:
    mark = marker()
    result = bash(tmp_path, level, ORPHANS.format(mark=mark))
    assert (result.exit_code, result.output) == (0, "started\n")
    assert processes_with(mark) == []


@pytest.mark.parametrize("level", ALL)
def test_silence_ends_the_whole_tree_and_keeps_partial_output(tmp_path: Path, level: Level) -> None:
    mark = marker()
    result = bash(tmp_path, level, ORPHANS.format(mark=mark) + "sleep 600", {"no_output_seconds": 0.7})
    assert (result.exit_code, result.reason, result.output) == (None, Reason.NO_OUTPUT, "started\n")
    assert "printed nothing for 0.7 s" in result.note
    assert processes_with(mark) == []


@pytest.mark.parametrize("level", ALL)
def test_hard_limit_ends_a_command_that_keeps_talking(tmp_path: Path, level: Level) -> None:
    result = bash(tmp_path, level, "while sleep 0.1; do echo tick; done", {"hard_seconds": 1.0})
    assert (result.exit_code, result.reason) == (None, Reason.HARD_LIMIT)
    assert result.output.startswith("tick\n")


@pytest.mark.parametrize("level", ALL)
def test_cancelled_call_leaves_nothing(tmp_path: Path, level: Level) -> None:
    mark = marker()

    async def work(sandbox: Sandbox) -> None:
        started = asyncio.Event()
        command = ["bash", "-c", ORPHANS.format(mark=mark) + "sleep 600"]
        task = asyncio.create_task(sandbox.run(command, on_output=lambda _: started.set()))
        await asyncio.wait_for(started.wait(), 20)
        assert processes_with(mark)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    with_sandbox(tmp_path, level, work)
    assert processes_with(mark) == []


SERVER = """
import asyncio, sys
from pathlib import Path
from dlite_agent.agent.sandbox import *

async def again(sandbox, script):
    while True:
        await sandbox.run(["bash", "-c", script], on_output=lambda _: print("started", flush=True))

async def main(workspace, level, state, *scripts):
    policy = Policy(Path(workspace), level=level, state_dir=Path(state))
    sandbox = await Sandbox.open(policy)
    await asyncio.gather(*(again(sandbox, script) for script in scripts))

asyncio.run(main(*sys.argv[1:]))
"""


def server(folder: Path, level: Level, *scripts: str) -> subprocess.Popen[bytes]:
    """A process that runs each script in a sandbox, over and over; it says so once the first has begun."""
    command = [sys.executable, "-c", SERVER, str(workspace_in(folder)), str(level), str(folder / "state"), *scripts]
    return subprocess.Popen(command, stdout=subprocess.PIPE, cwd=REPOSITORY)


@pytest.mark.parametrize("level", ALL)
def test_commands_die_with_a_killed_server(tmp_path: Path, level: Level) -> None:
    mark = marker()
    with server(tmp_path, level, ORPHANS.format(mark=mark) + "sleep 600") as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"started\n"
        assert [pid for pid in processes_with(mark) if pid != process.pid]
        process.kill()
        process.wait()
        assert wait_until(lambda: processes_with(mark) == [])


@pytest.mark.parametrize("level", ALL)
def test_no_command_survives_a_server_killed_while_it_starts_more(tmp_path: Path, level: Level) -> None:
    """Several servers at once keep the machine busy, and each dies while some of its commands are only half started."""
    mark = marker()
    scripts = [f": {mark}; echo started; setsid sleep 600 & sleep 0.0{n}" for n in range(1, 5)]
    rng = random.Random(0)
    for _ in range(3):
        with contextlib.ExitStack() as stack:
            processes = [stack.enter_context(server(tmp_path, level, *scripts)) for _ in range(5)]
            for process in processes:
                assert process.stdout is not None
                assert process.stdout.readline() == b"started\n"
            for process in processes:
                time.sleep(rng.uniform(0, 0.1))
                process.kill()
        assert wait_until(lambda: processes_with(mark) == [], 30)


@pytest.mark.parametrize("level", ALL)
def test_a_server_that_died_before_the_sandbox_stood(tmp_path: Path, level: Level) -> None:
    async def work(sandbox: Sandbox) -> None:
        mark = marker()
        lifeline, server = os.pipe()
        status, report = os.pipe()
        script = ["bash", "-c", f": {mark}; sleep 600"]
        line = command_line(level, sandbox.view, QUICK, sandbox.paths.root, report, lifeline, script)
        os.close(server)
        environment = sandbox.environment()
        with subprocess.Popen(line, env=environment, pass_fds=(report, lifeline), start_new_session=True) as process:
            assert process.wait(60) == 128 + signal.SIGKILL
        for descriptor in (lifeline, status, report):
            os.close(descriptor)
        assert processes_with(mark) == []

    with_sandbox(tmp_path, level, work)


@pytest.mark.parametrize("level", CONFINED)
def test_what_watches_over_a_command_is_out_of_its_reach(tmp_path: Path, level: Level) -> None:
    script = "kill -9 $PPID; kill -STOP $PPID; ls /proc/$PPID/fd; cat /proc/$PPID/environ; echo still here"
    result = bash(tmp_path, level, script)
    assert (result.exit_code, result.reason) == (0, Reason.EXIT)
    assert "PATH" not in result.output
    assert "pipe" not in result.output
    assert result.output.endswith("still here\n")


@pytest.mark.parametrize("level", ALL)
def test_fork_bomb_is_ended(tmp_path: Path, level: Level) -> None:
    mark = marker()
    bomb = f"true {mark}; b() {{ b | b & }}; b; sleep 20"
    result = bash(tmp_path, level, bomb, {"processes": 60, "hard_seconds": 15})
    assert result.reason is Reason.PROCESSES
    assert processes_with(mark) == []


@pytest.mark.parametrize("level", CONFINED)
def test_memory_of_one_process_and_of_the_tree(tmp_path: Path, level: Level) -> None:
    limits = replace(QUICK, memory_bytes=200 << 20)
    hog = "python3 -c 'x = bytearray(600 << 20)'"
    herd = "for i in 1 2 3 4; do python3 -c 'x = bytearray(100 << 20); import time; time.sleep(20)' & done; wait"

    async def work(sandbox: Sandbox) -> list[SandboxResult]:
        return await asyncio.gather(*(sandbox.run(["bash", "-c", script], limits=limits) for script in (hog, herd)))

    one, tree = with_sandbox(tmp_path, level, work)
    assert one.exit_code == 1
    assert "MemoryError" in one.output
    assert (tree.exit_code, tree.reason) == (None, Reason.MEMORY)


@pytest.mark.parametrize("level", CONFINED)
def test_file_size_cpu_and_core_limits(tmp_path: Path, level: Level) -> None:
    limits = replace(QUICK, file_bytes=8 << 20, cpu_seconds=1)
    scripts = ("ulimit -c; head -c 1G /dev/zero > big", "while :; do :; done")

    async def work(sandbox: Sandbox) -> list[SandboxResult]:
        return await asyncio.gather(*(sandbox.run(["bash", "-c", script], limits=limits) for script in scripts))

    big, spin = with_sandbox(tmp_path, level, work)
    assert big.exit_code in (1, 128 + signal.SIGXFSZ)
    assert big.output.startswith("0\n")
    assert (tmp_path / "workspace" / "big").stat().st_size == 8 << 20
    assert spin.exit_code in (128 + signal.SIGXCPU, 128 + signal.SIGKILL)


@pytest.mark.parametrize("level", CONFINED)
def test_infinite_output_is_bounded_in_memory_and_on_disk(tmp_path: Path, level: Level) -> None:
    limits = {"output_bytes": 1000, "spool_bytes": 1 << 20}
    result = bash(tmp_path, level, "yes", limits, state_dir=tmp_path / "state")
    assert (result.exit_code, result.reason) == (None, Reason.OUTPUT)
    assert result.elided > 1 << 20
    assert len(result.output) < 1100
    assert result.full_output is not None
    assert result.full_output.stat().st_size == 1 << 20


@pytest.mark.parametrize("level", CONFINED)
def test_odd_bytes_and_no_input(tmp_path: Path, level: Level) -> None:
    result = bash(tmp_path, level, r"printf 'a\xff\xc3(b\n'; cat; read -r line; echo read $?")
    assert result.output == "a\ufffd\ufffd(b\nread 1\n"


@pytest.mark.parametrize("level", CONFINED)
def test_only_the_workspace_can_be_written(tmp_path: Path, level: Level) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "kept").write_text("kept")
    sibling = tmp_path / "workspace-evil"
    sibling.mkdir()
    workspace = workspace_in(tmp_path)
    (workspace / "folder-link").symlink_to(outside)
    (workspace / "file-link").symlink_to(outside / "kept")
    (workspace / "future-link").symlink_to(outside / "future")
    attempts = [
        f"echo x > {outside}/kept",
        "echo x > ../outside/new",
        "echo x > folder-link/new",
        "echo x > file-link",
        "echo x > future-link",
        f"echo x > {sibling}/new",
        f"rm -f {outside}/kept",
        f"mv {outside} gone",
        f"ln {outside}/kept hard && echo x > hard",
        "echo x > /usr/dlite-test",
        "echo x > /etc/dlite-test",
        "echo x > /dlite-test",
        "echo 3 > /proc/sys/kernel/printk",
    ]
    script = "\n".join(f"({attempt}) 2> /dev/null && echo 'worked: {attempt}'" for attempt in attempts)
    result = bash(tmp_path, level, script + "\necho ours > mine; cat mine")
    # In a private /tmp a path of the host can exist anew; what counts is the host's own.
    assert result.output.endswith("ours\n")
    assert (workspace / "mine").read_text() == "ours\n"
    assert [path.name for path in outside.iterdir()] == ["kept"]
    assert (outside / "kept").read_text() == "kept"
    assert list(sibling.iterdir()) == []
    assert not any(Path(name).exists() for name in ("/usr/dlite-test", "/etc/dlite-test", "/dlite-test"))
    assert "printk" not in result.output


@pytest.mark.parametrize("level", CONFINED)
def test_secrets_of_the_server_cannot_be_read(tmp_path: Path, level: Level, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DLITE_TEST_SECRET", "hunter2")
    (tmp_path / "secret").write_text("hunter2")
    (workspace_in(tmp_path) / "link").symlink_to(tmp_path / "secret")
    script = (
        f"env; cat {tmp_path}/secret link /proc/{os.getpid()}/environ /etc/shadow; kill -0 {os.getpid()} && echo seen"
    )
    result = bash(tmp_path, level, script)
    assert "PATH=" in result.output
    assert "hunter2" not in result.output
    assert "root:" not in result.output
    assert "seen" not in result.output


@pytest.mark.parametrize("level", CONFINED)
def test_no_privileges_are_left(tmp_path: Path, level: Level) -> None:
    script = "grep -E 'NoNewPrivs|CapEff|CapPrm' /proc/self/status; umount /proc/sys; mount -t tmpfs none /tmp; exit 0"
    result = bash(tmp_path, level, script)
    facts = dict(line.split(":\t") for line in result.output.splitlines() if ":\t" in line)
    assert facts == {"NoNewPrivs": "1", "CapEff": "0" * 16, "CapPrm": "0" * 16}


NETWORK = """
import socket, sys
port, name = int(sys.argv[1]), sys.argv[2]
def attempt(what, kind, family, address):
    try:
        with socket.socket(family, kind) as client:
            client.settimeout(2)
            client.connect(address)
            client.send(b"hello")
            print(what, "worked")
    except OSError as error:
        print(what, "refused")
attempt("tcp", socket.SOCK_STREAM, socket.AF_INET, ("127.0.0.1", port))
attempt("udp", socket.SOCK_DGRAM, socket.AF_INET, ("127.0.0.1", port))
attempt("abstract", socket.SOCK_STREAM, socket.AF_UNIX, "\\0" + name)
"""


@pytest.mark.parametrize("level", CONFINED)
def test_network_only_by_permission(tmp_path: Path, level: Level) -> None:
    name = marker()
    (workspace_in(tmp_path) / "attempt.py").write_text(NETWORK)
    with (
        socket.create_server(("127.0.0.1", 0)) as tcp,
        socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as udp,
        socket.socket(socket.AF_UNIX) as abstract,
    ):
        port = tcp.getsockname()[1]
        udp.bind(("127.0.0.1", port))
        udp.settimeout(0.1)
        abstract.bind("\0" + name)
        abstract.listen()
        script = f"python3 attempt.py {port} {name}"
        result = bash(tmp_path, level, script)
        assert "tcp refused" in result.output
        assert "abstract refused" in result.output
        # A datagram into an empty network namespace is lost without an error.
        with pytest.raises(TimeoutError):
            udp.recv(16)
        assert "tcp worked" in bash(tmp_path, level, script, network=True).output
        assert udp.recv(16) == b"hello"


@pytest.mark.parametrize("level", PRIVATE)
def test_git_is_protected_unless_told_otherwise(tmp_path: Path, level: Level) -> None:
    git = workspace_in(tmp_path) / ".git"
    git.mkdir()
    (git / "config").write_text("ours")
    script = "echo x > .git/config; rm -rf .git; mv .git away; echo x > .git/hook; echo x > free; cat free"
    assert bash(tmp_path, level, script).output.endswith("x\n")
    assert [path.name for path in git.iterdir()] == ["config"]
    assert (git / "config").read_text() == "ours"
    bash(tmp_path, level, "echo theirs > .git/config", protect_git=False)
    assert (git / "config").read_text() == "theirs\n"


@pytest.mark.parametrize("level", PRIVATE)
def test_home_and_tmp_are_private_and_last_as_long_as_the_sandbox(tmp_path: Path, level: Level) -> None:
    async def work(sandbox: Sandbox) -> str:
        await sandbox.run(["bash", "-c", "echo one > /tmp/a; echo two > ~/b"])
        return (await sandbox.run(["bash", "-c", "cat /tmp/a ~/b; ls /tmp"])).output

    output = with_sandbox(tmp_path, level, work)
    assert output.startswith("one\ntwo\na\n")
    assert not Path("/tmp/a").exists()
    assert bash(tmp_path, level, "cat /tmp/a").exit_code == 1


def test_ladder_names_what_it_refused_and_never_falls_to_plain(tmp_path: Path) -> None:
    """Inside a sandbox the upper rungs are barred for real; what is chosen there says so."""
    program = (
        "import asyncio; from pathlib import Path; from dlite_agent.agent.sandbox import *\n"
        "async def main():\n"
        "    try:\n"
        "        sandbox = await Sandbox.open(Policy(Path('.')))\n"
        "        print(sandbox.level, *sandbox.refused)\n"
        "        print((await sandbox.run(['echo', 'hello'])).output)\n"
        "    except SandboxUnavailable as error:\n"
        "        print('refused', error.message)\n"
        "asyncio.run(main())"
    )

    async def work(sandbox: Sandbox) -> str:
        env = {"PYTHONPATH": str(REPOSITORY)}
        return (await sandbox.run([sys.executable, "-c", program], env=env)).output

    first, *rest = with_sandbox(tmp_path, STRONGEST, work, readable=(REPOSITORY / "dlite_agent",)).splitlines()
    words = first.split()
    if words[0] == "refused":
        assert all(f"{level}: " in first for level in Level if level is not Level.PLAIN)
    else:
        ladder = [str(level) for level in Level]
        assert words[0] != "plain"
        assert words[1:] == ladder[: ladder.index(words[0])]
        assert "hello" in rest


def test_landlock_refuses_what_it_cannot_keep(tmp_path: Path) -> None:
    (workspace_in(tmp_path) / ".git").mkdir()
    with pytest.raises(SandboxUnavailable, match=r"landlock: cannot protect \.git"):
        bash(tmp_path, Level.LANDLOCK, "true")


@pytest.mark.parametrize("level", PRIVATE[:1])
def test_worktree_finds_its_repository_but_cannot_write_it(tmp_path: Path, level: Level) -> None:
    main, linked = tmp_path / "main", tmp_path / "workspace"
    for arguments in (
        ["init", "-q", str(main)],
        ["-C", str(main), "-c", "user.name=A", "-c", "user.email=a@b.c", "commit", "-q", "--allow-empty", "-m", "one"],
        ["-C", str(main), "worktree", "add", "-q", str(linked)],
    ):
        subprocess.run(["git", *arguments], check=True, capture_output=True)
    result = bash(tmp_path, level, "git log --format=%s && git commit -q --allow-empty -m two")
    assert result.output.startswith("one\n")
    assert result.exit_code != 0


def test_linked_git_folder_cannot_be_protected(tmp_path: Path) -> None:
    (workspace_in(tmp_path) / ".git").symlink_to(tmp_path)
    with pytest.raises(InvalidRequest, match="protect_git=False"):
        bash(tmp_path, STRONGEST, "true")


@pytest.mark.parametrize("level", CONFINED)
def test_failing_sandbox_is_no_failing_command(tmp_path: Path, level: Level) -> None:
    missing = bash(tmp_path, level, "exec no-such-program-here")
    assert (missing.exit_code, missing.reason) == (127, Reason.EXIT)

    async def work(sandbox: Sandbox) -> None:
        result = await sandbox.run(["no-such-program-here"])
        assert result.exit_code == 127
        assert "no-such-program-here" in result.output
        with pytest.raises(InvalidRequest, match="cannot be started"):
            await sandbox.run(["echo", "x" * 200_000])
        if sandbox.level.private_view:
            shutil.rmtree(sandbox.scratch / "tmp")
            with pytest.raises(SandboxFailed, match="did not start the command"):
                await sandbox.run(["true"])

    with_sandbox(tmp_path, level, work)


def test_working_folder_stays_in_the_workspace(tmp_path: Path) -> None:
    workspace = workspace_in(tmp_path)
    (workspace / "inside").mkdir()
    (workspace / "link").symlink_to(tmp_path)

    async def work(sandbox: Sandbox) -> None:
        assert (await sandbox.run(["pwd"], cwd="inside")).output == f"{workspace}/inside\n"
        for cwd in ("..", "link", "/etc", str(workspace) + "-evil"):
            with pytest.raises(PathEscape):
                await sandbox.run(["true"], cwd=cwd)
        with pytest.raises(InvalidRequest, match="not a folder"):
            await sandbox.run(["true"], cwd="missing")

    with_sandbox(tmp_path, STRONGEST, work)


@pytest.mark.parametrize(
    ("name", "value"), [("hard_seconds", -1.0), ("memory_bytes", 0), ("no_output_seconds", float("inf"))]
)
def test_senseless_limits_are_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(InvalidRequest) as caught:
        Limits(**{name: value})
    assert caught.value.param == name


def test_sixty_four_commands_at_once(tmp_path: Path) -> None:
    async def work(sandbox: Sandbox) -> None:
        async def one(number: int) -> None:
            script = f"echo {number} > file-{number}; sleep 0.2; seq {number} | tail -n 1"
            result = await sandbox.run(["bash", "-c", script])
            assert (result.exit_code, result.output) == (0, f"{number}\n")

        await asyncio.gather(*(one(number) for number in range(1, 65)))

    with_sandbox(tmp_path, STRONGEST, work)
    assert len(list((tmp_path / "workspace").iterdir())) == 64


def test_descriptors_are_returned(tmp_path: Path) -> None:
    async def work(sandbox: Sandbox) -> None:
        await sandbox.run(["true"])
        before = len(list(Path("/proc/self/fd").iterdir()))
        for command in (["true"], ["no-such-program-here"], ["bash", "-c", "sleep 9 & disown"]):
            await sandbox.run(command)
        assert len(list(Path("/proc/self/fd").iterdir())) == before

    with_sandbox(tmp_path, STRONGEST, work)


def test_temporary_state_is_removed_and_given_state_is_kept(tmp_path: Path) -> None:
    async def main(state: Path | None) -> Path:
        async with await Sandbox.open(Policy(workspace_in(tmp_path), state_dir=state)) as sandbox:
            await sandbox.run(["bash", "-c", "echo kept > ~/note"])
            return sandbox.scratch

    assert not asyncio.run(main(None)).exists()
    assert (asyncio.run(main(tmp_path / "state")) / "home" / "note").read_text() == "kept\n"
