"""The trainer on a tiny random target: resume, learning, and refusals."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from dlite_agent.errors import CheckpointError, InvalidRequest, ModelError
from dlite_agent.model.drafter import Drafter
from dlite_agent.model.target import Target
from dlite_agent.train.collect import build_cache
from dlite_agent.train.objective import learning_rate
from dlite_agent.train.settings import Optimizer, Settings, Shape, read_settings
from dlite_agent.train.trainer import TargetTables, Trainer
from tests.train.conftest import collector, requests, run_settings

SHAPE = run_settings(Path()).shape


def _weights(drafter: Drafter) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in drafter.state_dict().items()}


@pytest.mark.parametrize(("group", "short"), [(1, 0), (3, 3)])
def test_a_run_killed_and_resumed_ends_with_the_very_same_weights(
    group: int, short: int, train_cache: Path, tables: TargetTables, tmp_path: Path
) -> None:
    settings = run_settings(train_cache, shape=replace(SHAPE, anchor_group_size=group), short_block=short)
    whole = _weights(Trainer(settings, tmp_path / "whole", tables).train())
    for stop in (4, 5, 11):
        Trainer(settings, tmp_path / "cut", tables).train(stop_at=stop)
    resumed = Trainer(settings, tmp_path / "cut", tables)
    assert resumed.step == 11
    again = _weights(resumed.train())
    assert all(torch.equal(whole[name], again[name]) for name in whole)


def test_training_lowers_the_loss_and_writes_a_loadable_drafter_with_its_card(
    train_cache: Path, held_out_cache: Path, tables: TargetTables, tmp_path: Path
) -> None:
    rates = Optimizer(lr=2e-2, warmup=3, tables=1.0)
    settings = run_settings(train_cache, held_out_cache, steps=126, batch=64, evaluate_steps=60, optimizer=rates)
    rows: list[dict[str, object]] = []
    trainer = Trainer(settings, tmp_path / "run", tables, special_ids=(0, 1, 2))
    trainer.train(rows.append)
    losses = [float(str(row["l1"])) for row in rows if "l1" in row]
    assert losses[-1] < 0.9 * losses[0]
    logged = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert logged == rows
    assert any("held_out_tau" in row for row in rows)
    drafter = Drafter.load(tmp_path / "run" / "drafter")
    assert drafter.draft_vocab_ids is not None
    assert {0, 1, 2} <= set(drafter.draft_vocab_ids.tolist())
    card = json.loads((tmp_path / "run" / "drafter" / "card.json").read_text())
    assert card["target_fingerprint"] == "tiny"
    assert card["anchors"] == 126 * 64


def test_shards_appended_during_a_run_are_taken_up(
    train_cache: Path, target: Target, tables: TargetTables, tmp_path: Path
) -> None:
    cache = tmp_path / "cache"
    build_cache(collector(target), requests(4, name="early"), cache)
    trainer = Trainer(run_settings(cache, refresh_steps=5), tmp_path / "run", tables)
    before = sum(len(shard) for shard in trainer.shards)
    trainer.train(stop_at=4)
    build_cache(collector(target), requests(9, name="late"), cache, worker=1)
    trainer.train()
    assert sum(len(shard) for shard in trainer.shards) > before
    assert (
        Trainer(run_settings(cache, refresh_steps=5), tmp_path / "run", tables).shards[-1].name
        == trainer.shards[-1].name
    )


def test_overlapping_sources_are_refused(train_cache: Path, tables: TargetTables, tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="24 sources are in training and held-out") as refusal:
        Trainer(run_settings(train_cache, train_cache), tmp_path, tables)
    assert refusal.value.param == "held_out"


def test_a_loss_that_is_not_finite_stops_the_run_and_keeps_the_checkpoint(
    train_cache: Path, tables: TargetTables, tmp_path: Path
) -> None:
    trainer = Trainer(run_settings(train_cache), tmp_path, tables)
    trainer.train(stop_at=3)
    kept = (tmp_path / "checkpoint.pt").read_bytes()
    with torch.no_grad():
        trainer.drafter.norm.weight.fill_(float("nan"))
    with pytest.raises(ModelError, match="the loss is nan at step 3") as stopped:
        trainer.train()
    assert stopped.value.param == "optimizer.lr"
    assert (tmp_path / "checkpoint.pt").read_bytes() == kept


def test_a_cache_of_another_target_and_wrong_taps_are_refused(
    train_cache: Path, tables: TargetTables, tmp_path: Path
) -> None:
    with pytest.raises(InvalidRequest, match="made with another target"):
        Trainer(run_settings(train_cache), tmp_path, replace(tables, fingerprint="other"))
    with pytest.raises(InvalidRequest, match="the cache taps layers"):
        Trainer(run_settings(train_cache, shape=replace(SHAPE, taps=4)), tmp_path, tables)
    counts = tmp_path / "counts.npy"
    np.save(counts, np.zeros(95))
    with pytest.raises(InvalidRequest, match=r"has shape \[95\], not \[96\]"):
        Trainer(run_settings(train_cache, text_counts=str(counts)), tmp_path, tables)
    counts.write_bytes(b"no array")
    with pytest.raises(InvalidRequest, match="not an array of counts"):
        Trainer(run_settings(train_cache, text_counts=str(counts)), tmp_path, tables)
    with pytest.raises(InvalidRequest, match="mask_token_id"):
        Trainer(run_settings(train_cache, mask_token_id=96), tmp_path, tables)


def test_a_run_folder_is_not_continued_with_other_settings_nor_from_a_damaged_file(
    train_cache: Path, tables: TargetTables, tmp_path: Path
) -> None:
    Trainer(run_settings(train_cache), tmp_path, tables).train(stop_at=1)
    with pytest.raises(CheckpointError, match="other settings \\(batch\\)"):
        Trainer(run_settings(train_cache, batch=8), tmp_path, tables)
    (tmp_path / "checkpoint.pt").write_bytes(b"torn")
    with pytest.raises(CheckpointError, match="cannot be read"):
        Trainer(run_settings(train_cache), tmp_path, tables)


def test_a_run_can_start_from_a_saved_drafter(train_cache: Path, tables: TargetTables, tmp_path: Path) -> None:
    first = Trainer(run_settings(train_cache), tmp_path / "a", tables)
    first.train()
    second = Trainer(run_settings(train_cache, init=str(tmp_path / "a" / "drafter")), tmp_path / "b", tables)
    ours, theirs = first.drafter.state_dict(), second.drafter.state_dict()
    assert all(torch.equal(ours[name].to(torch.bfloat16), theirs[name].to(torch.bfloat16)) for name in ours)
    other = run_settings(train_cache, init=str(tmp_path / "a" / "drafter"), shape=replace(SHAPE, rank=4))
    with pytest.raises(InvalidRequest, match="has another shape") as refusal:
        Trainer(other, tmp_path / "c", tables)
    assert refusal.value.param == "init"


def test_rate_rises_linearly_and_falls_to_its_floor() -> None:
    settings = Settings(target="t", cache="c", steps=110, optimizer=Optimizer(lr=1.0, warmup=10, final=0.1))
    rates = [learning_rate(settings, step) for step in range(110)]
    assert rates[0] == pytest.approx(0.1)
    assert max(rates) == rates[9] == pytest.approx(1.0)
    assert rates[10:] == sorted(rates[10:], reverse=True)
    assert learning_rate(settings, 110) == pytest.approx(0.1)


def test_settings_come_from_toml_and_unknown_keys_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text('target = "t"\ncache = "c"\n[shape]\ndepth = 3\n[optimizer]\nlr = 1\n')
    assert read_settings(file) == Settings("t", "c", shape=Shape(depth=3), optimizer=Optimizer(lr=1))
    for text, match in (
        ('target = "t"\ncache = "c"\ndepht = 3\n', "unknown key depht"),
        ('target = "t"\ncache = "c"\n[shape]\nrang = 3\n', "unknown key shape.rang"),
        ('target = "t"\ncache = "c"\nsteps = "many"\n', "steps must be of type int"),
        ('target = "t"\ncache = "c"\nshape = 1\n', "shape must be a table"),
        ('target = "t"\n', "lack a key"),
        ('target = "t"\ncache = "c"\nbatch = 0\n', "batch must be positive"),
        ('target = "t"\ncache = "c"\nshort_block = 8\n', "short_block must be 2..7"),
        ('target = "t"\ncache = "c"\nroute = "other"\n', "route must be one of direct, teacher, two-stage"),
        ('target = "t"\ncache = "c"\nroute = "two-stage"\n', "two_stage.teacher must name"),
        ('target = "t"\ncache = "c"\n[two_stage]\ndistil = 0.8\ntransition = 0.4\n', "two_stage is a share"),
        ('target = "t"\ncache = "c"\nprecision = "fp8"\n', "precision must be fp32 or bf16"),
        ('target = "t"\ncache = "c"\nscheduled_sampling = 2\n', "scheduled_sampling is a share"),
        ('target = "t"\ncache = "c"\n[history]\nwindow = 1\n', "history.window must be at least 2"),
        ('target = "t"\ncache = "c"\nsteps = true\n', "steps must be of type int"),
        ('target = "t"\ncache = "c"\n[shape]\nhead = 1\n', "shape.head must be of type bool"),
        ("target = ", "not readable TOML"),
    ):
        file.write_text(text)
        with pytest.raises(InvalidRequest, match=match):
            read_settings(file)
