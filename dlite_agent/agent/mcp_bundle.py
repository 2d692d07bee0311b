"""MCP servers as bundles: started over stdio, their tools listed in name order and called like any other.

A server is a program the operator names; it runs outside the sandbox, with the few variables the `mcp` package passes
on and those the operator adds. Its outcomes carry the level `mcp`, so that nobody takes them for confined.
"""

from __future__ import annotations

import asyncio
import json
import re
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import mcp
from mcp_types import CONNECTION_CLOSED, CallToolResult, TextContent
from mcp_types import Tool as ServerTool

from dlite_agent.agent.bundles import ToolOutcome
from dlite_agent.agent.sandbox_output import BoundedOutput
from dlite_agent.errors import DliteError, InvalidRequest, NotFound

LEVEL = "mcp"
_TOOL_NAME = re.compile(r"[a-zA-Z0-9_-]{1,64}")
_CLOSE_SECONDS = 10.0


class McpError(DliteError):
    """An MCP server could not be started, or broke off."""

    status = 502
    code = "mcp_error"


@dataclass(frozen=True, slots=True)
class McpServer:
    """How to start a server, and what to allow it.

    Args:
        name: for messages.
        command: program and arguments.
        start_seconds, call_seconds: longest wait for the handshake, and for one call.
        output_bytes: of one result given to the model; the rest is elided in the middle.
    """

    name: str
    command: Sequence[str]
    env: Mapping[str, str] = field(default_factory=dict)
    cwd: Path | None = None
    start_seconds: float = 30.0
    call_seconds: float = 120.0
    output_bytes: int = 20_000


class McpBundle:
    """The tools of one running server; made by `open`, ended by `close`."""

    def __init__(self, server: McpServer) -> None:
        if not server.command:
            raise InvalidRequest(f"The MCP server {server.name} has no command.", param="command")
        self.server = server
        self.tools: dict[str, ServerTool] = {}
        self._client: mcp.Client | None = None
        self._ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._closing = asyncio.Event()
        self._owner: asyncio.Task[None] | None = None
        self._folder = tempfile.TemporaryDirectory(prefix="dlite-mcp-")
        self._calls = 0

    @classmethod
    async def open(cls, server: McpServer) -> McpBundle:
        """Start the server, shake hands and list its tools. Raises McpError."""
        bundle = cls(server)
        # The client's scopes must be left by the task that entered them, whoever calls close.
        bundle._owner = asyncio.create_task(bundle._own(), name=f"mcp:{server.name}")
        try:
            async with asyncio.timeout(server.start_seconds):
                await asyncio.shield(bundle._ready)
        except BaseException as error:
            bundle._owner.cancel()
            await bundle.close()
            if isinstance(error, TimeoutError):
                raise McpError(f"The MCP server {server.name} did not answer in {server.start_seconds:g} s.") from error
            raise
        return bundle

    async def __aenter__(self) -> McpBundle:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """End the server; may be called again."""
        self._closing.set()
        if self._owner is not None:
            done, _ = await asyncio.wait({self._owner}, timeout=_CLOSE_SECONDS)
            if not done:
                self._owner.cancel()
                await asyncio.wait({self._owner})
        self._folder.cleanup()

    def schemas(self) -> list[dict[str, Any]]:
        """Function schemas in name order."""
        return [
            {
                "type": "function",
                "function": {
                    "name": name,
                    "description": (tool.description or tool.title or "").strip(),
                    "parameters": tool.input_schema,
                },
            }
            for name, tool in self.tools.items()
        ]

    async def call(self, name: str, arguments: Mapping[str, Any]) -> ToolOutcome:
        """Call a tool; an error the tool itself reports is an outcome with exit code 1.

        Raises:
            NotFound: the server has no such tool.
            McpError: the server is gone or broke the protocol.
        """
        if name not in self.tools:
            raise NotFound(f"The MCP server {self.server.name} has no tool {name}.", param="name")
        if self._client is None:
            raise McpError(f"The MCP server {self.server.name} is not running.")
        started = time.monotonic()
        try:
            async with asyncio.timeout(self.server.call_seconds):
                result = await self._client.call_tool(name, dict(arguments))
        except TimeoutError:
            text = f"No answer in {self.server.call_seconds:g} s."
            return ToolOutcome(name, text, None, "hard_limit", LEVEL, started, time.monotonic())
        except mcp.MCPError as error:
            if error.code != CONNECTION_CLOSED:
                return ToolOutcome(name, str(error), 1, "exit", LEVEL, started, time.monotonic())
            # A later call would wait in vain.
            self._client = None
            raise McpError(f"The MCP server {self.server.name} broke off during {name}.") from error
        ended = time.monotonic()
        self._calls += 1
        output = BoundedOutput(
            self.server.output_bytes, Path(self._folder.name) / f"{self._calls}.txt", spool_limit=64 << 20
        )
        output.write(_text(result).encode("utf-8", "replace"))
        output.close()
        return ToolOutcome(
            tool=name,
            output=output.text(),
            exit_code=1 if result.is_error else 0,
            reason="exit",
            level=LEVEL,
            started=started,
            ended=ended,
            elided=output.elided,
            full_output=output.full_path,
        )

    async def _own(self) -> None:
        program, *rest = self.server.command
        parameters = mcp.StdioServerParameters(
            command=program, args=list(rest), env=dict(self.server.env), cwd=self.server.cwd
        )
        with tempfile.TemporaryFile(mode="w+", errors="replace") as log:
            try:
                async with mcp.Client(mcp.stdio_client(parameters, errlog=log)) as client:
                    self.tools = await self._list(client)
                    self._client = client
                    self._ready.set_result(None)
                    await self._closing.wait()
                    self._client = None
            except Exception as error:
                self._client = None
                if not self._ready.done():
                    said = _tail(log)
                    message = f"The MCP server {self.server.name} did not start: {_root_cause(error)}. {said}".strip()
                    self._ready.set_exception(McpError(message, param="command"))

    async def _list(self, client: mcp.Client) -> dict[str, ServerTool]:
        listed: dict[str, ServerTool] = {}
        cursor: str | None = None
        while True:
            page = await client.list_tools(cursor=cursor)
            for tool in page.tools:
                if tool.name in listed or not _TOOL_NAME.fullmatch(tool.name):
                    raise McpError(f"the tool name {tool.name!r} is used twice or is no valid name")
                listed[tool.name] = tool
            cursor = page.next_cursor
            if cursor is None:
                return {name: listed[name] for name in sorted(listed)}


def _text(result: CallToolResult) -> str:
    """Text parts as they are, others by name; the structured content only if there is nothing else."""
    parts = [part.text if isinstance(part, TextContent) else f"[{part.type}]" for part in result.content]
    if not parts and result.structured_content is not None:
        parts = [json.dumps(result.structured_content, ensure_ascii=False)]
    return "\n".join(parts)


def _tail(log: IO[str]) -> str:
    log.seek(0)
    return log.read()[-1000:].strip()


def _root_cause(error: BaseException) -> BaseException:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
