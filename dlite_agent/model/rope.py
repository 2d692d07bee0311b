"""Rotary position embedding: default, linear, llama3 and YaRN (arXiv 2309.00071) frequencies."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from dlite_agent.model.spec import RopeSpec


def frequencies(rope: RopeSpec, head_dim: int) -> tuple[Tensor, float]:
    """Inverse frequencies [head_dim / 2] in fp32, and the factor that cos and sin are multiplied by."""
    inverse = 1.0 / rope.theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
    if rope.kind == "default":
        return inverse, 1.0
    options = rope.options
    factor = float(options["factor"])
    if rope.kind == "linear":
        return inverse / factor, 1.0
    if rope.kind == "llama3":
        return _llama3(inverse, factor, options), 1.0
    return _yarn(inverse, factor, options, rope.theta, head_dim)


def _llama3(inverse: Tensor, factor: float, options: dict[str, float]) -> Tensor:
    low, high = options["low_freq_factor"], options["high_freq_factor"]
    original = options["original_max_position_embeddings"]
    turns = original * inverse / (2 * math.pi)
    keep = ((turns - low) / (high - low)).clamp(0, 1)
    return inverse * (keep + (1 - keep) / factor)


def _yarn(
    inverse: Tensor, factor: float, options: dict[str, float], theta: float, head_dim: int
) -> tuple[Tensor, float]:
    original = options["original_max_position_embeddings"]

    def dim_at(turns: float) -> float:
        return head_dim * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low, high = dim_at(options.get("beta_fast") or 32), dim_at(options.get("beta_slow") or 1)
    if options.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    if low == high:
        high += 0.001
    ramp = ((torch.arange(head_dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)

    def mscale(scale: float) -> float:
        return 0.1 * scale * math.log(factor) + 1.0 if factor > 1 else 1.0

    attention = options.get("attention_factor")
    if attention is None:
        one, all_dims = options.get("mscale"), options.get("mscale_all_dim")
        attention = mscale(one) / mscale(all_dims) if one and all_dims else mscale(1.0)
    return inverse * (1 - ramp) + inverse / factor * ramp, float(attention)


class RotaryTable:
    """cos and sin for positions 0..size-1.

    Rows are [head_dim], both halves equal in frequency; sin of the first half is negated so that
    `x * cos + swap_halves(x) * sin` is the rotation.
    """

    def __init__(self, rope: RopeSpec, head_dim: int, *, size: int, device: torch.device, dtype: torch.dtype) -> None:
        inverse, factor = frequencies(rope, head_dim)
        angles = torch.outer(torch.arange(size, dtype=torch.float32), inverse)
        cos, sin = angles.cos() * factor, angles.sin() * factor
        self.cos = torch.cat((cos, cos), dim=1).to(device, dtype)
        self.sin = torch.cat((-sin, sin), dim=1).to(device, dtype)

    def at(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """cos and sin [N, 1, head_dim] at int64 positions [N]."""
        return self.cos[positions].unsqueeze(1), self.sin[positions].unsqueeze(1)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate heads x [..., N, heads, head_dim] by cos and sin [..., N, 1, head_dim]."""
    half = x.shape[-1] // 2
    swapped = torch.cat((x[..., half:], x[..., :half]), dim=-1)
    return torch.addcmul(x * cos, swapped, sin)
