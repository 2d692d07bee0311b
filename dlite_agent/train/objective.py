"""What a step minimises, and how fast: losses against the target, a teacher, or both, as the route's stage says."""

from __future__ import annotations

import math
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.func import functional_call
from torch.nn.attention import SDPBackend, sdpa_kernel

from dlite_agent.model.drafter import Drafter
from dlite_agent.train.anchors import Batch
from dlite_agent.train.losses import Labels, position_weights, top_losses
from dlite_agent.train.settings import Settings
from dlite_agent.train.teacher import Teacher

WHOLE_STEPS = 5
"""With short blocks, every so many steps are on whole ones."""


def learning_rate(settings: Settings, step: int) -> float:
    """Linear warm-up, then cosine to `final` times the peak."""
    optimizer = settings.optimizer
    if step < optimizer.warmup:
        return optimizer.lr * (step + 1) / optimizer.warmup
    done = (step - optimizer.warmup) / max(settings.steps - optimizer.warmup, 1)
    floor = optimizer.final
    return optimizer.lr * (floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * min(done, 1.0))))


@dataclass(frozen=True)
class Stage:
    """`teacher`: share of the loss that is KL to the teacher, the rest being CE + L1. `head`: the head learns too."""

    teacher: float
    head: bool


def stage(settings: Settings, step: int) -> Stage:
    """The stage of a step. Only a two-stage run has others than plain CE + L1."""
    if settings.route != "two-stage":
        return Stage(0.0, True)
    distil = round(settings.two_stage.distil * settings.steps)
    transition = round(settings.two_stage.transition * settings.steps)
    if step < distil:
        return Stage(1.0, False)
    if step < distil + transition:
        return Stage(0.5 * (1 + math.cos(math.pi * (step - distil + 0.5) / transition)), True)
    return Stage(0.0, True)


def twin(drafter: Drafter, block: int) -> Drafter:
    """The same drafter, parameter objects and all, that proposes `block` - 1 tokens."""
    config = replace(drafter.config, block_size=block)
    other = Teacher(config, drafter.window) if isinstance(drafter, Teacher) else Drafter(config)
    other.load_state_dict(drafter.state_dict(keep_vars=True), assign=True)
    return other.to(drafter.tap_ids.device)


@dataclass(frozen=True)
class Sample:
    """Which of the drafts of N anchors take part in a step, and which ids the head is fed in place of the true ones.

    `taken` [N, K] and `guessed` [N, K - 1] are bool; `mass` is the sum of the position weights over all valid drafts.
    `noise` [N, S, H], if any, is what the states that are read are blurred with, in units of their size.
    """

    taken: Tensor
    guessed: Tensor
    mass: float
    noise: Tensor | None = None

    def part(self, start: int, end: int) -> Sample:
        noise = None if self.noise is None else self.noise[start:end]
        return Sample(self.taken[start:end], self.guessed[start:end], self.mass, noise)


def _attention(device: torch.device) -> AbstractContextManager[None]:
    """On a CPU the fused attention's backward pass takes a third of a step at a dozen keys; plain products do not."""
    return sdpa_kernel(SDPBackend.MATH) if device.type == "cpu" else nullcontext()


@torch.no_grad()
def blurred(drafter: Drafter, features: Tensor, noise: Tensor) -> Tensor:
    """States with noise on those at the boundary, which come first, each by its own size once its tap is centred."""
    taps = noise.shape[1]
    size = (features[:, :taps] + drafter.layer_depth_embedding(drafter.tap_ids)).square().mean(-1, keepdim=True).sqrt()
    return torch.cat((features[:, :taps] + noise.to(features.device) * size, features[:, taps:]), dim=1)


class Objective:
    """The loss of a drafter's steps.

    Position k of a block takes part with probability exp(-k / gamma): an unbiased estimate of the weighted loss that
    spares half of the products with the head's vocabulary, the dearest part of a step.

    Args:
        embedding: the target's embedding [V, H], on the drafter's device.
        teacher: of a two-stage run, on the same device.
    """

    def __init__(self, settings: Settings, drafter: Drafter, embedding: Tensor, teacher: Teacher | None) -> None:
        self.settings = settings
        self._dtype = torch.bfloat16 if settings.precision == "bf16" else torch.float32
        self._embedding = embedding.to(self._dtype)
        whole = drafter.config.block_size
        blocks = {whole, settings.short_block or whole}
        self._twins = {block: twin(drafter, block) for block in blocks}
        self._teachers = {block: twin(teacher, block) for block in blocks} if teacher else {}
        self._short, self._whole = min(blocks), whole
        self._states = (len(drafter.config.target_layer_ids), embedding.shape[1])

    def block(self, step: int) -> int:
        """Block size of a step."""
        return self._whole if step % WHOLE_STEPS == 0 else self._short

    def weights(self, proposals: int) -> Tensor:
        return position_weights(proposals, self.settings.loss.gamma)

    def sample(self, valid: Tensor, rng: torch.Generator) -> Sample:
        """Draw what takes part of the valid drafts [N, K]."""
        mass = self.weights(valid.shape[1]) * valid
        taken = torch.rand(mass.shape, generator=rng) < mass
        guessed = torch.zeros(len(valid), valid.shape[1] - 1, dtype=torch.bool)
        if self.settings.scheduled_sampling:
            guessed = torch.rand(guessed.shape, generator=rng) < self.settings.scheduled_sampling
        noise = None
        if self.settings.feature_noise:
            noise = self.settings.feature_noise * torch.randn(len(valid), *self._states, generator=rng)
        return Sample(taken, guessed, mass.sum().item(), noise)

    def loss(self, batch: Batch, history: Batch | None, sample: Sample, at: Stage) -> Tensor:
        """This part's share of the loss.

        Args:
            history: the same anchors as the teacher reads them; needed where the stage uses one.
        """
        batch = batch.first(sample.taken.shape[1])
        drafter = self._twins[batch.following.shape[1] + 2]
        if sample.noise is not None:
            batch = replace(batch, features=blurred(drafter, batch.features, sample.noise))
        if sample.guessed.any():
            batch = replace(batch, following=self._guess(drafter, batch, sample.guessed))
        rows = torch.nonzero(sample.taken.flatten()).squeeze(1).to(batch.features.device)
        logits = self._logits(drafter, batch, rows)
        labels, weights = batch.labels, self.settings.loss
        total = logits.new_zeros(())
        if at.teacher < 1:
            losses = top_losses(logits, Labels(labels.rows[rows], labels.p[rows], labels.valid[rows]))
            total = total + (1 - at.teacher) * (weights.ce * losses.ce + weights.l1 * losses.l1).sum()
        if at.teacher > 0:
            assert history is not None
            teacher = self._teachers[batch.following.shape[1] + 2]
            with torch.no_grad():
                wanted = self._logits(teacher, replace(history, following=batch.following), rows).log_softmax(-1)
            kl = F.kl_div(logits.log_softmax(-1), wanted, log_target=True, reduction="sum")
            total = total + at.teacher * kl
        return total / sample.mass

    def _logits(self, drafter: Drafter, batch: Batch, rows: Tensor) -> Tensor:
        """fp32 logits of chosen drafts [M, head vocabulary]; only these go through the head's output product."""
        parameters = {name: p.to(self._dtype) for name, p in drafter.named_parameters()}
        output = parameters["sequential_head.output_proj.weight"]
        parameters["sequential_head.output_proj.weight"] = torch.eye(
            drafter.config.rank, dtype=self._dtype, device=output.device
        )
        inputs = (batch.features.to(self._dtype), batch.tokens, self._embedding, batch.following)
        with _attention(self._embedding.device):
            mixed: Tensor = functional_call(drafter, parameters, inputs)
        return (mixed.flatten(0, 1)[rows] @ output.T).float()

    @torch.no_grad()
    def _guess(self, drafter: Drafter, batch: Batch, guessed: Tensor) -> Tensor:
        """The ids after the anchor with some replaced by the drafter's own choice after the true ids before them."""
        count, width = batch.following.shape
        every = torch.arange(count * (width + 1), device=batch.features.device)
        chosen = self._logits(drafter, batch, every).argmax(-1).view(count, -1)[:, :-1]
        vocab = drafter.draft_vocab_ids
        ids = chosen if vocab is None else vocab[chosen].to(batch.following.dtype)
        return torch.where(guessed.to(ids.device), ids, batch.following)
