"""Distillation losses over the target's top tokens.

The DLite recipe (arXiv 2610.23787) adds 0.1 CE, whose label is the target's greedy token, to the L1 distance of the two
distributions (twice their total variation), weighted by exp(-k / gamma) over the positions of a block. Here the L1 runs
over the target's top tokens plus one bucket for all others, so that a step makes two passes over the vocabulary
instead of a dozen; it equals the full-vocabulary value where the target's tail is empty and is a lower bound elsewhere.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Labels:
    """The target's view of M draft positions.

    `rows` [M, T] are its top tokens as rows of the head's vocabulary, largest first, -1 where the head has no row for
    a token; `p` [M, T] their probabilities, 0 at those. `valid` [M]: positions inside the conversation.
    """

    rows: Tensor
    p: Tensor
    valid: Tensor


class _LogProbs(torch.autograd.Function):
    """log softmax at a few columns. The backward pass overwrites the logits, which nothing reads afterwards."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, columns: Tensor) -> Tensor:
        normaliser = logits.logsumexp(-1, keepdim=True)
        ctx.kept = (logits.detach(), columns, normaliser)
        return logits.gather(1, columns) - normaliser

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        logits, columns, normaliser = ctx.kept
        del ctx.kept
        grad = logits.sub_(normaliser).exp_().mul_(-grads[0].sum(-1, keepdim=True))
        return grad.scatter_add_(1, columns, grads[0]), None


@dataclass(frozen=True)
class Losses:
    """Per draft position [M]: cross-entropy of the target's greedy token and L1 distance (2 TV). 0 where not valid."""

    ce: Tensor
    l1: Tensor


def top_losses(logits: Tensor, labels: Labels) -> Losses:
    """Losses of logits [M, V]. A greedy token that the head has no row for has no cross-entropy.

    After backward() through the result, `logits` holds garbage: read metrics before.
    """
    known = labels.rows >= 0
    log_q: Tensor = _LogProbs.apply(logits, labels.rows.clamp(min=0))  # type: ignore[no-untyped-call]
    q = log_q.exp() * known
    rest = (1 - q.sum(-1)) - (1 - labels.p.sum(-1))
    l1 = (q - labels.p).abs().sum(-1) + rest.abs()
    ce = -log_q[:, 0] * known[:, 0]
    return Losses(ce * labels.valid, l1 * labels.valid)


def position_weights(length: int, gamma: float) -> Tensor:
    """exp(-k / gamma) for k = 0..length-1."""
    return torch.exp(-torch.arange(length) / gamma)


def weighted_mean(values: Tensor, valid: Tensor, weights: Tensor) -> Tensor:
    """Mean of values [N, K] with weights [K], over the valid entries [N, K]."""
    mass = weights * valid
    return (values * mass).sum() / mass.sum()


def accepted(chosen: Tensor, labels: Labels) -> Tensor:
    """Leading drafts [N, K] that equal the target's greedy token: what greedy verification would accept, [N]."""
    rows, valid = labels.rows.view(*chosen.shape, -1), labels.valid.view(chosen.shape)
    hits = (chosen == rows[..., 0]) & valid.bool()
    return hits.long().cumprod(dim=1).sum(dim=1)
