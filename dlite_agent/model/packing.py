"""Weights packed for our CPU kernels; `exact` finds the smallest form that holds a tensor's very numbers.

A GGUF file's blocks survive the way through dense fp32 weights: a block of 32 numbers that lie on a grid of 16 or 255
steps is told by its extremes, and every number is checked against the grid before the form is taken.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

import torch
from torch import Tensor

PANEL = 16
"""Outputs that are packed side by side; `NR` of native/linear.h."""
BLOCK = 32
"""Inputs of a block, as in GGUF."""


class Kind(IntEnum):
    """Forms of packed weights; `kind` of native/linear.h. BF16, Q8 and Q4 are laid out in blocks (native/blocks.h)."""

    FP32 = 0
    FP16 = 1
    BF16 = 2
    Q8 = 3
    Q4 = 4


@dataclass(frozen=True)
class Packed:
    """A weight [outputs, inputs] as the kernels read it."""

    memory: Tensor
    kind: Kind


def dense(weight: Tensor) -> Packed:
    """An fp32 or fp16 weight [out, in] as it is, in panels."""
    kind = Kind.FP16 if weight.dtype == torch.float16 else Kind.FP32
    return Packed(_padded(weight).view(-1, PANEL, weight.shape[1]).transpose(1, 2).contiguous(), kind)


def exact(weight: Tensor) -> Packed:
    """The smallest form that holds an fp32 weight [out, in] without loss."""
    if weight.shape[1] % BLOCK:
        return dense(weight)
    blocks = _padded(weight).view(-1, PANEL, weight.shape[1] // BLOCK, BLOCK)
    return _four_bits(blocks) or _eight_bits(blocks) or _bf16(blocks) or dense(weight)


def _padded(weight: Tensor) -> Tensor:
    return torch.nn.functional.pad(weight, (0, 0, 0, -weight.shape[0] % PANEL))


def _four_bits(blocks: Tensor) -> Packed | None:
    """GGUF's Q4_1: scale * q + least, q of 0..15."""
    least, most = blocks.aminmax(dim=-1, keepdim=True)
    scale, offset = ((most - least) / 15).half(), least.half()
    numbers = _steps(blocks - offset.float(), scale)
    if not torch.equal(numbers * scale.float() + offset.float(), blocks):
        return None
    # [panel, block, eight inputs, output, odd, pair of inputs]: nibbles 2s of the even inputs, then of the odd ones
    nibbles = numbers.to(torch.uint8).view(*numbers.shape[:-1], 4, 4, 2).permute(0, 2, 3, 1, 5, 4)
    packed = nibbles[..., 0::2] | nibbles[..., 1::2] << 4
    return Packed(_with_scales(packed, scale, offset), Kind.Q4)


def _eight_bits(blocks: Tensor) -> Packed | None:
    """GGUF's Q8_0: scale * q, q of -127..127."""
    scale = (blocks.abs().amax(dim=-1, keepdim=True) / 127).half()
    numbers = _steps(blocks, scale)
    if not torch.equal(numbers * scale.float(), blocks):
        return None
    packed = numbers.to(torch.int8).view(torch.uint8).view(*numbers.shape[:-1], 8, 4).permute(0, 2, 3, 1, 4)
    return Packed(_with_scales(packed, scale), Kind.Q8)


def _bf16(blocks: Tensor) -> Packed | None:
    halves = blocks.bfloat16()
    if not torch.equal(halves.float(), blocks):
        return None
    return Packed(halves.view(*halves.shape[:-1], BLOCK // 2, 2).permute(0, 2, 3, 1, 4).contiguous(), Kind.BF16)


def _steps(distances: Tensor, scale: Tensor) -> Tensor:
    """How many steps of a grid; 0 where its step is 0."""
    step = scale.float()
    return torch.where(step == 0, 0.0, distances / step).round()


def _with_scales(packed: Tensor, *scales: Tensor) -> Tensor:
    """Blocks [panels, blocks, bytes]: packed numbers, then the scales [panels, PANEL, blocks, 1] of their outputs."""
    parts = [packed.flatten(2)]
    parts += [scale.squeeze(-1).transpose(1, 2).contiguous().view(torch.uint8) for scale in scales]
    return torch.cat(parts, dim=-1)
