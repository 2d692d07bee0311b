"""Which drafter belongs to which target: the ones shipped with the package, found by the target's fingerprint."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import dlite_agent
from dlite_agent.errors import CheckpointError
from dlite_agent.model.drafter import Drafter
from dlite_agent.model.target import Target


@dataclass(frozen=True)
class ShippedDrafter:
    """A drafter folder of the package and its model card."""

    name: str
    folder: Path
    card: dict[str, Any]


def shipped_drafters() -> list[ShippedDrafter]:
    """Drafters in `dlite_agent/weights/`, by name."""
    root = Path(dlite_agent.__file__).parent / "weights"
    cards = sorted(root.glob("*/card.json"))
    return [ShippedDrafter(card.parent.name, card.parent, json.loads(card.read_text())) for card in cards]


def fitting_drafter(target_fingerprint: str) -> ShippedDrafter | None:
    """The shipped drafter that was trained for this very target, if there is one."""
    for drafter in shipped_drafters():
        if drafter.card.get("target_fingerprint") == target_fingerprint:
            return drafter
    return None


def load_drafter(drafter: str, target: Target, *, anchor_group_size: int | None = None) -> Drafter | None:
    """Load a drafter for a target and make it ready to serve.

    Args:
        drafter: a checkpoint folder; `auto` for the shipped one that fits, or None if none does; `none`.
        anchor_group_size: see `DrafterConfig.from_dict`.

    Raises:
        CheckpointError: the checkpoint is malformed or was made for another target.
    """
    if drafter == "none":
        return None
    if drafter == "auto":
        fitting = fitting_drafter(target.fingerprint)
        if fitting is None:
            return None
        folder = fitting.folder
    else:
        folder = Path(drafter)
        if not folder.is_dir():
            raise CheckpointError(f"{drafter} is not a folder; give a checkpoint folder, auto or none", param="drafter")
    loaded = Drafter.load(folder, anchor_group_size=anchor_group_size)
    loaded.config.check_target(target.spec)
    loaded.pack(target.precision, target.device)
    return loaded
