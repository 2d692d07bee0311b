"""One training run as a frozen tree, read from TOML; unknown keys are refused by name."""

from __future__ import annotations

import dataclasses
import tomllib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dlite_agent.errors import InvalidRequest

ROUTES = ("direct", "teacher", "two-stage")


@dataclass(frozen=True)
class Shape:
    """The drafter: depth, taps S, rank r, G, block size K + 1, rows of the draft vocabulary (0: the target's own).

    `head` false trains without the head's recurrence: drafts then do not depend on one another.
    """

    depth: int = 2
    taps: int = 8
    rank: int = 256
    anchor_group_size: int = 1
    block_size: int = 8
    draft_vocab: int = 8192
    head: bool = True


@dataclass(frozen=True)
class History:
    """What a teacher sees beside a student's inputs: fused states of the `window` - 1 tokens before the boundary."""

    window: int = 32


@dataclass(frozen=True)
class TwoStage:
    """The folder of the teacher's drafter, and the shares of the steps that the first two stages take.

    `distil`: forward KL to the teacher, head frozen; `transition`: cosine blend into CE + L1, which is the rest. The
    recipe's epochs are 1, 1 and 5.
    """

    teacher: str = ""
    distil: float = 1 / 7
    transition: float = 1 / 7


@dataclass(frozen=True)
class Loss:
    """Weights of CE and L1, and gamma of the position decay exp(-k / gamma)."""

    ce: float = 0.1
    l1: float = 1.0
    gamma: float = 4.0


@dataclass(frozen=True)
class Optimizer:
    """AdamW without weight decay: peak rate, warm-up steps, final rate as a share of the peak, clipping norm.

    `tables` is the rate of the head's two vocabulary tables, which start out good, as a share of all others'.
    """

    lr: float = 1e-3
    warmup: int = 100
    final: float = 0.02
    tables: float = 0.3
    clip: float = 1.0
    beta1: float = 0.9
    beta2: float = 0.95


@dataclass(frozen=True)
class Settings:
    """A run: `cache` is the training cache, `held_out` another one to evaluate on; sizes count anchors.

    `route`: direct (CE + L1 to the target), teacher (the same, with history), two-stage (see `TwoStage`).
    `init` names a drafter folder to start from; `text_counts` an array of id counts (see `data.count_ids`).
    `short_block`: in four of five steps, train on blocks of only this size; the first drafts, which decide acceptance,
    then learn from more anchors in the same time (0: always whole blocks).
    `scheduled_sampling`: how often the head is fed its own guess in place of the true token before a draft.
    `feature_noise`: normal noise on the states that are read, in units of their size once centred.
    `batch` is that of all processes together; each takes its share in `accumulate` parts.
    `precision` of the forward is fp32 or bf16; weights, gradients and optimizer are fp32 in both.
    """

    target: str
    cache: str
    route: str = "direct"
    held_out: str = ""
    init: str = ""
    text_counts: str = ""
    mask_token_id: int = -1
    steps: int = 2000
    batch: int = 256
    accumulate: int = 1
    precision: str = "fp32"
    device: str = "auto"
    generated_share: float = 0.65
    short_block: int = 0
    scheduled_sampling: float = 0.0
    feature_noise: float = 0.0
    seed: int = 0
    threads: int = 0
    refresh_steps: int = 0
    evaluate_steps: int = 500
    checkpoint_minutes: float = 5.0
    shape: Shape = field(default_factory=Shape)
    history: History = field(default_factory=History)
    two_stage: TwoStage = field(default_factory=TwoStage)
    loss: Loss = field(default_factory=Loss)
    optimizer: Optimizer = field(default_factory=Optimizer)

    def __post_init__(self) -> None:
        positive = {
            "steps": self.steps,
            "batch": self.batch,
            "accumulate": self.accumulate,
            "lr": self.optimizer.lr,
            "gamma": self.loss.gamma,
        }
        for name, value in positive.items():
            _require(value > 0, name, f"must be positive, not {value}")
        _require(
            self.short_block == 0 or 2 <= self.short_block < self.shape.block_size,
            "short_block",
            f"must be 2..{self.shape.block_size - 1}, or 0 for none, not {self.short_block}",
        )
        stages = self.two_stage
        _require(self.feature_noise >= 0, "feature_noise", f"cannot be negative, not {self.feature_noise}")
        shares = {
            "generated_share": self.generated_share,
            "scheduled_sampling": self.scheduled_sampling,
            "two_stage.distil": stages.distil,
            "two_stage.transition": stages.transition,
            "two_stage": stages.distil + stages.transition,
        }
        for name, share in shares.items():
            _require(0 <= share <= 1, name, f"is a share of 0..1, not {share}")
        _require(self.route in ROUTES, "route", f"must be one of {', '.join(ROUTES)}, not {self.route!r}")
        _require(self.precision in ("fp32", "bf16"), "precision", f"must be fp32 or bf16, not {self.precision!r}")
        _require(self.history.window >= 2, "history.window", f"must be at least 2, not {self.history.window}")
        _require(
            self.route != "two-stage" or bool(stages.teacher),
            "two_stage.teacher",
            "must name the drafter folder of a teacher: train one with route teacher first",
        )


def _require(condition: bool, name: str, rule: str) -> None:
    if not condition:
        raise InvalidRequest(f"{name} {rule}", param=name)


def read_settings(path: Path) -> Settings:
    """Settings of a TOML file.

    Raises:
        InvalidRequest: the file is unreadable, a key is unknown or missing, or a value is of the wrong type.
    """
    try:
        table = tomllib.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise InvalidRequest(f"{path} is not readable TOML: {error}", param="config") from error
    settings = _build(Settings, table, "")
    assert isinstance(settings, Settings)
    return settings


def _build(cls: Any, table: dict[str, Any], at: str) -> Any:
    fields = {f.name: f for f in dataclasses.fields(cls)}
    values: dict[str, Any] = {}
    for key, value in table.items():
        if key not in fields:
            known = ", ".join(fields)
            raise InvalidRequest(f"unknown key {at}{key}; known are {known}", param=f"{at}{key}")
        default = fields[key].default_factory
        if default is not dataclasses.MISSING:
            if not isinstance(value, dict):
                raise InvalidRequest(f"{at}{key} must be a table", param=f"{at}{key}")
            values[key] = _build(default, value, f"{key}.")
            continue
        kind: Any = {"str": str, "bool": bool, "int": int, "float": (int, float)}[str(fields[key].type)]
        if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
            raise InvalidRequest(f"{at}{key} must be of type {fields[key].type}, not {value!r}", param=f"{at}{key}")
        values[key] = value
    try:
        return cls(**values)
    except TypeError as error:
        raise InvalidRequest(f"the settings lack a key: {error}", param="config") from error
