"""One step of a batch: draft, verify in one causal forward, commit; prompt chunks ride in the same forward.

A round starts from the boundary: KV covers ids[:n], the features of token n-1 are known, ids[n] is the anchor. The
drafter proposes a block from these alone; the target runs [anchor, drafts] once and decides a token at each position;
the accepted run and one token more are committed, KV is cut back to the last committed token but one, and the tap rows
of that same forward are the next boundary's features. No forward is ever made for the drafter's sake.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from dlite_agent.config import Mode
from dlite_agent.decode.kv import KVPool
from dlite_agent.decode.planner import MAX_DRAFT, NOTHING, Plan, Planner
from dlite_agent.decode.sampling import DRAFT, Sampler, SamplingParams, Window, draw, filtered, verify
from dlite_agent.decode.state import DecodeState, TokenScore, Turn
from dlite_agent.decode.suffix import continuation
from dlite_agent.decode.text import TextStream
from dlite_agent.decode.timing import PartSeconds, StepClock
from dlite_agent.errors import ContextOverflow, InvalidRequest
from dlite_agent.model.drafter import Drafter
from dlite_agent.model.graphs import DraftGraphs
from dlite_agent.model.target import Rows, Target

if TYPE_CHECKING:
    from dlite_agent.decode.grammar import Matcher

PREFILL_CHUNK = 512
UNKNOWN_RATE = 0.5
"""Acceptance at each position of a drafter whose card does not tell."""


@dataclass(frozen=True)
class RowFigures:
    """One turn's part in a step.

    Attributes:
        context: ids in KV before the step.
        prefilled: prompt rows run; drafted, verified: drafts made and window rows run (0 while prefilling).
        advance: tokens emitted: accepted drafts that were kept, plus one.
        plan: what was to be drafted, and why.
    """

    turn: Turn
    context: int
    prefilled: int
    drafted: int
    verified: int
    advance: int
    plan: Plan = NOTHING


@dataclass(frozen=True)
class StepFigures:
    """What one step did, and its seconds: T_D is `seconds.draft`, T_V `seconds.verify`, T_S `seconds.rest`."""

    seconds: PartSeconds
    rows: tuple[RowFigures, ...]

    @property
    def batch(self) -> int:
        return len(self.rows)


Observer = Callable[[StepFigures], None]


@dataclass(frozen=True)
class Proposal:
    """Drafts [k] of one turn, and the head's probabilities `sure` [k] of them; `q` [k, V] is the distribution they were
    drawn from, None where they are its argmax."""

    ids: Tensor
    q: Tensor | None = None
    sure: Tensor | None = None

    def first(self, count: int) -> Proposal:
        return Proposal(self.ids[:count], None if self.q is None else self.q[:count])


class Decoder:
    """Runs turns of several sessions on one target and, where there is one, its drafter.

    Args:
        observer: called with the figures of every step.

    Attributes:
        verify_window: rows of a verify pass for `dlite` turns that do not say; the whole block unless it is set.
        planner: decides what is drafted.
        target_forwards, drafter_forwards: how many were made, for tests and figures.
    """

    def __init__(
        self, target: Target, drafter: Drafter | None, pool: KVPool, *, observer: Observer | None = None
    ) -> None:
        if drafter is not None:
            drafter.config.check_target(target.spec)
        self.target = target
        self.drafter = drafter
        self.pool = pool
        self.observer = observer
        self.target_forwards = 0
        self.drafter_forwards = 0
        # Without a drafter the final-norm state alone is tapped: a resume with no new ids needs it.
        self.taps = drafter.config.target_layer_ids if drafter is not None else (target.spec.num_layers - 1,)
        self.proposal_length = drafter.config.proposal_length if drafter is not None else 0
        self.verify_window = self.proposal_length + 1
        self.planner = Planner([UNKNOWN_RATE] * self.proposal_length)
        self._draft_graphs = None if target.device.type != "cuda" else DraftGraphs(self._draft_greedy)
        self._clock = StepClock(target.device)

    def open(self) -> DecodeState:
        """A new, empty session."""
        return DecodeState(self.pool.sequence())

    def begin(
        self,
        state: DecodeState,
        new_ids: Sequence[int],
        params: SamplingParams,
        *,
        max_new_tokens: int,
        mode: Mode = "dlite",
        verify_window: int | None = None,
        text: TextStream | None = None,
        ignore_eos: bool = False,
        matcher: Matcher | None = None,
        top_scores: int | None = None,
        headroom: int | None = None,
    ) -> Turn:
        """Start a turn: append ids (there may be none) and reserve KV.

        Args:
            matcher: holds the answer to a grammar, drafts included.
            top_scores: see `Turn`.
            headroom: positions to reserve behind the prompt, where the caller reserves more as the answer grows;
                None for all of `max_new_tokens`.

        Raises:
            InvalidRequest: an argument cannot be honoured.
            ContextOverflow: the prompt leaves no room for an answer.
            KVExhausted: no memory. In each case the session is as it was.
        """
        spec, limit, length = self.target.spec, self.target.context_limit, len(state.ids) + len(new_ids)
        if max_new_tokens < 1:
            raise InvalidRequest("max_new_tokens must be at least 1", param="max_new_tokens")
        if mode == "dlite" and self.drafter is None:
            raise InvalidRequest("mode dlite needs a drafter: load one, or use mode ar", param="mode")
        widest = MAX_DRAFT + 1 if mode in ("suffix", "mixed") else self.proposal_length + 1
        usual = self.verify_window if mode in ("ar", "dlite") else widest
        window = usual if verify_window is None else verify_window
        if not 1 <= window <= widest:
            raise InvalidRequest(f"verify_window must be 1..{widest}", param="verify_window")
        if length == 0:
            raise InvalidRequest("a session needs at least one token to start from", param="new_ids")
        if bad := [token for token in new_ids if not 0 <= token < spec.vocab_size]:
            raise InvalidRequest(f"token id {bad[0]} is outside the vocabulary", param="new_ids")
        if length >= limit:
            raise ContextOverflow(
                f"This model's maximum context length is {limit} tokens, the session has {length}: "
                "shorten the messages",
                param="messages",
            )
        device = self.target.device
        prompt = [*state.ids, *new_ids]
        sampler = Sampler(params, prompt=prompt, vocab_size=spec.vocab_size, device=device, matcher=matcher)
        if mode == "mixed" and sampler.drafts_sampled:
            # Such a turn's tokens depend on its drafts, so these must not depend on load or company.
            mode, window = ("dlite", min(window, self.verify_window)) if self.drafter is not None else ("ar", 1)
        ahead = max_new_tokens if headroom is None else min(headroom, max_new_tokens)
        state.kv.reserve(min(length + ahead, limit) + window)
        resumed = not new_ids and len(state.pending) == 1 and state.features is not None
        state.ids += new_ids
        eos = frozenset() if ignore_eos else frozenset(spec.eos_ids)
        return Turn(state, sampler, mode, max_new_tokens, window, limit, eos, text, resumed, top_scores)

    def finish(self, turn: Turn) -> None:
        """Keep what a resume needs, and give back what the turn had reserved beyond it."""
        turn.state.keep()
        turn.state.kv.shrink()

    def abort(self, turn: Turn, length: int) -> None:
        """Drop a turn: the session goes back to its first `length` ids."""
        turn.state.truncate(length)
        turn.state.kv.shrink()

    @torch.inference_mode()
    def step(self, turns: Sequence[Turn], *, prefill_chunk: int = PREFILL_CHUNK) -> StepFigures:
        """Advance unfinished turns: a round for each that decodes, prompt chunks of `prefill_chunk` rows in all.

        A turn for which no prompt rows are left in this step waits for the next.
        """
        self._clock.start()
        chunks = self._share_prefill(turns, prefill_chunk)
        turns = [turn for turn in turns if turn.decoding or not turn.state.pending or chunks.get(id(turn))]
        contexts = [turn.state.boundary for turn in turns]
        self._clock.enter("draft")
        deciding = [turn for turn in turns if turn.decoding]
        plans = self.planner.plan(deciding)
        proposals = self._draft(deciding, plans)
        sure = {key: proposal.sure for key, proposal in proposals.items() if proposal.sure is not None}
        if sure:
            plans = self.planner.cut(deciding, plans, sure)
            proposals |= {key: proposals[key].first(plans[key].length) for key in sure}
        self._clock.enter("verify")
        inputs = [self._input(turn, chunks, proposals) for turn in turns]
        logits, taps = self._forward(turns, inputs)
        self._clock.enter("rest")
        advances = self._commit(turns, inputs, proposals, logits, taps)
        rows = []
        for turn, context, ids, advance in zip(turns, contexts, inputs, advances, strict=True):
            count, decoding = ids.shape[0], id(turn) in proposals
            plan = plans.get(id(turn), NOTHING)
            drafted = count - 1 if decoding else 0
            if turn.finish is None:
                self.planner.record(turn, plan, advance - 1)
            rows.append(
                RowFigures(turn, context, 0 if decoding else count, drafted, count if decoding else 0, advance, plan)
            )
        figures = StepFigures(self._clock.stop(), tuple(rows))
        if self.planner.costs is not None:
            self.planner.costs.observe(figures)
        if self.observer is not None:
            self.observer(figures)
        return figures

    def _share_prefill(self, turns: Sequence[Turn], budget: int) -> dict[int, int]:
        """Prompt rows each prefilling turn may run in this step, first come first served."""
        chunks = {}
        for turn in turns:
            if not turn.decoding:
                chunks[id(turn)] = min(len(turn.state.pending), budget)
                budget -= chunks[id(turn)]
        return chunks

    def _draft(self, turns: Sequence[Turn], plans: dict[int, Plan]) -> dict[int, Proposal]:
        """Proposals by id(turn), as planned."""
        proposals = {}
        for turn in turns:
            plan, ids = plans[id(turn)], turn.state.ids
            copied = [] if plan.match is None else continuation(ids, plan.match, plan.length)
            proposals[id(turn)] = Proposal(torch.tensor(copied, dtype=torch.int64, device=self.target.device))
        wanting = [turn for turn in turns if plans[id(turn)].source == "dlite"]
        drafter = self.drafter
        if drafter is None or not wanting:
            return proposals

        def shape(turn: Turn) -> tuple[int, int]:
            real = min(drafter.config.anchor_group_size, len(turn.state.ids))
            return real, drafter.placeholders(plans[id(turn)].length)

        for (real, _), group in groupby(sorted(wanting, key=shape), key=shape):
            proposals |= self._draft_group(list(group), plans, real)
        return proposals

    def _draft_group(self, turns: list[Turn], plans: dict[int, Plan], real_tokens: int) -> dict[int, Proposal]:
        """One drafter pass for turns whose blocks have the same shape, so that none depends on who else drafts."""
        assert self.drafter is not None
        self.drafter_forwards += 1
        target, lengths = self.target, [plans[id(turn)].length for turn in turns]
        features = torch.stack([turn.state.features for turn in turns if turn.state.features is not None])
        tokens = torch.tensor([turn.state.ids[-real_tokens:] for turn in turns], device=target.device)
        sampled = [i for i, turn in enumerate(turns) if turn.sampler.drafts_sampled]
        numbers = [turns[i].sampler.numbers(len(turns[i].state.ids), max(lengths), DRAFT) for i in sampled]
        q: list[list[Tensor]] = [[] for _ in turns]
        # Only mixed turns are cut by what the head is sure of.
        cutting, most = any(turn.mode == "mixed" for turn in turns), list[Tensor]()
        sure: Tensor | None = None
        paths = [(i, _Path(turn.sampler.matcher)) for i, turn in enumerate(turns) if turn.sampler.matcher is not None]
        vocab = self.drafter.draft_vocab_ids

        def choose(step: int, logits: Tensor) -> Tensor:
            for i, path in paths:
                logits[i] = path.masked(logits[i], vocab)
            picked = logits.argmax(-1)
            for i, uniform in zip(sampled, numbers, strict=True):
                q[i].append(filtered(logits[i : i + 1], turns[i].sampler.params))
                picked[i : i + 1] = draw(q[i][-1], uniform[step : step + 1])
            if cutting:
                most.append(logits.float().softmax(-1).gather(1, picked.unsqueeze(1)).squeeze(1))
            for i, path in paths:
                path.follow(int(picked[i] if vocab is None else vocab[picked[i]]))
            return picked

        if not sampled and not paths:
            greedy = self._draft_greedy if self._draft_graphs is None else self._draft_graphs.run
            drafts, sure = greedy(features, tokens, max(lengths))
        else:
            try:
                drafts = self.drafter.draft(features, tokens, target.embedding, max(lengths), choose)
                sure = torch.stack(most, dim=1) if cutting else None
            finally:
                for _, path in paths:
                    path.leave()
        return {
            id(turn): Proposal(
                drafts[i, :length], self._full_vocabulary(q[i][:length]), None if sure is None else sure[i, :length]
            )
            for i, (turn, length) in enumerate(zip(turns, lengths, strict=True))
        }

    def _draft_greedy(self, features: Tensor, tokens: Tensor, steps: int) -> tuple[Tensor, Tensor]:
        assert self.drafter is not None
        return self.drafter.draft_greedy(features, tokens, self.target.embedding, steps)

    def _full_vocabulary(self, q: list[Tensor]) -> Tensor | None:
        """q [k, V] over the target's vocabulary, where the head may know only part of it."""
        assert self.drafter is not None
        if not q:
            return None
        head, vocab = torch.cat(q), self.drafter.draft_vocab_ids
        if vocab is None:
            return head
        return head.new_zeros(len(q), self.target.spec.vocab_size).index_copy_(1, vocab, head)

    def _input(self, turn: Turn, chunks: dict[int, int], proposals: dict[int, Proposal]) -> Tensor:
        """Ids [n] that this turn runs through the target: [anchor, drafts], a prompt chunk, or nothing."""
        proposal = proposals.get(id(turn))
        known = turn.state.pending if proposal is not None else turn.state.pending[: chunks[id(turn)]]
        ids = torch.tensor(known, dtype=torch.int64, device=self.target.device)
        return ids if proposal is None else torch.cat((ids, proposal.ids))

    def _forward(self, turns: Sequence[Turn], inputs: Sequence[Tensor]) -> tuple[Tensor, list[Tensor]]:
        """Logits where a token is to be decided, and tap rows per turn.

        A turn without input stands at a known boundary: the tap of the last layer is the final-norm state, so the head
        alone gives its logits.
        """
        wanted, first = [], 0
        for turn, ids in zip(turns, inputs, strict=True):
            count = ids.shape[0]
            start = 0 if turn.decoding else count - 1
            complete = turn.decoding or count == len(turn.state.pending)
            wanted.append(range(first + start, first + count) if count and complete else range(0))
            first += count
        rows = [row for part in wanted for row in part]
        running = [Rows(turn.state.kv, ids) for turn, ids in zip(turns, inputs, strict=True) if ids.shape[0]]
        device = self.target.device
        logits, taps = None, None
        if running:
            self.target_forwards += 1
            select = None if len(rows) == first else torch.tensor(rows, dtype=torch.int64, device=device)
            out = self.target.forward(running, logit_rows=select, tap_layers=self.taps, tap_rows=select)
            logits, taps = out.logits, out.taps
        logit_parts, tap_parts, at = [], [], 0
        for turn, ids, part in zip(turns, inputs, wanted, strict=True):
            if not ids.shape[0]:
                assert turn.state.features is not None
                tap_parts.append(turn.state.features.unsqueeze(0))
                logit_parts.append(self.target.head(turn.state.features[-1:]))
                continue
            assert logits is not None
            assert taps is not None
            tap_parts.append(taps[at : at + len(part)])
            logit_parts.append(logits[at : at + len(part)])
            at += len(part)
        return logit_parts[0] if len(logit_parts) == 1 else torch.cat(logit_parts), tap_parts

    def _commit(
        self,
        turns: Sequence[Turn],
        inputs: Sequence[Tensor],
        proposals: dict[int, Proposal],
        logits: Tensor,
        taps: Sequence[Tensor],
    ) -> list[int]:
        """Decide tokens, emit them, cut KV to the new boundary and move the features there; returns the advances."""
        none = Proposal(torch.empty(0, dtype=torch.int64, device=self.target.device), None)
        deciding = [(turn, rows) for turn, rows in zip(turns, taps, strict=True) if rows.shape[0]]
        windows = []
        for turn, _ in deciding:
            proposal = proposals.get(id(turn), none)
            windows.append(Window(turn.sampler, len(turn.state.ids), proposal.ids, proposal.q))
        keys = [id(turn) for turn, _ in deciding]
        emitted = dict(zip(keys, verify(windows, logits), strict=True)) if windows else {}
        decided = dict(zip(keys, torch.split(logits, [rows.shape[0] for _, rows in deciding]), strict=True))
        advances = []
        for turn, ids, rows in zip(turns, inputs, taps, strict=True):
            tokens, state = emitted.get(id(turn)), turn.state
            if tokens is None:
                state.features = None
                advances.append(0)
                continue
            taken = turn.emit(tokens)
            if turn.top_scores is not None:
                turn.scores += _scores(decided[id(turn)][:taken], tokens[:taken], turn.top_scores)
            if id(turn) in proposals:
                state.kv.truncate(state.boundary - ids.shape[0] + taken)
                state.features = rows[taken - 1].clone()
            else:
                state.features = rows[0].clone()
                state.keep()
            advances.append(taken)
        return advances


class _Path:
    """A draft's way through a grammar, one step at a time; `leave` goes back to where it began."""

    def __init__(self, matcher: Matcher) -> None:
        self._matcher = matcher
        self._depth = 0
        self._inside = True

    def masked(self, logits: Tensor, vocab: Tensor | None) -> Tensor:
        """Logits [head_vocab] without refused tokens; as they are where the head knows no allowed one."""
        if not self._inside:
            return logits
        refused = torch.zeros((1, self._matcher.vocab_size), dtype=torch.float32, device=logits.device)
        self._matcher.mask(refused)
        allowed = logits + (refused[0] if vocab is None else refused[0, vocab])
        return allowed if bool(torch.isfinite(allowed).any()) else logits

    def follow(self, token: int) -> None:
        self._inside = self._inside and self._matcher.push(token)
        self._depth += self._inside

    def leave(self) -> None:
        self._matcher.pop(self._depth)


def _scores(logits: Tensor, tokens: Sequence[int], top: int) -> list[TokenScore]:
    """Scores of tokens decided from logits [n, V]."""
    logprobs = logits.float().log_softmax(-1)
    chosen = logprobs.gather(1, torch.tensor(tokens, device=logits.device).unsqueeze(1)).squeeze(1).tolist()
    best = logprobs.topk(top, dim=-1) if top else None
    values, ids = (best.values.tolist(), best.indices.tolist()) if best is not None else ([[]] * len(tokens),) * 2
    return [
        TokenScore(token, logprob, tuple(zip(ids[i], values[i], strict=True)))
        for i, (token, logprob) in enumerate(zip(tokens, chosen, strict=True))
    ]
