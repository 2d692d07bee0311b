"""`dlite-agent train ...`: build a corpus, train a drafter on it, measure it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from dlite_agent.options import Dtype, Target

train_app = typer.Typer(no_args_is_help=True, help="Drafters for a target: corpus, training, evaluation.")
data_app = typer.Typer(no_args_is_help=True, help="A corpus of the target's own states.")
train_app.add_typer(data_app, name="data")

Corpus = Annotated[Path, typer.Argument(help="The corpus folder.")]


def _show(figures: dict[str, Any]) -> None:
    print(json.dumps(figures), flush=True)


@data_app.command("plan")
def plan(
    corpus: Corpus,
    root: Annotated[list[Path], typer.Option(help="Folder or file to read sources from; give it several times.")],
    sources: Annotated[int, typer.Option(help="Sources at most.")] = 5000,
    seed: int = 0,
    target: Target = "smollm2-135m",
) -> None:
    """Decide which prompts are answered, and which of them stay out of training."""
    from dlite_agent.train.commands import plan_corpus
    from dlite_agent.train.data import Plan

    roots = tuple(str(path) for path in root)
    _show(plan_corpus(corpus, Plan(roots=roots, sources=sources, seed=seed), target=target))


@data_app.command("build")
def build(
    corpus: Corpus,
    target: Target = "smollm2-135m",
    max_new: Annotated[int, typer.Option(help="Longest answer in tokens.")] = 224,
    worker: Annotated[int, typer.Option(help="Which of the workers this one is, from 0.")] = 0,
    workers: Annotated[int, typer.Option(help="Processes that share the work; one a core.")] = 1,
    threads: Annotated[int, typer.Option(help="CPU threads of this worker.")] = 1,
) -> None:
    """Let the target answer the plan and keep its states; stopped at any moment, it goes on from there."""
    import torch

    from dlite_agent.train.commands import build_corpus

    torch.set_num_threads(threads)
    build_corpus(corpus, target=target, max_new=max_new, worker=worker, workers=workers)


@train_app.command("run")
def run(
    config: Annotated[Path, typer.Argument(help="The run's TOML file.")],
    folder: Annotated[Path, typer.Argument(help="The run's folder; an existing run is continued.")],
) -> None:
    """Train, or continue a run; a JSON line of figures every few steps, the drafter in `folder/drafter`."""
    from dlite_agent.train.commands import train

    _show(train(config, folder, _show))


@train_app.command("evaluate")
def evaluate(
    prompts: Annotated[Path, typer.Option(help='JSONL, one {"id", "messages"} a line.')],
    drafter: Annotated[str, typer.Option(help="Checkpoint folder, or auto for the shipped one.")] = "auto",
    target: Target = "smollm2-135m",
    dtype: Dtype = "auto",
    max_new: Annotated[int, typer.Option(help="Tokens an answer.")] = 128,
) -> None:
    """Tau by really decoding: advances and acceptance by position, for each kind of prompt."""
    from dlite_agent.train.commands import evaluate as measure

    for kind, figures in measure(drafter, prompts, target=target, dtype=dtype, max_new=max_new).items():
        _show({"kind": kind} | figures)
