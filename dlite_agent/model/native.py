"""Our own CPU kernels: compiled once on the machine that runs them, and not needed where there is no compiler.

The sources in native/ are plain C. They are built into the user's cache folder by the system's compiler, for this
very processor, and called through ctypes, which lets other Python threads run meanwhile. Without a compiler, or on
another kind of processor, `library` is None and torch's kernels serve.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from ctypes import Structure, c_int, c_int64, c_void_p
from functools import cache
from importlib import resources
from pathlib import Path

import torch
from torch import Tensor

from dlite_agent.model.measured import processor
from dlite_agent.model.packing import PANEL, Packed
from dlite_agent.paths import cache_dir

log = logging.getLogger(__name__)

_HEADERS = ("linear.h", "blocks.h", "tiles.h", "decoder.h", "attention.h", "attention_tiles.h")
_SOURCES = ("forward.c", "draft.c")
_FLAGS = ("-O3", "-march=native", "-fno-math-errno", "-fno-trapping-math", "-ffp-contract=fast", "-fopenmp", "-fPIC")


class CLinear(Structure):
    """`Linear` of native/linear.h."""

    _fields_ = (("weight", c_void_p), ("bias", c_void_p), ("n", c_int64), ("k", c_int64), ("kind", c_int64))


@cache
def library() -> ctypes.CDLL | None:
    """The compiled kernels, or None where they cannot be had."""
    if platform.machine() not in ("x86_64", "AMD64") or torch.backends.cpu.get_cpu_capability() not in (
        "AVX2",
        "AVX512",
    ):
        return None
    compiler = shutil.which(os.environ.get("CC", "cc")) or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        log.info("no C compiler: torch's kernels serve")
        return None
    try:
        return _declared(ctypes.CDLL(str(_built(compiler))))
    except (OSError, subprocess.SubprocessError) as error:
        log.warning("the CPU kernels could not be built, torch's serve: %s", getattr(error, "stderr", None) or error)
        return None


def _built(compiler: str) -> Path:
    """The shared object; compiled now unless this compiler has built these sources for this CPU before."""
    source = resources.files("dlite_agent.model") / "native"
    texts = {name: (source / name).read_bytes() for name in (*_HEADERS, *_SOURCES)}
    version = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=True, timeout=60).stdout
    key = hashlib.sha256(b"".join(texts.values()))
    key.update(f"{version} {_FLAGS} {processor()}".encode())
    target = cache_dir() / f"kernels-{key.hexdigest()[:16]}.so"
    if not target.is_file():
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=target.parent) as folder:
            for name, text in texts.items():
                (Path(folder) / name).write_bytes(text)
            _compile(compiler, Path(folder), Path(folder) / "out.so")
            (Path(folder) / "out.so").replace(target)
    return target


def _compile(compiler: str, folder: Path, out: Path) -> None:
    """Link against the OpenMP runtime that torch has loaded, so that there is one pool of threads, not two."""

    def call(*arguments: str) -> None:
        subprocess.run([compiler, *arguments], cwd=folder, capture_output=True, text=True, check=True, timeout=300)

    call(*_FLAGS, "-c", *_SOURCES)
    objects = [name.replace(".c", ".o") for name in _SOURCES]
    call("-shared", *objects, "-o", out.name, "-lm")
    try:
        ctypes.CDLL(str(out), mode=os.RTLD_NOW)
    except OSError:
        call("-shared", "-fopenmp", *objects, "-o", out.name, "-lm")


def _declared(found: ctypes.CDLL) -> ctypes.CDLL:
    found.dlite_linear.argtypes = (c_void_p, c_void_p, c_void_p, c_int64, c_void_p, c_int)
    found.dlite_forward.argtypes = (c_void_p, c_void_p, c_int)
    found.dlite_draft.argtypes = (c_void_p, c_void_p, c_void_p, c_int)
    found.dlite_mask.argtypes = (c_void_p, c_void_p, c_int64, c_int64, c_int64, c_int64)
    found.dlite_mask.restype = None
    found.dlite_linear.restype = found.dlite_forward.restype = found.dlite_draft.restype = None
    found.dlite_linear_scratch.argtypes = (c_void_p, c_int64, c_int64)
    found.dlite_scratch.argtypes = (c_void_p, c_int64, c_int64, c_int64, c_int64)
    found.dlite_draft_scratch.argtypes = (c_void_p, c_int64, c_int64, c_int64, c_int64)
    for sizes in (found.dlite_linear_scratch, found.dlite_scratch, found.dlite_draft_scratch):
        sizes.restype = c_int64
    return found


def mask_logits(logits: Tensor, allowed: Tensor) -> bool:
    """Set logits [R, V] (fp32, rows contiguous) of refused ids to -inf, in place.

    Args:
        allowed: int32 [R, ceil(V / 32)]; bit id % 32 of word id // 32 is set for an id that may stand there.

    Returns:
        False where the kernel does not serve; then nothing has been done.
    """
    lib = library()
    if lib is None or logits.device.type != "cpu" or logits.dtype != torch.float32:
        return False
    rows, vocab = logits.shape
    lib.dlite_mask(logits.data_ptr(), allowed.data_ptr(), rows, vocab, logits.stride(0), allowed.shape[1])
    return True


class NativeLinear:
    """x [N, in] fp32 -> [N, out] fp32 by a weight [out, in] that `pack` has laid out for the kernels."""

    def __init__(self, weight: Tensor, bias: Tensor | None, pack: Callable[[Tensor], Packed]) -> None:
        lib = library()
        if lib is None:
            raise NotImplementedError("the native kernels cannot be had here")
        self.outputs, self.inputs = weight.shape
        self._weight = pack(weight)
        self._bias = None if bias is None else torch.nn.functional.pad(bias.float(), (0, -self.outputs % PANEL))
        self.c = CLinear(
            self._weight.memory.data_ptr(),
            None if self._bias is None else self._bias.data_ptr(),
            self.outputs,
            self.inputs,
            self._weight.kind,
        )
        self.nbytes = self._weight.memory.nbytes
        self._lib = lib
        self._reference = ctypes.byref(self.c)

    def __call__(self, x: Tensor) -> Tensor:
        x, rows, threads = x.contiguous(), x.shape[0], torch.get_num_threads()
        y = x.new_empty(rows, self.outputs)
        scratch = x.new_empty(self._lib.dlite_linear_scratch(self._reference, rows, threads))
        self._lib.dlite_linear(self._reference, x.data_ptr(), y.data_ptr(), rows, scratch.data_ptr(), threads)
        return y
