"""Replayed rounds against rounds really decoded with the target, and where training starts."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
import torch

from dlite_agent.decode.kv import KVPool
from dlite_agent.errors import InvalidRequest
from dlite_agent.model.drafter import Drafter
from dlite_agent.model.target import Rows, Target
from dlite_agent.train.evaluate import Acceptance, replay
from dlite_agent.train.settings import Settings, Shape
from dlite_agent.train.start import draft_vocabulary, low_rank, mean_next_state
from dlite_agent.train.store import open_shards
from dlite_agent.train.trainer import TargetTables, Trainer
from tests.train.conftest import TAPS

K = 4


@pytest.fixture(scope="module")
def drafter(train_cache: Path, tables: TargetTables, tmp_path_factory: pytest.TempPathFactory) -> Drafter:
    settings = Settings(
        target="tiny",
        cache=str(train_cache),
        mask_token_id=1,
        steps=40,
        batch=32,
        shape=Shape(depth=1, taps=3, rank=8, block_size=K + 1, draft_vocab=80),
    )
    return Trainer(settings, tmp_path_factory.mktemp("run"), tables).train()


def test_replayed_rounds_are_those_of_real_greedy_decoding(
    drafter: Drafter, held_out_cache: Path, target: Target, tables: TargetTables
) -> None:
    shards = open_shards(held_out_cache)
    found = replay(drafter, shards, tables.embedding, rows=3)
    advances: Counter[int] = Counter()
    pool = KVPool(target.spec, dtype=torch.float32, device=target.device, budget_bytes=1 << 22, max_positions=256)
    for shard in shards:
        for i in range(len(shard.conversations)):
            conversation = shard.conversation(i)
            ids, at, end = conversation.ids, conversation.prompt, len(conversation.ids)
            kv = pool.sequence()
            kv.reserve(end + K + 1)
            last = torch.tensor([at - 1])
            features = target.forward([Rows(kv, ids[:at])], tap_layers=TAPS, tap_rows=last, logit_rows=last).taps
            while at < end:
                anchor = ids[at : at + 1]
                with torch.no_grad():
                    drafts = drafter.draft(
                        features, anchor[None], tables.embedding, K, lambda _, logits: logits.argmax(-1)
                    )[0]
                window = target.forward([Rows(kv, torch.cat((anchor, drafts)))], tap_layers=TAPS)
                wanted = window.logits.argmax(-1)
                hits = int((drafts == wanted[:K]).long().cumprod(0).sum())
                hits = min(hits, end - at)  # an answer that was cut, by length or as a loop, ends inside a round
                advances[hits] += 1
                features = window.taps[hits : hits + 1]
                kv.truncate(at + 1 + hits)
                at += 1 + hits
            kv.free()
    assert {i: n for i, n in enumerate(found["all"].advances) if n} == dict(advances)
    assert found["all"].rounds == sum(advances.values()) == found["code"].rounds + found["prose"].rounds


def test_acceptance_counts_positions_given_all_before_them() -> None:
    acceptance = Acceptance()
    acceptance.add(3, 4, 4)
    acceptance.add(0, 4, 4)
    acceptance.add(1, 1, 4)
    assert acceptance.advances == [1, 1, 0, 1, 0]
    assert acceptance.tau == pytest.approx((4 + 1 + 2) / 3)
    assert acceptance.reached == [3, 1, 1, 1]
    assert acceptance.accepted == [2, 1, 1, 0]
    assert acceptance.rates() == [0.6667, 1.0, 1.0, 0.0]


def test_a_cache_without_greedy_answers_cannot_be_evaluated_on(
    drafter: Drafter, held_out_cache: Path, tables: TargetTables
) -> None:
    shard = open_shards(held_out_cache)[0]
    shard.conversations = [type(labels)(labels.id, labels.source, labels.kind, 0.7) for labels in shard.conversations]
    with pytest.raises(InvalidRequest, match="no greedy answers"):
        replay(drafter, [shard], tables.embedding)


def test_low_rank_factors_beat_a_plain_decomposition_where_the_states_are() -> None:
    rng = torch.Generator().manual_seed(0)
    head = torch.randn(200, 24, generator=rng) + 3.0
    states = torch.randn(500, 24, generator=rng) * torch.logspace(0, -2, 24)
    factor, basis = low_rank(head, states, 6)
    centred = head - head.mean(0)
    u, s, v = torch.linalg.svd(centred, full_matrices=False)
    plain = (u[:, :6] * s[:6]) @ v[:6]
    wanted = states @ centred.T
    ours, theirs = (wanted - states @ (factor @ basis).T).norm(), (wanted - states @ plain.T).norm()
    assert ours < 0.5 * theirs
    full, whole = low_rank(head, states, 24)
    torch.testing.assert_close(states @ (full @ whole).T, wanted, rtol=1e-3, atol=1e-3)


def test_the_state_after_a_token_is_its_mean_and_a_fit_where_it_was_never_seen() -> None:
    rng = torch.Generator().manual_seed(0)
    embedding = torch.randn(60, 12, generator=rng)
    mapping = torch.randn(12, 12, generator=rng)
    ids = torch.randint(0, 50, (4000,), generator=rng)
    states = embedding[ids] @ mapping + torch.randn(4000, 12, generator=rng) * 0.1
    found = mean_next_state(embedding, ids, states)
    torch.testing.assert_close(found[:50], embedding[:50] @ mapping, rtol=0.1, atol=0.1)
    torch.testing.assert_close(found[50:], embedding[50:] @ mapping, rtol=0.2, atol=0.2)


def test_the_draft_vocabulary_holds_special_ids_and_the_most_chosen(train_cache: Path) -> None:
    shards = open_shards(train_cache)
    counts = torch.zeros(96)
    counts[90] = 10**6
    vocab = draft_vocabulary(shards, counts, 20, special=[0, 1, 95])
    assert vocab.tolist() == sorted(set(vocab.tolist()))
    assert len(vocab) == 20
    assert {0, 1, 90, 95} <= set(vocab.tolist())
    chosen = Counter(int(v) for shard in shards for v in shard.top_ids[:, 0])
    assert set(vocab.tolist()) >= {token for token, _ in chosen.most_common(12)}
