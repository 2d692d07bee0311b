"""Whole runs in processes of their own: killed and resumed, and shared by two."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from dlite_agent.train.settings import History
from dlite_agent.train.teacher import Teacher
from dlite_agent.train.trainer import TargetTables, Trainer
from tests.train.conftest import run_settings

STEPS = 24
ROUTES: dict[str, dict[str, Any]] = {
    "direct": {"scheduled_sampling": 0.3, "short_block": 3, "feature_noise": 0.2},
    "teacher": {"history": {"window": 6}, "feature_noise": 0.2},
    "two-stage": {},
}


class Trainers:
    """Forks trainers from one warm process."""

    def __init__(self) -> None:
        command = [sys.executable, "-m", "tests.train.crash"]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def start(self, cache: Path, folder: Path, changes: dict[str, Any], world: int = 1) -> list[int]:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps([world, str(cache), str(folder), changes]) + "\n")
        self._process.stdin.flush()
        return self._answer("running")

    def ended(self) -> list[int]:
        """Exit codes of what was started last; minus the signal's number where one ended it."""
        return self._answer("ended")

    def _answer(self, word: str) -> list[int]:
        assert self._process.stdout is not None
        first, *numbers = self._process.stdout.readline().split()
        assert first == word
        return [int(number) for number in numbers]

    def close(self) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.stdout.close()
        self._process.wait()


@pytest.fixture(scope="module")
def trainers() -> Iterator[Trainers]:
    found = Trainers()
    yield found
    found.close()


@pytest.fixture(scope="module")
def teacher_folder(train_cache: Path, tables: TargetTables, tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("teacher")
    settings = run_settings(train_cache, route="teacher", history=History(window=6), steps=4)
    Trainer(settings, run, tables).train()
    return run / "drafter"


def _state(folder: Path) -> tuple[list[torch.Tensor], list[dict[str, Any]]]:
    """Weights, moments and generator of a run, and its metrics but for those of the clock."""
    saved = torch.load(folder / "checkpoint.pt", weights_only=True)
    assert saved["step"] == STEPS
    moments = [value for state in saved["optimizer"]["state"].values() for value in state.values()]
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    kept = ("step", "loss", "prefix", "tv", "grad_norm")
    return [*saved["drafter"].values(), *moments, saved["rng"]], [{key: row[key] for key in kept} for row in rows]


def _wait_for_checkpoints(folder: Path, count: int) -> None:
    """Until so many have been written from now on; there is one a step."""
    path = folder / "checkpoint.pt"
    last = path.stat().st_mtime_ns if path.exists() else None
    deadline = time.monotonic() + 120
    while count:
        assert time.monotonic() < deadline, "the run writes no checkpoints"
        now = path.stat().st_mtime_ns if path.exists() else None
        if now != last:
            last, count = now, count - 1
        time.sleep(0.001)


@pytest.mark.parametrize("route", ROUTES)
def test_a_run_killed_at_three_random_moments_ends_like_an_uninterrupted_one(
    route: str, trainers: Trainers, teacher_folder: Path, train_cache: Path, tmp_path: Path
) -> None:
    changes = {"route": route, "steps": STEPS, "checkpoint_minutes": 0.0, "evaluate_steps": 0, **ROUTES[route]}
    changes["two_stage"] = {"teacher": str(teacher_folder), "distil": 0.25, "transition": 0.25}
    trainers.start(train_cache, tmp_path / "whole", changes)
    assert trainers.ended() == [0]
    moments = random.Random(time.time_ns())
    for _ in range(3):
        (trainer,) = trainers.start(train_cache, tmp_path / "cut", changes)
        _wait_for_checkpoints(tmp_path / "cut", moments.randint(1, 4))
        time.sleep(moments.uniform(0, 0.01))
        os.kill(trainer, signal.SIGKILL)
        assert trainers.ended() == [-signal.SIGKILL]
    trainers.start(train_cache, tmp_path / "cut", changes)
    assert trainers.ended() == [0]
    whole, cut = _state(tmp_path / "whole"), _state(tmp_path / "cut")
    assert len(whole[0]) == len(cut[0])
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(whole[0], cut[0], strict=True))
    assert whole[1] == cut[1]


@pytest.mark.parametrize("accumulate", [1, 2])
def test_two_processes_end_where_one_with_the_same_whole_batch_does(
    accumulate: int, trainers: Trainers, train_cache: Path, tmp_path: Path
) -> None:
    changes = {"batch": 15, "steps": STEPS, "evaluate_steps": 0}
    trainers.start(train_cache, tmp_path / "one", changes)
    assert trainers.ended() == [0]
    trainers.start(train_cache, tmp_path / "two", {**changes, "accumulate": accumulate}, world=2)
    assert trainers.ended() == [0, 0]
    one, two = (torch.load(tmp_path / name / "checkpoint.pt", weights_only=True) for name in ("one", "two"))
    assert torch.equal(one["rng"], two["rng"])
    for name, ours in one["drafter"].items():
        torch.testing.assert_close(two["drafter"][name], ours, rtol=2e-3, atol=2e-4)
    rows = [(tmp_path / name / "metrics.jsonl").read_text().splitlines() for name in ("one", "two")]
    assert len(rows[0]) == len(rows[1]) > 0


def test_a_teacher_is_saved_with_its_role(teacher_folder: Path) -> None:
    config = json.loads((teacher_folder / "config.json").read_text())["dlite_config"]
    assert config["model_role"] == "swa_teacher"
    assert config["swa_window_size"] == Teacher.load(teacher_folder).window == 6
