"""The native kernels against torch, and their promise: a row's result is the same to the bit in any company."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from dlite_agent.decode.kv import SequenceKV
from dlite_agent.decode.rounds import Decoder
from dlite_agent.model import native
from dlite_agent.model.fused import MAX_ROWS
from dlite_agent.model.linear import Precision
from dlite_agent.model.target import Rows, Target
from tests.helpers import (
    CPU,
    load_tiny,
    make_drafter,
    pool_for,
    prompt,
    relative_error,
    run_turn,
    save_model,
    successor_drafter,
    tiny_model,
)
from tests.model.test_target import MODELS, TOLERANCE

NATIVE = Precision("fp32", "native")
PACKED = Precision("packed", "native-packed")
HALF = Precision("fp16w", "native-fp16")
SIZES = (150, 1, 2, 3, 7, 64, 33, 8, 32)
"""Pieces of a prompt: wide and narrow ones, across the border of an attention chunk."""

pytestmark = pytest.mark.skipif(native.library() is None, reason="no C compiler, or not an AVX2 processor")


def round_to_bf16(model: torch.nn.Module) -> None:
    """Parameters only: a rotary table's frequencies stay what they are."""
    for parameter in model.parameters():
        parameter.data = parameter.data.bfloat16().float()


@pytest.fixture(scope="module", params=[NATIVE, PACKED], ids=["dense", "packed"])
def target(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Target:
    """Packed, its weights are bf16 numbers, and so are a drafter's."""
    model = tiny_model("qwen3", seed=3)
    if request.param == PACKED:
        round_to_bf16(model)
    return load_tiny(save_model(model, tmp_path_factory.mktemp("qwen3")), precision=request.param)


def reserved(target: Target, positions: int = 400) -> SequenceKV:
    kv = pool_for(target).sequence()
    kv.reserve(positions)
    return kv


def feed(target: Target, kv: SequenceKV, ids: list[int], taps: tuple[int, ...] = ()) -> tuple[Tensor, Tensor]:
    out = target.forward([Rows(kv, torch.tensor(ids))], tap_layers=taps)
    return out.logits, out.taps


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("precision", [NATIVE, PACKED])
def test_logits_equal_transformers(name: str, precision: Precision, tmp_path: Path) -> None:
    family, config = MODELS[name]
    model = tiny_model(family, seed=3, scale=1.5, **config)
    round_to_bf16(model)
    target = load_tiny(save_model(model, tmp_path), precision=precision)
    ids = prompt(sum(SIZES))
    with torch.inference_mode():
        wanted = model(torch.tensor([ids]), output_hidden_states=True)
    kv, at, layers = reserved(target), 0, (0, 2, target.spec.num_layers - 1)
    for size in SIZES:
        logits, taps = feed(target, kv, ids[at : at + size], layers)
        rows = slice(at, at + size)
        assert relative_error(logits, wanted.logits[0, rows]) <= TOLERANCE
        for i, layer in enumerate(layers):
            assert relative_error(taps[:, i], wanted.hidden_states[layer + 1][0, rows]) <= TOLERANCE
        at += size


def test_wanted_rows_are_those_rows(target: Target) -> None:
    ids, rows = prompt(20), torch.tensor([3, 11, 19])
    every, taps = feed(target, reserved(target), ids, (1, 3))
    out = target.forward([Rows(reserved(target), torch.tensor(ids))], logit_rows=rows, tap_layers=(1, 3), tap_rows=rows)
    assert torch.equal(out.logits, every[rows])
    assert torch.equal(out.taps, taps[rows])


@settings(max_examples=25)
@given(st.data())
def test_a_row_does_not_depend_on_its_company(target: Target, data: st.DataObject) -> None:
    """Cut a continuation into windows of any sizes, and put each beside windows of other sequences."""
    start = data.draw(st.integers(1, 280), label="context")
    new = prompt(data.draw(st.integers(1, 40), label="new"), seed=5)
    alone, kv = reserved(target), reserved(target)
    for sequence in (alone, kv):
        feed(target, sequence, prompt(start))
    wanted = torch.cat([feed(target, alone, [token], (1, 3))[0] for token in new])
    found: list[Tensor] = []
    while new:
        size = data.draw(st.integers(1, min(len(new), 12)), label="window")
        others = data.draw(st.lists(st.sampled_from([1, 2, 5, 9, 30, 64, 70]), max_size=5), label="others")
        before = data.draw(st.integers(0, len(others)), label="before")
        batch = [Rows(reserved(target), torch.tensor(prompt(count, seed=count))) for count in others]
        batch.insert(before, Rows(kv, torch.tensor(new[:size])))
        first = sum(others[:before])
        rows = torch.arange(first, first + size)
        if data.draw(st.booleans(), label="only these rows"):
            out = target.forward(batch, logit_rows=rows, tap_layers=(1, 3), tap_rows=rows)
            found.append(out.logits)
            assert out.taps.shape == (size, 2, target.spec.hidden_size)
        else:
            found.append(target.forward(batch).logits[rows])
        new = new[size:]
    assert torch.equal(torch.cat(found), wanted)


def test_many_sequences_go_through_in_passes(target: Target) -> None:
    """More rows than one pass takes: each sequence's logits and taps are those it has alone."""
    sizes = [30, 7, 60, 1, 64, 80, 5, 3]
    ids = [torch.tensor(prompt(size, seed=size)) for size in sizes]
    out = target.forward([Rows(reserved(target), part) for part in ids], tap_layers=(1, 3))
    logits, taps = torch.split(out.logits, sizes), torch.split(out.taps, sizes)
    for i, part in enumerate(ids):
        alone = target.forward([Rows(reserved(target), part)], tap_layers=(1, 3))
        assert torch.equal(logits[i], alone.logits)
        assert torch.equal(taps[i], alone.taps)


@pytest.mark.parametrize("precision", [NATIVE, PACKED, HALF])
@pytest.mark.parametrize("shape", [(16, 8), (97, 48), (48, 7), (130, 33)])
def test_a_product_does_not_depend_on_the_number_of_rows(precision: Precision, shape: tuple[int, int]) -> None:
    generator = torch.Generator().manual_seed(1)
    op = precision.linear(torch.randn(shape, generator=generator), torch.randn(shape[0], generator=generator))
    x = torch.randn(23, shape[1], generator=generator)
    alone = torch.cat([op(row.unsqueeze(0)) for row in x])
    for rows in range(1, len(x) + 1):
        assert torch.equal(op(x[:rows]), alone[:rows])
    assert op(x[:0]).shape == (0, shape[0])


@pytest.mark.parametrize("group_size", [1, 3])
@pytest.mark.parametrize("vocab", [None, 41])
@pytest.mark.parametrize("short_block", [0, 5])
def test_drafts_equal_the_modules(target: Target, group_size: int, vocab: int | None, short_block: int) -> None:
    drafters = [make_drafter(target.spec, group_size=group_size, draft_vocab_size=vocab, seed=4) for _ in range(2)]
    if vocab is not None:
        for drafter in drafters:
            assert drafter.draft_vocab_ids is not None
            drafter.draft_vocab_ids.copy_(torch.arange(vocab) * 2 + 1)
    fast, plain = drafters
    fast.card = plain.card = {"short_block": short_block}
    fast.pack(target.precision, CPU)
    generator = torch.Generator().manual_seed(2)
    for real in range(1, group_size + 1):
        for count in (1, 2, 9):
            features = torch.randn(count, 3, target.spec.hidden_size, generator=generator)
            tokens = torch.randint(0, target.spec.vocab_size, (count, real), generator=generator)
            for steps in (1, 4, 7):
                with torch.no_grad():
                    wanted, likely = plain.draft_greedy(features, tokens, target.embedding, steps)
                    found, sure = fast.draft_greedy(features, tokens, target.embedding, steps)
                assert torch.equal(found, wanted)
                assert torch.allclose(sure, likely, rtol=1e-3)


@pytest.mark.parametrize("window", [2, 5, 8])
def test_dlite_equals_ar_to_the_last_token(target: Target, window: int) -> None:
    decoder = Decoder(target, successor_drafter(target), pool_for(target))
    ids = prompt(MAX_ROWS + 40)
    ar, _ = run_turn(decoder, decoder.open(), ids, mode="ar", max_new_tokens=200)
    dlite, steps = run_turn(decoder, decoder.open(), ids, verify_window=window, max_new_tokens=200)
    assert dlite.state.ids == ar.state.ids
    assert len(steps) < 150


@settings(max_examples=40)
@given(st.data())
def test_logits_are_masked_bit_by_bit(data: st.DataObject) -> None:
    vocab, rows = data.draw(st.integers(1, 200), label="vocab"), data.draw(st.integers(1, 4), label="rows")
    words = st.sampled_from([0, -1, 1, -(2**31), 0x55555555]) | st.integers(-(2**31), 2**31 - 1)
    width = -(-vocab // 32)
    allowed = torch.tensor(data.draw(st.lists(words, min_size=rows * width, max_size=rows * width), label="bits"))
    allowed = allowed.to(torch.int32).view(rows, width)
    wide = torch.randn(rows, vocab + data.draw(st.integers(0, 5), label="beyond"))
    found = wide.clone()
    assert native.mask_logits(found[:, :vocab], allowed)
    for row in range(rows):
        for id in range(wide.shape[1]):
            kept = id >= vocab or int(allowed[row, id // 32]) >> id % 32 & 1
            assert found[row, id] == (wide[row, id] if kept else -torch.inf)


def test_what_the_mask_kernel_does_not_take_is_left_alone() -> None:
    logits = torch.zeros(1, 40, dtype=torch.bfloat16)
    assert not native.mask_logits(logits, torch.zeros(1, 2, dtype=torch.int32))
    assert not logits.any()
