"""A disk that is full: each writer says so and leaves what was there, and nothing half-written."""

from __future__ import annotations

import contextlib
import resource
from collections.abc import Iterator
from pathlib import Path

import pytest

from dlite_agent.errors import InvalidRequest, ModelError
from dlite_agent.model.drafter import Drafter
from dlite_agent.train.data import Plan, write_plan
from dlite_agent.train.store import open_shards, write_shard
from dlite_agent.train.trainer import TargetTables, Trainer
from tests.train.conftest import requests, run_settings


@contextlib.contextmanager
def full(limit: int) -> Iterator[None]:
    """No file may grow past `limit` bytes."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_shard_is_written_whole_or_not_at_all(train_cache: Path, tmp_path: Path) -> None:
    shard = open_shards(train_cache)[0]
    conversations = [shard.conversation(i) for i in range(8)]
    with full(20_000), pytest.raises(InvalidRequest, match="free some space"):
        write_shard(tmp_path / "00-00000", shard.header, conversations)
    assert list(tmp_path.iterdir()) == []


def test_a_plan_is_written_whole_or_not_at_all(tmp_path: Path) -> None:
    plan = Plan(roots=(), sources=0)
    with full(2_000), pytest.raises(InvalidRequest, match="free some space") as refusal:
        write_plan(tmp_path / "corpus", plan, requests(60, name="plan"))
    assert refusal.value.param == "corpus"
    assert list((tmp_path / "corpus").iterdir()) == []


def test_a_checkpoint_and_its_drafter_stay_when_the_next_ones_do_not_fit(
    train_cache: Path, tables: TargetTables, tmp_path: Path
) -> None:
    trainer = Trainer(run_settings(train_cache), tmp_path, tables)
    trainer.train(stop_at=3)
    names = sorted(path.name for path in tmp_path.iterdir())
    kept = (tmp_path / "checkpoint.pt").read_bytes()
    card = Drafter.load(tmp_path / "drafter").card
    for limit in (40_000, len(kept) - 100):
        with full(limit), pytest.raises(ModelError, match="the previous checkpoint stays"):
            trainer.train(stop_at=4)
        assert (tmp_path / "checkpoint.pt").read_bytes() == kept
        assert Drafter.load(tmp_path / "drafter").card == card
        assert sorted(path.name for path in tmp_path.iterdir()) == names
    assert Trainer(run_settings(train_cache), tmp_path, tables).step == 3
