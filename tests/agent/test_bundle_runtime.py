"""Bundles in a sandbox: an unmodified one of SWE-agent's shape, what persists between calls, and what does not."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from dlite_agent.agent.bundle_runtime import BundleRuntime, Submission
from dlite_agent.agent.bundles import BundleError
from dlite_agent.agent.sandbox import Level, Sandbox
from dlite_agent.errors import InvalidRequest, NotFound
from dlite_agent.paths import content_dir
from tests.agent.support import CONFINED, PRIVATE, STRONGEST, with_sandbox, workspace_in

NOTEBOOK = Path(__file__).parent / "bundles" / "notebook"
HAND_IN = NOTEBOOK.parent / "hand_in"
SHELL = content_dir("tools") / "shell"


@pytest.mark.parametrize("level", PRIVATE)
def test_unmodified_bundle_of_swe_agents_shape_runs(tmp_path: Path, level: Level) -> None:
    before = {path: path.read_bytes() for path in NOTEBOOK.rglob("*") if path.is_file()}

    async def work(sandbox: Sandbox) -> None:
        runtime = await BundleRuntime.open(sandbox, [NOTEBOOK])
        assert [schema["function"]["name"] for schema in runtime.schemas()] == ["open_note", "tag_note", "write_note"]
        opened = await runtime.call("open_note", {"name": "my note", "line": 4})
        assert (opened.exit_code, opened.output) == (0, "arguments: ['my note', '4']\n")
        assert opened.level == str(level)
        # The state command ran after the call, on its own time.
        assert opened.state == {"working_dir": str(sandbox.paths.root), "name": "my note", "line": 4}
        assert opened.state_seconds > 0
        written = await runtime.call("write_note", {"name": "my note", "body": "one\n$(two)"})
        assert written.output.strip() == "2"
        assert (sandbox.paths.root / "my note").read_text() == "one\n$(two)\n"
        tagged = await runtime.call("tag_note", {"name": "n", "mode": "drop", "tags": ["a b", "c"]})
        assert tagged.output.splitlines()[0] == "<n><--mode><drop><--tags><a b><c>"

    with_sandbox(tmp_path, level, work)
    assert {path: path.read_bytes() for path in NOTEBOOK.rglob("*") if path.is_file()} == before


def test_exports_and_functions_of_the_installer_are_there_in_each_call(tmp_path: Path) -> None:
    async def work(sandbox: Sandbox) -> None:
        runtime = await BundleRuntime.open(sandbox, [NOTEBOOK, SHELL])
        for _ in range(2):
            outcome = await runtime.call("shell", {"command": 'echo "$NOTEBOOK_GREETING"; unset NOTEBOOK_GREETING'})
            assert outcome.output == "two\nlines; with 'quotes'\n"

    with_sandbox(tmp_path, STRONGEST, work)


@pytest.mark.parametrize("level", CONFINED)
def test_shell_keeps_the_folder_and_nothing_else(tmp_path: Path, level: Level) -> None:
    (workspace_in(tmp_path) / "deep" / "er").mkdir(parents=True)

    async def work(sandbox: Sandbox) -> None:
        runtime = await BundleRuntime.open(sandbox, [SHELL])

        async def shell(command: str) -> str:
            return (await runtime.call("shell", {"command": command})).output

        root = sandbox.paths.root
        assert await shell("cd deep && export LEFT=over && false; pwd") == f"{root}/deep\n"
        assert await shell('pwd; echo "[$LEFT]"; cd er') == f"{root}/deep\n[]\n"
        assert runtime.cwd == root / "deep" / "er"
        # Outside the workspace there is no staying.
        assert await shell("cd /usr; pwd") == "/usr\n"
        assert await shell("pwd; cd ..; rmdir er") == f"{root}/deep/er\n"
        assert (await runtime.call("shell", {"command": "exit 9"})).exit_code == 9
        await shell("cd ..; rmdir deep")
        assert await shell("pwd") == f"{root}\n"
        failed = await runtime.call("shell", {"command": "echo 'unclosed"})
        assert failed.exit_code not in (0, None)

    with_sandbox(tmp_path, level, work)


@pytest.mark.parametrize("level", CONFINED)
@pytest.mark.parametrize("lines", [0, 1, 40_000])
def test_what_swe_agents_submit_prints_is_the_submission(tmp_path: Path, level: Level, lines: int) -> None:
    root = workspace_in(tmp_path)
    patch = "".join(f"+line {i} <<SWE_AGENT_SUBMISSION>> of the patch\n" for i in range(lines))
    (root / "patch").write_text(patch)

    async def work(sandbox: Sandbox) -> None:
        runtime = await BundleRuntime.open(sandbox, [HAND_IN])
        assert runtime.submission() is None
        asked = await runtime.call("submit", {})
        assert asked.output == "Look at it once more.\n"
        assert runtime.submission() is None
        done = await runtime.call("submit", {})
        assert done.exit_code == 0
        assert (done.elided > 0) == (lines > 1)
        assert runtime.submission() == Submission("", patch)
        await runtime.call("submit", {})
        assert runtime.submission() == Submission("", patch), "a failed one leaves the last as it was"

    with_sandbox(tmp_path, level, work, protect_git=False)


def test_links_planted_in_the_home_do_not_lead_the_server_out(tmp_path: Path) -> None:
    """Commands own their home; what the server writes and reads there must not follow them elsewhere."""
    victim = tmp_path / "victim"
    victim.write_text("kept")

    async def work(sandbox: Sandbox) -> None:
        runtime = await BundleRuntime.open(sandbox, [SHELL])
        plant = f"for n in $(seq 0 40); do ln -sf {victim} ~/.dlite/call-$n; ln -sf {victim} ~/.dlite/cwd-$n; done"
        await runtime.call("shell", {"command": plant})
        for _ in range(3):
            assert (await runtime.call("shell", {"command": "echo fine"})).output == "fine\n"
        assert victim.read_text() == "kept"

    with_sandbox(tmp_path, STRONGEST, work)


def test_parallel_calls_and_long_arguments(tmp_path: Path) -> None:
    async def work(sandbox: Sandbox) -> None:
        runtime = await BundleRuntime.open(sandbox, [SHELL])
        commands = [f"echo {number}; : {'x' * 100_000}" for number in range(8)]
        outcomes = await asyncio.gather(*(runtime.call("shell", {"command": command}) for command in commands))
        assert [outcome.output for outcome in outcomes] == [f"{number}\n" for number in range(8)]

    with_sandbox(tmp_path, STRONGEST, work)


def test_unknown_tool_and_wrong_arguments(tmp_path: Path) -> None:
    async def work(sandbox: Sandbox) -> None:
        runtime = await BundleRuntime.open(sandbox, [SHELL])
        with pytest.raises(NotFound, match="there are shell"):
            await runtime.call("bash", {"command": "true"})
        with pytest.raises(InvalidRequest, match="needs the argument command"):
            await runtime.call("shell", {})
        assert runtime.submission() is None

    with_sandbox(tmp_path, STRONGEST, work)


@pytest.mark.parametrize(
    ("installer", "message"),
    [("echo no luck; false", "no luck"), ("exit 3", "installing failed"), (":", "no_such_program is not found")],
)
def test_installation_that_fails_says_so(tmp_path: Path, installer: str, message: str) -> None:
    bundle = tmp_path / "bundle"
    bundle.mkdir()
    (bundle / "config.yaml").write_text("tools:\n  no_such_program: {}\n")
    (bundle / "install.sh").write_text(installer)

    async def work(sandbox: Sandbox) -> None:
        with pytest.raises(BundleError, match=message) as caught:
            await BundleRuntime.open(sandbox, [bundle])
        assert caught.value.param is not None
        assert caught.value.param.startswith(str(bundle))

    with_sandbox(tmp_path, STRONGEST, work)
