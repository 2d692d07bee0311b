"""`dlite-agent run`: a task worked on by the loop, in this process or on a server, and watched live."""

from __future__ import annotations

import asyncio
import contextlib
import json
import shlex
import sys
import tempfile
from collections.abc import AsyncGenerator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dlite_agent.config import DEFAULT_TARGET_NAME, ModelSettings, Settings
from dlite_agent.errors import DliteError, InvalidRequest
from dlite_agent.options import Device, DrafterOption, Dtype, Target, Threads

if TYPE_CHECKING:
    from dlite_agent.agent.runs import RunsSettings

Event = tuple[str, dict[str, Any]]


def run(
    task: Annotated[str | None, typer.Option(help="What to do; without it, an interrupted run goes on.")] = None,
    repo: Annotated[Path | None, typer.Option(help="The workspace: the one folder the tools may write.")] = None,
    data_dir: Annotated[Path | None, typer.Option(help="Keeps journal, event log and sessions.")] = None,
    max_turns: Annotated[int, typer.Option(help="Turns until the run ends.")] = 50,
    bundle: Annotated[list[str] | None, typer.Option(help="Tool bundles by name; all that ship by default.")] = None,
    bundles_dir: Annotated[list[Path] | None, typer.Option(help="A folder of further bundles.")] = None,
    mcp: Annotated[list[str] | None, typer.Option(help="Command of an MCP server (stdio) whose tools to add.")] = None,
    plan: Annotated[list[str] | None, typer.Option(help="Tool that the next of the first turns must call.")] = None,
    tool_choice: Annotated[str, typer.Option(help="required (every turn calls) or auto.")] = "required",
    parallel: Annotated[bool, typer.Option(help="Allow several calls in a turn.")] = True,
    max_tokens: Annotated[int | None, typer.Option(help="Tokens of one turn.")] = None,
    argument_characters: Annotated[int | None, typer.Option(help="Longest string in a call.")] = None,
    temperature: float = 0.0,
    seed: int | None = None,
    sandbox: Annotated[str, typer.Option(help="auto, bubblewrap, unshare, landlock or plain (none).")] = "auto",
    protect_git: Annotated[bool, typer.Option(help="Keep the repository's .git read-only for the tools.")] = True,
    server: Annotated[str | None, typer.Option(help="URL of a server to run on; --repo is then a path there.")] = None,
    api_key: Annotated[str | None, typer.Option(envvar="DLITE_API_KEY", help="For --server.")] = None,
    target: Target = DEFAULT_TARGET_NAME,
    drafter: DrafterOption = "auto",
    dtype: Dtype = "auto",
    device: Device = "auto",
    threads: Threads = None,
) -> None:
    """Work on a task in a repository until it is done or a limit is reached, with tools in a sandbox."""
    from dlite_agent.agent.mcp_bundle import McpServer
    from dlite_agent.agent.run_spec import BUNDLES, SMALL_MODEL, SMALL_OUTPUT
    from dlite_agent.agent.runs import RunsSettings

    if (task is None) != (repo is None):
        raise InvalidRequest("give --task together with --repo", param="repo")
    if task is None and (server is not None or data_dir is None):
        raise InvalidRequest("without --task, give the --data-dir of an interrupted run", param="task")
    small = target == DEFAULT_TARGET_NAME
    model: dict[str, Any] = dict(SMALL_MODEL) if small else {}
    asked = {"max_tokens": max_tokens, "argument_characters": argument_characters, "seed": seed}
    model |= {name: value for name, value in asked.items() if value is not None}
    model |= {"temperature": temperature, "tool_choice": tool_choice, "parallel_tool_calls": parallel}
    model["plan"] = plan or []
    limits: dict[str, Any] = {"turns": max_turns} | ({"output_bytes": SMALL_OUTPUT} if small else {})
    body: dict[str, Any] | None = None
    if task is not None and repo is not None:
        workspace = str(repo) if server else str(repo.resolve())
        body = {"task": task, "workspace": workspace, "bundles": bundle or list(BUNDLES), "model": model}
        body |= {"limits": limits, "sandbox": sandbox, "protect_git": protect_git}
    if server is not None:
        assert body is not None
        if mcp or bundles_dir:
            raise InvalidRequest("--mcp and --bundles-dir are for runs in this process", param="server")
        events = _remote(server.rstrip("/"), api_key, body)
    else:
        settings = Settings(
            model=ModelSettings(target=target, drafter=drafter, dtype=dtype, device=device, threads=threads),
            data_dir=data_dir,
        )
        servers = tuple(McpServer(f"mcp-{i}", shlex.split(line)) for i, line in enumerate(mcp or (), 1))
        events = _local(settings, body, RunsSettings(_roots(repo), tuple(bundles_dir or ()), servers))
    try:
        end = asyncio.run(_watch(events))
    except KeyboardInterrupt:
        kept = f"; go on with: dlite-agent run --data-dir {data_dir}" if data_dir and not server else ""
        print(f"interrupted{kept}", file=sys.stderr)
        raise typer.Exit(130) from None
    if end not in ("submitted", "answered"):
        raise typer.Exit(2)


async def _watch(events: AsyncGenerator[Event, None]) -> str:
    """Show a run to its end; its state."""
    from rich.console import Console
    from rich.live import Live

    from dlite_agent.cli_run_view import RunView

    console = Console(highlight=False)
    live = console.is_terminal
    view = RunView(None if live else lambda line: print(line, flush=True))
    with contextlib.ExitStack() as stack:
        if live:
            stack.enter_context(Live(get_renderable=view.render, console=console, refresh_per_second=8))
        async with contextlib.aclosing(events):
            async for kind, data in events:
                view.feed(kind, data)
    about = view.card
    used = f"{about['turns']} turns, {about['tool_calls']} calls, {about['tokens']} tokens"
    print(f"{about['state']}: {used}, {about['seconds']:.1f} s, of which tools {about['tool_seconds']:.1f} s")
    for name in ("error", "answer", "patch"):
        if about.get(name):
            print(f"{name}:\n{about[name]}")
    return str(about["state"])


def _roots(repo: Path | None) -> tuple[Path, ...]:
    """Where the run may work; one that goes on keeps the workspace it had."""
    return (Path("/"),) if repo is None else (repo.resolve(),)


async def _local(settings: Settings, body: dict[str, Any] | None, agents: RunsSettings) -> AsyncGenerator[Event, None]:
    """A run in this process, on an engine of its own."""
    from pydantic import ValidationError

    from dlite_agent.agent.run_spec import RunSpec
    from dlite_agent.api.app import build_app
    from dlite_agent.api.problems import from_pydantic
    from dlite_agent.api.runs import card, follow

    try:
        spec = None if body is None else RunSpec.model_validate(body)
    except ValidationError as error:
        raise from_pydantic(error) from error
    allowed = replace(agents, allow_plain=spec is not None and spec.sandbox == "plain")
    with tempfile.TemporaryDirectory() as folder:
        if settings.data_dir is None:
            settings = replace(settings, data_dir=Path(folder))
        app = build_app(settings, allowed)
        async with app.router.lifespan_context(app):
            runs = app.state.runs
            if spec is not None:
                chosen = await runs.start(spec, "")
            else:
                working = [one for one in runs.list("") if not one.at_rest]
                if not working:
                    raise InvalidRequest(f"{settings.data_dir} holds no interrupted run", param="data_dir")
                chosen = working[0]
            async for kind, data, _ in follow(chosen, 0, settings.server.keepalive_seconds):
                yield kind, data
            yield "state", card(chosen)


async def _remote(url: str, key: str | None, body: dict[str, Any]) -> AsyncGenerator[Event, None]:
    """A run on a server."""
    import httpx

    headers = {} if key is None else {"authorization": f"Bearer {key}"}
    async with httpx.AsyncClient(base_url=url, headers=headers, timeout=httpx.Timeout(60, read=None)) as client:
        answer = await client.post("/v1/agents/runs", json=body)
        if answer.is_error:
            raise _refusal(answer.text)
        path = f"/v1/agents/runs/{answer.json()['id']}"
        async with client.stream("GET", f"{path}/events") as stream:
            kind = ""
            async for line in stream.aiter_lines():
                name, _, value = line.partition(": ")
                if name == "event":
                    kind = value
                elif name == "data":
                    yield kind, json.loads(value)
        yield "state", (await client.get(path)).json()


def _refusal(text: str) -> DliteError:
    try:
        error = json.loads(text)["error"]
        return InvalidRequest(error["message"], param=error.get("param"))
    except (ValueError, KeyError, TypeError):
        return DliteError(f"The server answered: {text[:300]}")
