"""Packed weights keep every number, in the smallest form that can, and multiply as the dense ones do."""

from __future__ import annotations

import gguf
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from dlite_agent.model import native
from dlite_agent.model.native import NativeLinear
from dlite_agent.model.packing import Kind, exact
from tests.helpers import relative_error

TYPES = {Kind.Q4: gguf.GGMLQuantizationType.Q4_1, Kind.Q8: gguf.GGMLQuantizationType.Q8_0}


def weight_of(kind: Kind, shape: tuple[int, int], seed: int = 0) -> Tensor:
    """A random weight that a file of this kind could hold."""
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 0.05
    if kind == Kind.BF16:
        return weight.bfloat16().float()
    if kind in TYPES:
        return torch.from_numpy(gguf.dequantize(gguf.quantize(weight.numpy(), TYPES[kind]), TYPES[kind]))
    return weight


@given(st.sampled_from([Kind.Q4, Kind.Q8, Kind.BF16, Kind.FP32]), st.integers(0, 1000))
def test_the_smallest_exact_form_is_found(kind: Kind, seed: int) -> None:
    assert exact(weight_of(kind, (20, 64), seed)).kind == kind


def test_one_number_off_the_grid_is_not_lost() -> None:
    weight = weight_of(Kind.Q4, (16, 64))
    weight[3, 40] += 1e-4
    assert exact(weight).kind == Kind.FP32


def test_blank_and_constant_blocks() -> None:
    assert exact(torch.zeros(16, 64)).kind == Kind.Q4
    assert exact(torch.full((16, 32), 0.375)).kind == Kind.Q4


def test_inputs_that_fill_no_block_stay_dense() -> None:
    assert exact(weight_of(Kind.BF16, (16, 48))).kind == Kind.FP32


@pytest.mark.skipif(native.library() is None, reason="no C compiler, or not an AVX2 processor")
@pytest.mark.parametrize("kind", [Kind.Q4, Kind.Q8, Kind.BF16, Kind.FP32])
@pytest.mark.parametrize("shape", [(16, 32), (97, 576), (130, 96)])
def test_products(kind: Kind, shape: tuple[int, int]) -> None:
    """As in double precision, and the same for a row in any company."""
    weight = weight_of(kind, shape)
    bias, x = (torch.randn(count, generator=torch.Generator().manual_seed(1)) for count in (shape[0], 70 * shape[1]))
    op, x = NativeLinear(weight, bias, exact), x.view(70, -1)
    alone = torch.cat([op(row.unsqueeze(0)) for row in x])
    assert relative_error(alone, x.double() @ weight.double().T + bias.double()) <= 1e-5
    for rows in (0, 2, 5, 15, 16, 17, 33, 70):
        assert torch.equal(op(x[:rows]), alone[:rows])
