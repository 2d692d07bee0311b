"""The six bundles in `tools/`, run as an agent would, on small workspaces."""

from __future__ import annotations

import asyncio
import resource
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from dlite_agent.agent.bundle_runtime import BundleRuntime, Submission
from dlite_agent.agent.bundles import load_bundles
from dlite_agent.agent.sandbox import Sandbox
from dlite_agent.paths import content_dir
from tests.agent.support import STRONGEST, with_sandbox, workspace_in

TOOLS = load_bundles([content_dir("tools") / name for name in ("files", "edit", "shell", "tests", "git", "submit")])[1]
Call = Callable[..., tuple[int, str]]


def tools_on(folder: Path, **options: Any) -> Call:
    """The tools as programs, without a sandbox around them; one test below has one."""
    search = ":".join(sorted({str(tool.bundle / "bin") for tool in TOOLS.values()}))
    environment = {
        "PATH": f"{search}:/usr/bin:/bin",
        "HOME": str(folder / "home"),
        "DLITE_WORKSPACE": str(workspace_in(folder)),
        "DLITE_PYTHON": sys.executable,
    }

    def call(name: str, **arguments: Any) -> tuple[int, str]:
        command = ["bash", "-c", TOOLS[name].shell_line(arguments)]
        pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "env": environment}
        done = subprocess.run(command, cwd=workspace_in(folder), **pipes, **options)
        return done.returncode, done.stdout.decode()

    return call


def git(folder: Path, *arguments: str) -> str:
    identity = ["-c", "user.name=A", "-c", "user.email=a@example.org", "-c", "init.defaultBranch=main"]
    command = ["git", *identity, *arguments]
    return subprocess.run(command, cwd=folder, check=True, capture_output=True, text=True).stdout


def repository_in(folder: Path) -> Path:
    workspace = workspace_in(folder)
    (workspace / "a.py").write_text("one = 1\ntwo = 2\n")
    git(workspace, "init", "-q")
    git(workspace, "add", ".")
    git(workspace, "commit", "-q", "-m", "first: add a")
    return workspace


def test_files(tmp_path: Path) -> None:
    workspace = workspace_in(tmp_path)
    (workspace / "src" / "deep" / "deeper").mkdir(parents=True)
    (workspace / ".git").mkdir()
    (workspace / ".git" / "needle.py").write_text("needle")
    (workspace / "src" / "long.py").write_text("".join(f"line {number}\n" for number in range(1, 251)))
    (workspace / "src" / "deep" / "needle.py").write_text("x = 'needle'\n" + "y" * 900 + "\n")
    (workspace / "blob").write_bytes(b"\0\1needle")

    call = tools_on(tmp_path)
    code, text = call("view_file", path="src/long.py", start=249)
    assert (code, text) == (0, "[src/long.py: lines 249 to 250 of 250]\n   249  line 249\n   250  line 250\n")
    _, text = call("view_file", path="src/long.py", lines=2)
    assert text.splitlines()[1:] == ["     1  line 1", "     2  line 2", "[248 more lines]"]
    assert call("view_file", path="src/long.py", start=251) == (1, "src/long.py has only 250 lines.\n")
    assert (call("view_file", path="src/long.py", lines=401))[0] == 1
    assert call("view_file", path="blob") == (1, "blob is binary (8 bytes).\n")
    assert call("view_file", path="needle.py") == (
        1,
        "needle.py does not exist. Found: src/deep/needle.py.\n",
    )
    _, text = call("view_file", path=".")
    assert text == "[./: two levels]\nblob\nsrc/\nsrc/deep/\nsrc/long.py\n"
    _, text = call("find_files", pattern="*.py")
    assert text == "src/deep/needle.py\nsrc/long.py\n[2 found]\n"
    assert (call("find_files", pattern="deep/*.py", path="src"))[1] == "src/deep/needle.py\n[1 found]\n"
    _, text = call("grep_files", pattern="needle|y{900}")
    first, second, count = text.splitlines()
    assert first == "src/deep/needle.py:1:x = 'needle'"
    assert second.endswith("y [... 400 more characters]")
    assert count == "[2 matches in 1 files]"
    assert (call("grep_files", pattern="-needle", include="*.txt"))[1] == "[0 matches in 0 files]\n"
    code, text = call("grep_files", pattern="(")
    assert (code, "no regular expression" in text) == (1, True)


def test_edit_shows_the_change_and_undoes_it(tmp_path: Path) -> None:
    workspace = workspace_in(tmp_path)
    source = workspace / "a.py"
    source.write_text("def f():\n    return 1\n")
    source.chmod(0o755)

    call = tools_on(tmp_path)
    code, text = call("replace_text", path="a.py", old="return 1", new="return '$HOME'")
    assert code == 0
    assert text.splitlines()[3:] == [" def f():", "-    return 1", "+    return '$HOME'"]
    code, text = call("insert_text", path="a.py", after=0, text="# top")
    assert (code, source.read_text()) == (0, "# top\ndef f():\n    return '$HOME'\n")
    assert source.stat().st_mode & 0o777 == 0o755
    assert (call("undo_edit", path="a.py"))[0] == 0
    code, text = call("undo_edit", path=str(source))
    assert (code, source.read_text()) == (0, "def f():\n    return 1\n")
    assert "+    return 1" in text
    code, text = call("undo_edit", path="a.py")
    assert (code, text) == (1, "Refused: There is no change to a.py to undo.\n")
    assert (call("create_file", path="new/b.txt", text="x\n"))[0] == 0
    assert (workspace / "new" / "b.txt").read_text() == "x\n"
    assert (call("create_file", path="new/b.txt", text="y"))[0] == 1
    assert (call("undo_edit", path="new/b.txt"))[0] == 0
    assert not (workspace / "new" / "b.txt").exists()


def test_edit_keeps_line_ends_and_foreign_bytes(tmp_path: Path) -> None:
    source = workspace_in(tmp_path) / "dos.txt"
    source.write_bytes(b"one\r\ntwo \xff\x0c\r\nthree")

    call = tools_on(tmp_path)
    assert (call("replace_text", path="dos.txt", old="one\ntwo", new="1\n2"))[0] == 0
    assert (call("insert_text", path="dos.txt", after=3, text="four"))[0] == 0
    assert source.read_bytes() == b"1\r\n2 \xff\x0c\r\nthree\r\nfour\r\n"


@pytest.mark.parametrize(
    ("tool", "arguments", "message"),
    [
        ("replace_text", {"old": "x", "new": "y"}, "2 times in a.py, at lines 1, 3"),
        ("replace_text", {"old": "aa", "new": "b"}, "2 times in a.py, at lines 4, 4"),
        ("replace_text", {"old": "absent", "new": "y"}, "is not in a.py"),
        ("replace_text", {"old": "  y  =  2", "new": "y"}, "Line 2 differs from it only in blanks"),
        ("replace_text", {"old": "", "new": "y"}, "old is empty"),
        ("replace_text", {"old": "y = 2", "new": "y = 2"}, "the same"),
        ("replace_text", {"path": "missing", "old": "x", "new": "y"}, "create_file makes new files"),
        ("insert_text", {"after": 5, "text": "x"}, "after must be 0 to 4"),
        ("insert_text", {"path": "blob", "after": 0, "text": "x"}, "binary"),
        ("insert_text", {"path": "../outside", "after": 0, "text": "x"}, "outside the workspace"),
        ("insert_text", {"path": "link", "after": 0, "text": "x"}, "outside the workspace"),
        ("create_file", {"path": ".git/hooks/pre-commit", "text": "x"}, "inside .git"),
        ("create_file", {"path": "a.py", "text": "x"}, "exists"),
        ("create_file", {"path": "a.py/below", "text": "x"}, "Not a directory"),
    ],
)
def test_edit_refuses(tmp_path: Path, tool: str, arguments: dict[str, Any], message: str) -> None:
    workspace = workspace_in(tmp_path)
    (workspace / "a.py").write_text("x = 1\ny = 2\nx = 1\naaa\n")
    (workspace / "blob").write_bytes(b"\0")
    (tmp_path / "outside").write_text("kept")
    (workspace / "link").symlink_to(tmp_path / "outside")
    code, text = tools_on(tmp_path)(tool, **({"path": "a.py"} | arguments))
    assert (code, message in text) == (1, True)
    assert (workspace / "a.py").read_text() == "x = 1\ny = 2\nx = 1\naaa\n"
    assert (tmp_path / "outside").read_text() == "kept"


def test_undo_does_not_lose_the_work_of_others(tmp_path: Path) -> None:
    workspace_in(tmp_path)

    call = tools_on(tmp_path)
    call("create_file", path="a", text="1")
    call("shell", command="echo 2 >> a")
    code, text = call("undo_edit", path="a")
    assert (code, "changed by something else" in text) == (1, True)


def test_tests_reports_failures_first(tmp_path: Path) -> None:
    workspace = workspace_in(tmp_path)
    (workspace / "test_a.py").write_text(
        "import pytest\n"
        "def test_good(): pass\n"
        "def test_bad():\n    value = 1\n    assert value == 2\n"
        "@pytest.mark.skip\ndef test_later(): pass\n"
    )
    (workspace / "test_broken.py").write_text("import no_such_module\n")
    # The workspace's own environment comes first; this one spares us the plugins of ours.
    python = workspace / ".venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text('#!/bin/sh\nPYTEST_DISABLE_PLUGIN_AUTOLOAD=1 exec "$DLITE_PYTHON" "$@"\n')
    python.chmod(0o755)

    call = tools_on(tmp_path)
    code, text = call("run_tests", target="test_a.py")
    first, _, failed, *trace = text.splitlines()
    assert (code, first) == (1, "1 failed, 1 passed, 1 skipped")
    assert failed.startswith("FAILED test_a::test_bad: ")
    assert any("assert 1 == 2" in line for line in trace)
    code, text = call("run_tests", keyword="good or bad")
    assert code not in (0, None)
    assert "No module named 'no_such_module'" in text


def test_git_looks_and_does_not_touch(tmp_path: Path) -> None:
    workspace = repository_in(tmp_path)
    (workspace / "a.py").write_text("one = 1\ntwo = 3\n")
    (workspace / "new").write_text("x")

    call = tools_on(tmp_path)
    code, text = call("git_status")
    assert (code, text.splitlines()[1:]) == (0, [" M a.py", "?? new"])
    _, text = call("git_diff")
    assert "-two = 2\n+two = 3\n" in text
    assert call("git_diff", path="new") == (0, "")
    _, text = call("git_log", count=5)
    assert text.endswith("A: first: add a\n")
    assert call("git_log", path="new") == (0, "")
    assert (call("git_log", count=0))[0] == 1


def test_git_diff_before_the_first_commit(tmp_path: Path) -> None:
    workspace = workspace_in(tmp_path)
    git(workspace, "init", "-q")
    (workspace / "new").write_text("x\n")
    git(workspace, "add", "new")

    call = tools_on(tmp_path)
    code, text = call("git_diff")
    assert (code, "+x" in text) == (0, True)
    assert (call("submit", answer="done"))[0] == 0
    assert "+x" in (tmp_path / "home" / ".dlite" / "submission" / "patch").read_text()


def test_submit_makes_a_patch_that_applies(tmp_path: Path) -> None:
    workspace = repository_in(tmp_path)
    (workspace / "a.py").write_text("one = 1\ntwo = 3\n")
    (workspace / "new").mkdir()
    (workspace / "new" / "blob").write_bytes(bytes(range(256)))
    (workspace / ".gitignore").write_text("ignored\n")
    (workspace / "ignored").write_text("x")
    (workspace / "huge").write_text("".join(f"line {number}\n" for number in range(100_000)))
    before = git(workspace, "status", "--porcelain")

    call = tools_on(tmp_path)
    code, text = call("submit", answer='It\'s "done".\n$HOME')
    assert code == 0
    assert "Submitted: answer of 18 characters" in text
    submission = tmp_path / "home" / ".dlite" / "submission"
    assert (submission / "answer").read_text() == 'It\'s "done".\n$HOME'
    assert git(workspace, "status", "--porcelain") == before
    git(tmp_path, "clone", "-q", str(workspace), "clone")
    git(tmp_path / "clone", "apply", str(submission / "patch"))
    for name in ("a.py", "new/blob", "huge"):
        assert (tmp_path / "clone" / name).read_bytes() == (workspace / name).read_bytes()
    assert not (tmp_path / "clone" / "ignored").exists()


def test_submit_without_a_repository(tmp_path: Path) -> None:
    call = tools_on(tmp_path)
    code, text = call("submit", answer="42")
    assert (code, "no git repository" in text) == (0, True)
    submission = tmp_path / "home" / ".dlite" / "submission"
    assert (submission / "patch").read_bytes() == b""


def test_a_whole_task_in_the_sandbox(tmp_path: Path) -> None:
    workspace = repository_in(tmp_path)
    (workspace / "check").write_text("grep -q 'two = 3' a.py\n")

    async def work(sandbox: Sandbox) -> Submission | None:
        folders = [tool.bundle for tool in TOOLS.values()]
        runtime = await BundleRuntime.open(sandbox, list(dict.fromkeys(folders)))

        async def call(name: str, **arguments: Any) -> tuple[int | None, str]:
            outcome = await runtime.call(name, arguments)
            return outcome.exit_code, outcome.output

        assert (await call("grep_files", pattern="two"))[1].startswith("a.py:2:two = 2\n")
        assert (await call("shell", command="sh check"))[0] == 1
        assert (await call("replace_text", path="a.py", old="two = 2", new="two = 3"))[0] == 0
        assert (await call("shell", command="sh check"))[0] == 0
        looked = await asyncio.gather(call("git_status"), call("git_diff"), call("view_file", path="a.py"))
        assert [code for code, _ in looked] == [0, 0, 0]
        assert (await call("shell", command="git commit -qam mine"))[0] != 0
        assert (await call("submit", answer="two is 3 now"))[0] == 0
        return runtime.submission()

    submission = with_sandbox(tmp_path, STRONGEST, work)
    assert submission.answer == "two is 3 now"
    assert "+two = 3" in submission.patch
    assert git(workspace, "log", "--format=%s") == "first: add a\n"


def test_edits_of_one_file_at_the_same_time_are_all_kept(tmp_path: Path) -> None:
    """A model may change a file twice in one turn, and calls of a turn run together."""
    workspace = workspace_in(tmp_path)
    (workspace / "a.txt").write_text("".join(f"line {number:02}\n" for number in range(12)))
    call = tools_on(tmp_path)

    def change(number: int) -> int:
        return call("replace_text", path="a.txt", old=f"line {number:02}\n", new=f"changed {number:02}\n")[0]

    with ThreadPoolExecutor(12) as pool:
        assert set(pool.map(change, range(12))) == {0}
    assert (workspace / "a.txt").read_text() == "".join(f"changed {number:02}\n" for number in range(12))


def test_a_file_of_one_gigabyte_is_looked_at_in_little_memory(tmp_path: Path) -> None:
    big = workspace_in(tmp_path) / "big.log"
    with big.open("wb") as file:
        file.write(b"needle here\n" * 400)
        file.truncate(1 << 30)
        file.seek(0, 2)
        file.write(b"\nlast needle\n")
    limit = (256 << 20, 256 << 20)
    call = tools_on(tmp_path, preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_DATA, limit))
    _, text = call("view_file", path="big.log", start=400)
    assert text.splitlines()[1:3] == ["   400  needle here", f"   401  {chr(0) * 500} [... 1048076 more characters]"]
    code, text = call("grep_files", pattern="^last")
    assert (code, text) == (0, "big.log:402:last needle\n[1 matches in 1 files]\n")
