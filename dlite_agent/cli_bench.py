"""`dlite-agent bench ...`: measurements; each prints a table and writes JSON."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from dlite_agent.options import Device, DrafterOption, Dtype, GroupSize, JsonOut, Prompts, Target, Threads, Window

bench_app = typer.Typer(no_args_is_help=True, help="Measurements; each prints a table and writes JSON.")


@bench_app.command("decode")
def bench_decode(
    prompts: Prompts,
    json_out: JsonOut = None,
    limit: Annotated[int | None, typer.Option(help="Use only the first N prompts.")] = None,
    max_new_tokens: int = 128,
    temperature: float = 0.0,
    seed: int | None = None,
    verification: Annotated[str, typer.Option(help="match or rejection.")] = "match",
    modes: Annotated[str, typer.Option(help="ar and what to compare with it.")] = "ar,dlite,suffix,mixed",
    verify_window: Window = None,
    repeats: Annotated[int, typer.Option(help="Runs of each prompt and mode; the median one counts.")] = 1,
    target: Target = "smollm2-135m",
    drafter: DrafterOption = "auto",
    anchor_group_size: GroupSize = None,
    dtype: Dtype = "auto",
    device: Device = "auto",
    threads: Threads = None,
) -> None:
    """AR and every other mode on the same prompts in one run, taking turns."""
    from dlite_agent.bench import decode
    from dlite_agent.decode.load import load_runtime
    from dlite_agent.decode.sampling import SamplingParams
    from dlite_agent.tables import decode_bench_table
    from dlite_agent.train.data import read_prompts

    found = read_prompts(prompts)[:limit]
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
        ratios = (f"{mode} {'-' if ratio is None else f'{ratio:.2f}x'}" for mode, ratio in row["speedup"].items())
        console.print(f"{row['id']}: {row['tokens']} tokens, {', '.join(ratios)}", highlight=False)

    result = decode.bench_decode(
        runtime,
        found,
        params,
        max_new_tokens=max_new_tokens,
        modes=decode.modes_of(modes),
        verify_window=verify_window,
        repeats=repeats,
        on_row=progress,
    )
    table, kinds = decode_bench_table(result)
    _show(result, json_out, table, console)
    console.print(kinds)


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
    _show(result, json_out, executor_bench_table(result), Console())


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
    from dlite_agent.decode.load import device_of
    from dlite_agent.tables import device_bench_table

    if threads is not None:
        torch.set_num_threads(threads)
    console = Console()

    def progress(row: dict[str, Any]) -> None:
        console.print(
            f"context {row['context']}, batch {row['batch']}: overhead {row['overhead']:.2f}", highlight=False
        )

    result = bench.bench_device(
        shape,
        device=str(device_of(device)),
        dtype=dtype,
        contexts=context,
        batches=batch,
        steps=steps,
        layers=layers,
        on_row=progress,
    )
    _show(result, json_out, device_bench_table(result), console)


@bench_app.command("retention")
def bench_retention(
    workload: Annotated[Path, typer.Option(help="Workload CSV: one row a model call, with waits.")],
    json_out: JsonOut = None,
) -> None:
    """Keep, spill or drop paused sessions: our policy against LRU, fixed TTL, keep-all and drop-all, simulated."""
    from dlite_agent.bench.retention import main

    print(main(workload, output=json_out))


@bench_app.command("retention-live")
def bench_retention_live(
    workload: Annotated[Path, typer.Option(help="Workload CSV: one row a model call, with waits.")],
    json_out: JsonOut = None,
    divide: Annotated[int, typer.Option(help="Divide the workload's lengths by this.")] = 40,
    conversations: Annotated[int, typer.Option(help="Only the first N conversations.")] = 4,
    budget: Annotated[float, typer.Option(help="Device memory as a share of the peak of all pauses.")] = 0.1,
    target: Target = "smollm2-135m",
    dtype: Dtype = "auto",
    device: Device = "auto",
    threads: Threads = None,
) -> None:
    """The retention policies on a real model, every transfer and recomputation measured, beside the simulation."""
    from dlite_agent.bench.retention import Outcome, load_pauses
    from dlite_agent.bench.retention_live import bench_live
    from dlite_agent.decode.load import load_runtime
    from dlite_agent.tables import retention_live_table

    pauses = load_pauses(workload)
    runtime = load_runtime(target=target, drafter="none", dtype=dtype, device=device, threads=threads)
    console = Console()

    def progress(name: str, simulated: Outcome, live: Outcome) -> None:
        console.print(f"{name}: simulated {simulated.waste:.1f}, live {live.waste:.1f} GB·s", highlight=False)

    result = bench_live(runtime, pauses, divide=divide, conversations=conversations, budget=budget, on_policy=progress)
    _show(result, json_out, retention_live_table(result), console)


@bench_app.command("restore")
def bench_restore(
    json_out: JsonOut = None,
    context: Annotated[list[int], typer.Option(help="Prompt tokens; give it several times.")] = [512, 1024, 2048, 4096],  # noqa: B006
    repeats: int = 3,
    new_tokens: int = 32,
    target: Target = "smollm2-135m",
    drafter: DrafterOption = "auto",
    dtype: Dtype = "auto",
    device: Device = "auto",
    threads: Threads = None,
) -> None:
    """A paused session back from host memory and from disk, against computing it again; tau after each."""
    from dlite_agent.bench import restore
    from dlite_agent.decode.load import load_runtime
    from dlite_agent.tables import restore_bench_table

    runtime = load_runtime(target=target, drafter=drafter, dtype=dtype, device=device, threads=threads)
    console = Console()

    def progress(row: dict[str, Any]) -> None:
        console.print(f"{row['context']} tokens: disk {row['ratio']['disk']:.1f}x recomputing", highlight=False)

    result = restore.bench_restore(runtime, context, repeats=repeats, new_tokens=new_tokens, on_row=progress)
    _show(result, json_out, restore_bench_table(result), console)


@bench_app.command("batch")
def bench_batch(
    prompts: Prompts,
    json_out: JsonOut = None,
    batch: Annotated[list[int], typer.Option(help="Sessions together; give it several times.")] = [1, 2, 4, 8, 16, 32],  # noqa: B006
    modes: Annotated[str, typer.Option(help="ar and what to compare with it.")] = "ar,dlite,suffix,mixed",
    new_tokens: int = 48,
    repeats: int = 3,
    target: Target = "smollm2-135m",
    drafter: DrafterOption = "auto",
    dtype: Dtype = "auto",
    device: Device = "auto",
    threads: Threads = None,
) -> None:
    """Tokens a second at several batch sizes, AR and the other modes taking turns."""
    from dlite_agent.bench.batch import bench_batch as bench
    from dlite_agent.bench.decode import modes_of
    from dlite_agent.decode.load import load_runtime
    from dlite_agent.tables import batch_bench_table
    from dlite_agent.train.data import read_prompts

    found = read_prompts(prompts)
    runtime = load_runtime(target=target, drafter=drafter, dtype=dtype, device=device, threads=threads)
    console = Console()

    def progress(row: dict[str, Any]) -> None:
        ratios = ", ".join(f"{mode} {figures['speedup']:.2f}x" for mode, figures in row["modes"].items())
        console.print(f"batch {row['batch']}: {ratios}", highlight=False)

    result = bench(
        runtime, found, sizes=batch, modes=modes_of(modes), new_tokens=new_tokens, repeats=repeats, on_row=progress
    )
    _show(result, json_out, batch_bench_table(result), console)


@bench_app.command("gate")
def bench_gate(
    prompts: Prompts,
    json_out: JsonOut = None,
    plot: Annotated[Path | None, typer.Option(help="Draw drafted tokens over time to this PNG.")] = None,
    load: Annotated[list[int], typer.Option(help="Sessions in each stretch; give it several times.")] = [1, 16, 1],  # noqa: B006
    seconds: Annotated[float, typer.Option(help="Seconds a stretch lasts.")] = 10.0,
    target: Target = "smollm2-135m",
    drafter: DrafterOption = "auto",
    dtype: Dtype = "auto",
    device: Device = "auto",
    threads: Threads = None,
) -> None:
    """What the planner drafts while the number of sessions changes in steps."""
    from dlite_agent.bench import gate
    from dlite_agent.decode.load import load_runtime
    from dlite_agent.tables import gate_bench_table
    from dlite_agent.train.data import read_prompts

    found = read_prompts(prompts)
    runtime = load_runtime(target=target, drafter=drafter, dtype=dtype, device=device, threads=threads)
    console = Console()

    def progress(row: dict[str, Any]) -> None:
        console.print(f"{row['load']} sessions: {row['drafted']:.2f} drafted a session", highlight=False)

    result = gate.bench_gate(runtime, found, loads=load, seconds=seconds, on_row=progress)
    if plot is not None:
        gate.plot_gate(result, plot)
    _show(result, json_out, gate_bench_table(result), console)


@bench_app.command("floor")
def bench_floor(
    json_out: JsonOut = None,
    context: int = 256,
    repeats: int = 31,
    target: Target = "smollm2-135m",
    drafter: DrafterOption = "auto",
    dtype: Dtype = "auto",
    threads: Threads = None,
) -> None:
    """T_AR, T_V and T_D against reading their weights once at the measured memory bandwidth."""
    from dlite_agent.bench.floor import bench_floor as bench
    from dlite_agent.decode.load import load_runtime
    from dlite_agent.tables import floor_bench_table

    runtime = load_runtime(target=target, drafter=drafter, dtype=dtype, device="cpu", threads=threads)
    result = bench(runtime, context=context, repeats=repeats)
    _show(result, json_out, floor_bench_table(result), Console())


@bench_app.command("peers")
def bench_peers(
    session: Annotated[Path, typer.Argument(help="A recorded session with token ids.")],
    peers: Annotated[Path, typer.Option(help="The peers.json that examples/peers/setup.sh has written.")],
    json_out: JsonOut = None,
    only: Annotated[list[str] | None, typer.Option(help="Only peers whose name begins so; several times.")] = None,
    modes: Annotated[str, typer.Option(help="Our modes; the first is what ratios are of.")] = "mixed,ar",
    new_tokens: Annotated[int, typer.Option(help="Tokens a turn at most.")] = 64,
    repeats: int = 3,
    target: Target = "smollm2-135m",
    drafter: DrafterOption = "auto",
    dtype: Dtype = "auto",
    threads: Threads = None,
) -> None:
    """A recorded agent session through this engine and through llama.cpp, vLLM and transformers, taking turns."""
    from dlite_agent.bench import peers as bench
    from dlite_agent.bench.decode import known_modes
    from dlite_agent.decode.load import load_runtime
    from dlite_agent.tables import peers_bench_table
    from dlite_agent.trace.log import read_log
    from dlite_agent.trace.script import scripts

    script = scripts(read_log(session))[0]
    commands = bench.read_peers(peers)
    ours = known_modes(modes)
    console, started = Console(), list[bench.Peer]()
    try:
        for mode in ours:
            runtime = load_runtime(target=target, drafter=drafter, dtype=dtype, device="cpu", threads=threads)
            started.append(bench.Ours(runtime, mode))
        for name, command in commands.items():
            if only is None or any(name.startswith(start) for start in only):
                process = bench.Process(name, command)
                started.append(process)
                console.print(f"{name}: {process.about}", highlight=False)
        result = bench.bench_peers(
            started, script, new_tokens=new_tokens, repeats=repeats, on_turn=lambda line: console.print(line)
        )
    finally:
        for peer in started:
            peer.close()
    _show(result, json_out, peers_bench_table(result), console)


def _show(result: dict[str, Any], json_out: Path | None, table: Table, console: Console) -> None:
    if json_out is not None:
        json_out.write_text(json.dumps(result, indent=1))
    console.print(table)
