"""The one command, `dlite-agent`: it parses, calls, and prints."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Annotated, Any, get_args

import typer
from rich.console import Console
from rich.table import Table

from dlite_agent.cli_bench import bench_app
from dlite_agent.cli_run import run as run_task
from dlite_agent.cli_sessions import sessions_app
from dlite_agent.cli_trace import convert, replay, report
from dlite_agent.cli_train import train_app
from dlite_agent.cli_watch import watch
from dlite_agent.config import Mode
from dlite_agent.errors import DliteError, InvalidRequest
from dlite_agent.options import Device, DrafterOption, Dtype, GroupSize, Target, Threads, Window

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)
model_app = typer.Typer(no_args_is_help=True, help="The target and its drafters.")
app.command("run")(run_task)
app.add_typer(model_app, name="model")
app.add_typer(bench_app, name="bench")
app.add_typer(sessions_app, name="sessions")
app.add_typer(train_app, name="train")
app.command("watch")(watch)
app.command("report")(report)
app.command("convert")(convert)
app.command("replay")(replay)


def main() -> None:
    """Run the command; a typed error becomes one line on stderr and exit code 1."""
    try:
        app()
    except DliteError as error:
        field = f" [{error.param}]" if error.param else ""
        print(f"dlite-agent: {error.message}{field}", file=sys.stderr)
        sys.exit(1)


@model_app.command("pull")
def model_pull() -> None:
    """Fetch the default target and cache it dense; later starts map it into memory."""
    from dlite_agent.model.weights import pull_default

    print(pull_default())


@model_app.command("info")
def model_info(target: Target = "smollm2-135m") -> None:
    """Architecture, size, fingerprint, measured precision and the drafter that fits."""
    from dlite_agent.decode.load import describe
    from dlite_agent.model.catalog import fitting_drafter

    about = describe(target)
    fitting = fitting_drafter(about["fingerprint"])
    table = Table(show_header=False)
    for name, value in about.items():
        table.add_row(name, str(value))
    table.add_row("drafter", "none shipped" if fitting is None else f"{fitting.name} (tau {fitting.card.get('tau')})")
    Console().print(table)


@app.command()
def generate(
    prompt: Annotated[str | None, typer.Option(help="A user message.")] = None,
    messages: Annotated[Path | None, typer.Option(help="JSON file with a list of messages.")] = None,
    mode: Annotated[str, typer.Option(help="ar, dlite, suffix or mixed.")] = "dlite",
    max_new_tokens: int = 256,
    temperature: float = 0.0,
    top_p: float = 1.0,
    seed: int | None = None,
    verification: Annotated[str, typer.Option(help="match or rejection.")] = "match",
    verify_window: Window = None,
    target: Target = "smollm2-135m",
    drafter: DrafterOption = "auto",
    anchor_group_size: GroupSize = None,
    dtype: Dtype = "auto",
    device: Device = "auto",
    threads: Threads = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of text and tables.")] = False,
) -> None:
    """Stream an answer, then show phases, tau and a histogram of advances."""
    from dlite_agent.decode.generate import generate as run
    from dlite_agent.decode.load import chat_ids, load_runtime
    from dlite_agent.decode.sampling import SamplingParams
    from dlite_agent.decode.state import Turn
    from dlite_agent.decode.text import TextStream
    from dlite_agent.tables import figures_table

    conversation = _conversation(prompt, messages)
    params = SamplingParams(
        temperature=temperature,
        top_p=top_p,
        seed=seed,
        verification=verification,  # type: ignore[arg-type]  # checked by SamplingParams
    )
    if mode not in get_args(Mode):
        raise InvalidRequest(f"mode must be one of {', '.join(get_args(Mode))}, not {mode!r}", param="mode")
    runtime = load_runtime(
        target=target,
        drafter=drafter if mode in ("dlite", "mixed") else "none",
        dtype=dtype,
        device=device,
        threads=threads,
        anchor_group_size=anchor_group_size,
    )
    text = TextStream(runtime.tokenizer)
    shown = 0

    def stream(_: Turn) -> None:
        nonlocal shown
        print(text.text[shown:], end="", flush=True)
        shown = len(text.text)

    turn, figures = run(
        runtime.decoder,
        runtime.decoder.open(),
        chat_ids(runtime.tokenizer, conversation),
        params,
        max_new_tokens=max_new_tokens,
        mode=mode,  # type: ignore[arg-type]  # checked above
        verify_window=verify_window,
        text=text,
        on_step=None if as_json else stream,
    )
    text.finish()
    if as_json:
        about: dict[str, Any] = {"mode": mode, "finish": turn.finish, "text": text.text, "token_ids": turn.generated}
        about |= {"dtype": runtime.decoder.target.precision.name, "seed": turn.sampler.seed}
        print(json.dumps(about | figures.summary()))
        return
    print(text.text[shown:])
    for table in figures_table(figures):
        Console().print(table)


def _conversation(prompt: str | None, messages: Path | None) -> list[dict[str, Any]]:
    if (prompt is None) == (messages is None):
        raise InvalidRequest("give either --prompt or --messages", param="prompt")
    if prompt is not None:
        return [{"role": "user", "content": prompt}]
    assert messages is not None
    try:
        found = json.loads(messages.read_text())
    except (OSError, ValueError) as error:
        raise InvalidRequest(f"{messages} is not readable JSON: {error}", param="messages") from error
    if not isinstance(found, list):
        raise InvalidRequest(f"{messages} must hold a list of messages", param="messages")
    return found


@app.command()
def serve(
    host: str = "127.0.0.1",
    port: int = 8000,
    data_dir: Annotated[Path | None, typer.Option(help="Folder for event logs, sessions and agent runs.")] = None,
    workspaces: Annotated[
        list[Path] | None, typer.Option(help="Folder below which agent runs may work; may be given several times.")
    ] = None,
    bundles_dir: Annotated[list[Path] | None, typer.Option(help="A folder of further tool bundles.")] = None,
    redis: Annotated[
        str | None,
        typer.Option(help="Redis URL that replicas share; or set DLITE_REDIS_URL, which keeps it out of ps."),
    ] = None,
    redis_kv_limit_mib: Annotated[float, typer.Option(help="KV that one session may keep in Redis, MiB.")] = 0.0,
    lease_seconds: Annotated[
        float, typer.Option(help="Idle seconds before another replica may take a session.")
    ] = 30.0,
    host_gib: Annotated[float, typer.Option(help="Host memory for paused sessions' KV, GiB.")] = 2.0,
    disk_gib: Annotated[float | None, typer.Option(help="Disk space for sessions, GiB; no limit by default.")] = None,
    idle_share: Annotated[float, typer.Option(help="Share of the KV budget that paused sessions may hold.")] = 0.8,
    target: Target = "smollm2-135m",
    drafter: DrafterOption = "auto",
    anchor_group_size: GroupSize = None,
    dtype: Dtype = "auto",
    device: Device = "auto",
    threads: Threads = None,
    kv_budget_gib: Annotated[float, typer.Option(help="KV memory of all sessions together, GiB.")] = 4.0,
    context_limit: Annotated[int | None, typer.Option(help="Tokens a session may hold.")] = None,
    name: Annotated[list[str] | None, typer.Option(help="Name by which clients may ask for the model.")] = None,
    api_key_file: Annotated[Path | None, typer.Option(help="Accepted keys, one a line; or set DLITE_API_KEY.")] = None,
    allowed_host: Annotated[
        list[str] | None, typer.Option(help="Host header to serve besides loopback names; with keys, any by default.")
    ] = None,
    allowed_origin: Annotated[list[str] | None, typer.Option(help="Web origin that may call (CORS).")] = None,
    max_running: Annotated[int, typer.Option(help="Turns in one batch.")] = 16,
    max_queued: Annotated[int, typer.Option(help="Requests that may wait; one more gets 429.")] = 64,
    max_queued_tokens: Annotated[int, typer.Option(help="Prompt tokens that may wait.")] = 1 << 18,
    request_seconds: Annotated[float, typer.Option(help="Deadline of a request, queue included.")] = 1800.0,
    drain_seconds: Annotated[float, typer.Option(help="What runs may go on for so long after SIGTERM.")] = 30.0,
    mode: Annotated[str, typer.Option(help="How to decode unless a request says: ar, dlite, suffix, mixed.")] = "mixed",
    share_prefixes: Annotated[bool, typer.Option(help="Copy equal prompt prefixes across API keys too.")] = False,
    session_conflict: Annotated[str, typer.Option(help="A busy session: refuse (409) or wait.")] = "refuse",
    log_content: Annotated[bool, typer.Option(help="Write prompts and answers to the log.")] = False,
) -> None:
    """Serve sessions over HTTP in OpenAI's and Anthropic's shapes."""
    from dlite_agent import config
    from dlite_agent.agent.runs import RunsSettings
    from dlite_agent.api.serve import serve as run

    key = os.environ.get("DLITE_API_KEY")
    keys = config.read_keys(api_key_file) if api_key_file else (key,) if key else ()
    run(
        config.Settings(
            model=config.ModelSettings(
                target=target,
                drafter=drafter,
                dtype=dtype,
                device=device,
                threads=threads,
                kv_budget=int(kv_budget_gib * 2**30),
                context_limit=context_limit,
                anchor_group_size=anchor_group_size,
                names=tuple(name or ()),
            ),
            scheduler=config.SchedulerSettings(
                max_running=max_running,
                max_queued=max_queued,
                max_queued_tokens=max_queued_tokens,
                request_seconds=request_seconds,
                share_prefixes=share_prefixes,
                mode=mode,  # type: ignore[arg-type]  # checked by SchedulerSettings
            ),
            server=config.ServerSettings(
                host=host,
                port=port,
                api_keys=keys,
                allowed_hosts=tuple(allowed_host or ()),
                allowed_origins=tuple(allowed_origin or ()),
                drain_seconds=drain_seconds,
                session_conflict=session_conflict,  # type: ignore[arg-type]  # checked by ServerSettings
                log_content=log_content,
            ),
            sessions=config.SessionSettings(
                host_bytes=int(host_gib * 2**30),
                idle_share=idle_share,
                disk_bytes=None if disk_gib is None else int(disk_gib * 2**30),
                redis_url=redis or os.environ.get("DLITE_REDIS_URL"),
                redis_kv_limit=int(redis_kv_limit_mib * 2**20),
                lease_ttl_s=lease_seconds,
            ),
            data_dir=data_dir,
        ),
        RunsSettings(roots=tuple(workspaces or ()), bundles=tuple(bundles_dir or ())),
    )


if __name__ == "__main__":
    main()
