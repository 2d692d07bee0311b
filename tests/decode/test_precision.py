"""The choice of numbers and kernels is measured, kept, and follows what was measured."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from dlite_agent.decode.load import load_target
from dlite_agent.decode.precision import choose_precision
from dlite_agent.model import native
from dlite_agent.model.linear import CANDIDATES, Precision
from dlite_agent.model.spec import ModelSpec
from dlite_agent.model.weights import FolderWeights, fingerprint
from tests.helpers import CPU

PAIRS = [(name, kernel) for name, kernels in CANDIDATES.items() for kernel in kernels]


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("DLITE_CACHE", str(tmp_path))
    return tmp_path


def choose(folder: Path, dtype: str, device: torch.device = CPU) -> Precision:
    return choose_precision(dtype, ModelSpec.from_folder(folder), FolderWeights(folder), device, name="tiny")


def test_the_fastest_measured_is_taken_and_kept(cache: Path, tiny_folders: dict[str, Path]) -> None:
    chosen = choose(tiny_folders["qwen3"], "fp32")
    path = cache / "measured.json"
    costs = json.loads(path.read_text())
    assert len(costs) == len(CANDIDATES["fp32"])
    assert f"fp32/{chosen.kernel} " in min(costs, key=costs.__getitem__)
    slow_now = {key: 1.0 if f"/{chosen.kernel} " in key else 0.5 for key in costs}
    path.write_text(json.dumps(slow_now))
    assert choose(tiny_folders["qwen3"], "fp32").kernel != chosen.kernel
    path.write_text("torn {")
    assert choose(tiny_folders["qwen3"], "fp32").name == "fp32"


def test_auto_covers_every_precision(cache: Path, tiny_folders: dict[str, Path]) -> None:
    choose(tiny_folders["llama"], "auto")
    keys = json.loads((cache / "measured.json").read_text())
    assert {key.split()[-2] for key in keys} == {f"{name}/{kernel}" for name, kernel in PAIRS}


def test_a_device_needs_no_measurement(cache: Path, tiny_folders: dict[str, Path]) -> None:
    device = torch.device("cuda")
    for asked, served in {"auto": "bf16", "packed": "bf16", "bf16": "bf16", "fp32": "fp32"}.items():
        assert choose(tiny_folders["llama"], asked, device) == Precision(served, "plain")
    assert not (cache / "measured.json").exists()


def test_without_a_compiler_torch_serves(
    cache: Path, tiny_folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(cache))
    native.library.cache_clear()
    try:
        assert native.library() is None
        assert not choose(tiny_folders["llama"], "auto").native
    finally:
        native.library.cache_clear()


def test_load_target_measures_once_and_remembers(cache: Path, tiny_folders: dict[str, Path]) -> None:
    first = load_target(str(tiny_folders["llama"]), dtype="auto", device="cpu", context_limit=100)
    measured = (cache / "measured.json").read_text()
    second = load_target(str(tiny_folders["llama"]), dtype="auto", device="cpu")
    assert second.precision == first.precision
    assert (cache / "measured.json").read_text() == measured
    assert (first.context_limit, second.context_limit) == (100, second.spec.max_positions)
    assert first.fingerprint == fingerprint(tiny_folders["llama"])
