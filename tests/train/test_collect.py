"""Answers with states: equal to a plain forward, in any company, cut at loops, and stored whole or not at all."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dlite_agent.decode.kv import KVPool
from dlite_agent.errors import InvalidRequest
from dlite_agent.model.spec import ModelSpec
from dlite_agent.model.target import Rows, Target
from dlite_agent.train.anchors import Anchors, Examples, legal_anchors
from dlite_agent.train.collect import LONGEST_LOOP, build_cache, loop_cut
from dlite_agent.train.store import Shard, check_disjoint, open_shards, write_shard
from dlite_agent.train.teacher import history_layer_ids
from tests.train.conftest import TAPS, collector, drafter, encode, requests, teacher


@settings(max_examples=60, deadline=None)
@given(
    unit=st.lists(st.integers(0, 9), min_size=1, max_size=LONGEST_LOOP, unique_by=lambda x: x),
    head=st.lists(st.integers(10, 99), max_size=20, unique=True),
)
def test_a_loop_is_cut_at_its_second_repeat(unit: list[int], head: list[int]) -> None:
    times = max(3, -(-16 // len(unit)))
    looping = head + unit * times
    assert loop_cut(looping) == len(head) + 2 * len(unit)
    assert loop_cut(looping[:-1]) is None


def test_varied_text_is_not_a_loop() -> None:
    assert loop_cut([]) is None
    assert loop_cut(list(range(200))) is None
    assert loop_cut([1, 2, 3] * 2 + [4] + [1, 2, 3] * 2) is None


def test_states_are_those_of_a_plain_forward_and_greedy_answers_follow_the_argmax(target: Target) -> None:
    asked = requests(7, name="plain", temperature=0.0)
    spec = target.spec
    pool = KVPool(spec, dtype=torch.float32, device=target.device, budget_bytes=1 << 22, max_positions=128)
    for found in collector(target, slots=3).run(asked):
        request = next(r for r in asked if r.id == found.labels.id)
        prompt = encode(request.messages)
        assert found.ids[: found.prompt].tolist() == prompt
        kv = pool.sequence()
        kv.reserve(len(found.ids))
        whole = target.forward([Rows(kv, found.ids)], tap_layers=TAPS)
        torch.testing.assert_close(found.taps.float(), whole.taps, rtol=1e-2, atol=1e-2)
        p, ids = whole.logits.softmax(-1).topk(found.top_p.shape[1])
        torch.testing.assert_close(found.top_p.float(), p, rtol=1e-2, atol=1e-3)
        assert (found.top_ids[:, 0] == ids[:, 0]).all()
        assert (found.ids[found.prompt :] == found.top_ids[found.prompt - 1 : -1, 0]).all()
        assert len(found.ids) > found.prompt or int(found.top_ids[-1, 0]) in spec.eos_ids
        kv.free()


def test_an_answer_does_not_depend_on_its_company(target: Target) -> None:
    asked = requests(9, name="company")
    together = {c.labels.id: c.ids.tolist() for c in collector(target, slots=5).run(asked)}
    alone = {c.labels.id: c.ids.tolist() for c in collector(target, slots=1).run(list(reversed(asked)))}
    assert together == alone
    assert len(together) == 9


def test_a_prompt_that_is_too_long_is_refused(target: Target) -> None:
    request = requests(1, name="x" * 2000)[0]
    with pytest.raises(InvalidRequest, match="tokens, 1536 at most"):
        list(collector(target).run([request]))


def test_a_stopped_build_goes_on_and_repeats_nothing(target: Target, tmp_path: Path) -> None:
    asked = requests(10, name="build")
    build_cache(collector(target), asked[:4], tmp_path / "cache")
    build_cache(collector(target), asked, tmp_path / "cache")
    build_cache(collector(target), asked, tmp_path / "cache")
    shards = open_shards(tmp_path / "cache")
    assert [shard.name for shard in shards] == ["00-00000", "00-00001"]
    assert sorted(labels.id for shard in shards for labels in shard.conversations) == [r.id for r in asked]


def test_workers_share_the_requests(target: Target, tmp_path: Path) -> None:
    asked = requests(9, name="worker")
    for worker in (1, 0):
        build_cache(collector(target), asked, tmp_path / "cache", worker=worker, workers=2)
    found = {s.name: {labels.id for labels in s.conversations} for s in open_shards(tmp_path / "cache")}
    assert found == {"00-00000": {r.id for r in asked[0::2]}, "01-00000": {r.id for r in asked[1::2]}}


def test_torn_shards_are_invisible_and_damaged_ones_refused(train_cache: Path, target: Target, tmp_path: Path) -> None:
    shard = open_shards(train_cache)[0]
    conversations = [shard.conversation(i) for i in range(3)]
    write_shard(tmp_path / "00-00000", shard.header, conversations)
    (tmp_path / ".00-00001.partial").mkdir()
    (copy,) = open_shards(tmp_path)
    for i, conversation in enumerate(conversations):
        again = copy.conversation(i)
        assert again.labels == conversation.labels
        assert again.spans == conversation.spans
        for name in ("ids", "taps", "top_ids", "top_p"):
            assert torch.equal(getattr(again, name), getattr(conversation, name))
    write_shard(tmp_path / "00-00001", replace(shard.header, target="another"), conversations)
    with pytest.raises(InvalidRequest, match="different targets or taps"):
        open_shards(tmp_path)
    (tmp_path / "00-00001" / "taps.npy").write_bytes(b"")
    with pytest.raises(InvalidRequest, match="not a readable shard"):
        open_shards(tmp_path)
    with pytest.raises(InvalidRequest, match="at least one conversation"):
        write_shard(tmp_path / "x", shard.header, [])
    with pytest.raises(InvalidRequest, match="holds no shards"):
        open_shards(tmp_path / "absent")
    (tmp_path / "file").write_text("")
    with pytest.raises(InvalidRequest, match="cannot write"):
        write_shard(tmp_path / "file" / "00", shard.header, conversations)


def test_shared_sources_are_found(train_cache: Path, held_out_cache: Path) -> None:
    train, held = open_shards(train_cache), open_shards(held_out_cache)
    check_disjoint(train, held)
    with pytest.raises(InvalidRequest, match="'train-0' first"):
        check_disjoint(train, [*held, *train])


@pytest.mark.parametrize("group", [1, 3])
def test_anchors_are_legal_and_batches_hold_what_the_shard_says(train_cache: Path, spec: ModelSpec, group: int) -> None:
    shards = open_shards(train_cache)
    vocab = torch.arange(0, 96, 2)
    examples = Examples(shards, drafter(spec, group=group, vocab=vocab))
    everything = Anchors.join(legal_anchors(shards, examples.before))
    tokens = sum(len(shard) for shard in shards)
    conversations = sum(len(shard.conversations) for shard in shards)
    assert len(everything) == tokens - conversations * max(1, group - 1)
    batch = examples.gather(everything)
    row_of = {int(v): i for i, v in enumerate(vocab)}
    for n in np.random.default_rng(0).integers(len(everything), size=80):
        shard: Shard = shards[everything.shard[n]]
        row, end = int(everything.row[n]), int(everything.end[n])
        i = int(np.searchsorted(shard.starts, row, side="right")) - 1
        start = int(shard.starts[i])
        assert start < row < end == int(shard.starts[i + 1])
        assert row - group + 1 >= start
        conversation, at = shard.conversation(i), row - start
        assert batch.tokens[n].tolist() == conversation.ids[at - group + 1 : at + 1].tolist()
        assert torch.equal(batch.features[n], conversation.taps[at - 1].float())
        for k in range(4):
            inside = at + k < len(conversation.ids)
            assert batch.labels.valid[n * 4 + k] == inside
            if inside:
                wanted = [row_of.get(int(v), -1) for v in conversation.top_ids[at + k]]
                assert batch.labels.rows[n * 4 + k].tolist() == wanted
                assert batch.labels.p[n * 4 + k][0] == (conversation.top_p[at + k][0] if wanted[0] >= 0 else 0)
                if k:
                    assert batch.following[n, k - 1] == conversation.ids[at + k]


def test_draws_take_the_asked_share_of_each_side(train_cache: Path, spec: ModelSpec) -> None:
    shards = open_shards(train_cache)
    examples = Examples(shards, drafter(spec))
    everywhere = examples.pick(40, generated_share=0.75, rng=torch.Generator().manual_seed(1))
    assert len(everywhere) == 40
    again = examples.pick(40, generated_share=0.75, rng=torch.Generator().manual_seed(1))
    assert (everywhere.row == again.row).all()
    empty = Examples(shards, drafter(spec))
    empty.generated = empty.generated.take(np.array([], dtype=np.int64))
    with pytest.raises(InvalidRequest, match="no generated tokens with 1 before them"):
        empty.pick(8, generated_share=0.5, rng=torch.Generator())
    assert len(empty.pick(8, generated_share=0.0, rng=torch.Generator())) == 8


def test_a_teacher_reads_the_history_before_the_boundary_oldest_first(train_cache: Path, spec: ModelSpec) -> None:
    shards = open_shards(train_cache)
    reader = teacher(spec, window=5)
    examples = Examples(shards, reader)
    columns = [TAPS.index(layer) for layer in history_layer_ids(reader.config)]
    batch = examples.gather(examples.generated)
    assert batch.features.shape[1] == len(TAPS) + 4 * 3
    for n in range(0, len(examples.generated), 7):
        shard, row = shards[examples.generated.shard[n]], int(examples.generated.row[n])
        taps = torch.from_numpy(shard.taps[row - 5 : row].copy()).view(torch.bfloat16).float()
        assert torch.equal(batch.features[n, : len(TAPS)], taps[-1])
        assert torch.equal(batch.features[n, len(TAPS) :].view(4, 3, -1), taps[:4][:, columns])


def test_anchors_of_a_conversation_with_tool_outputs_end_with_their_answer(
    train_cache: Path, spec: ModelSpec, tmp_path: Path
) -> None:
    shard = open_shards(train_cache)[0]
    conversation = replace(shard.conversation(0), spans=((6, 9), (14, 20)))
    write_shard(tmp_path / "00-00000", shard.header, [shard.conversation(1), conversation])
    (mixed,) = open_shards(tmp_path)
    origin, limit = int(mixed.starts[1]), int(mixed.starts[2])
    assert limit - origin > 20
    assert mixed.conversation(1).spans == ((6, 9), (14, 20))
    generated, context = legal_anchors([mixed], 1)
    ours = generated.take(np.flatnonzero(generated.row >= origin))
    assert (ours.row - origin).tolist() == [6, 7, 8, *range(14, 20)]
    assert (ours.end - origin).tolist() == [9] * 3 + [20] * 6
    theirs = context.take(np.flatnonzero(context.row >= origin))
    assert (theirs.row - origin).tolist() == [*range(1, 6), *range(9, 14), *range(20, limit - origin)]
    assert (theirs.end == limit).all()
    assert mixed.generated == 9 + shard.conversation(1).spans[0][1] - shard.conversation(1).prompt


def test_shards_of_the_first_builders_are_read(train_cache: Path, tmp_path: Path) -> None:
    shard = open_shards(train_cache)[0]
    write_shard(tmp_path / "00-00000", shard.header, [shard.conversation(i) for i in range(3)])
    (tmp_path / "00-00000" / "spans.npy").unlink()
    np.save(tmp_path / "00-00000" / "prompts.npy", np.array([shard.conversation(i).prompt for i in range(3)]))
    (old,) = open_shards(tmp_path)
    assert [old.conversation(i).spans for i in range(3)] == [shard.conversation(i).spans for i in range(3)]


def test_fewer_taps_are_read_from_a_cache_that_has_them_and_others_refused(train_cache: Path, spec: ModelSpec) -> None:
    shards = open_shards(train_cache)
    few = Examples(shards, drafter(spec, taps=2))
    batch = few.gather(few.generated.take(np.arange(5)))
    whole = Examples(shards, drafter(spec)).gather(few.generated.take(np.arange(5)))
    assert torch.equal(batch.features, whole.features[:, [0, -1]])
    with pytest.raises(InvalidRequest, match="wants layer 2 too") as refusal:
        Examples(shards, drafter(spec, taps=4))
    assert refusal.value.param == "shape.taps"
