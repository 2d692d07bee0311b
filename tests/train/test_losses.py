"""Losses over the target's top tokens against the same losses computed densely."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dlite_agent.train.losses import Labels, accepted, position_weights, top_losses, weighted_mean


def _case(seed: int, rows: int, vocab: int, top: int) -> tuple[torch.Tensor, Labels, torch.Tensor]:
    rng = torch.Generator().manual_seed(seed)
    logits = torch.randn(rows, vocab, generator=rng, dtype=torch.float64)
    dense = torch.zeros(rows, vocab, dtype=torch.float64)
    columns = torch.stack([torch.randperm(vocab, generator=rng)[:top] for _ in range(rows)])
    p = torch.rand(rows, top, generator=rng, dtype=torch.float64).sort(dim=1, descending=True).values
    p = p / p.sum(1, keepdim=True)
    dense.scatter_(1, columns, p)
    return logits, Labels(columns, p, torch.ones(rows)), dense


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 10**6), vocab=st.integers(8, 40), full=st.booleans())
def test_losses_and_gradients_equal_the_dense_ones_where_the_tail_is_empty(seed: int, vocab: int, full: bool) -> None:
    top = vocab if full else vocab // 2
    logits, labels, dense = _case(seed, 5, vocab, top)
    ours = logits.clone().requires_grad_()
    found = top_losses(ours * 1.0, labels)
    (0.1 * found.ce.sum() + found.l1.sum()).backward()  # type: ignore[no-untyped-call]

    theirs = logits.clone().requires_grad_()
    q = theirs.softmax(-1)
    ce = torch.nn.functional.cross_entropy(theirs, dense.argmax(-1), reduction="none")
    # Outside the top the target has no mass, so |q - p| = q there and one bucket loses nothing.
    l1 = (q - dense).abs().sum(-1)
    (0.1 * ce.sum() + l1.sum()).backward()  # type: ignore[no-untyped-call]
    torch.testing.assert_close(found.ce, ce)
    torch.testing.assert_close(found.l1, l1)
    assert ours.grad is not None
    torch.testing.assert_close(ours.grad, theirs.grad)


def test_the_bucket_is_a_lower_bound_where_the_target_has_a_tail() -> None:
    rng = torch.Generator().manual_seed(1)
    logits = torch.randn(50, 30, generator=rng)
    dense = torch.randn(50, 30, generator=rng).softmax(-1)
    p, columns = dense.topk(6)
    found = top_losses(logits, Labels(columns, p, torch.ones(50))).l1
    exact = (logits.softmax(-1) - dense).abs().sum(-1)
    assert (found <= exact + 1e-6).all()
    assert (found > 0.3 * exact).all()


def test_tokens_outside_the_draft_vocabulary_count_as_mass_that_cannot_be_matched() -> None:
    logits = torch.tensor([[0.0, 0.0, -30.0]])
    # The greedy token (p = 0.5) has no row; rows 0 and 1 have 0.25 each in the target, 0.5 each in the draft.
    labels = Labels(torch.tensor([[-1, 0, 1]]), torch.tensor([[0.0, 0.25, 0.25]]), torch.ones(1))
    found = top_losses(logits, labels)
    assert found.ce.item() == 0
    assert abs(found.l1.item() - 1.0) < 1e-6


def test_positions_past_the_end_weigh_nothing() -> None:
    logits, labels, _ = _case(3, 4, 12, 6)
    valid = torch.tensor([1.0, 1.0, 0.0, 0.0])
    cut = top_losses(logits, Labels(labels.rows, labels.p, valid))
    assert cut.l1[2:].eq(0).all()
    assert cut.ce[:2].gt(0).all()
    mean = weighted_mean(cut.l1.view(1, 4), valid.view(1, 4), position_weights(4, 4.0))
    w = torch.exp(torch.tensor([0.0, -0.25], dtype=torch.float64))
    torch.testing.assert_close(mean.double(), (cut.l1[:2] * w).sum() / w.sum())


def test_accepted_counts_the_leading_run() -> None:
    rows = torch.tensor([[[7], [8], [9]], [[7], [8], [9]], [[7], [8], [9]], [[-1], [8], [9]]])
    labels = Labels(rows.view(12, 1), torch.ones(12, 1), torch.tensor([1.0] * 6 + [1, 1, 0] + [1.0] * 3))
    chosen = torch.tensor([[7, 8, 9], [7, 0, 9], [7, 8, 9], [0, 8, 9]])
    assert accepted(chosen, labels).tolist() == [3, 1, 2, 0]
