"""MCP servers over stdio: real ones, small ones, and ones that misbehave."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Coroutine
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dlite_agent.agent.mcp_bundle import McpBundle, McpError, McpServer
from dlite_agent.errors import InvalidRequest, NotFound
from tests.agent.support import marker, processes_with, wait_until

SERVER = '''
import asyncio
import os
import sys

from mcp.server.mcpserver import MCPServer

server = MCPServer("small")


@server.tool()
def shout(text: str, times: int = 1) -> str:
    """Repeat a text in capitals."""
    return text.upper() * times


@server.tool()
def fail() -> str:
    """Always fail."""
    raise ValueError("no luck today")


@server.tool()
async def sleep() -> str:
    """Take long."""
    await asyncio.sleep(60)
    return "awake"


@server.tool()
def secret() -> str:
    """Look at the environment."""
    return str(os.environ.get("DLITE_TEST_SECRET")) + str(os.environ.get("GIVEN"))


@server.tool()
def leave() -> str:
    """End the server."""
    os._exit(3)


server.run("stdio")
'''


def with_server(folder: Path, work: Callable[[McpBundle], Coroutine[Any, Any, None]], **settings: Any) -> str:
    """Run `work` with the small server; returns a mark in its command line."""
    mark = marker()
    (folder / "server.py").write_text(SERVER)

    async def main() -> None:
        command = [sys.executable, str(folder / "server.py"), mark]
        async with await McpBundle.open(McpServer("small", command, **settings)) as bundle:
            await work(bundle)

    asyncio.run(main())
    return mark


def test_life_of_a_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DLITE_TEST_SECRET", "hunter2")

    async def work(bundle: McpBundle) -> None:
        schemas = {schema["function"]["name"]: schema["function"] for schema in bundle.schemas()}
        assert list(schemas) == ["fail", "leave", "secret", "shout", "sleep"]
        assert schemas["shout"]["description"] == "Repeat a text in capitals."
        assert schemas["shout"]["parameters"]["required"] == ["text"]
        shouted = await bundle.call("shout", {"text": "abc", "times": 2})
        assert (shouted.output, shouted.exit_code, shouted.level) == ("ABCABC", 0, "mcp")
        assert shouted.started < shouted.ended
        failed = await bundle.call("fail", {})
        assert (failed.exit_code, "fail" in failed.output) == (1, True)
        wrong = await bundle.call("shout", {"times": "many"})
        assert wrong.exit_code == 1
        assert (await bundle.call("secret", {})).output == "Nonegiven"
        outcomes = await asyncio.gather(*(bundle.call("shout", {"text": f"a{number}"}) for number in range(16)))
        assert [outcome.output for outcome in outcomes] == [f"A{number}" for number in range(16)]
        with pytest.raises(NotFound):
            await bundle.call("whisper", {})
        bundle.server = replace(bundle.server, call_seconds=0.5)
        slow = await bundle.call("sleep", {})
        assert (slow.exit_code, slow.reason) == (None, "hard_limit")
        bundle.server = replace(bundle.server, call_seconds=30.0)
        long = await bundle.call("shout", {"text": "ab", "times": 50_000})
        assert (long.elided, len(long.output) < 1100) == (99_000, True)
        assert long.full_output is not None
        assert long.full_output.stat().st_size == 100_000
        with pytest.raises(McpError, match="broke off during leave"):
            await bundle.call("leave", {})
        with pytest.raises(McpError, match="is not running"):
            await bundle.call("shout", {"text": "a"})

    mark = with_server(tmp_path, work, env={"GIVEN": "given"}, call_seconds=30.0, output_bytes=1000)
    assert wait_until(lambda: processes_with(mark) == [])


@pytest.mark.parametrize(
    ("command", "seconds", "message"),
    [
        (["no-such-mcp-server"], 30.0, "did not start"),
        (["python3", "-c", "import sys; sys.exit('out of luck')"], 30.0, "did not start.*out of luck"),
        (["sleep", "60"], 1.0, "did not answer"),
    ],
)
def test_server_that_does_not_start(command: list[str], seconds: float, message: str) -> None:
    with pytest.raises(McpError, match=message):
        asyncio.run(McpBundle.open(McpServer("bad", command, start_seconds=seconds)))


def test_server_needs_a_command() -> None:
    async def main() -> None:
        await McpBundle.open(McpServer("empty", []))

    with pytest.raises(InvalidRequest, match="no command"):
        asyncio.run(main())
