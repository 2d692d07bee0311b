"""Losses of the routes on a tiny target: stages, the teacher's part, guesses fed to the head, bf16, no recurrence."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dlite_agent.errors import CheckpointError, InvalidRequest
from dlite_agent.model.drafter import Drafter
from dlite_agent.model.spec import ModelSpec
from dlite_agent.train.anchors import Batch, Examples
from dlite_agent.train.losses import position_weights, top_losses, weighted_mean
from dlite_agent.train.objective import Objective, Stage, blurred, stage
from dlite_agent.train.settings import History, Loss, Optimizer, TwoStage
from dlite_agent.train.store import open_shards
from dlite_agent.train.teacher import Teacher
from dlite_agent.train.trainer import TargetTables, Trainer
from tests.train.conftest import drafter, run_settings, teacher

PLAIN = Stage(0.0, True)


@pytest.fixture(scope="module")
def teacher_folder(train_cache: Path, tables: TargetTables, tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("teacher")
    settings = run_settings(train_cache, route="teacher", history=History(window=6), steps=30)
    Trainer(settings, run, tables).train()
    return run / "drafter"


def _batch(cache: Path, model: Drafter, count: int = 12) -> Batch:
    examples = Examples(open_shards(cache), model)
    return examples.gather(examples.generated.take(np.arange(count) * 7))


def _objective(cache: Path, model: Drafter, tables: TargetTables, **changes: Any) -> Objective:
    return Objective(replace(run_settings(cache), **changes), model, tables.embedding, None)


def test_stages_follow_one_another_and_the_blend_is_a_cosine() -> None:
    two = TwoStage(teacher="t", distil=0.2, transition=0.3)
    settings = run_settings(Path("c"), route="two-stage", two_stage=two, steps=100)
    stages = [stage(settings, step) for step in range(100)]
    assert stages[:20] == [Stage(1.0, False)] * 20
    assert stages[50:] == [PLAIN] * 50
    blend = [at.teacher for at in stages[20:50]]
    assert blend == sorted(blend, reverse=True)
    assert 0.99 < blend[0] < 1
    assert blend[14] + blend[15] == pytest.approx(1.0)
    assert all(at.head for at in stages[20:])
    assert stage(replace(settings, route="direct"), 0) == PLAIN


def test_the_sampled_loss_is_the_weighted_loss_on_average(
    train_cache: Path, spec: ModelSpec, tables: TargetTables
) -> None:
    model = drafter(spec)
    objective = _objective(train_cache, model, tables, loss=Loss(ce=0.3, l1=1.0, gamma=2.0))
    batch = _batch(train_cache, model)
    valid = batch.labels.valid.view(12, 4) > 0
    rng = torch.Generator().manual_seed(0)
    with torch.no_grad():
        found = [objective.loss(batch, None, objective.sample(valid, rng), PLAIN) for _ in range(300)]
        losses = top_losses(
            model(batch.features, batch.tokens, tables.embedding, batch.following).flatten(0, 1), batch.labels
        )
    exact = weighted_mean((0.3 * losses.ce + losses.l1).view(12, 4), valid, position_weights(4, 2.0))
    assert torch.stack(found).mean().item() == pytest.approx(exact.item(), rel=0.03)


@pytest.mark.parametrize("noise", [0.0, 0.3])
def test_parts_of_a_batch_add_up_to_the_whole(
    train_cache: Path, spec: ModelSpec, tables: TargetTables, noise: float
) -> None:
    model = drafter(spec)
    objective = _objective(train_cache, model, tables, feature_noise=noise)
    examples = Examples(open_shards(train_cache), model)
    anchors = examples.generated.take(np.arange(10))
    sample = objective.sample(torch.from_numpy(anchors.valid(4)), torch.Generator().manual_seed(3))
    whole = objective.loss(examples.gather(anchors), None, sample, PLAIN)
    parts = [
        objective.loss(examples.gather(anchors.take(np.arange(a, b))), None, sample.part(a, b), PLAIN)
        for a, b in ((0, 4), (4, 10))
    ]
    torch.testing.assert_close(sum(parts), whole)


def test_noise_is_in_proportion_to_each_states_size_and_leaves_history_alone(
    train_cache: Path, spec: ModelSpec, tables: TargetTables
) -> None:
    model = drafter(spec)
    objective = _objective(train_cache, model, tables, feature_noise=0.5)
    taps, hidden = len(model.config.target_layer_ids), tables.embedding.shape[1]
    sizes = torch.tensor([0.1, 3.0, 50.0])[:, None, None]
    centre = -model.layer_depth_embedding(model.tap_ids).detach()
    features = torch.cat((centre + sizes * torch.ones(3, taps, hidden), torch.full((3, 5, hidden), 7.0)), dim=1)
    sample = objective.sample(torch.ones(3, 4, dtype=torch.bool), torch.Generator().manual_seed(0))
    assert sample.noise is not None
    moved = blurred(model, features, sample.noise)
    torch.testing.assert_close(moved[:, :taps] - features[:, :taps], sample.noise * sizes, rtol=1e-3, atol=1e-4)
    assert sample.noise.std().item() == pytest.approx(0.5, rel=0.1)
    assert torch.equal(moved[:, taps:], features[:, taps:])


def test_the_teachers_part_is_the_forward_divergence_of_the_drafts_taken(
    train_cache: Path, spec: ModelSpec, tables: TargetTables
) -> None:
    master, student = teacher(spec, window=4), drafter(spec)
    objective = Objective(run_settings(train_cache), student, tables.embedding, master)
    history = _batch(train_cache, master)
    batch = replace(history, features=history.features[:, :3])
    sample = objective.sample(torch.ones(12, 4, dtype=torch.bool), torch.Generator().manual_seed(0))
    loss = objective.loss(batch, history, sample, Stage(1.0, False))
    with torch.no_grad():
        p = master(history.features, batch.tokens, tables.embedding, batch.following).log_softmax(-1)
        q = student(batch.features, batch.tokens, tables.embedding, batch.following).log_softmax(-1)
    exact = ((p.exp() * (p - q)).sum(-1) * sample.taken).sum() / sample.mass
    torch.testing.assert_close(loss.detach(), exact)
    mixed = objective.loss(batch, history, sample, Stage(0.25, True))
    plain = objective.loss(batch, history, sample, PLAIN)
    torch.testing.assert_close(mixed, 0.25 * loss + 0.75 * plain)


def test_the_head_is_fed_its_own_guesses_only_where_drawn(
    train_cache: Path, spec: ModelSpec, tables: TargetTables
) -> None:
    vocab = torch.arange(10, 90)
    model = drafter(spec, vocab=vocab)
    objective = _objective(train_cache, model, tables, scheduled_sampling=0.5)
    batch = _batch(train_cache, model)
    sample = objective.sample(batch.labels.valid.view(12, 4) > 0, torch.Generator().manual_seed(0))
    assert 0.3 < sample.guessed.float().mean() < 0.7
    fed = objective._guess(model, batch, sample.guessed)
    logits = model(batch.features, batch.tokens, tables.embedding, batch.following)
    own = vocab[logits.argmax(-1)[:, :-1]]
    assert torch.equal(fed, torch.where(sample.guessed, own, batch.following))


def test_a_bf16_forward_gives_nearly_the_same_loss_and_fp32_gradients(
    train_cache: Path, spec: ModelSpec, tables: TargetTables
) -> None:
    model = drafter(spec)
    batch = _batch(train_cache, model)
    losses = []
    for precision in ("fp32", "bf16"):
        objective = _objective(train_cache, model, tables, precision=precision)
        sample = objective.sample(batch.labels.valid.view(12, 4) > 0, torch.Generator().manual_seed(0))
        model.zero_grad()
        loss = objective.loss(batch, None, sample, PLAIN)
        loss.backward()  # type: ignore[no-untyped-call]
        losses.append(loss.item())
        assert all(p.grad is None or p.grad.dtype == torch.float32 for p in model.parameters())
    assert losses[0] != losses[1] == pytest.approx(losses[0], rel=0.05)


def test_a_bf16_run_learns(train_cache: Path, tables: TargetTables, tmp_path: Path) -> None:
    rates = Optimizer(lr=2e-2, warmup=3, tables=1.0)
    settings = run_settings(train_cache, steps=51, batch=48, precision="bf16", optimizer=rates)
    rows: list[dict[str, float]] = []
    Trainer(settings, tmp_path, tables).train(rows.append)
    assert rows[-1]["l1"] < 0.95 * rows[0]["l1"]


def test_without_the_head_drafts_do_not_depend_on_one_another(
    train_cache: Path, tables: TargetTables, tmp_path: Path
) -> None:
    shape = replace(run_settings(train_cache).shape, head=False)
    Trainer(run_settings(train_cache, shape=shape), tmp_path, tables).train()
    model = Drafter.load(tmp_path / "drafter")
    assert model.sequential_head.state_hidden_mlp.weight[:, :8].abs().max() == 0
    batch = _batch(train_cache, model)
    with torch.no_grad():
        one = model(batch.features, batch.tokens, tables.embedding, batch.following)
        other = model(batch.features, batch.tokens, tables.embedding, (batch.following + 1) % 96)
    assert torch.equal(one, other)


def test_a_two_stage_run_keeps_the_head_in_its_first_stage_only(
    teacher_folder: Path, train_cache: Path, held_out_cache: Path, tables: TargetTables, tmp_path: Path
) -> None:
    two = TwoStage(teacher=str(teacher_folder), distil=0.5, transition=0.25)
    settings = run_settings(train_cache, held_out_cache, route="two-stage", two_stage=two)
    trainer = Trainer(settings, tmp_path, tables)
    start = {name: tensor.clone() for name, tensor in trainer.drafter.state_dict().items()}
    trainer.train(stop_at=6)
    master = Teacher.load(teacher_folder).sequential_head.state_dict()
    half = trainer.drafter.state_dict()
    assert all(torch.equal(half[f"sequential_head.{name}"], tensor) for name, tensor in master.items())
    assert not torch.equal(half["norm.weight"], start["norm.weight"])
    end = trainer.train().state_dict()
    assert all(not torch.equal(end[f"sequential_head.{name}"], tensor) for name, tensor in master.items())
    assert Drafter.load(tmp_path / "drafter").card["route"] == "two-stage"


def test_a_teacher_sees_its_history_and_is_no_drafter_to_serve(
    teacher_folder: Path, train_cache: Path, held_out_cache: Path, tables: TargetTables, tmp_path: Path
) -> None:
    master = Teacher.load(teacher_folder)
    batch = _batch(train_cache, master)
    changed = batch.features.clone()
    changed[:, 3] += 1  # the oldest token's first state
    with torch.no_grad():
        one, other = (
            master(features, batch.tokens, tables.embedding, batch.following) for features in (batch.features, changed)
        )
    assert not torch.allclose(one, other)
    settings = run_settings(train_cache, held_out_cache, route="teacher", history=History(window=6))
    assert Trainer(settings, tmp_path / "again", tables).evaluate()["held_out_tau"] >= 1
    with pytest.raises(CheckpointError, match="swa_teacher") as refusal:
        Drafter.load(teacher_folder)
    assert refusal.value.param == "model_role"


def test_a_teacher_that_does_not_fit_is_refused(
    teacher_folder: Path, train_cache: Path, tables: TargetTables, tmp_path: Path
) -> None:
    shape = run_settings(train_cache).shape
    two = TwoStage(teacher=str(teacher_folder))
    settings = run_settings(train_cache, route="two-stage", two_stage=two, shape=replace(shape, rank=4))
    with pytest.raises(InvalidRequest, match="only depth may differ") as misfit:
        Trainer(settings, tmp_path / "a", tables)
    assert misfit.value.param == "two_stage.teacher"
    Trainer(run_settings(train_cache, steps=1), tmp_path / "student", tables).train()
    for folder, match in ((tmp_path / "student" / "drafter", "not a teacher"), (tmp_path, "not a readable teacher")):
        settings = run_settings(train_cache, route="two-stage", two_stage=TwoStage(teacher=str(folder)))
        with pytest.raises(CheckpointError, match=match):
            Trainer(settings, tmp_path / "b", tables)
