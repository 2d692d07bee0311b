"""The target's and the drafter's distributions, and both verifications: match and rejection.

Randomness is a function of (seed, position, purpose) and of nothing else, so a request's tokens do not depend on who
shares its batch, on how rounds fall, or on a pause in between; in `match` verification a sampled DLite run draws the
very tokens that the autoregressive run draws. Each decision of a position uses a number of its own, and a number drawn
for a draft that was thrown away has influenced nothing that was kept, so reuse in the next round is sound.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dlite_agent.errors import InvalidRequest

if TYPE_CHECKING:
    from dlite_agent.decode.grammar import Matcher

Verification = Literal["match", "rejection"]
DRAFT, ACCEPT, EMIT = 0, 1, 2
"""Purposes of a position's random numbers."""

_TOP_P_CANDIDATES = 1024


@dataclass(frozen=True)
class SamplingParams:
    """How tokens are chosen. Temperature 0 is greedy; repetition counts prompt and output, presence and frequency
    the output only (as vLLM). Order: logit bias, penalties, temperature, min-p, top-k, top-p.

    Raises:
        InvalidRequest: a value is out of range; `param` names it.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    seed: int | None = None
    verification: Verification = "match"

    def __post_init__(self) -> None:
        _check("temperature", self.temperature, 0.0, 100.0)
        _check("top_k", self.top_k, 0, float("inf"))
        _check("top_p", self.top_p, 0.0, 1.0, open_low=True)
        _check("min_p", self.min_p, 0.0, 1.0)
        _check("repetition_penalty", self.repetition_penalty, 0.0, float("inf"), open_low=True)
        _check("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _check("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        if self.seed is not None:
            _check("seed", self.seed, 0, 2**63 - 1)
        if self.verification not in ("match", "rejection"):
            raise InvalidRequest(
                f"verification must be match or rejection, not {self.verification!r}", param="verification"
            )

    @property
    def penalised(self) -> bool:
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0

    @property
    def plain_greedy(self) -> bool:
        return self.temperature == 0.0 and not self.penalised and not self.logit_bias


def _check(name: str, value: float, low: float, high: float, *, open_low: bool = False) -> None:
    if not (low < value if open_low else low <= value) or not value <= high:
        raise InvalidRequest(
            f"{name} must be {'above' if open_low else 'at least'} {low} and at most {high}", param=name
        )


def uniforms(seed: int, position: int, count: int) -> NDArray[np.float64]:
    """Random numbers in [0, 1) for positions position..position+count-1, [count, 4], a column a purpose.

    Philox4x64 with the seed as key and the position as counter: one block of four words a position.
    """
    words = np.random.Philox(key=seed, counter=position).random_raw(4 * count)
    return (words >> np.uint64(11)).astype(np.float64).reshape(count, 4) * 2.0**-53


def filtered(logits: Tensor, params: SamplingParams) -> Tensor:
    """Probabilities [R, V] of logits [R, V] after temperature (> 0), min-p, top-k and top-p."""
    scaled = logits.float() / params.temperature
    if params.min_p > 0:
        floor = scaled.amax(-1, keepdim=True) + float(np.log(params.min_p))
        scaled = scaled.masked_fill(scaled < floor, float("-inf"))
    if 0 < params.top_k < scaled.shape[-1]:
        kth = scaled.topk(params.top_k, dim=-1).values[..., -1:]
        scaled = scaled.masked_fill(scaled < kth, float("-inf"))
    probs = scaled.softmax(-1)
    return _top_p(probs, params.top_p) if params.top_p < 1 else probs


def _top_p(probs: Tensor, top_p: float) -> Tensor:
    """Keep the smallest set of most likely tokens whose mass reaches top_p, renormalised."""
    count = min(_TOP_P_CANDIDATES, probs.shape[-1])
    ranked, order = probs.topk(count, dim=-1)
    if count < probs.shape[-1] and bool((ranked.sum(-1) < top_p).any()):
        ranked, order = probs.sort(dim=-1, descending=True)
    before = ranked.cumsum(-1) - ranked
    kept = ranked.masked_fill(before >= top_p, 0.0)
    return torch.zeros_like(probs).scatter_(-1, order, kept / kept.sum(-1, keepdim=True))


def draw(weights: Tensor, uniform: Tensor) -> Tensor:
    """Inverse-CDF samples [R] of unnormalised weights [R, V] at uniform numbers [R]."""
    cumulative = weights.cumsum(-1)
    total = cumulative[:, -1:]
    picked = torch.searchsorted(cumulative, uniform.to(weights.dtype).unsqueeze(1) * total, right=True)
    # Rounding may push the threshold to the very end: fall back to the last token that adds any weight.
    return torch.minimum(picked, torch.searchsorted(cumulative, total.contiguous())).squeeze(1)


class Sampler:
    """Chooses tokens for one request. Holds its seed and, where they are needed, its token counts and its place in a
    grammar."""

    def __init__(
        self,
        params: SamplingParams,
        *,
        prompt: Sequence[int],
        vocab_size: int,
        device: torch.device,
        matcher: Matcher | None = None,
    ) -> None:
        if params.seed is None:
            params = replace(params, seed=secrets.randbits(63))
        self.params = params
        self.matcher = matcher
        self.device = device
        self._bias: tuple[Tensor, Tensor] | None = None
        if params.logit_bias:
            if bad := [token for token in params.logit_bias if not 0 <= token < vocab_size]:
                raise InvalidRequest(f"token {bad[0]} is outside the vocabulary", param="logit_bias")
            self._bias = (
                torch.tensor(list(params.logit_bias), device=device),
                torch.tensor(list(params.logit_bias.values()), device=device, dtype=torch.float32),
            )
        if params.penalised:
            self._in_prompt = torch.zeros(vocab_size, dtype=torch.bool, device=device)
            self._in_prompt[torch.tensor(list(prompt), dtype=torch.int64, device=device)] = True
            self._counts = torch.zeros(vocab_size, dtype=torch.float32, device=device)

    @property
    def seed(self) -> int:
        assert self.params.seed is not None
        return self.params.seed

    @property
    def plain_greedy(self) -> bool:
        """Whether the argmax of the target's bare logits is the answer."""
        return self.params.plain_greedy and self.matcher is None

    @property
    def drafts_sampled(self) -> bool:
        """Whether drafts are drawn from the drafter's distribution q (else they are its argmax)."""
        return self.params.verification == "rejection" and self.params.temperature > 0

    def commit(self, ids: Sequence[int]) -> None:
        """Count tokens that have been emitted."""
        if self.matcher is not None:
            self.matcher.commit(ids)
        if self.params.penalised and ids:
            added = torch.tensor(list(ids), dtype=torch.int64, device=self.device)
            self._counts.index_add_(0, added, torch.ones_like(added, dtype=torch.float32))

    def numbers(self, position: int, count: int, purpose: int) -> Tensor:
        """This request's random numbers [count] for positions position.. and one purpose, float64."""
        return torch.from_numpy(uniforms(self.seed, position, count)[:, purpose].copy()).to(self.device)

    def adjusted(self, logits: Tensor, drafts: Tensor) -> Tensor:
        """Logits [k + 1, V] fp32 with bias and penalties; row i counts the drafts [k] before it as emitted."""
        logits = logits.float()
        if self._bias is not None:
            logits = logits.index_add(1, self._bias[0], self._bias[1].expand(logits.shape[0], -1))
        if not self.params.penalised:
            return logits
        counts = self._counts.clone()
        rows = []
        for i, row in enumerate(logits):
            if i:
                counts.index_add_(0, drafts[i - 1 : i], counts.new_ones(1))
            rows.append(self._penalise(row, counts))
        return torch.stack(rows)

    def _penalise(self, row: Tensor, counts: Tensor) -> Tensor:
        params, emitted = self.params, counts > 0
        if params.repetition_penalty != 1.0:
            penalty = params.repetition_penalty
            seen = self._in_prompt | emitted
            row = torch.where(seen, torch.where(row > 0, row / penalty, row * penalty), row)
        return row - params.frequency_penalty * counts - params.presence_penalty * emitted

    def choices(self, logits: Tensor, drafts: Tensor, q: Tensor | None, position: int) -> Tensor:
        """What the target decides at each of k + 1 positions, given that all drafts [k] before it were accepted.

        Args:
            logits: the target's [k + 1, V].
            q: in rejection verification the distribution [k, V] each draft was drawn from, else None.
            position: absolute position of the first decision.

        Returns:
            int64 [k + 1]: a token id; in rejection verification -1 - id where the draft was rejected and `id` drawn
            from the normalised max(p - q, 0) in its place (Leviathan et al., arXiv 2211.17192).
        """
        logits = self.adjusted(logits, drafts)
        if self.matcher is not None:
            logits = logits.clone()
            self.matcher.mask(logits, drafts.tolist())
        if self.params.temperature == 0:
            return logits.argmax(-1)
        p = filtered(logits, self.params)
        emit = self.numbers(position, p.shape[0], EMIT)
        if q is None:
            return draw(p, emit)
        k = drafts.shape[0]
        accept = self.numbers(position, k, ACCEPT)
        taken = drafts.unsqueeze(1)
        ratio = p[:k].gather(1, taken) / q.gather(1, taken).clamp_min(1e-20)
        accepted = accept < ratio.squeeze(1)
        residual = (p[:k] - q).clamp_min(0)
        empty = residual.sum(-1, keepdim=True) <= 1e-8
        weights = torch.cat((torch.where(empty, p[:k], residual), p[k:]))
        drawn = draw(weights, emit)
        return torch.cat((torch.where(accepted, drafts, -1 - drawn[:k]), drawn[k:]))


@dataclass(frozen=True)
class Window:
    """One request's part of a verify pass: drafts [k] (may be empty), their q, and where the first decision falls."""

    sampler: Sampler
    position: int
    drafts: Tensor
    q: Tensor | None = None


def verify(windows: Sequence[Window], logits: Tensor) -> list[list[int]]:
    """Tokens each window emits: its accepted drafts and then one token of the target's own.

    Args:
        logits: the target's, windows one after another, k + 1 rows each [sum(k + 1), V].

    The one host synchronisation of a round is here.
    """
    greedy = logits.argmax(-1) if any(window.sampler.plain_greedy for window in windows) else None
    choices, first = [], 0
    for window in windows:
        rows = slice(first, first + window.drafts.shape[0] + 1)
        first = rows.stop
        if greedy is not None and window.sampler.plain_greedy:
            choices.append(greedy[rows])
        else:
            choices.append(window.sampler.choices(logits[rows], window.drafts, window.q, window.position))
    decided = torch.cat([*choices, *(window.drafts for window in windows)]).tolist()
    emitted, at, drafted = [], 0, first
    for window in windows:
        k = window.drafts.shape[0]
        emitted.append(_accepted_run(decided[at : at + k + 1], decided[drafted : drafted + k]))
        at += k + 1
        drafted += k
    return emitted


def _accepted_run(choices: list[int], drafts: list[int]) -> list[int]:
    for i, draft in enumerate(drafts):
        if choices[i] != draft:
            return [*drafts[:i], choices[i] if choices[i] >= 0 else -1 - choices[i]]
    return [*drafts, choices[-1]]
