"""Every linear kernel computes the same product, and the choice among them is measured and kept."""

from __future__ import annotations

import json
import warnings
from pathlib import Path

import pytest
import torch

from dlite_agent.model.linear import CANDIDATES, MEASURED_ROWS, Precision, choose_precision
from tests.helpers import CPU, relative_error

TOLERANCE = {"fp32": 1e-5, "bf16": 2e-2, "fp16w": 2e-3}
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


def test_the_fastest_measured_is_taken_and_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DLITE_CACHE", str(tmp_path))
    shapes = [(32, 16), (16, 32)]
    chosen = choose_precision("fp32", shapes, CPU)
    path = tmp_path / "measured.json"
    costs = json.loads(path.read_text())
    assert len(costs) == len(CANDIDATES["fp32"])
    assert f"fp32/{chosen.kernel} " in min(costs, key=costs.__getitem__)
    slow_now = {key: 1.0 if f"/{chosen.kernel} " in key else 0.5 for key in costs}
    path.write_text(json.dumps(slow_now))
    assert choose_precision("fp32", shapes, CPU).kernel != chosen.kernel
    path.write_text("torn {")
    assert choose_precision("fp32", shapes, CPU).name == "fp32"


def test_auto_covers_every_precision(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DLITE_CACHE", str(tmp_path))
    choose_precision("auto", [(32, 16)], CPU)
    keys = json.loads((tmp_path / "measured.json").read_text())
    assert {key.split()[-2] for key in keys} == {f"{name}/{kernel}" for name, kernel in PAIRS}
    assert min(MEASURED_ROWS) == 1


def test_a_device_needs_no_measurement(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DLITE_CACHE", str(tmp_path))
    device = torch.device("cuda")
    assert choose_precision("auto", [(32, 16)], device) == Precision("bf16", "plain")
    assert choose_precision("fp32", [(32, 16)], device) == Precision("fp32", "plain")
    assert not (tmp_path / "measured.json").exists()
