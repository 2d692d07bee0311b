"""Measurements of this machine, kept in the user's cache folder so that a restart decides as before."""

from __future__ import annotations

import hashlib
import json
import platform
from collections.abc import Callable
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any, TypeVar

import torch

from dlite_agent.paths import cache_dir

T = TypeVar("T", float, list[float])


def remember(what: str, measure: Callable[[], T]) -> T:
    """Figures for `what` on this processor, thread count, torch version and kernels: measured once, then read."""
    known = _read()
    key = f"{_machine()} threads={torch.get_num_threads()} torch={torch.__version__} kernels={_kernels()} {what}"
    if key not in known:
        known[key] = measure()
        _write(known)
    found: T = known[key]
    return found


def _machine() -> str:
    return f"{platform.machine()}/{torch.backends.cpu.get_cpu_capability()}/{processor()}"


@cache
def _kernels() -> str:
    """Short digest of our kernels' sources: what was measured with others says nothing of these."""
    sources = sorted((resources.files("dlite_agent.model") / "native").iterdir(), key=lambda source: source.name)
    return hashlib.sha256(b"".join(source.read_bytes() for source in sources)).hexdigest()[:8]


def processor() -> str:
    try:
        with Path("/proc/cpuinfo").open() as lines:
            return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor()


def _read() -> dict[str, Any]:
    try:
        found: dict[str, Any] = json.loads((cache_dir() / "measured.json").read_text())
    except (OSError, ValueError):
        return {}
    return found


def _write(known: dict[str, Any]) -> None:
    path = cache_dir() / "measured.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(".tmp")
    temporary.write_text(json.dumps(known, indent=1))
    temporary.replace(path)
