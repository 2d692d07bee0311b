"""Costs are measured once, kept, and follow the rounds that are really made."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dlite_agent.decode.costs import ROWS, CostModel, cost_model
from dlite_agent.decode.rounds import Decoder
from dlite_agent.model.target import Target
from tests.helpers import GREEDY, pool_for, prompt, run_turn, successor_drafter


def test_a_machine_is_measured_once(target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DLITE_CACHE", str(tmp_path))
    decoder = Decoder(target, successor_drafter(target), pool_for(target))
    first = cost_model(decoder, "tiny")
    known = json.loads((tmp_path / "measured.json").read_text())
    forwards = decoder.target_forwards
    second = cost_model(decoder, "tiny")
    assert json.loads((tmp_path / "measured.json").read_text()) == known
    assert decoder.target_forwards == forwards
    for rows in ROWS:
        assert second.verify(rows, 0) == first.verify(rows, 0) > 0
    assert first.verify(1, 100_000) >= first.verify(1, 0)
    assert first.draft(7, 8) >= first.draft(7, 1) > 0
    assert first.draft(0, 1) == 0
    assert decoder.pool.reserved == 0


def test_without_a_drafter_only_the_target_is_measured(
    target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DLITE_CACHE", str(tmp_path))
    assert cost_model(Decoder(target, None, pool_for(target)), "tiny").draft(3, 1) == 0


def test_rounds_teach_and_prompts_do_not(target: Target) -> None:
    """Costs start a hundred times too high; prompt rows would say nothing about rows of a window."""
    costs = CostModel([(1, 10.0), (64, 20.0)], 0.0, [(1, 10.0), (7, 10.0)])
    decoder = Decoder(target, successor_drafter(target), pool_for(target))
    decoder.planner.costs = costs
    state = decoder.open()
    turn = decoder.begin(state, prompt(40), GREEDY, max_new_tokens=60)
    decoder.step([turn])
    assert (costs.verify(1, 0), costs.draft(1, 1)) == (10.0, 10.0)
    while turn.finish is None:
        decoder.step([turn])
    run_turn(decoder, state, prompt(5), max_new_tokens=100)
    assert costs.verify(1, 0) < 1.0
    assert costs.draft(1, 1) < 1.0
    assert costs.rest > 0
