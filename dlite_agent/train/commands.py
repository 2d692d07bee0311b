"""The steps of training, as the command line calls them: plan and build a corpus, train on it, measure a drafter."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from dlite_agent.decode.load import chat_ids, load_runtime, load_target, load_tokenizer
from dlite_agent.errors import InvalidRequest
from dlite_agent.model.drafter_config import target_layer_ids
from dlite_agent.model.spec import ModelSpec
from dlite_agent.model.weights import resolve
from dlite_agent.session.messages import normalise
from dlite_agent.session.template import ChatTemplate
from dlite_agent.train.checkpoint import DRAFTER
from dlite_agent.train.collect import Collector, build_cache
from dlite_agent.train.curves import plot, read_metrics
from dlite_agent.train.data import (
    SPLITS,
    Plan,
    Request,
    atomic_file,
    count_ids,
    make_plan,
    prompt_ids,
    read_plan,
    read_prompts,
    summarise,
    with_thinking,
    write_plan,
)
from dlite_agent.train.measure import Measurement, measure
from dlite_agent.train.parallel import Processes
from dlite_agent.train.recorded import Recording, read_recordings
from dlite_agent.train.settings import Settings, read_settings
from dlite_agent.train.trainer import TargetTables, Trainer

Report = Callable[[dict[str, Any]], None]
ID_COUNTS, CURVES = "id_counts.npy", "curves.png"


def plan_corpus(corpus: Path, plan: Plan, *, target: str) -> dict[str, Any]:
    """Write a corpus folder's plan, manifest and id counts; returns the manifest. See `make_plan`.

    Raises:
        InvalidRequest: a source or a log cannot be used, or thinking is asked for where the template has no switch.
    """
    template = _template(target)
    requests = make_plan(plan, recordings_of([Path(p) for p in plan.recorded], target))
    if template.switches_thinking:
        requests = with_thinking(requests, plan.thinking_share, seed=plan.seed)
    elif plan.thinking_share:
        raise InvalidRequest("this target's template has no switch for thinking: leave it out", param="thinking_share")
    return write_corpus(corpus, plan, requests, target)


def write_corpus(corpus: Path, plan: Plan, requests: Sequence[Request], target: str) -> dict[str, Any]:
    """Write a corpus folder's plan, manifest and id counts; returns the manifest."""
    template = _template(target)
    vocab_size = ModelSpec.from_folder(resolve(target)).vocab_size
    for request in requests:
        if max(request.ids, default=0) >= vocab_size:
            raise InvalidRequest(
                f"{request.source} has ids that this target lacks: it was recorded with another", param="sessions"
            )
    manifest = write_plan(corpus, plan, requests)
    with atomic_file(corpus / ID_COUNTS) as file:
        np.save(file, count_ids(requests, partial(_rendered, template), vocab_size))
    return manifest


def _template(target: str) -> ChatTemplate:
    folder = resolve(target)
    return ChatTemplate(load_tokenizer(folder), ModelSpec.from_folder(folder).eos_ids)


def _rendered(template: ChatTemplate, messages: list[dict[str, Any]], *, thinking: bool | None = None) -> list[int]:
    """Ids of a prompt as the server would render it."""
    render = template.opening(normalise(messages), thinking=thinking)
    return render.ids + render.prompt


def recordings_of(paths: Sequence[Path], target: str) -> list[Recording]:
    """Recorded sessions of this target; see `read_recordings`. A log's name of a target is not looked up on a hub."""
    folder = resolve(target)
    return read_recordings(
        paths, same_target=lambda name: name == target or (Path(name).is_dir() and resolve(name) == folder)
    )


def build_corpus(
    corpus: Path,
    *,
    target: str,
    taps: int = 8,
    max_new: int = 224,
    max_prompt: int = 1400,
    slots: int = 48,
    dtype: str = "fp32",
    device: str = "auto",
    worker: int = 0,
    workers: int = 1,
) -> dict[str, Any]:
    """Answer a planned corpus into its caches, held-out side first; stopped at any moment, it goes on from there.

    Prompts longer than `max_prompt` tokens are passed over; recorded sessions are read up to the target's limit. Start
    one worker a core, each with one torch thread: two threads that share a product lose more to waiting than they gain.
    Returns the manifest with the counts of what is built so far.
    """
    model = load_target(target, dtype=dtype, device=device)
    encode = partial(_rendered, _template(target))
    limit = model.max_positions - 1

    def collector(slots: int, max_new: int, max_prompt: int) -> Collector:
        layers = target_layer_ids(model.spec.num_layers, taps)
        return Collector(
            model,
            encode,
            tap_layers=layers,
            eos=model.spec.eos_ids,
            slots=slots,
            max_new=max_new,
            max_prompt=max_prompt,
        )

    answering, reading = collector(slots, max_new, max_prompt), collector(1, 0, limit)
    requests = read_plan(corpus)
    for split in reversed(SPLITS):
        mine = [request for request in requests if request.split == split]
        asked = [r for r in mine if r.messages and len(prompt_ids(r, encode)) <= max_prompt]
        recorded = [r.cut(limit) for r in mine if r.ids]
        for part, with_collector in ((recorded, reading), (asked, answering)):
            if part:
                build_cache(with_collector, part, corpus / split, worker=worker, workers=workers)
    return summarise(corpus)


def train(config: Path, run: Path, report: Report | None = None) -> dict[str, Any]:
    """Run or continue the training that a TOML file describes; returns the card of the drafter in `run/drafter`.

    Under torchrun every process calls this; the first one writes and reports. The curves are drawn to `run/curves.png`
    where matplotlib is installed.
    """
    run_training(read_settings(config), run, report)
    card: dict[str, Any] = json.loads((run / DRAFTER / "card.json").read_text())
    return card


def run_training(
    settings: Settings, run: Path, report: Report | None = None, *, measure_first: bool = False
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Run or continue a training; returns its first and last held-out figures, those of the start if asked for."""
    special = tuple(load_tokenizer(resolve(settings.target)).all_special_ids)
    processes = Processes.join(settings.device)
    try:
        tables = TargetTables.load(settings.target)
        trainer = Trainer(settings, run, tables, special_ids=special, processes=processes)
        if measure_first and trainer.step == 0:
            trainer.tell(trainer.evaluate(), report)
        trainer.train(report if processes.first else None)
        processes.meet()
    finally:
        processes.leave()
    if processes.first and importlib.util.find_spec("matplotlib"):
        plot(run, run / CURVES)
    held_out = [row for row in read_metrics(run) if "held_out_prefix" in row]
    return (held_out[0], held_out[-1]) if held_out else ({}, {})


def evaluate(
    drafter: str,
    prompts: Path,
    *,
    target: str,
    dtype: str = "auto",
    device: str = "auto",
    max_new: int = 128,
    ar: bool = True,
    limit: int | None = None,
    verify_window: int | None = None,
) -> Measurement:
    """Really decode a prompt file with a drafter and, with `ar`, without; see `Measurement`.

    Args:
        verify_window: rows of a verify pass; by default the whole block, whatever would be served on this machine.

    Raises:
        InvalidRequest: the prompts cannot be used, or no drafter fits the target.
    """
    runtime = load_runtime(target=target, drafter=drafter, dtype=dtype, device=device)
    if runtime.decoder.drafter is None:
        raise InvalidRequest("no shipped drafter fits this target: name a checkpoint folder", param="drafter")
    runtime.decoder.verify_window = verify_window or runtime.decoder.proposal_length + 1
    encode = partial(chat_ids, runtime.tokenizer)
    asked = read_prompts(prompts)[:limit]
    return measure(runtime.decoder, asked, encode, runtime.tokenizer.decode, max_new=max_new, ar=ar)
