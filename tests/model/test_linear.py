"""Every linear kernel computes the same product."""

from __future__ import annotations

import warnings

import pytest
import torch

from dlite_agent.model.linear import CANDIDATES, Precision
from tests.helpers import relative_error

TOLERANCE = {"fp32": 1e-5, "bf16": 2e-2, "fp16w": 2e-3, "packed": 1e-5}
PAIRS = [(name, kernel) for name, kernels in CANDIDATES.items() for kernel in kernels]


@pytest.mark.parametrize(("name", "kernel"), PAIRS)
@pytest.mark.parametrize("bias", [False, True])
def test_kernels_agree(name: str, kernel: str, bias: bool) -> None:
    precision = Precision(name, kernel)
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(48, 64, generator=generator)
    shift = torch.randn(48, generator=generator) if bias else None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            op = precision.linear(weight, shift)
            op(torch.randn(2, 64).to(precision.dtype))
    except (RuntimeError, NotImplementedError):
        pytest.skip(f"{kernel} does not serve {name} on this processor")
    for rows in (1, 7, 8, 64):
        x = torch.randn(rows, 64, generator=generator)
        wanted = torch.nn.functional.linear(x.double(), weight.double(), None if shift is None else shift.double())
        assert relative_error(op(x.to(precision.dtype)), wanted) <= TOLERANCE[name]
