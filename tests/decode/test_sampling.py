"""Distributions against their description, and the laws of the random numbers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats

from dlite_agent.decode.sampling import Sampler, SamplingParams, Window, draw, filtered, uniforms, verify
from dlite_agent.errors import InvalidRequest
from tests.decode.reference import probabilities
from tests.helpers import CPU

SETTINGS = [
    SamplingParams(temperature=1.0),
    SamplingParams(temperature=0.3),
    SamplingParams(temperature=1.0, top_k=1),
    SamplingParams(temperature=1.0, top_k=7),
    SamplingParams(temperature=1.0, top_k=1000),
    SamplingParams(temperature=1.5, top_p=0.5),
    SamplingParams(temperature=1.0, top_p=1e-6),
    SamplingParams(temperature=1.0, min_p=0.2),
    SamplingParams(temperature=1.0, min_p=1.0),
    SamplingParams(temperature=0.9, top_k=12, top_p=0.85, min_p=0.05, repetition_penalty=1.3),
    SamplingParams(temperature=0.9, presence_penalty=-1.0, frequency_penalty=0.4, logit_bias={3: 2.0, 5: -50.0}),
    SamplingParams(temperature=1.0, repetition_penalty=0.5),
]


@pytest.mark.parametrize("params", SETTINGS, ids=range(len(SETTINGS)))
def test_p_is_what_the_parameters_say(params: SamplingParams) -> None:
    generator = torch.Generator().manual_seed(0)
    logits = 2 * torch.randn(4, 20, generator=generator)
    prompt, emitted, drafts = [1, 2, 2, 9], [4, 4, 11], [4, 7, 7]
    sampler = Sampler(params, prompt=prompt, vocab_size=20, device=CPU)
    sampler.commit(emitted)
    found = filtered(sampler.adjusted(logits, torch.tensor(drafts)), params).numpy()
    for row in range(4):
        wanted = probabilities(logits[row].numpy(), params, prompt, emitted + drafts[:row])
        np.testing.assert_allclose(found[row], wanted, rtol=1e-4, atol=1e-7)


def test_looking_at_drafts_counts_nothing() -> None:
    params = SamplingParams(temperature=1.0, frequency_penalty=1.0)
    sampler = Sampler(params, prompt=[], vocab_size=5, device=CPU)
    logits = torch.zeros(3, 5)
    first = sampler.adjusted(logits, torch.tensor([1, 1]))
    assert torch.equal(first, sampler.adjusted(logits, torch.tensor([1, 1])))
    assert first[:, 1].tolist() == [0.0, -1.0, -2.0]


@pytest.mark.parametrize("top_p", [0.3, 0.9, 0.999999])
def test_top_p_over_a_large_flat_vocabulary(top_p: float) -> None:
    """Flat rows need more candidates than the quick path looks at."""
    logits = 0.1 * torch.randn(2, 5000, generator=torch.Generator().manual_seed(1))
    params = SamplingParams(temperature=1.0, top_p=top_p)
    for row, found in zip(logits, filtered(logits, params), strict=True):
        full = row.double().softmax(-1)
        kept = found > 0
        assert float(full[kept].sum()) >= top_p - 1e-4
        assert float(full[kept].sum() - full[kept].min()) <= top_p + 1e-4
        assert float(full[kept].min()) >= float(full[~kept].max()) if bool((~kept).any()) else True


def test_greedy_is_the_argmax_after_bias_and_penalties() -> None:
    logits = torch.tensor([[3.0, 2.9, 0.0], [3.0, 2.9, 0.0], [3.0, 2.9, 2.8]])
    params = SamplingParams(presence_penalty=0.5)
    sampler = Sampler(params, prompt=[], vocab_size=3, device=CPU)
    assert verify([Window(sampler, 5, torch.tensor([0, 1]))], logits) == [[0, 1, 2]]
    biased = Sampler(SamplingParams(logit_bias={2: 5.0}), prompt=[], vocab_size=3, device=CPU)
    assert verify([Window(biased, 5, torch.tensor([2, 0]))], logits) == [[2, 2]]


def test_numbers_depend_on_seed_position_and_purpose_alone() -> None:
    assert np.array_equal(uniforms(7, 100, 50)[20:], uniforms(7, 120, 30))
    assert not np.intersect1d(uniforms(7, 0, 200), uniforms(8, 0, 200)).size
    numbers = uniforms(2**63 - 1, 0, 20_000)
    assert numbers.min() >= 0
    assert numbers.max() < 1
    for purpose in range(3):
        assert stats.kstest(numbers[:, purpose], "uniform").pvalue > 1e-4
    correlation = np.asarray(np.corrcoef(np.vstack((numbers[:-1].T, numbers[1:].T))))
    assert np.abs(correlation[~np.eye(8, dtype=bool)]).max() < 0.04


def test_a_request_without_a_seed_gets_one_of_its_own() -> None:
    seeds = {Sampler(SamplingParams(temperature=1.0), prompt=[], vocab_size=3, device=CPU).seed for _ in range(20)}
    assert len(seeds) == 20


def test_draws_never_leave_the_support() -> None:
    weights = torch.tensor([[0.0, 0.3, 0.0, 0.7, 0.0]]).repeat(4, 1)
    picked = draw(weights, torch.tensor([0.0, 0.29999, 0.5, 1.0 - 2**-53], dtype=torch.float64))
    assert picked.tolist() == [1, 1, 3, 3]


@pytest.mark.parametrize(
    ("field", "values"),
    [
        ("temperature", [-0.1, 101.0, float("nan")]),
        ("top_k", [-1]),
        ("top_p", [0.0, 1.1, float("nan")]),
        ("min_p", [-0.1, 1.1]),
        ("repetition_penalty", [0.0, -1.0]),
        ("presence_penalty", [-2.1, 2.1]),
        ("frequency_penalty", [-2.1, 2.1]),
        ("seed", [-1, 2**63]),
        ("verification", ["maybe"]),
    ],
)
def test_a_value_out_of_range_is_named(field: str, values: list[Any]) -> None:
    for value in values:
        with pytest.raises(InvalidRequest) as caught:
            replace(SamplingParams(), **{field: value})
        assert caught.value.param == field
