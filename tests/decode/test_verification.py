"""Rejection keeps the target's distribution; match draws the very tokens of the autoregressive run."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Literal, get_args

import numpy as np
import pytest
import torch
from torch import Tensor

from dlite_agent.config import Mode
from dlite_agent.decode.rounds import Decoder
from dlite_agent.decode.sampling import DRAFT, Sampler, SamplingParams, Window, draw, filtered, verify
from dlite_agent.decode.state import DecodeState
from dlite_agent.model.target import Rows, Target
from tests.decode.reference import Vector, p_value, probabilities
from tests.helpers import CPU, prompt, run_turn

SAMPLES = 20_000
LEAST = 1e-4
"""A p-value below this is a failure; all seeds are fixed, so a pass stays a pass."""

PLAIN = SamplingParams(temperature=1.0, verification="rejection", seed=1)
SETTINGS = {
    "plain": PLAIN,
    "cold": replace(PLAIN, temperature=0.6),
    "top-k": replace(PLAIN, top_k=3),
    "top-p": replace(PLAIN, top_p=0.8),
    "min-p": replace(PLAIN, min_p=0.15),
    "logit bias": replace(PLAIN, logit_bias={2: 1.5, 4: -100.0}),
    "all": replace(PLAIN, temperature=0.8, top_k=5, top_p=0.9, min_p=0.02, logit_bias={1: 0.5}),
}
PENALISED = replace(PLAIN, repetition_penalty=1.5, presence_penalty=0.5, frequency_penalty=0.6)


def table(rows: int, vocab: int, seed: int) -> Tensor:
    return 1.2 * torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed))


def distribution_p_value(params: SamplingParams, *, claimed: SamplingParams | None = None) -> float:
    """Worst p-value over six contexts of SAMPLES decisions; q is reported as if drawn under `claimed`.

    Each position of a window is decided by numbers of its own, so one window of many drafts is as many samples.
    """
    contexts, vocab = 6, 7
    p_logits, q_logits = table(contexts, vocab, 1), table(contexts, vocab, 2)
    where = torch.arange(SAMPLES) % contexts
    sampler = Sampler(params, prompt=[], vocab_size=vocab, device=CPU)
    true_q = filtered(q_logits, params)[where]
    drafts = draw(true_q, sampler.numbers(5, SAMPLES, DRAFT))
    q = true_q if claimed is None else filtered(q_logits, claimed)[where]
    logits = torch.cat((p_logits[where], p_logits[:1]))
    decided = sampler.choices(logits, drafts, q, 5)[:SAMPLES]
    tokens = torch.where(decided < 0, -1 - decided, decided)
    worst = 1.0
    for context in range(contexts):
        found = torch.bincount(tokens[where == context], minlength=vocab).numpy().astype(float)
        expected = probabilities(p_logits[context].numpy(), params, [], []) * found.sum()
        worst = min(worst, p_value(found, expected))
    return worst


@pytest.mark.parametrize("setting", SETTINGS)
def test_rejection_keeps_the_distribution(setting: str) -> None:
    assert distribution_p_value(SETTINGS[setting]) > LEAST


@pytest.mark.parametrize("setting", ["plain", "top-k", "top-p", "min-p"])
def test_a_q_of_another_temperature_is_seen(setting: str) -> None:
    params = SETTINGS[setting]
    assert distribution_p_value(params, claimed=replace(params, temperature=1.5)) < LEAST


EPISODE, EPISODE_VOCAB, EPISODE_PROMPT = 4, 3, (0, 2)


class Chain:
    """Episodes of four tokens in which each token's logits depend on the token before it."""

    def __init__(self, params: SamplingParams, seed: int, *, claimed: SamplingParams | None = None) -> None:
        self.params = params
        self.p_logits = table(EPISODE_VOCAB, EPISODE_VOCAB, 3)
        q_logits = self.p_logits + 0.5 * table(EPISODE_VOCAB, EPISODE_VOCAB, 4)
        self._q = filtered(q_logits, params)
        self._claimed_q = filtered(q_logits, claimed or params)
        self.counts = np.zeros((EPISODE_VOCAB,) * EPISODE)
        self._seed = seed
        self._begin()

    def _begin(self) -> None:
        self._seed += 1
        self.emitted: list[int] = []
        self.sampler = Sampler(
            replace(self.params, seed=self._seed), prompt=EPISODE_PROMPT, vocab_size=EPISODE_VOCAB, device=CPU
        )

    def window(self) -> tuple[Window, Tensor]:
        position = len(EPISODE_PROMPT) + len(self.emitted)
        length = EPISODE - len(self.emitted) - 1
        path = [self.emitted[-1] if self.emitted else EPISODE_PROMPT[-1]]
        uniform = self.sampler.numbers(position, max(length, 1), DRAFT)
        for i in range(length):
            path.append(int(draw(self._q[path[-1]][None], uniform[i : i + 1])))
        at = torch.tensor(path)
        return Window(self.sampler, position, at[1:], self._claimed_q[at[:-1]] if length else None), self.p_logits[at]

    def take(self, tokens: Sequence[int]) -> None:
        self.sampler.commit(tokens)
        self.emitted += tokens
        if len(self.emitted) == EPISODE:
            self.counts[tuple(self.emitted)] += 1
            self._begin()

    def expected(self) -> Vector:
        cells = np.zeros_like(self.counts)
        for path in itertools.product(range(EPISODE_VOCAB), repeat=EPISODE):
            cells[path] = np.prod(
                [
                    probabilities(
                        self.p_logits[(EPISODE_PROMPT[-1], *path)[i]].numpy(), self.params, EPISODE_PROMPT, path[:i]
                    )[path[i]]
                    for i in range(EPISODE)
                ]
            )
        expected: Vector = cells * self.counts.sum()
        return expected

    def p_value(self) -> float:
        return p_value(self.counts.ravel(), self.expected().ravel())


def run_chains(chains: Sequence[Chain], samples: int) -> None:
    """Emit `samples` tokens in all, one verify pass for all chains at a time."""
    done = 0
    while done < samples:
        parts = [chain.window() for chain in chains]
        runs = verify([window for window, _ in parts], torch.cat([logits for _, logits in parts]))
        for chain, run in zip(chains, runs, strict=True):
            chain.take(run)
            done += len(run)


def test_penalties_count_the_drafts_before_a_position() -> None:
    chain = Chain(PENALISED, 0)
    run_chains([chain], SAMPLES)
    assert chain.p_value() > LEAST


def test_a_batch_of_eight_keeps_each_distribution() -> None:
    settings = [SETTINGS[name] for name in ("plain", "top-p", "min-p", "cold", "plain")]
    settings += [replace(PLAIN, top_k=2), PENALISED, replace(PENALISED, top_p=0.9)]
    chains = [Chain(params, 10**6 * i) for i, params in enumerate(settings)]
    run_chains(chains, SAMPLES)
    assert min(chain.p_value() for chain in chains) > LEAST


def test_a_planted_fault_is_seen_in_a_batch_of_eight() -> None:
    chains = [Chain(PLAIN, 10**6 * i, claimed=replace(PLAIN, temperature=2.0)) for i in range(8)]
    run_chains(chains, SAMPLES // 4)
    together = chains[0]
    together.counts = np.sum([chain.counts for chain in chains], axis=0)
    assert together.p_value() < LEAST


def first_tokens(
    decoder: Decoder, paused: DecodeState, params: SamplingParams, samples: int, mode: Mode
) -> tuple[Vector, int]:
    """Counts of the first token after `paused` over many seeds, in batches of 16, and how many were accepted drafts."""
    counts, accepted, batch = np.zeros(decoder.target.spec.vocab_size), 0, 16
    for first in range(0, samples, batch):
        states = [paused.fork() for _ in range(batch)]
        turns = [
            decoder.begin(state, [], replace(params, seed=first + i), max_new_tokens=2, mode=mode)
            for i, state in enumerate(states)
        ]
        decoder.step(turns)
        for turn in turns:
            counts[turn.generated[0]] += 1
            accepted += len(turn.generated) == 2
            turn.state.kv.free()
    return counts, accepted


def next_logits(decoder: Decoder, ids: Sequence[int]) -> Vector:
    kv = decoder.pool.sequence()
    kv.reserve(len(ids))
    logits: Vector = decoder.target.forward([Rows(kv, torch.tensor(ids))]).logits[-1].numpy()
    kv.free()
    return logits


def first_token_p_value(
    decoder: Decoder, paused: DecodeState, params: SamplingParams, samples: int, mode: Mode = "dlite"
) -> float:
    counts, accepted = first_tokens(decoder, paused, params, samples, mode)
    assert 0.1 * samples < accepted < 0.9 * samples, "both outcomes of a verification must be common"
    return p_value(counts, probabilities(next_logits(decoder, paused.ids), params, paused.ids, []) * samples)


def after_a_turn(decoder: Decoder) -> DecodeState:
    paused = decoder.open()
    run_turn(decoder, paused, prompt(12), max_new_tokens=5)
    return paused


ROUND = SamplingParams(temperature=4.0, verification="rejection", top_p=0.95)


def test_whole_rounds_keep_the_distribution(make_decoder: Callable[..., Decoder]) -> None:
    decoder = make_decoder(positions=10**6)
    assert first_token_p_value(decoder, after_a_turn(decoder), ROUND, 960) > LEAST


@pytest.mark.parametrize("mode", ["suffix", "mixed"])
@pytest.mark.parametrize("verification", ["match", "rejection"])
def test_copied_drafts_keep_the_distribution(
    mode: Mode, verification: Literal["match", "rejection"], make_decoder: Callable[..., Decoder]
) -> None:
    """Whatever the turn before ended with has stood after `again` before, and `again` after it."""
    decoder, again = make_decoder(positions=10**6), 7
    pairs = [id for token in range(decoder.target.spec.vocab_size) for id in (again, token)]
    paused = decoder.open()
    run_turn(decoder, paused, [*pairs, *prompt(12), again], max_new_tokens=1)
    logits = next_logits(decoder, paused.ids)
    likely = {again: float(logits.max() - logits[again])}
    params = replace(ROUND, verification=verification, logit_bias=likely)
    assert first_token_p_value(decoder, paused, params, 480, mode) > LEAST


@pytest.mark.soak
@pytest.mark.parametrize("params", [ROUND, replace(ROUND, top_p=1.0), replace(ROUND, top_k=20, repetition_penalty=1.3)])
def test_whole_rounds_keep_the_distribution_at_length(
    params: SamplingParams, make_decoder: Callable[..., Decoder]
) -> None:
    decoder = make_decoder(positions=10**6)
    assert first_token_p_value(decoder, after_a_turn(decoder), params, SAMPLES) > LEAST


SAMPLED = {
    "warm": SamplingParams(temperature=3.0, seed=3),
    "filtered": SamplingParams(temperature=4.0, top_k=30, top_p=0.9, min_p=0.01, seed=4),
    "penalised": SamplingParams(
        temperature=3.0, repetition_penalty=1.2, presence_penalty=0.5, frequency_penalty=0.3, seed=5
    ),
    "greedy penalised": SamplingParams(repetition_penalty=1.5, frequency_penalty=1.0, logit_bias={3: 4.0}),
}


@pytest.mark.parametrize("setting", SAMPLED)
def test_match_draws_the_tokens_of_the_autoregressive_run(setting: str, make_decoder: Callable[..., Decoder]) -> None:
    decoder, params = make_decoder(), SAMPLED[setting]
    for i in range(3):
        runs = [run_turn(decoder, decoder.open(), prompt(15, i), params, mode=mode)[0] for mode in get_args(Mode)]
        assert all(run.generated == runs[0].generated for run in runs)
        assert len(set(runs[0].generated)) > 5


def test_another_seed_draws_other_tokens(make_decoder: Callable[..., Decoder]) -> None:
    decoder = make_decoder()
    one, two, three = (
        run_turn(decoder, decoder.open(), prompt(15), SamplingParams(temperature=3.0, seed=seed))[0].generated
        for seed in (3, 4, 3)
    )
    assert one == three != two


def test_rejection_repeats_with_its_seed(make_decoder: Callable[..., Decoder], target: Target) -> None:
    params = SamplingParams(temperature=3.0, verification="rejection", seed=9)
    decoder = make_decoder()
    runs = [run_turn(decoder, decoder.open(), prompt(15), params)[0].generated for _ in range(2)]
    assert runs[0] == runs[1]
    assert all(0 <= token < target.spec.vocab_size for token in runs[0])
