"""`dlite-agent train ...`: build a corpus, train a drafter on it, measure it; or all of it from recorded sessions."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Annotated, Any

import typer

from dlite_agent.options import Device, Dtype, Prompts, Target, Threads

train_app = typer.Typer(invoke_without_command=True, help="Drafters for a target: corpus, training, evaluation.")
data_app = typer.Typer(no_args_is_help=True, help="A corpus of the target's own states.")
train_app.add_typer(data_app, name="data")

Corpus = Annotated[Path, typer.Argument(help="The corpus folder.")]
Roots = Annotated[list[Path], typer.Option(help="Folder or file of code, prose, logs or data; several times.")]
Recorded = Annotated[list[Path], typer.Option(help="Session log, chat JSONL or a folder of them; several times.")]
Sources = Annotated[int, typer.Option(help="Text sources at most.")]
Questions = Annotated[bool, typer.Option(help="Add programming questions and tracebacks, which need no source.")]
HeldOut = Annotated[float, typer.Option(help="Share of the sources that stays out of training.")]
Thinking = Annotated[float, typer.Option(help="Share of answers with reasoning on, where the template can.")]
Folder = Annotated[Path, typer.Argument(help="The run's folder.")]


def _show(figures: dict[str, Any]) -> None:
    print(json.dumps(figures), flush=True)


@contextmanager
def _reporting(steps: int) -> Iterator[Callable[[dict[str, Any]], None]]:
    """A progress bar on a terminal, else one JSON line of figures every few steps."""
    if not sys.stderr.isatty():
        yield _show
        return
    from dlite_agent.train.curves import Bar

    with Bar(steps) as bar:
        yield bar.report


@train_app.callback()
def sessions(
    context: typer.Context,
    sessions: Annotated[Path | None, typer.Option(help="Recorded sessions to fine-tune on: a log or a folder.")] = None,
    out: Annotated[Path, typer.Option(help="Folder for corpus, run and drafter.")] = Path("drafter-run"),
    drafter: Annotated[str, typer.Option(help="Drafter to start from; auto for the shipped one.")] = "auto",
    target: Target = "smollm2-135m",
    steps: int = 300,
    batch: Annotated[int, typer.Option(help="Anchors a step.")] = 128,
    lr: Annotated[float, typer.Option(help="Peak learning rate.")] = 5e-4,
    threads: Threads = None,
) -> None:
    """Fine-tune a drafter on recorded sessions, or call one of the steps below."""
    if context.invoked_subcommand is not None:
        return
    if sessions is None:
        print(context.get_help())
        raise typer.Exit(2)
    _set_threads(threads)
    from dlite_agent.train.finetune import train_on_sessions

    with _reporting(steps) as report:
        result = train_on_sessions(
            sessions, out, target=target, drafter=drafter, steps=steps, batch=batch, lr=lr, report=report
        )
    _show(result)


def _set_threads(threads: int | None) -> None:
    if threads is not None:
        import torch

        torch.set_num_threads(threads)


@data_app.command("plan")
def plan(
    corpus: Corpus,
    root: Roots = [],  # noqa: B006
    recorded: Recorded = [],  # noqa: B006
    sources: Sources = 5000,
    questions: Questions = True,
    held_out: HeldOut = 0.03,
    thinking: Thinking = 0.0,
    seed: int = 0,
    target: Target = "smollm2-135m",
) -> None:
    """Decide which prompts are answered, and which of them stay out of training."""
    from dlite_agent.train.commands import plan_corpus
    from dlite_agent.train.data import Plan

    inputs = Plan(
        roots=tuple(str(path) for path in root),
        recorded=tuple(str(path) for path in recorded),
        sources=sources,
        with_questions=questions,
        held_out_share=held_out,
        thinking_share=thinking,
        seed=seed,
    )
    _show(plan_corpus(corpus, inputs, target=target))


@data_app.command("build")
def build(
    corpus: Corpus,
    root: Roots = [],  # noqa: B006
    recorded: Recorded = [],  # noqa: B006
    sources: Sources = 5000,
    questions: Questions = True,
    held_out: HeldOut = 0.03,
    thinking: Thinking = 0.0,
    seed: int = 0,
    target: Target = "smollm2-135m",
    taps: Annotated[int, typer.Option(help="Layers of the target to keep states of.")] = 8,
    max_new: Annotated[int, typer.Option(help="Longest answer in tokens.")] = 224,
    max_prompt: Annotated[int, typer.Option(help="Longer prompts are passed over.")] = 1400,
    worker: Annotated[int, typer.Option(help="Which of the workers this one is, from 0.")] = 0,
    workers: Annotated[int, typer.Option(help="Processes that share the work; one a core.")] = 1,
    threads: Annotated[int, typer.Option(help="CPU threads of this worker.")] = 1,
    dtype: Dtype = "fp32",
    device: Device = "auto",
) -> None:
    """Plan if sources are given, then let the target answer and keep its states; stopped at any moment, it goes on."""
    from dlite_agent.train.commands import build_corpus

    if root or recorded:
        plan(corpus, root, recorded, sources, questions, held_out, thinking, seed, target)
    _set_threads(threads)
    manifest = build_corpus(
        corpus,
        target=target,
        taps=taps,
        max_new=max_new,
        max_prompt=max_prompt,
        dtype=dtype,
        device=device,
        worker=worker,
        workers=workers,
    )
    _show(manifest["built"])


@train_app.command("run")
def run(
    config: Annotated[Path, typer.Argument(help="The run's TOML file.")],
    folder: Folder,
) -> None:
    """Train, or continue a run: figures as it goes, the drafter in `folder/drafter`, curves in `folder/curves.png`.

    Several GPUs: torchrun --nproc-per-node N -m dlite_agent.cli train run CONFIG FOLDER.
    """
    from dlite_agent.train.commands import train
    from dlite_agent.train.settings import read_settings

    first = os.environ.get("RANK", "0") == "0"
    reporting: Any = _reporting(read_settings(config).steps) if first else nullcontext()
    with reporting as report:
        card = train(config, folder, report)
    if first:
        _show(card)


@train_app.command("plot")
def plot(
    folder: Folder,
    picture: Annotated[Path | None, typer.Option(help="The PNG to write; folder/curves.png by default.")] = None,
) -> None:
    """Draw a run's training and held-out curves in one picture."""
    from dlite_agent.train.curves import plot as draw

    draw(folder, picture or folder / "curves.png")


@train_app.command("evaluate")
def evaluate(
    prompts: Prompts,
    drafter: Annotated[str, typer.Option(help="Checkpoint folder, or auto for the shipped one.")] = "auto",
    target: Target = "smollm2-135m",
    dtype: Dtype = "auto",
    device: Device = "auto",
    threads: Threads = None,
    max_new: Annotated[int, typer.Option(help="Tokens an answer.")] = 128,
    limit: Annotated[int | None, typer.Option(help="Use only the first N prompts.")] = None,
    ar: Annotated[bool, typer.Option(help="Decode without a drafter too, for the speed-up.")] = True,
    verify_window: Annotated[int | None, typer.Option(help="Rows a verify pass; the whole block by default.")] = None,
) -> None:
    """Tau by really decoding: one line with the speed-up and its parts, then one for each group of rounds."""
    from dlite_agent.train.commands import evaluate as measure

    _set_threads(threads)
    found = measure(
        drafter,
        prompts,
        target=target,
        dtype=dtype,
        device=device,
        max_new=max_new,
        ar=ar,
        limit=limit,
        verify_window=verify_window,
    )
    _show(found.speed())
    for row in found.rows():
        _show(row)
