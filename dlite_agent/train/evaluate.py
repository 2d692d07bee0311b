"""Acceptance of a drafter, by replaying the rounds of greedy decoding on cached answers.

A cached greedy answer fixes what the target would have said after any accepted prefix, so walking it in rounds gives
the advances of real greedy decoding (but for near-ties between kernels) at the drafter's cost alone.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from dlite_agent.errors import InvalidRequest
from dlite_agent.model.drafter import Drafter
from dlite_agent.train.anchors import Anchors, Batch, Examples
from dlite_agent.train.losses import accepted
from dlite_agent.train.store import Shard


@dataclass
class Acceptance:
    """Rounds of a set of answers. `advances[i]` counts rounds that emitted i + 1 tokens.

    `reached[k]` counts rounds that had a k-th draft to check (0-based) after accepting all before it, `accepted[k]`
    those that accepted it.
    """

    advances: list[int] = field(default_factory=list)
    reached: list[int] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)

    @property
    def rounds(self) -> int:
        return sum(self.advances)

    @property
    def tau(self) -> float:
        """Mean advance."""
        return sum((i + 1) * n for i, n in enumerate(self.advances)) / max(self.rounds, 1)

    def rates(self) -> list[float]:
        """Acceptance of each position, given that all before it were accepted."""
        return [round(a / r, 4) if r else 0.0 for a, r in zip(self.accepted, self.reached, strict=True)]

    def add(self, hits: int, possible: int, length: int) -> None:
        """One round that accepted `hits` drafts where at most `possible` could be, with `length` drafts a round."""
        for counts in (self.advances, self.reached, self.accepted):
            counts.extend([0] * (length + (counts is self.advances) - len(counts)))
        self.advances[hits] += 1
        for k in range(min(hits + 1, possible)):
            self.reached[k] += 1
            self.accepted[k] += k < hits


@torch.no_grad()
def draft_logits(drafter: Drafter, batch: Batch, embedding: Tensor) -> Tensor:
    """Teacher-forced logits [N, K, head vocabulary]."""
    logits: Tensor = drafter(batch.features, batch.tokens, embedding, batch.following)
    return logits


def replay(drafter: Drafter, shards: Sequence[Shard], embedding: Tensor, *, rows: int = 64) -> dict[str, Acceptance]:
    """Acceptance over the greedy answers of a cache, by kind of prompt, and "all"; `rows` answers at a time.

    Answers with fewer tokens before them than the drafter needs are left out.

    Raises:
        InvalidRequest: the cache holds no greedy answer.
    """
    width = drafter.config.proposal_length
    examples = Examples(shards, drafter)
    walks = [
        (number, int(shard.starts[i]) + start, int(shard.starts[i]) + end, shard.conversations[i].kind)
        for number, shard in enumerate(shards)
        for i, start, end in shard.spans.tolist()
        if shard.conversations[i].temperature == 0 and start >= examples.before
    ]
    if not walks:
        raise InvalidRequest("the cache holds no greedy answers to evaluate on", param="held_out")
    results: dict[str, Acceptance] = defaultdict(Acceptance)
    active: list[tuple[int, int, int, str]] = []
    while walks or active:
        active += [walks.pop() for _ in range(min(rows - len(active), len(walks)))]
        active = [walk for walk in active if walk[1] < walk[2]]
        if not active:
            continue
        columns = zip(*[walk[:3] for walk in active], strict=True)
        batch = examples.gather(Anchors(*(np.array(column, dtype=np.int64) for column in columns)))
        batch = batch.to(embedding.device)
        hits = accepted(draft_logits(drafter, batch, embedding).argmax(-1), batch.labels)
        moved = []
        for (number, row, end, kind), hit in zip(active, hits.tolist(), strict=True):
            for name in (kind, "all"):
                results[name].add(hit, min(width, end - row), width)
            moved.append((number, row + hit + 1, end, kind))
        active = moved
    return dict(results)
