"""`bench device` in a shape small enough for a test."""

from __future__ import annotations

from dataclasses import replace

import pytest

from dlite_agent.bench import device
from dlite_agent.errors import InvalidRequest


def test_figures_for_every_context_and_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    real = device.SHAPES["smollm2-135m"]
    small = replace(real.spec, num_layers=4, hidden_size=36, intermediate_size=32, head_dim=4, vocab_size=64)
    monkeypatch.setitem(device.SHAPES, "small", replace(real, spec=small, rank=8))
    seen: list[tuple[int, int]] = []
    result = device.bench_device(
        "small",
        device="cpu",
        dtype="fp32",
        contexts=(16, 40),
        batches=(1, 3),
        steps=3,
        on_row=lambda row: seen.append((row["context"], row["batch"])),
    )
    assert seen == [(16, 1), (16, 3), (40, 1), (40, 3)]
    for row in result["rows"]:
        assert min(row["t_ar"], row["t_d"], row["t_v"], row["t_s"]) > 0
        assert row["overhead"] == pytest.approx((row["t_d"] + row["t_v"] + row["t_s"]) / row["t_ar"])


def test_an_unknown_shape_is_refused_by_name() -> None:
    with pytest.raises(InvalidRequest) as caught:
        device.bench_device("huge", device="cpu", dtype="fp32", contexts=(16,), batches=(1,))
    assert caught.value.param == "shape"
