"""Linear layers with the kernel that measures fastest here.

On CPUs the same product costs two to five times more or less by library, weight packing and row count, and the order
changes from machine to machine, so nothing is assumed: candidates are timed once per machine and the answer is kept.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from dlite_agent.model.measured import remember
from dlite_agent.model.native import NativeLinear

DTYPES: dict[str, torch.dtype] = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16w": torch.float32}
"""Precisions by name -> dtype of activations and KV. `fp16w` keeps fp16 weights and fp32 activations (CPU only)."""

Matmul = Callable[[Tensor], Tensor]
Shape = tuple[int, int]
MEASURED_ROWS = (1, 8, 64)


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


def _native_fp16(weight: Tensor, bias: Tensor | None) -> Matmul:
    return NativeLinear(weight.half(), bias)


KERNELS: dict[str, Callable[[Tensor, Tensor | None], Matmul]] = {
    "plain": plain,
    "onednn": _onednn,
    "fbgemm-fp16": _fbgemm_fp16,
    "native": NativeLinear,
    "native-fp16": _native_fp16,
}
CANDIDATES = {
    "fp32": ("plain", "onednn", "native"),
    "bf16": ("plain", "onednn", "fbgemm-fp16"),
    "fp16w": ("fbgemm-fp16", "native-fp16"),
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


def choose_precision(dtype: str, shapes: list[Shape], device: torch.device) -> Precision:
    """Pick kernel, and for dtype `auto` also precision, by measuring linears of `shapes` on this machine.

    The answer is cached in the user's cache folder per processor, thread count, torch version and shapes, so that a
    restart computes in the same numbers.
    """
    if device.type != "cpu":
        return Precision("bf16" if dtype in ("auto", "fp16w") else dtype, "plain")
    names = list(CANDIDATES) if dtype == "auto" else [dtype]
    sizes = " ".join(f"{rows}x{cols}" for rows, cols in shapes)
    costs = {
        (name, kernel): remember(f"products {name}/{kernel} {sizes}", partial(_measure, name, kernel, shapes))
        for name in names
        for kernel in CANDIDATES[name]
    }
    name, kernel = min(costs, key=lambda pair: costs[pair])
    return Precision(name, kernel)


def _measure(name: str, kernel: str, shapes: list[Shape]) -> float:
    """Seconds of all shapes at each of MEASURED_ROWS, a prompt row counted as a 64th; infinite where unsupported."""
    precision = Precision(name, kernel)
    layers = 6  # several copies, so that weights come from memory as in a real forward
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # packing announces its own deprecation on some builds
            ops = [precision.linear(torch.randn(shape) * 0.02) for _ in range(layers) for shape in shapes]
        total = 0.0
        for rows in MEASURED_ROWS:
            inputs = [torch.randn(rows, shape[1]).to(precision.dtype) for shape in shapes]
            seconds = []
            for _ in range(6):
                start = time.perf_counter()
                for i, op in enumerate(ops):
                    op(inputs[i % len(shapes)])
                seconds.append(time.perf_counter() - start)
            # The least: whatever else the machine does only adds.
            total += min(seconds) / (8 if rows == 64 else 1)
        return total
    except (RuntimeError, NotImplementedError):
        return float("inf")
