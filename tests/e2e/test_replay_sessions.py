"""Every shipped session, replayed on the default model: the same tokens on both sides, and a prediction that holds."""

from __future__ import annotations

from pathlib import Path

import pytest

from dlite_agent.bench.replay import parse_sides
from dlite_agent.bench.replay_commands import present, read_changes, read_scripts, replay_decode
from dlite_agent.config import ModelSettings
from dlite_agent.paths import content_dir
from dlite_agent.trace.comparison import comparisons
from dlite_agent.trace.phases import timelines

SESSIONS = sorted(content_dir("sessions").rglob("*.jsonl"))


def test_there_are_shipped_sessions() -> None:
    assert len(SESSIONS) >= 6


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("path", SESSIONS, ids=lambda path: path.stem)
def test_a_shipped_session_replays_to_the_same_tokens_as_predicted(path: Path) -> None:
    found = read_scripts([path])
    changes = read_changes([], ModelSettings(dtype="fp32"))
    log = replay_decode(found, parse_sides("ar,dlite"), changes, progress=print)
    print(present(log, found, "decode", "table"))
    (item,) = comparisons(timelines(log))
    _, dlite = item.sides
    assert not [mismatch for mismatch in dlite.mismatches if mismatch.against == item.base]
    assert dlite.predicted_to_measured == pytest.approx(1.0, abs=0.1)
