"""Answers of the target, with its states: one pass that generates in ragged batches and keeps every token's taps."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from dlite_agent.decode.kv import KVPool, SequenceKV
from dlite_agent.errors import InvalidRequest
from dlite_agent.model.target import Rows, Target
from dlite_agent.train.data import Encode, Request, prompt_ids
from dlite_agent.train.store import TOP, Conversation, Header, Labels, open_shards, write_shard

PREFILL_ROWS = 512
LONG_ROWS = 1024
"""Longer prompts go through the target in pieces of this size: logits of a row are large."""
SHARD_TOKENS = 12_000
LONGEST_LOOP = 64
GREEDY = 0.98


def loop_cut(ids: Sequence[int]) -> int | None:
    """Length to which an answer that has begun to repeat itself is cut; None while it has not.

    A loop is a unit of at most LONGEST_LOOP tokens seen three times in a row, and at least 16 tokens long in all. What
    stays is the unit and its first repeat.
    """
    n = len(ids)
    for period in range(1, min(LONGEST_LOOP, n // 3) + 1):
        times = max(3, -(-16 // period))
        if n >= times * period and all(ids[n - i - 1] == ids[n - i - 1 - period] for i in range((times - 1) * period)):
            return n - (times - 2) * period
    return None


@dataclass
class _Slot:
    request: Request
    kv: SequenceKV
    rng: torch.Generator
    ids: list[int]
    prompt: int
    taps: list[Tensor] = field(default_factory=list)
    top_ids: list[Tensor] = field(default_factory=list)
    top_p: list[Tensor] = field(default_factory=list)

    def keep(self, taps: Tensor, top_ids: Tensor, top_p: Tensor) -> None:
        self.taps.append(taps)
        self.top_ids.append(top_ids)
        self.top_p.append(top_p)

    def conversation(self, length: int) -> Conversation:
        request = self.request
        ids, top_ids = torch.tensor(self.ids[:length]), torch.cat(self.top_ids)[:length]
        spans = tuple(request.spans) or ((self.prompt, length),)
        temperature = request.temperature if request.messages else float(not _greedy(ids, top_ids, spans))
        return Conversation(
            labels=Labels(request.id, request.source, request.kind, temperature, request.thinking),
            spans=spans,
            ids=ids,
            taps=torch.cat(self.taps)[:length],
            top_ids=top_ids,
            top_p=torch.cat(self.top_p)[:length],
        )


def _greedy(ids: Tensor, top_ids: Tensor, spans: Sequence[tuple[int, int]]) -> bool:
    """Whether recorded answers are the target's greedy ones, but for ties that its kernels decide otherwise."""
    chosen = torch.cat([torch.arange(start, end) for start, end in spans])
    return (ids[chosen] == top_ids[chosen - 1, 0]).float().mean().item() > GREEDY


class Collector:
    """Answers requests and yields them with states, up to `slots` at a time; recorded sessions are only read.

    Args:
        max_new: longest answer in tokens.
        max_prompt: longer prompts are refused.
        eos: ids that end an answer; they are not part of it.
    """

    def __init__(
        self,
        target: Target,
        encode: Encode,
        *,
        tap_layers: tuple[int, ...],
        eos: Sequence[int],
        slots: int = 48,
        max_new: int = 256,
        max_prompt: int = 1536,
    ) -> None:
        self.target = target
        self.encode = encode
        self.eos = frozenset(eos)
        self.slots = slots
        self.max_new = max_new
        self.max_prompt = max_prompt
        spec = target.spec
        self.header = Header(target.fingerprint, tap_layers, spec.hidden_size, spec.vocab_size)
        longest = max_prompt + max_new
        budget = slots * longest * 2 * spec.num_layers * spec.kv_size * target.dtype.itemsize
        self._pool = KVPool(spec, dtype=target.dtype, device=target.device, budget_bytes=budget, max_positions=longest)

    def run(self, requests: Sequence[Request]) -> Iterator[Conversation]:
        """Conversations in the order in which they end. The same request gives the same ids in any company, up to ties.

        Raises:
            InvalidRequest: a prompt is longer than `max_prompt`.
        """
        waiting = list(reversed(requests))
        active: list[_Slot] = []
        while waiting or active:
            if waiting and len(active) < self.slots:
                active += self._admit(waiting, self.slots - len(active))
            yield from self._finished(active)
            if active:
                self._step(active)

    def _admit(self, waiting: list[Request], free: int) -> list[_Slot]:
        """Prefill the next requests, about PREFILL_ROWS rows together."""
        slots: list[_Slot] = []
        rows = 0
        while waiting and len(slots) < free and (rows < PREFILL_ROWS):
            request = waiting.pop()
            ids = list(prompt_ids(request, self.encode))
            if len(ids) > self.max_prompt:
                raise InvalidRequest(
                    f"prompt {request.id} has {len(ids)} tokens, {self.max_prompt} at most", param="prompts"
                )
            kv = self._pool.sequence()
            kv.reserve(len(ids) + self.max_new)
            rng = torch.Generator().manual_seed(int(request.id, 16) % 2**63 if _is_hex(request.id) else 0)
            slots.append(_Slot(request, kv, rng, ids, len(ids)))
            rows += len(ids)
        rest = [slot.ids for slot in slots]
        for i, slot in enumerate(slots):
            while len(rest[i]) > LONG_ROWS:
                self._forward([slot], [rest[i][:LONG_ROWS]])
                rest[i] = rest[i][LONG_ROWS:]
        self._extend(slots, rest)
        return slots

    def _step(self, active: list[_Slot]) -> None:
        self._extend(active, [slot.ids[-1:] for slot in active])

    def _extend(self, slots: list[_Slot], new: list[list[int]]) -> None:
        """Run new ids and append each slot's next token."""
        top, top_ids = self._forward(slots, new)
        for i, slot in enumerate(slots):
            slot.ids.append(self._choose(slot, top[i].cpu(), top_ids[i].cpu()))

    def _forward(self, slots: list[_Slot], new: list[list[int]]) -> tuple[Tensor, Tensor]:
        """Run new ids and keep states of every row; top logits and ids [slots, TOP] after each slot's last."""
        device = self.target.device
        batch = [Rows(slot.kv, torch.tensor(ids, device=device)) for slot, ids in zip(slots, new, strict=True)]
        result = self.target.forward(batch, tap_layers=self.header.tap_layers)
        logits = result.logits.float()
        top, top_ids = logits.topk(min(TOP, logits.shape[-1]))
        top_p = (top - logits.logsumexp(-1, keepdim=True)).exp().to(torch.float16)
        taps = result.taps.to(torch.bfloat16)
        end, last = 0, []
        for slot, ids in zip(slots, new, strict=True):
            start, end = end, end + len(ids)
            slot.keep(taps[start:end].cpu(), top_ids[start:end].to("cpu", torch.int32), top_p[start:end].cpu())
            last.append(end - 1)
        return top[last], top_ids[last]

    def _choose(self, slot: _Slot, top: Tensor, ids: Tensor) -> int:
        """Next token: the likeliest, or drawn from the TOP likeliest at the request's temperature."""
        temperature = slot.request.temperature
        if temperature == 0:
            return int(ids[0])
        return int(ids[torch.multinomial((top / temperature).softmax(-1), 1, generator=slot.rng)])

    def _finished(self, active: list[_Slot]) -> Iterator[Conversation]:
        """Take out slots whose newest token ends them. That token has no states yet and is dropped."""
        for slot in list(active):
            length = len(slot.ids) - 1
            recorded = bool(slot.request.ids)
            cut = None if recorded else loop_cut(slot.ids[slot.prompt :])
            if cut is not None:
                length = min(length, slot.prompt + cut)
            elif not recorded and slot.ids[-1] not in self.eos and length - slot.prompt < self.max_new:
                continue
            active.remove(slot)
            slot.kv.free()
            yield slot.conversation(length)


def _is_hex(text: str) -> bool:
    return all(c in "0123456789abcdef" for c in text)


def build_cache(
    collector: Collector, requests: Sequence[Request], cache: Path, *, worker: int = 0, workers: int = 1
) -> None:
    """Answer the requests that `cache` lacks and append them as shards; safe to stop and start again at any time.

    With several workers each takes every `workers`-th request and writes shards of its own.
    """
    cache.mkdir(parents=True, exist_ok=True)
    have = [path for path in cache.iterdir() if path.name[0] != "."]
    done = {labels.id for shard in (open_shards(cache) if have else []) for labels in shard.conversations}
    todo = [request for request in requests[worker::workers] if request.id not in done]
    number = sum(path.name.startswith(f"{worker:02d}-") for path in have)
    held: list[Conversation] = []
    for conversation in collector.run(todo):
        held.append(conversation)
        if sum(c.ids.shape[0] for c in held) >= SHARD_TOKENS:
            write_shard(cache / f"{worker:02d}-{number:05d}", collector.header, held)
            held, number = [], number + 1
    if held:
        write_shard(cache / f"{worker:02d}-{number:05d}", collector.header, held)
