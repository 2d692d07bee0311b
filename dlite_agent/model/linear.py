"""Linear layers by any of several libraries' kernels or our own.

On CPUs the same product costs two to five times more or less by library, weight packing and row count, and the order
changes from machine to machine, so nothing is assumed: decode/precision.py times the candidates.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from dlite_agent.model.native import NativeLinear
from dlite_agent.model.packing import dense, exact

DTYPES: dict[str, torch.dtype] = {
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16w": torch.float32,
    "packed": torch.float32,
}
"""Precisions by name -> dtype of activations and KV.

`fp16w` keeps fp16 weights and fp32 activations, `packed` each weight in the smallest form that holds it exactly; both
are for CPUs only."""

Matmul = Callable[[Tensor], Tensor]


def plain(weight: Tensor, bias: Tensor | None) -> Matmul:
    """torch's own product; the only one that gradients flow through."""
    return lambda x: F.linear(x, weight, bias)


def _onednn(weight: Tensor, bias: Tensor | None) -> Matmul:
    packed = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), 8)
    op = torch.ops.mkldnn._linear_pointwise
    return lambda x: op(x, packed, bias, "none", [], "")


def _fbgemm_fp16(weight: Tensor, bias: Tensor | None) -> Matmul:
    # bf16 weights lose nothing in fp16 but what lies below its range; the product itself is in fp32.
    packed = torch.ops.quantized.linear_prepack_fp16(
        weight.float().contiguous(), None if bias is None else bias.float()
    )
    op = torch.ops.quantized.linear_dynamic_fp16
    return lambda x: op(x.float(), packed).to(x.dtype)


def _native(weight: Tensor, bias: Tensor | None) -> Matmul:
    return NativeLinear(weight, bias, dense)


def _native_fp16(weight: Tensor, bias: Tensor | None) -> Matmul:
    return NativeLinear(weight.half(), bias, dense)


def _native_packed(weight: Tensor, bias: Tensor | None) -> Matmul:
    return NativeLinear(weight, bias, exact)


KERNELS: dict[str, Callable[[Tensor, Tensor | None], Matmul]] = {
    "plain": plain,
    "onednn": _onednn,
    "fbgemm-fp16": _fbgemm_fp16,
    "native": _native,
    "native-fp16": _native_fp16,
    "native-packed": _native_packed,
}
CANDIDATES = {
    "fp32": ("plain", "onednn", "native"),
    "bf16": ("plain", "onednn", "fbgemm-fp16"),
    "fp16w": ("fbgemm-fp16", "native-fp16"),
    "packed": ("native-packed",),
}


@dataclass(frozen=True)
class Precision:
    """The numbers a model computes in, and the linear kernel that serves them here."""

    name: str
    kernel: str

    @property
    def dtype(self) -> torch.dtype:
        return DTYPES[self.name]

    @property
    def native(self) -> bool:
        """Whether our own kernels serve, which run whole layers as well."""
        return self.kernel.startswith("native")

    def linear(self, weight: Tensor, bias: Tensor | None = None) -> Matmul:
        """Pack a weight [out, in] and return x [N, in] -> [N, out]. Plain kernels keep a reference to `weight`."""
        weight = weight.to(self.dtype)
        return KERNELS[self.kernel](weight, None if bias is None else bias.to(self.dtype))
