"""One command from recorded sessions to a drafter that knows them: the shipped one, trained on what was really said."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

from dlite_agent.errors import InvalidRequest
from dlite_agent.model.catalog import fitting_drafter
from dlite_agent.model.drafter import Drafter
from dlite_agent.model.weights import fingerprint, resolve
from dlite_agent.train.commands import build_corpus, recordings_of, run_training, write_corpus
from dlite_agent.train.data import SPLITS, Plan, recorded_requests
from dlite_agent.train.settings import Loss, Optimizer, Settings, Shape

HELD_OUT_SHARE = 0.2
"""Share of the sessions, the newest ones, that are kept out of training to measure on."""
RESULT = "sessions.json"


def train_on_sessions(
    sessions: Path,
    run: Path,
    *,
    target: str,
    drafter: str = "auto",
    steps: int = 300,
    batch: int = 128,
    lr: float = 5e-4,
    report: Callable[[dict[str, Any]], None] | None = None,
) -> dict[str, Any]:
    """Fine-tune a drafter on recorded sessions; the newest fifth of them is held out and measured before and after.

    `run` gets the corpus, the run and, in `run/drafter`, the drafter. Started again, it goes on where it was stopped.

    Returns:
        sessions trained on and held out, tokens, and the held-out figures before and after (also in `sessions.json`).

    Raises:
        InvalidRequest: the logs cannot be used, or there are fewer than two sessions.
    """
    recordings = recordings_of([sessions], target)
    if len(recordings) < 2:
        raise InvalidRequest(
            f"{sessions} holds one session: at least two are needed, one to measure on", param="sessions"
        )
    later = math.ceil(HELD_OUT_SHARE * len(recordings))
    sides = {recording.key: SPLITS[i >= len(recordings) - later] for i, recording in enumerate(recordings)}
    requests = [r for recording in recordings for r in recorded_requests(recording, sides[recording.key])]
    plan = Plan(roots=(), sources=0, recorded=(str(sessions),), with_questions=False, held_out_share=HELD_OUT_SHARE)
    base = _base(drafter, target)
    corpus = run / "corpus"
    write_corpus(corpus, plan, requests, target)
    built = build_corpus(corpus, target=target, taps=len(base.config.target_layer_ids))["built"]
    settings = _settings(base, _folder(drafter, target), corpus, target, steps, batch, lr)
    first, last = run_training(settings, run, report, measure_first=True)
    result = {
        "sessions": {side: sum(name == side for name in sides.values()) for side in SPLITS},
        "tokens": {side: built[side]["tokens"] for side in SPLITS},
        "generated": {side: built[side]["generated"] for side in SPLITS},
        "before": first,
        "after": last,
    }
    (run / RESULT).write_text(json.dumps(result, indent=1) + "\n")
    return result


def _folder(drafter: str, target: str) -> Path:
    if drafter != "auto":
        return Path(drafter)
    fitting = fitting_drafter(fingerprint(resolve(target)))
    if fitting is None:
        raise InvalidRequest("no shipped drafter fits this target: name a checkpoint folder", param="drafter")
    return fitting.folder


def _base(drafter: str, target: str) -> Drafter:
    return Drafter.load(_folder(drafter, target))


def _settings(base: Drafter, init: Path, corpus: Path, target: str, steps: int, batch: int, lr: float) -> Settings:
    config = base.config
    return Settings(
        target=target,
        cache=str(corpus / "train"),
        held_out=str(corpus / "held_out"),
        init=str(init),
        mask_token_id=config.mask_token_id,
        steps=steps,
        batch=batch,
        generated_share=1.0,
        evaluate_steps=max(steps // 4, 1),
        shape=Shape(
            depth=config.depth,
            taps=len(config.target_layer_ids),
            rank=config.rank,
            anchor_group_size=config.anchor_group_size,
            block_size=config.block_size,
            draft_vocab=config.draft_vocab_size or 0,
        ),
        loss=Loss(ce=0.5),
        optimizer=Optimizer(lr=lr, warmup=max(steps // 20, 1), tables=0.2),
    )
