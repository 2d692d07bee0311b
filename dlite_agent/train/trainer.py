"""The trainer: direct distillation of a drafter from cached target states. Resumable to the same final weights.

Anchors come from all over the cache in every step, which beats many anchors of a few sequences by far.
"""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.func import functional_call

from dlite_agent.errors import CheckpointError, InvalidRequest, ModelError
from dlite_agent.model.drafter import Drafter
from dlite_agent.model.drafter_config import DrafterConfig
from dlite_agent.model.spec import ModelSpec
from dlite_agent.model.weights import FolderWeights, fingerprint, resolve
from dlite_agent.train.anchors import Batch, Examples
from dlite_agent.train.evaluate import replay
from dlite_agent.train.losses import Labels, accepted, position_weights, top_losses, weighted_mean
from dlite_agent.train.settings import Settings
from dlite_agent.train.start import draft_vocabulary, initialise, statistics
from dlite_agent.train.store import Shard, check_disjoint, open_shards

DETAIL_STEPS = 25
"""Every so many steps a batch is also measured exactly, before the step learns from it."""
WHOLE_STEPS = 5
"""With short blocks, every so many steps are on whole ones."""
Report = Callable[[dict[str, Any]], None]


@dataclass(frozen=True)
class TargetTables:
    """What training needs of a target: embedding and LM head [V, H] in fp32; nothing of it is trained or saved."""

    spec: ModelSpec
    fingerprint: str
    embedding: Tensor
    head: Tensor

    @classmethod
    def load(cls, model: str) -> TargetTables:
        """Read the two tables of a target by name or folder (see `model.weights.resolve`)."""
        folder = resolve(model)
        spec, weights = ModelSpec.from_folder(folder), FolderWeights(folder)
        embedding = weights["model.embed_tokens.weight"].float()
        head = embedding if spec.tied_head else weights["lm_head.weight"].float()
        return cls(spec, fingerprint(folder), embedding, head)


def learning_rate(settings: Settings, step: int) -> float:
    """Linear warm-up, then cosine to `final` times the peak."""
    optimizer = settings.optimizer
    if step < optimizer.warmup:
        return optimizer.lr * (step + 1) / optimizer.warmup
    done = (step - optimizer.warmup) / max(settings.steps - optimizer.warmup, 1)
    floor = optimizer.final
    return optimizer.lr * (floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * min(done, 1.0))))


def _with_block(drafter: Drafter, block: int) -> Drafter:
    """The same drafter, parameter objects and all, that proposes `block` - 1 tokens."""
    short = Drafter(replace(drafter.config, block_size=block))
    short.load_state_dict(drafter.state_dict(keep_vars=True), assign=True)
    return short


class Trainer:
    """One run in one folder: `checkpoint.pt`, `metrics.jsonl`, and the drafter itself in `drafter/`.

    A folder that holds a checkpoint is continued, with the shards it had (and those it takes up at `refresh_steps`).

    Raises:
        InvalidRequest: settings and data do not fit, or training and held-out data share a source.
        CheckpointError: the folder's checkpoint belongs to other settings.
    """

    def __init__(
        self, settings: Settings, run: Path, tables: TargetTables, *, special_ids: tuple[int, ...] = ()
    ) -> None:
        if settings.threads:
            torch.set_num_threads(settings.threads)
        self.settings = settings
        self.run_dir = run
        self.tables = tables
        self.special_ids = special_ids
        self.step = 0
        self.rng = torch.Generator().manual_seed(settings.seed)
        run.mkdir(parents=True, exist_ok=True)
        saved = self._read_checkpoint()
        self.shards = open_shards(Path(settings.cache), names=saved["shards"] if saved else None)
        self.held_out = open_shards(Path(settings.held_out)) if settings.held_out else []
        self._check_data()
        self.drafter = self._drafter(saved)
        self.optimizer = torch.optim.AdamW(
            self._groups(),
            lr=settings.optimizer.lr,
            betas=(settings.optimizer.beta1, settings.optimizer.beta2),
            weight_decay=0.0,
            fused=True,
        )
        if saved:
            self.optimizer.load_state_dict(saved["optimizer"])
            self.rng.set_state(saved["rng"])
            self.step = saved["step"]
        self._short = _with_block(self.drafter, settings.short_block) if settings.short_block else self.drafter
        self._use(self.shards)

    def _check_data(self) -> None:
        header, spec = self.shards[0].header, self.tables.spec
        if header.target != self.tables.fingerprint or header.vocab_size != spec.vocab_size:
            raise InvalidRequest("the cache was made with another target than this one: build it anew", param="cache")
        check_disjoint(self.shards, self.held_out)

    def _drafter(self, saved: dict[str, Any] | None) -> Drafter:
        settings, shape = self.settings, self.settings.shape
        config = DrafterConfig.for_target(
            self.tables.spec,
            mask_token_id=settings.mask_token_id,
            depth=shape.depth,
            taps=shape.taps,
            rank=shape.rank,
            anchor_group_size=shape.anchor_group_size,
            block_size=shape.block_size,
            draft_vocab_size=shape.draft_vocab or None,
        )
        drafter = self._checked(Drafter(config))
        if saved:
            drafter.load_state_dict(saved["drafter"])
            return drafter
        if settings.init:
            drafter = Drafter.load(Path(settings.init))
            if drafter.config != config:
                raise InvalidRequest(
                    f"{settings.init} has another shape, target or mask_token_id than these settings", param="init"
                )
            return drafter
        if config.draft_vocab_size is not None:
            drafter.draft_vocab_ids = draft_vocabulary(
                self.shards, self._text_counts(), config.draft_vocab_size, self.special_ids
            )
        stats = statistics(self.shards)
        initialise(drafter, stats, self.tables.embedding, self.tables.head, seed=settings.seed)
        return drafter

    def _groups(self) -> list[dict[str, Any]]:
        """Parameters with the share of the learning rate that each takes."""
        head = self.drafter.sequential_head
        tables = [head.output_proj.weight, head.prev_token_embedding.weight]
        rest = [p for p in self.drafter.parameters() if all(p is not table for table in tables)]
        return [{"params": rest, "share": 1.0}, {"params": tables, "share": self.settings.optimizer.tables}]

    def _text_counts(self) -> Tensor:
        path, size = self.settings.text_counts, self.tables.spec.vocab_size
        if not path:
            return torch.zeros(size)
        try:
            counts = torch.from_numpy(np.load(path))
        except (OSError, ValueError) as error:
            raise InvalidRequest(f"{path} is not an array of counts: {error}", param="text_counts") from error
        if counts.shape != (size,):
            raise InvalidRequest(f"{path} has shape {list(counts.shape)}, not [{size}]", param="text_counts")
        return counts

    def _checked(self, drafter: Drafter) -> Drafter:
        layers = drafter.config.target_layer_ids
        if layers != self.shards[0].header.tap_layers:
            raise InvalidRequest(
                f"the cache taps layers {list(self.shards[0].header.tap_layers)}, the drafter wants {list(layers)}",
                param="shape.taps",
            )
        if not 0 <= drafter.config.mask_token_id < self.tables.spec.vocab_size:
            raise InvalidRequest("mask_token_id must be an id of the target's vocabulary", param="mask_token_id")
        return drafter

    def _use(self, shards: list[Shard]) -> None:
        config = self.drafter.config
        self.shards = shards
        self.examples = Examples(
            shards,
            proposals=config.proposal_length,
            group=config.anchor_group_size,
            vocab_size=config.vocab_size,
            vocab=self.drafter.draft_vocab_ids,
        )

    def _refresh(self) -> None:
        """Take up shards that have been appended to the cache since the run began."""
        shards = open_shards(Path(self.settings.cache))
        if len(shards) > len(self.shards):
            check_disjoint(shards, self.held_out)
            self._use(shards)

    def train(self, report: Report | None = None, *, stop_at: int | None = None) -> Drafter:
        """Run to `steps` (or to `stop_at`, as if killed there after a checkpoint) and write the drafter.

        Raises:
            ModelError: the loss is not finite; the last checkpoint stays.
        """
        settings = self.settings
        end = min(settings.steps, stop_at or settings.steps)
        saved_at = time.monotonic()
        with (self.run_dir / "metrics.jsonl").open("a") as log:

            def tell(row: dict[str, Any]) -> None:
                log.write(json.dumps(row) + "\n")
                log.flush()
                if report:
                    report(row)

            while self.step < end:
                if settings.refresh_steps and self.step and self.step % settings.refresh_steps == 0:
                    self._refresh()
                self._one_step(tell)
                if settings.evaluate_steps and self.step % settings.evaluate_steps == 0 and self.held_out:
                    tell(self.evaluate())
                if time.monotonic() - saved_at > 60 * settings.checkpoint_minutes:
                    self.save()
                    saved_at = time.monotonic()
        self.save()
        return self.drafter

    def _one_step(self, tell: Report) -> None:
        settings, started = self.settings, time.monotonic()
        rate = learning_rate(settings, self.step)
        for group in self.optimizer.param_groups:
            group["lr"] = rate * group["share"]
        batch = self.examples.draw(settings.batch, generated_share=settings.generated_share, rng=self.rng)
        detailed = self.step % DETAIL_STEPS == 0
        figures = self._figures(batch) if detailed else {}
        loss = self._loss(batch)
        if not math.isfinite(loss.item()):
            raise ModelError(
                f"the loss is {loss.item()} at step {self.step}: lower optimizer.lr; the last checkpoint stays",
                param="optimizer.lr",
            )
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()  # type: ignore[no-untyped-call]
        norm = torch.nn.utils.clip_grad_norm_(self.drafter.parameters(), settings.optimizer.clip)
        self.optimizer.step()
        self.step += 1
        if detailed:
            seconds = time.monotonic() - started
            tell(
                {
                    "step": self.step,
                    "loss": round(loss.item(), 4),
                    **figures,
                    "lr": rate,
                    "grad_norm": round(norm.item(), 3),
                    "anchors_per_s": round(settings.batch / seconds, 1),
                    "eta_s": round((settings.steps - self.step) * seconds),
                    "cache_tokens": sum(len(shard) for shard in self.shards),
                }
            )

    def _loss(self, batch: Batch) -> Tensor:
        """An unbiased estimate of the weighted loss: position k takes part with probability exp(-k / gamma).

        It spares half of the products with the head's vocabulary, the dearest part of a step.
        """
        drafter = self.drafter if self.step % WHOLE_STEPS == 0 else self._short
        batch = batch.first(drafter.config.proposal_length)
        labels = batch.labels
        mixed = self._before_output(drafter, batch)
        mass = self._weights(drafter).repeat(len(batch.tokens)) * labels.valid
        taken = torch.nonzero(torch.rand(mass.shape, generator=self.rng) < mass).squeeze(1)
        logits = mixed.flatten(0, 1)[taken] @ self.drafter.sequential_head.output_proj.weight.T
        losses = top_losses(logits, Labels(labels.rows[taken], labels.p[taken], labels.valid[taken]))
        weights = self.settings.loss
        return (weights.ce * losses.ce + weights.l1 * losses.l1).sum() / mass.sum()

    def _weights(self, drafter: Drafter) -> Tensor:
        return position_weights(drafter.config.proposal_length, self.settings.loss.gamma)

    def _before_output(self, drafter: Drafter, batch: Batch) -> Tensor:
        """The head's mixed states [N, K, r], which its output product turns into logits."""
        identity = {"sequential_head.output_proj.weight": torch.eye(drafter.config.rank)}
        inputs = (batch.features, batch.tokens, self.tables.embedding, batch.following)
        mixed: Tensor = functional_call(drafter, identity, inputs)
        return mixed

    @torch.no_grad()
    def _figures(self, batch: Batch) -> dict[str, Any]:
        """Exact losses, total variation a position, and mean advance by teacher forcing, of a batch."""
        logits = self.drafter(batch.features, batch.tokens, self.tables.embedding, batch.following)
        shape = logits.shape[:2]
        prefix = accepted(logits.argmax(-1), batch.labels).float().mean() + 1
        losses = top_losses(logits.flatten(0, 1), batch.labels)
        ce, l1, valid = (values.view(shape) for values in (losses.ce, losses.l1, batch.labels.valid))
        weights = self._weights(self.drafter)
        tv = (l1.sum(0) / valid.sum(0) / 2).tolist()
        return {
            "prefix": round(prefix.item(), 4),
            "ce": round(weighted_mean(ce, valid, weights).item(), 4),
            "l1": round(weighted_mean(l1, valid, weights).item(), 4),
            "tv": [round(value, 4) for value in tv],
        }

    def evaluate(self) -> dict[str, Any]:
        """Acceptance on the held-out cache (see `evaluate.replay`)."""
        found = replay(self.drafter, self.held_out, self.tables.embedding)
        return {
            "step": self.step,
            "held_out_tau": round(found["all"].tau, 4),
            "held_out_rates": found["all"].rates(),
            "held_out_kinds": {kind: round(a.tau, 3) for kind, a in sorted(found.items())},
        }

    def save(self) -> None:
        """Write the checkpoint by one rename, then the drafter with its card."""
        state = {
            "settings": asdict(self.settings),
            "shards": [shard.name for shard in self.shards],
            "drafter": self.drafter.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "rng": self.rng.get_state(),
            "step": self.step,
        }
        path = self.run_dir / "checkpoint.pt"
        partial = path.with_suffix(".partial")
        try:
            with partial.open("wb") as file:
                torch.save(state, file)
                file.flush()
                os.fsync(file.fileno())
            partial.replace(path)
        except (OSError, RuntimeError) as error:
            partial.unlink(missing_ok=True)
            raise ModelError(f"cannot write {path}: {error}; the previous checkpoint stays", param="run") from error
        self.drafter.save(self.run_dir / "drafter", self.card())

    def card(self) -> dict[str, Any]:
        """What the weights were made from."""
        settings = self.settings
        return {
            "target": settings.target,
            "target_fingerprint": self.tables.fingerprint,
            "steps": self.step,
            "anchors": self.step * settings.batch,
            "cache_tokens": sum(len(shard) for shard in self.shards),
            "conversations": sum(len(shard.conversations) for shard in self.shards),
            "shape": asdict(settings.shape),
            "loss": asdict(settings.loss),
            "optimizer": asdict(settings.optimizer),
            "batch": settings.batch,
            "generated_share": settings.generated_share,
            "short_block": settings.short_block,
        }

    def _read_checkpoint(self) -> dict[str, Any] | None:
        path = self.run_dir / "checkpoint.pt"
        if not path.is_file():
            return None
        try:
            saved: dict[str, Any] = torch.load(path, weights_only=True)
        except Exception as error:  # torch raises half a dozen kinds for a damaged file
            raise CheckpointError(f"{path} cannot be read: {error}; delete it to start over", param="run") from error
        free = ("threads", "evaluate_steps", "checkpoint_minutes", "refresh_steps")
        ours = {key: value for key, value in asdict(self.settings).items() if key not in free}
        theirs = {key: value for key, value in saved["settings"].items() if key not in free}
        if changed := [key for key in ours if ours[key] != theirs.get(key)]:
            raise CheckpointError(
                f"{path} was made with other settings ({', '.join(changed)}): use another run folder", param=changed[0]
            )
        return saved
