"""Every shipped session, replayed on the default model: the same tokens on both sides, and a prediction that holds."""

from __future__ import annotations

import pytest

from dlite_agent.bench.replay import parse_sides
from dlite_agent.bench.replay_commands import present, read_changes, read_scripts, replay_decode
from dlite_agent.config import ModelSettings
from dlite_agent.paths import content_dir
from dlite_agent.trace.comparison import comparisons
from dlite_agent.trace.phases import timelines


@pytest.mark.soak
def test_shipped_sessions_replay_to_the_same_tokens_as_predicted() -> None:
    paths = sorted(content_dir("sessions").rglob("*.jsonl"))
    assert paths
    found = read_scripts(paths)
    log = replay_decode(found, parse_sides("ar,dlite"), read_changes([], ModelSettings(dtype="fp32")))
    print(present(log, found, "decode", "table"))
    wrong = []
    for item in comparisons(timelines(log)):
        _, dlite = item.sides
        if any(mismatch.against == item.base for mismatch in dlite.mismatches):
            wrong.append(f"{item.original}: other tokens than {item.base}")
        assert dlite.predicted_to_measured is not None
        if abs(dlite.predicted_to_measured - 1) > 0.1:
            wrong.append(f"{item.original}: predicted / measured {dlite.predicted_to_measured:.3f}")
    assert wrong == []
