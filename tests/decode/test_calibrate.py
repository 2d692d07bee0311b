"""The window is the one with the least measured cost an expected token."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from dlite_agent.decode.calibrate import best_window
from dlite_agent.decode.rounds import Decoder


@pytest.mark.parametrize(
    ("seconds", "acceptance", "best"),
    [
        # Every draft is accepted and rows cost next to nothing: the whole block.
        ([1.0, 1.01, 1.02, 1.03, 1.04, 1.05, 1.06], [1.0] * 7, 8),
        # Nothing is ever accepted: the shortest draft there is.
        ([1.0, 1.01, 1.02, 1.03, 1.04, 1.05, 1.06], [0.0] * 7, 2),
        # Expected tokens 1.5, 1.75, 1.875, ...: per token .67, .63, .64, ...
        ([1.0, 1.1, 1.2, 1.3, 1.4, 1.5, 1.6], [0.5] * 7, 3),
    ],
)
def test_cost_an_expected_token_decides(
    seconds: list[float],
    acceptance: list[float],
    best: int,
    make_decoder: Callable[..., Decoder],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("DLITE_CACHE", str(tmp_path))
    decoder = make_decoder()
    best_window(decoder, acceptance, "first")  # measures; what it found is then replaced by known costs
    path = tmp_path / "measured.json"
    ((key, measured),) = json.loads(path.read_text()).items()
    assert len(measured) == decoder.proposal_length == 7
    assert min(measured) > 0
    path.write_text(json.dumps({key: seconds}))
    assert best_window(decoder, acceptance, "first") == best
    assert decoder.pool.reserved == 0
