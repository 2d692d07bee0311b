"""The one command, `dlite-agent`: it parses, calls, and prints."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from dlite_agent.errors import DliteError, InvalidRequest

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)
model_app = typer.Typer(no_args_is_help=True, help="The target and its drafters.")
bench_app = typer.Typer(no_args_is_help=True, help="Measurements; each prints a table and writes JSON.")
app.add_typer(model_app, name="model")
app.add_typer(bench_app, name="bench")

Target = Annotated[str, typer.Option(help="Model folder, GGUF file, hub id, or the default target's name.")]
DrafterOption = Annotated[str, typer.Option(help="Checkpoint folder, auto (the shipped one that fits), or none.")]
Dtype = Annotated[str, typer.Option(help="fp32, bf16, fp16w (fp16 weights, CPU) or auto (measured).")]
Device = Annotated[str, typer.Option(help="cpu, cuda or auto.")]
Threads = Annotated[int | None, typer.Option(help="CPU threads; torch's own choice by default.")]
GroupSize = Annotated[int | None, typer.Option(help="G of a checkpoint whose config lacks it, if you know it.")]
Window = Annotated[int | None, typer.Option(help="Rows of a verify pass; shortens the draft too.")]
JsonOut = Annotated[Path | None, typer.Option("--json", help="Write all figures to this file.")]


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
    from dlite_agent.model.catalog import fitting_drafter
    from dlite_agent.model.weights import describe

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
    mode: Annotated[str, typer.Option(help="ar or dlite.")] = "dlite",
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
    if mode not in ("ar", "dlite"):
        raise InvalidRequest(f"mode must be ar or dlite, not {mode!r}", param="mode")
    runtime = load_runtime(
        target=target,
        drafter=drafter if mode == "dlite" else "none",
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
    data_dir: Annotated[Path | None, typer.Option(help="Folder for event logs.")] = None,
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
    session_conflict: Annotated[str, typer.Option(help="A busy session: refuse (409) or wait.")] = "refuse",
    log_content: Annotated[bool, typer.Option(help="Write prompts and answers to the log.")] = False,
) -> None:
    """Serve sessions over HTTP in OpenAI's and Anthropic's shapes."""
    from dlite_agent import config
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
            server=config.ServerSettings(
                host=host,
                port=port,
                api_keys=keys,
                session_conflict=session_conflict,  # type: ignore[arg-type]  # checked by ServerSettings
                log_content=log_content,
            ),
            data_dir=data_dir,
        )
    )


@app.command()
def report(
    sessions: Annotated[list[Path], typer.Argument(help="Event logs or session files of a known format.")],
    fmt: Annotated[str, typer.Option("--format", help="table, json or html.")] = "table",
    out: Annotated[Path | None, typer.Option(help="Write here instead of printing.")] = None,
) -> None:
    """Where the time of sessions went, and what faster decoding can bring at most (Amdahl)."""
    from dlite_agent.trace.report import report_command

    text = report_command(sessions, fmt, out)
    if out is None:
        print(text)


@app.command()
def convert(
    source: Annotated[Path, typer.Argument(help="A session file; its format is told from its content.")],
    out: Annotated[Path, typer.Argument(help="The file to write.")],
    to: Annotated[str, typer.Option(help="dlite, atif, otel or chrome.")] = "dlite",
    session: Annotated[str | None, typer.Option(help="Only this session of the file.")] = None,
) -> None:
    """Turn a session file of one format into another."""
    from dlite_agent.trace.formats import convert as run

    run(source, to, out, session=session)


@bench_app.command("decode")
def bench_decode(
    prompts: Annotated[Path, typer.Option(help='JSONL, one {"id", "messages"} a line.')],
    json_out: JsonOut = None,
    limit: Annotated[int | None, typer.Option(help="Use only the first N prompts.")] = None,
    max_new_tokens: int = 128,
    temperature: float = 0.0,
    seed: int | None = None,
    verification: Annotated[str, typer.Option(help="match or rejection.")] = "match",
    verify_window: Window = None,
    target: Target = "smollm2-135m",
    drafter: DrafterOption = "auto",
    anchor_group_size: GroupSize = None,
    dtype: Dtype = "auto",
    device: Device = "auto",
    threads: Threads = None,
) -> None:
    """AR and DLite on the same prompts in one run, alternating."""
    from dlite_agent.bench import decode
    from dlite_agent.decode.load import load_runtime
    from dlite_agent.decode.sampling import SamplingParams
    from dlite_agent.tables import decode_bench_table

    found = decode.read_prompts(prompts)[:limit]
    params = SamplingParams(temperature=temperature, seed=seed, verification=verification)  # type: ignore[arg-type]
    runtime = load_runtime(
        target=target,
        drafter=drafter,
        dtype=dtype,
        device=device,
        threads=threads,
        anchor_group_size=anchor_group_size,
    )
    console = Console()

    def progress(row: dict[str, Any]) -> None:
        ratio = "-" if row["speedup"] is None else f"{row['speedup']:.2f}x"
        console.print(f"{row['id']}: {row['tokens']} tokens, tau {row['tau']:.2f}, {ratio}", highlight=False)

    result = decode.bench_decode(
        runtime, found, params, max_new_tokens=max_new_tokens, verify_window=verify_window, on_row=progress
    )
    if json_out is not None:
        json_out.write_text(json.dumps(result, indent=1))
    console.print(decode_bench_table(result))


@bench_app.command("executor")
def bench_executor(
    json_out: JsonOut = None,
    target: Target = "smollm2-135m",
    dtype: Annotated[list[str], typer.Option(help="Give it several times.")] = ["fp32", "bf16"],  # noqa: B006
    context: int = 512,
    repeats: int = 15,
    threads: Threads = None,
) -> None:
    """One cached step, of 1 and of 8 rows, against transformers on the same weights."""
    import torch

    from dlite_agent.bench.executor import bench_executor as bench
    from dlite_agent.tables import executor_bench_table

    if threads is not None:
        torch.set_num_threads(threads)
    result = bench(target, dtypes=tuple(dtype), context=context, rows=(1, 8), repeats=repeats)
    if json_out is not None:
        json_out.write_text(json.dumps(result, indent=1))
    Console().print(executor_bench_table(result))


@bench_app.command("device")
def bench_device(
    json_out: JsonOut = None,
    shape: Annotated[str, typer.Option(help="qwen3-8b or smollm2-135m.")] = "smollm2-135m",
    context: Annotated[list[int], typer.Option(help="Context lengths; give it several times.")] = [1024, 8192],  # noqa: B006
    batch: Annotated[list[int], typer.Option(help="Batch sizes; give it several times.")] = [1, 8],  # noqa: B006
    steps: Annotated[int, typer.Option(help="Steps a figure is the median of.")] = 12,
    layers: Annotated[int | None, typer.Option(help="Fewer target layers, for a small machine.")] = None,
    dtype: Dtype = "auto",
    device: Device = "auto",
    threads: Threads = None,
) -> None:
    """T_AR, T_D, T_V, T_S and the round overhead with random weights in real shapes."""
    import torch

    from dlite_agent.bench import device as bench
    from dlite_agent.tables import device_bench_table

    if threads is not None:
        torch.set_num_threads(threads)
    place = ("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device
    console = Console()

    def progress(row: dict[str, Any]) -> None:
        console.print(
            f"context {row['context']}, batch {row['batch']}: overhead {row['overhead']:.2f}", highlight=False
        )

    result = bench.bench_device(
        shape,
        device=place,
        dtype=dtype,
        contexts=context,
        batches=batch,
        steps=steps,
        layers=layers,
        on_row=progress,
    )
    if json_out is not None:
        json_out.write_text(json.dumps(result, indent=1))
    console.print(device_bench_table(result))


if __name__ == "__main__":
    main()
