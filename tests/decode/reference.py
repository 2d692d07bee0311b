"""The target's distribution written out for one row at a time in numpy, as the documentation of parameters has it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from scipy import stats

from dlite_agent.decode.sampling import SamplingParams

Vector = NDArray[np.float64]


def probabilities(logits: Vector, params: SamplingParams, prompt: Sequence[int], emitted: Sequence[int]) -> Vector:
    x = logits.astype(np.float64).copy()
    for token, bias in params.logit_bias.items():
        x[token] += bias
    for token in range(len(x)):
        count = list(emitted).count(token)
        if token in prompt or count:
            x[token] = x[token] / params.repetition_penalty if x[token] > 0 else x[token] * params.repetition_penalty
        x[token] -= params.frequency_penalty * count + params.presence_penalty * bool(count)
    x = x / params.temperature
    p = np.exp(x - x.max())
    p[p < params.min_p * p.max()] = 0
    if params.top_k:
        p[p < np.sort(p)[::-1][min(params.top_k, len(p)) - 1]] = 0
    p /= p.sum()
    order = np.argsort(-p, kind="stable")
    kept, mass = np.zeros_like(p), 0.0
    for token in order:
        if mass >= params.top_p:
            break
        kept[token] = p[token]
        mass += p[token]
    normalised: Vector = kept / kept.sum()
    return normalised


def p_value(counts: Vector, expected: Vector) -> float:
    """Chi-square p-value; cells that expect fewer than five are one cell. What cannot happen must not have happened."""
    assert not counts[expected == 0].any(), "an impossible outcome was drawn"
    rare = expected < 5
    counts = np.append(counts[~rare], counts[rare].sum())
    expected = np.append(expected[~rare], expected[rare].sum())
    keep = expected > 0
    scaled = expected[keep] * counts[keep].sum() / expected[keep].sum()
    if len(scaled) == 1:
        return 1.0
    return float(stats.chisquare(counts[keep], scaled).pvalue)
