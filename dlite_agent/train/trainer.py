"""The trainer: one loop for every route, on cached target states. Resumable to the same final weights.

Anchors come from all over the cache in every step, which beats many anchors of a few sequences by far.
"""

from __future__ import annotations

import hashlib
import json
import math
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dlite_agent.errors import InvalidRequest, ModelError
from dlite_agent.model.drafter import Drafter
from dlite_agent.model.drafter_config import DrafterConfig
from dlite_agent.model.spec import ModelSpec
from dlite_agent.model.weights import FolderWeights, fingerprint, resolve
from dlite_agent.train.anchors import Anchors, Batch, Examples, tap_columns
from dlite_agent.train.checkpoint import METRICS, cut_metrics, read_checkpoint, write_checkpoint
from dlite_agent.train.evaluate import replay
from dlite_agent.train.losses import accepted, position_weights, top_losses, weighted_mean
from dlite_agent.train.objective import Objective, learning_rate, stage
from dlite_agent.train.parallel import Processes
from dlite_agent.train.settings import Settings
from dlite_agent.train.start import draft_vocabulary, initialise, statistics
from dlite_agent.train.store import Shard, check_disjoint, open_shards
from dlite_agent.train.teacher import Teacher

DETAIL_STEPS = 25
"""Every so many steps a batch is also measured exactly, before the step learns from it."""
HELD_OUT_ANCHORS = 512
"""Held-out anchors that are measured like a training batch, so that the two curves compare."""
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


class Trainer:
    """One run in one folder: `checkpoint.pt`, `metrics.jsonl`, and the drafter itself in `drafter/`.

    A folder that holds a checkpoint is continued, with the shards it had (and those it takes up at `refresh_steps`).

    Args:
        processes: of a run that torchrun started; this process alone by default.

    Raises:
        InvalidRequest: settings and data do not fit, or training and held-out data share a source.
        CheckpointError: the folder's checkpoint belongs to other settings, or `two_stage.teacher` is none.
    """

    def __init__(
        self,
        settings: Settings,
        run: Path,
        tables: TargetTables,
        *,
        special_ids: tuple[int, ...] = (),
        processes: Processes | None = None,
    ) -> None:
        if settings.threads:
            torch.set_num_threads(settings.threads)
        self.settings = settings
        self.run_dir = run
        self.tables = tables
        self.special_ids = special_ids
        self.processes = processes or Processes(torch.device("cpu"))
        self.step = 0
        self._tau: dict[str, Any] = {}
        self.rng = torch.Generator().manual_seed(settings.seed)
        run.mkdir(parents=True, exist_ok=True)
        saved = read_checkpoint(run, settings)
        self.shards = open_shards(Path(settings.cache), names=saved["shards"] if saved else None)
        self.held_out = open_shards(Path(settings.held_out)) if settings.held_out else []
        self._check_data()
        device = self.processes.device
        self.embedding = tables.embedding.to(device)
        self.teacher = self._teacher()
        self.drafter = self._drafter(saved).to(device)
        self.processes.copy_first([parameter.data for parameter in self.drafter.parameters()])
        if not settings.shape.head:
            self._silence_recurrence()
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
            self._tau = saved.get("tau", {})
        if self.processes.first:
            cut_metrics(run, self.step)
        self.objective = Objective(settings, self.drafter, self.embedding, self.teacher)
        self._use(self.shards)
        if self.held_out:
            self._held_out_sample()  # what cannot be measured is refused before the first step

    def _check_data(self) -> None:
        header, spec = self.shards[0].header, self.tables.spec
        if header.target != self.tables.fingerprint or header.vocab_size != spec.vocab_size:
            raise InvalidRequest("the cache was made with another target than this one: build it anew", param="cache")
        if self.held_out and self.held_out[0].header != header:
            raise InvalidRequest("cache and held_out were made with different targets or taps", param="held_out")
        check_disjoint(self.shards, self.held_out)

    def _config(self) -> DrafterConfig:
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
        tap_columns(self.shards[0], config.target_layer_ids)
        if not 0 <= config.mask_token_id < self.tables.spec.vocab_size:
            raise InvalidRequest("mask_token_id must be an id of the target's vocabulary", param="mask_token_id")
        return config

    def _drafter(self, saved: dict[str, Any] | None) -> Drafter:
        settings, config = self.settings, self._config()
        kind = Teacher if settings.route == "teacher" else Drafter
        drafter = Teacher(config, settings.history.window) if kind is Teacher else Drafter(config)
        if saved:
            drafter.load_state_dict(saved["drafter"])
            return drafter
        if settings.init:
            drafter = kind.load(Path(settings.init))
            if drafter.config != config:
                raise InvalidRequest(
                    f"{settings.init} has another shape, target or mask_token_id than these settings", param="init"
                )
            return drafter
        if config.draft_vocab_size is not None:
            drafter.draft_vocab_ids = draft_vocabulary(
                self.shards, self._text_counts(), config.draft_vocab_size, self.special_ids
            )
        stats = statistics(self.shards, config.target_layer_ids)
        initialise(drafter, stats, self.tables.embedding, self.tables.head, seed=settings.seed)
        if self.teacher is not None:
            drafter.draft_vocab_ids = self.teacher.draft_vocab_ids
            drafter.sequential_head.load_state_dict(self.teacher.sequential_head.state_dict())
        return drafter

    def _teacher(self) -> Teacher | None:
        if self.settings.route != "two-stage":
            return None
        teacher = Teacher.load(Path(self.settings.two_stage.teacher))
        teacher.requires_grad_(False)
        if replace(teacher.config, depth=self.settings.shape.depth) != self._config():
            raise InvalidRequest(
                "the teacher has another target or shape than these settings; only depth may differ",
                param="two_stage.teacher",
            )
        return teacher.to(self.processes.device)

    def _silence_recurrence(self) -> None:
        """Cut the head's recurrence off its output, for good: these weights stay zero."""
        weight, rank = self.drafter.sequential_head.state_hidden_mlp.weight, self.drafter.config.rank
        keep = torch.ones_like(weight)
        keep[:, :rank] = 0
        with torch.no_grad():
            weight.mul_(keep)
        weight.register_hook(lambda grad: grad * keep)  # type: ignore[no-untyped-call]

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

    def _use(self, shards: list[Shard]) -> None:
        self.shards = shards
        self._digest = hashlib.sha256("".join(shard.digest() for shard in shards).encode()).hexdigest()
        self.examples = Examples(shards, self.drafter)
        self._teacher_examples = Examples(shards, self.teacher) if self.teacher else self.examples

    def _refresh(self) -> None:
        """Take up shards that have been appended to the cache since the run began."""
        cache = Path(self.settings.cache)
        names = self.processes.ask_first([shard.name for shard in open_shards(cache)])
        if len(names) > len(self.shards):
            shards = open_shards(cache, names=names)
            check_disjoint(shards, self.held_out)
            self._use(shards)

    def train(self, report: Report | None = None, *, stop_at: int | None = None) -> Drafter:
        """Run to `steps` (or to `stop_at`, as if killed there after a checkpoint) and write the drafter.

        Raises:
            ModelError: the loss is not finite, or the disk is full; the last checkpoint stays.
        """
        settings, first = self.settings, self.processes.first
        end = min(settings.steps, stop_at or settings.steps)
        saved_at = time.monotonic()
        self._told_at, self._told_step = saved_at, self.step
        while self.step < end:
            if settings.refresh_steps and self.step and self.step % settings.refresh_steps == 0:
                self._refresh()
            row = self._one_step()
            if row is not None:
                self.tell(row, report)
            due = settings.evaluate_steps and (self.step % settings.evaluate_steps == 0 or self.step == settings.steps)
            if first and due and self.held_out:
                self.tell(self.evaluate(), report)
            if first and time.monotonic() - saved_at >= 60 * settings.checkpoint_minutes:
                self.save()
                saved_at = time.monotonic()
        if first:
            self.save()
        return self.drafter

    def tell(self, row: dict[str, Any], report: Report | None) -> None:
        """Add a row to the metrics."""
        with (self.run_dir / METRICS).open("a") as log:
            log.write(json.dumps(row) + "\n")
        if report:
            report(row)

    def _one_step(self) -> dict[str, Any] | None:
        """One step; its row of the metrics, if it is one that has one."""
        settings, processes = self.settings, self.processes
        rate = learning_rate(settings, self.step)
        for group in self.optimizer.param_groups:
            group["lr"] = rate * group["share"]
        at = stage(settings, self.step)
        self.drafter.sequential_head.requires_grad_(at.head)
        examples = self._teacher_examples if at.teacher else self.examples
        anchors = examples.pick(settings.batch, generated_share=settings.generated_share, rng=self.rng)
        proposals = self.objective.block(self.step) - 1
        sample = self.objective.sample(torch.from_numpy(anchors.valid(proposals)), self.rng)
        self.optimizer.zero_grad(set_to_none=True)
        total, figures = torch.zeros((), device=processes.device), None
        parts = np.array_split(np.arange(settings.batch), processes.world * settings.accumulate)
        for mine in parts[processes.rank * settings.accumulate :][: settings.accumulate]:
            if not len(mine):
                continue
            batch, history = self._gather(examples, anchors.take(mine), bool(at.teacher))
            if figures is None and processes.first and self.step % DETAIL_STEPS == 0:
                figures = self._figures(batch)
            loss = self.objective.loss(batch, history, sample.part(mine[0], mine[-1] + 1), at)
            loss.backward()  # type: ignore[no-untyped-call]
            total += loss.detach()
        learning = [p for p in self.drafter.parameters() if p.requires_grad]
        grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in learning]
        processes.sum([total, *grads])
        if not math.isfinite(total.item()):
            raise ModelError(
                f"the loss is {total.item()} at step {self.step}: lower optimizer.lr; the last checkpoint stays",
                param="optimizer.lr",
            )
        norm = torch.nn.utils.clip_grad_norm_(learning, settings.optimizer.clip)
        self.optimizer.step()
        self.step += 1
        if figures is None:
            return None
        return {"step": self.step, "loss": round(total.item(), 4), **figures, **self._pace(rate, norm.item())}

    def _gather(self, examples: Examples, anchors: Anchors, teaching: bool) -> tuple[Batch, Batch | None]:
        """The drafter's batch and, where a teacher takes part, the teacher's."""
        batch = examples.gather(anchors).to(self.processes.device)
        if not teaching:
            return batch, None
        taps = len(self.drafter.config.target_layer_ids)
        return replace(batch, features=batch.features[:, :taps]), batch

    def _pace(self, rate: float, norm: float) -> dict[str, Any]:
        """Rates since the last row, and the time left by them."""
        now = time.monotonic()
        seconds = max(now - self._told_at, 1e-9) / (self.step - self._told_step)
        self._told_at, self._told_step = now, self.step
        anchors = self.settings.batch / seconds
        return {
            "lr": rate,
            "grad_norm": round(norm, 3),
            "anchors_per_s": round(anchors, 1),
            "tokens_per_s": round(anchors * self.drafter.config.proposal_length, 1),
            "eta_s": round((self.settings.steps - self.step) * seconds),
            "cache_tokens": sum(len(shard) for shard in self.shards),
        }

    @torch.no_grad()
    def _figures(self, batch: Batch) -> dict[str, Any]:
        """Exact losses, total variation a position, and mean advance by teacher forcing, of a batch."""
        logits = self.drafter(batch.features, batch.tokens, self.embedding, batch.following)
        shape = logits.shape[:2]
        prefix = accepted(logits.argmax(-1), batch.labels).float().mean() + 1
        losses = top_losses(logits.flatten(0, 1), batch.labels)
        ce, l1, valid = (values.view(shape) for values in (losses.ce, losses.l1, batch.labels.valid))
        weights = position_weights(shape[1], self.settings.loss.gamma).to(ce.device)
        tv = (l1.sum(0) / valid.sum(0).clamp(min=1) / 2).tolist()
        return {
            "prefix": round(prefix.item(), 4),
            "ce": round(weighted_mean(ce, valid, weights).item(), 4),
            "l1": round(weighted_mean(l1, valid, weights).item(), 4),
            "tv": [round(value, 4) for value in tv],
        }

    def evaluate(self) -> dict[str, Any]:
        """The held-out cache: the figures of a training batch and, on its greedy answers, acceptance (see `replay`)."""
        examples, anchors = self._held_out_sample()
        figures = self._figures(examples.gather(anchors).to(self.processes.device))
        row: dict[str, Any] = {"step": self.step} | {f"held_out_{name}": value for name, value in figures.items()}
        if any(labels.temperature == 0 for shard in self.held_out for labels in shard.conversations):
            found = replay(self.drafter, self.held_out, self.embedding)
            row |= {
                "held_out_tau": round(found["all"].tau, 4),
                "held_out_rates": found["all"].rates(),
                "held_out_kinds": {kind: round(a.tau, 3) for kind, a in sorted(found.items())},
            }
            self._tau = {"tau": row["held_out_tau"], "acceptance": row["held_out_rates"], "at_step": self.step}
        return row

    def _held_out_sample(self) -> tuple[Examples, Anchors]:
        """The held-out anchors that are measured like a training batch, the same each time."""
        examples, share = Examples(self.held_out, self.drafter), self.settings.generated_share
        rng = torch.Generator().manual_seed(0)
        return examples, examples.pick(HELD_OUT_ANCHORS, generated_share=share, rng=rng)

    def save(self) -> None:
        """Write the checkpoint and the drafter with its card."""
        state = {
            "settings": asdict(self.settings),
            "shards": [shard.name for shard in self.shards],
            "drafter": self.drafter.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "rng": self.rng.get_state(),
            "step": self.step,
            "tau": self._tau,
        }
        write_checkpoint(self.run_dir, state, self.drafter, self.card())

    def card(self) -> dict[str, Any]:
        """What the weights were made from; with a held-out cache also tau and acceptance, which a server reads."""
        settings = self.settings
        return {
            **self._tau,
            "target": settings.target,
            "target_fingerprint": self.tables.fingerprint,
            "route": settings.route,
            "steps": self.step,
            "anchors": self.step * settings.batch,
            "cache_tokens": sum(len(shard) for shard in self.shards),
            "cache_digest": self._digest,
            "conversations": sum(len(shard.conversations) for shard in self.shards),
            "shape": asdict(settings.shape),
            "loss": asdict(settings.loss),
            "optimizer": asdict(settings.optimizer),
            "batch": settings.batch,
            "generated_share": settings.generated_share,
            "short_block": settings.short_block,
        }
