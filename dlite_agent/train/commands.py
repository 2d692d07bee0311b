"""The three commands of training, as the command line calls them: build a corpus, train on it, measure a drafter."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from dlite_agent.decode.load import chat_ids, load_runtime, load_tokenizer
from dlite_agent.errors import InvalidRequest
from dlite_agent.model.drafter_config import target_layer_ids
from dlite_agent.model.weights import load_target, resolve
from dlite_agent.train.collect import Collector, build_cache
from dlite_agent.train.data import SPLITS, Plan, count_ids, make_plan, read_plan, read_prompts, write_plan
from dlite_agent.train.evaluate import Acceptance, decode
from dlite_agent.train.settings import read_settings
from dlite_agent.train.trainer import TargetTables, Trainer

Report = Callable[[dict[str, Any]], None]
ID_COUNTS = "id_counts.npy"


def plan_corpus(corpus: Path, plan: Plan, *, target: str) -> dict[str, Any]:
    """Write a corpus folder's plan, manifest and id counts; returns the manifest. See `make_plan`."""
    tokenizer = load_tokenizer(resolve(target))
    requests = make_plan(plan)
    manifest = write_plan(corpus, plan, requests)
    np.save(corpus / ID_COUNTS, count_ids(requests, partial(chat_ids, tokenizer), len(tokenizer)))
    return manifest


def build_corpus(
    corpus: Path,
    *,
    target: str,
    taps: int = 8,
    max_new: int = 224,
    max_prompt: int = 1400,
    slots: int = 48,
    worker: int = 0,
    workers: int = 1,
) -> None:
    """Answer a planned corpus into its caches, held-out side first; stopped at any moment, it goes on from there.

    Prompts longer than `max_prompt` tokens are passed over. Start one worker a core, each with one torch thread: two
    threads that share a product lose more to waiting than they gain.
    """
    model = load_target(target, dtype="fp32")
    encode = partial(chat_ids, load_tokenizer(resolve(target)))
    collector = Collector(
        model,
        encode,
        tap_layers=target_layer_ids(model.spec.num_layers, taps),
        eos=model.spec.eos_ids,
        slots=slots,
        max_new=max_new,
        max_prompt=max_prompt,
    )
    requests = [request for request in read_plan(corpus) if len(encode(request.messages)) <= max_prompt]
    for split in reversed(SPLITS):
        mine = [request for request in requests if request.split == split]
        build_cache(collector, mine, corpus / split, worker=worker, workers=workers)


def train(config: Path, run: Path, report: Report | None = None) -> dict[str, Any]:
    """Run or continue the training that a TOML file describes; returns the card of the drafter in `run/drafter`."""
    settings = read_settings(config)
    special = tuple(load_tokenizer(resolve(settings.target)).all_special_ids)
    trainer = Trainer(settings, run, TargetTables.load(settings.target), special_ids=special)
    trainer.train(report)
    return trainer.card()


def evaluate(
    drafter: str, prompts: Path, *, target: str, dtype: str = "auto", max_new: int = 128
) -> dict[str, dict[str, Any]]:
    """Acceptance by kind of really decoding a prompt file: tau, rounds, advances and rates a position.

    Raises:
        InvalidRequest: the prompts cannot be used, or no drafter fits the target.
    """
    runtime = load_runtime(target=target, drafter=drafter, dtype=dtype)
    if runtime.decoder.drafter is None:
        raise InvalidRequest("no shipped drafter fits this target: name a checkpoint folder", param="drafter")
    found = decode(runtime.decoder, read_prompts(prompts), partial(chat_ids, runtime.tokenizer), max_new=max_new)
    return {kind: _figures(acceptance) for kind, acceptance in sorted(found.items())}


def _figures(acceptance: Acceptance) -> dict[str, Any]:
    rates: Sequence[float] = acceptance.rates()
    return {
        "tau": round(acceptance.tau, 4),
        "rounds": acceptance.rounds,
        "advances": acceptance.advances,
        "rates": list(rates),
    }
