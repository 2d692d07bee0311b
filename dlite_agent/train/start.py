"""Where training starts: a drafter whose head already knows the target's bigrams, and whose context is centred.

The head's output is the best low-rank factor of the target's LM head under the statistics of its final hidden states;
the head's token embedding is the mean final state after each token, in that factor's basis. A fresh drafter therefore
begins as a bigram model of the target instead of noise, at no training cost.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dlite_agent.model.drafter import Drafter
from dlite_agent.train.anchors import tap_columns
from dlite_agent.train.store import Shard

SAMPLE = 60_000
"""Tokens whose states are read for the statistics."""
WHISPER = 0.2
"""Scale at which the backbone's hidden states enter the head at first."""
KEPT_STATE = 0.25
"""Share of the old state that the head's recurrence keeps at first."""


@dataclass(frozen=True)
class Statistics:
    """Moments of the cached taps: `mean` and `rms` (about the mean) [S, H]; final states [n, H] and their ids [n]."""

    mean: Tensor
    spread: Tensor
    final: Tensor
    ids: Tensor


def statistics(shards: Sequence[Shard], layers: Sequence[int]) -> Statistics:
    """Read about SAMPLE tokens of the caches, whole shards in order; the last of `layers` is the final states."""
    taps, ids, read = [], [], 0
    columns = tap_columns(shards[0], layers)
    for shard in shards:
        taps.append(torch.from_numpy(shard.taps[:, columns].copy()).view(torch.bfloat16))
        ids.append(torch.from_numpy(shard.ids[:].astype("int64")))
        read += len(shard)
        if read >= SAMPLE:
            break
    joined = torch.cat(taps)
    mean, spread = [], []
    for layer in range(joined.shape[1]):
        x = joined[:: max(len(joined) // 8192, 1), layer].float()
        # A sequence's first token has states hundreds of times larger in a few channels: medians are not moved by it.
        centre = x.median(dim=0).values
        mean.append(centre)
        spread.append((x - centre).abs().median(dim=0).values * 1.48)
    return Statistics(torch.stack(mean), torch.stack(spread), joined[:, -1].float(), torch.cat(ids))


CHOICE = 20
"""How many occurrences in the corpus's text one choice of the target counts for."""


def draft_vocabulary(shards: Sequence[Shard], text_counts: Tensor, size: int, special: Sequence[int]) -> Tensor:
    """The `size` ids that the target chooses or the corpus's text holds most often, and all special ids; ascending.

    Args:
        text_counts: occurrences [V] of each id in the prompts of the whole corpus.
    """
    vocab_size = text_counts.shape[0]
    counts = text_counts.double()
    for shard in shards:
        chosen = torch.from_numpy(shard.top_ids[:, 0].astype("int64"))
        counts += CHOICE * torch.bincount(chosen, minlength=vocab_size)
    counts += torch.linspace(0.5, 0, vocab_size, dtype=torch.float64)  # unseen ids: low ones are the commoner merges
    counts[list(special)] = float("inf")
    return counts.topk(size).indices.sort().values


def low_rank(head: Tensor, states: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """Factors [V, r] and [r, H] that best give the logits of `head` [V, H] on `states` [n, H], up to a shift."""
    centred = head.double() - head.double().mean(dim=0)
    moment = states.double().T @ states.double() / len(states)
    values, vectors = torch.linalg.eigh(moment + 1e-6 * moment.trace() / len(moment) * torch.eye(len(moment)))
    root = vectors * values.sqrt() @ vectors.T
    inverse = vectors / values.sqrt() @ vectors.T
    directions = torch.linalg.eigh(root @ (centred.T @ centred) @ root).eigenvectors[:, -rank:]
    return (centred @ root @ directions).float(), (directions.T @ inverse).float()


def mean_next_state(embedding: Tensor, ids: Tensor, states: Tensor, *, strength: float = 4.0) -> Tensor:
    """Expected final state [V, H] after each token: seen tokens by their mean, shrunk to a linear fit on embeddings."""
    vocab, width = embedding.shape
    x = torch.cat((embedding[ids], torch.ones(len(ids), 1)), dim=1).double()
    gram = x.T @ x + 1e-3 * len(ids) / vocab * torch.eye(width + 1, dtype=torch.float64)
    fit = torch.linalg.solve(gram, x.T @ states.double()).float()
    fitted = embedding @ fit[:-1] + fit[-1]
    count = torch.bincount(ids, minlength=vocab).unsqueeze(1)
    total = torch.zeros(vocab, width).index_add_(0, ids, states)
    mean: Tensor = (total + strength * fitted) / (count + strength)
    return mean


@torch.no_grad()
def initialise(drafter: Drafter, stats: Statistics, embedding: Tensor, lm_head: Tensor, *, seed: int) -> None:
    """Set a fresh drafter's weights as the module says. `drafter.draft_vocab_ids` must be set already."""
    rng = torch.Generator().manual_seed(seed)
    config, head = drafter.config, drafter.sequential_head
    rank = config.rank
    for name, parameter in drafter.named_parameters():
        if parameter.ndim == 2:
            damping = (2 * config.depth) ** -0.5 if name.endswith(("o_proj.weight", "down_proj.weight")) else 1.0
            parameter.copy_(torch.randn(parameter.shape, generator=rng) * damping * parameter.shape[1] ** -0.5)
        else:
            parameter.fill_(0.0 if name.endswith("bias") else 1.0)
    taps = list(config.target_layer_ids)
    noise = torch.randn(len(taps), config.hidden_size, generator=rng) * stats.spread.mean(dim=1, keepdim=True)
    drafter.layer_depth_embedding.weight.zero_()
    drafter.layer_depth_embedding.weight[taps] = 0.5 * noise - stats.mean
    shape = (stats.spread / stats.spread.pow(2).mean(dim=1, keepdim=True).sqrt()).mean(dim=0)
    drafter.context_norm.weight.copy_((1 / shape.clamp(min=0.05)).clamp(max=4))

    vocab = drafter.draft_vocab_ids
    factor, basis = low_rank(lm_head if vocab is None else lm_head[vocab], stats.final, rank)
    head.output_proj.weight.copy_(factor)
    after = mean_next_state(embedding, stats.ids, stats.final) @ basis.T
    seen = after[stats.ids]
    scale = 0.4 / seen.std(dim=0)  # keeps the recurrence's tanh nearly linear
    head.prev_token_embedding.weight.copy_(((after - seen.mean(dim=0)) * scale).clamp(-1.5, 1.5))
    eye = torch.eye(rank)
    head.state_proj.weight.copy_(torch.randn(head.state_proj.weight.shape, generator=rng) * 0.02)
    head.state_proj.weight[rank:, rank:] += eye
    head.state_proj.bias[:rank] = torch.logit(torch.tensor(KEPT_STATE))
    head.state_hidden_mlp.weight[:, :rank] = (1 / scale / (1 - KEPT_STATE)).diag()
    # In this basis final states have unit variance in every direction, so the backbone may learn in its own
    # coordinates; the states themselves would be badly conditioned to imitate. It starts as a whisper.
    head.state_hidden_mlp.weight[:, rank:].mul_(WHISPER)
    head.state_hidden_mlp.bias.copy_(seen.mean(dim=0))
