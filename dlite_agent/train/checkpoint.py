"""Checkpoints of a run: written by one rename, read strictly, and continued only with the settings they began with."""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError

from dlite_agent.errors import CheckpointError, ModelError
from dlite_agent.model.drafter import Drafter
from dlite_agent.train.settings import Settings

CHECKPOINT, METRICS, DRAFTER = "checkpoint.pt", "metrics.jsonl", "drafter"
FREE = ("threads", "device", "accumulate", "evaluate_steps", "checkpoint_minutes", "refresh_steps")
"""Settings that a continued run may change."""


def read_checkpoint(run: Path, settings: Settings) -> dict[str, Any] | None:
    """What `write_checkpoint` wrote, if anything.

    Raises:
        CheckpointError: it is damaged or belongs to other settings.
    """
    path = run / CHECKPOINT
    if not path.is_file():
        return None
    try:
        saved: dict[str, Any] = torch.load(path, weights_only=True, map_location="cpu")
        theirs = _filled(saved["settings"], asdict(Settings(target="", cache="")))
    except Exception as error:  # torch raises half a dozen kinds for a damaged file
        raise CheckpointError(f"{path} cannot be read: {error}; delete it to start over", param="run") from error
    ours = asdict(settings)
    if changed := [key for key in ours if key not in FREE and ours[key] != theirs[key]]:
        raise CheckpointError(
            f"{path} was made with other settings ({', '.join(changed)}): use another run folder", param=changed[0]
        )
    return saved


def _filled(saved: dict[str, Any], defaults: dict[str, Any]) -> dict[str, Any]:
    """Saved settings with the defaults of keys that came later."""
    return {
        key: _filled(saved[key], value) if key in saved and isinstance(value, dict) else saved.get(key, value)
        for key, value in defaults.items()
    }


def write_checkpoint(run: Path, state: dict[str, Any], drafter: Drafter, card: dict[str, Any]) -> None:
    """Replace the checkpoint, then the drafter with its card; neither is ever half-written.

    Raises:
        ModelError: the disk refuses; what was there before stays.
    """
    path, folder = run / CHECKPOINT, run / DRAFTER
    partial, fresh = run / f".{CHECKPOINT}.partial", run / f".{DRAFTER}.partial"
    try:
        with partial.open("wb") as file:
            torch.save(state, file)
            file.flush()
            os.fsync(file.fileno())
        shutil.rmtree(fresh, ignore_errors=True)
        drafter.save(fresh, card)
        partial.replace(path)
        shutil.rmtree(folder, ignore_errors=True)
        fresh.rename(folder)
    except (OSError, RuntimeError, SafetensorError) as error:
        partial.unlink(missing_ok=True)
        shutil.rmtree(fresh, ignore_errors=True)
        raise ModelError(
            f"cannot write {path}: {error}; free some space: the previous checkpoint stays", param="run"
        ) from error


def cut_metrics(run: Path, step: int) -> None:
    """Drop the rows of steps that a killed run took after its last checkpoint, and a torn last line."""
    path = run / METRICS
    if not path.is_file():
        return
    kept = []
    for line in path.read_text().splitlines():
        try:
            row = json.loads(line)
        except ValueError:
            continue
        if row["step"] <= step:
            kept.append(line + "\n")
    path.write_text("".join(kept))
