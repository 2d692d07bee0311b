"""Rounds: drafts change nothing but the speed, each row advances by its own run, and KV ends where the ids say."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch

from dlite_agent.decode.rounds import Decoder, StepFigures
from dlite_agent.decode.sampling import SamplingParams
from dlite_agent.decode.state import DecodeState, Turn
from dlite_agent.errors import CheckpointError, ContextOverflow, InvalidRequest, KVExhausted
from dlite_agent.model.target import Rows, Target
from tests.helpers import (
    GREEDY,
    advances,
    load_tiny,
    make_drafter,
    pool_for,
    prompt,
    relative_error,
    run_batch,
    run_turn,
    successor_drafter,
    tiny_model,
)


def recomputed(decoder: Decoder, ids: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits and taps of all ids in one forward on fresh KV."""
    kv = decoder.pool.sequence()
    kv.reserve(len(ids))
    out = decoder.target.forward([Rows(kv, torch.tensor(ids))], tap_layers=decoder.taps)
    kv.free()
    return out.logits, out.taps


def assert_whole(decoder: Decoder, state: DecodeState) -> None:
    """KV and features of a state are what one forward over its ids would have left."""
    kv = decoder.pool.sequence()
    kv.reserve(state.boundary)
    taps = decoder.target.forward([Rows(kv, torch.tensor(state.ids[: state.boundary]))], tap_layers=decoder.taps).taps
    assert relative_error(state.kv.export(), kv.export()) <= 1e-4
    assert state.features is not None
    assert relative_error(state.features, taps[-1]) <= 1e-4
    kv.free()


def pushed_by_hand(decoder: Decoder, ids: list[int], count: int) -> list[int]:
    """Greedy continuation by whole forwards, no KV reuse."""
    ids = list(ids)
    for _ in range(count):
        ids.append(int(recomputed(decoder, ids)[0][-1].argmax()))
    return ids[-count:]


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_greedy_dlite_is_greedy_ar_is_transformers(family: str, tiny: dict[str, Target]) -> None:
    model, target = tiny_model(family), tiny[family]
    decoder = Decoder(target, successor_drafter(target), pool_for(target))
    for i in range(2):
        ids = prompt(20, i)
        with torch.inference_mode():
            wanted = model.generate(torch.tensor([ids]), max_new_tokens=40, do_sample=False)[0, 20:].tolist()
        assert run_turn(decoder, decoder.open(), ids, mode="ar")[0].generated == wanted
        assert run_turn(decoder, decoder.open(), ids, mode="dlite")[0].generated == wanted


@pytest.mark.parametrize("group_size", [1, 6])
def test_after_runs_of_every_length_kv_and_features_are_right(
    group_size: int, make_decoder: Callable[..., Decoder]
) -> None:
    """The pivot is the last committed token with KV, whatever number of drafts was accepted."""
    decoder, seen = make_decoder(group_size), Counter[int]()
    for i in range(8):
        state = decoder.open()
        turn = decoder.begin(state, prompt(10, i), GREEDY, max_new_tokens=60)
        decoder.step([turn])
        while turn.finish is None:
            before = len(state.ids)
            (row,) = decoder.step([turn]).rows
            assert row.context == before - 1
            assert len(state.ids) == before + row.advance
            assert state.boundary == len(state.ids) - 1
            if not seen[row.advance - 1]:
                assert_whole(decoder, state)
            seen[row.advance - 1] += 1
        decoder.finish(turn)
        assert state.kv.reserved == state.boundary == len(state.ids) - 1
        state.kv.free()
    assert set(seen) == set(range(8)), f"accepted runs seen: {dict(seen)}"


def test_a_drafter_of_noise_changes_nothing(target: Target) -> None:
    drafter = make_drafter(target.spec, group_size=6)
    drafter.pack(target.precision, target.device)
    decoder = Decoder(target, drafter, pool_for(target))
    dlite, steps = run_turn(decoder, decoder.open(), prompt(1), max_new_tokens=30)
    ar, _ = run_turn(decoder, decoder.open(), prompt(1), max_new_tokens=30, mode="ar")
    assert dlite.generated == ar.generated
    assert sum(advances(steps, dlite)) == 29


@pytest.mark.parametrize("group_size", [1, 6])
@pytest.mark.parametrize("length", [1, 2, 4, 5, 7])
def test_prompts_shorter_than_the_group(length: int, group_size: int, make_decoder: Callable[..., Decoder]) -> None:
    decoder, ids = make_decoder(group_size), prompt(length)
    turn, steps = run_turn(decoder, decoder.open(), ids, max_new_tokens=20)
    assert turn.generated == pushed_by_hand(decoder, ids, 20)
    assert max(advances(steps, turn)) > 1


def test_rows_advance_apart_and_do_not_depend_on_mates(make_decoder: Callable[..., Decoder]) -> None:
    decoder = make_decoder(6)
    params = [
        GREEDY,
        SamplingParams(temperature=3.0, seed=1),
        SamplingParams(temperature=3.0, seed=2, verification="rejection"),
        SamplingParams(temperature=2.0, seed=3, top_p=0.9, repetition_penalty=1.2),
        GREEDY,
        SamplingParams(temperature=3.0, seed=4, verification="rejection", top_k=30),
    ]
    lengths = [1, 30, 3, 60, 7, 12]
    prompts = [prompt(length, i) for i, length in enumerate(lengths)]
    alone = [run_turn(decoder, decoder.open(), *pair, max_new_tokens=30) for pair in zip(prompts, params, strict=True)]
    turns = [
        decoder.begin(decoder.open(), ids, each, max_new_tokens=30) for ids, each in zip(prompts, params, strict=True)
    ]
    steps = run_batch(decoder, turns, prefill_chunk=25)
    for turn, (single, single_steps) in zip(turns, alone, strict=True):
        assert turn.generated == single.generated
        assert advances(steps, turn) == advances(single_steps, single)
        assert turn.state.kept.keys() == single.state.kept.keys()
    assert any(len({row.advance for row in step.rows}) > 2 for step in steps), "rows must advance apart"


def test_short_blocks_do_not_depend_on_mates(target: Target) -> None:
    """A drafter of short blocks sees as many placeholders as it drafts; a mate with a longer draft adds none to them.

    In rejection verification the tokens show it: they depend on q.
    """
    drafter = successor_drafter(target)
    drafter.card = {"short_block": 3}
    decoder = Decoder(target, drafter, pool_for(target))

    def begin(window: int) -> Turn:
        params = SamplingParams(temperature=3.0, seed=window, verification="rejection")
        return decoder.begin(decoder.open(), prompt(9), params, max_new_tokens=60, verify_window=window)

    alone = []
    for window in (2, 4, 8):
        turn = begin(window)
        run_batch(decoder, [turn])
        alone.append(turn.generated)
    together = [begin(window) for window in (2, 4, 8)]
    run_batch(decoder, together)
    assert [turn.generated for turn in together] == alone


def test_prompt_chunks_share_a_step_with_rounds(make_decoder: Callable[..., Decoder]) -> None:
    decoder = make_decoder()
    wanted = run_turn(decoder, decoder.open(), prompt(90, 5))[0].generated
    first = decoder.begin(decoder.open(), prompt(8), GREEDY, max_new_tokens=40)
    decoder.step([first])
    second = decoder.begin(decoder.open(), prompt(90, 5), GREEDY, max_new_tokens=40)
    third = decoder.begin(decoder.open(), prompt(5, 6), GREEDY, max_new_tokens=4)
    before = decoder.target_forwards
    step = decoder.step([first, second, third], prefill_chunk=32)
    assert decoder.target_forwards == before + 1
    rows = {id(row.turn): row for row in step.rows}
    assert step.batch == 2, "no prompt rows were left for the third"
    assert rows[id(first)].advance >= 1
    assert (rows[id(second)].prefilled, rows[id(second)].advance, rows[id(second)].verified) == (32, 0, 0)
    run_batch(decoder, [first, second, third], prefill_chunk=32)
    assert second.generated == wanted


@pytest.mark.parametrize("window", range(1, 9))
def test_a_verify_window_shortens_the_draft(window: int, make_decoder: Callable[..., Decoder]) -> None:
    decoder = make_decoder()
    turn, steps = run_turn(decoder, decoder.open(), prompt(12), verify_window=window)
    rows = [row for step in steps[1:] for row in step.rows]
    assert max(row.drafted for row in rows) == window - 1
    assert all(row.verified == row.drafted + 1 >= row.advance for row in rows)
    assert decoder.drafter_forwards == (0 if window == 1 else sum(row.drafted > 0 for row in rows))
    assert turn.generated == run_turn(decoder, decoder.open(), prompt(12), mode="ar")[0].generated


def test_no_draft_is_longer_than_what_may_still_come(make_decoder: Callable[..., Decoder]) -> None:
    decoder = make_decoder()
    turn, steps = run_turn(decoder, decoder.open(), prompt(12), max_new_tokens=4)
    left = 3
    for step in steps[1:]:
        assert step.rows[0].drafted == left - 1
        left -= step.rows[0].advance
    assert len(turn.generated) == 4


def test_ar_needs_no_drafter_and_makes_no_drafter_forward(make_decoder: Callable[..., Decoder]) -> None:
    bare, full = make_decoder(drafter=False), make_decoder()
    one, steps = run_turn(bare, bare.open(), prompt(9), max_new_tokens=10, mode="ar")
    two, _ = run_turn(full, full.open(), prompt(9), max_new_tokens=10, mode="ar")
    assert one.generated == two.generated
    assert len(steps) == bare.target_forwards == full.target_forwards == 10
    assert full.drafter_forwards == 0


def test_the_observer_sees_every_step(target: Target) -> None:
    seen: list[StepFigures] = []
    decoder = Decoder(target, successor_drafter(target), pool_for(target), observer=seen.append)
    _, steps = run_turn(decoder, decoder.open(), prompt(9))
    assert seen == steps


def test_a_drafter_state_does_not_grow_with_context(make_decoder: Callable[..., Decoder]) -> None:
    """Between rounds the drafter keeps nothing, and what a boundary carries for it does not depend on its position."""
    decoder, sizes = make_decoder(6), []
    assert decoder.drafter is not None
    for length in (10, 400):
        state = decoder.open()
        run_turn(decoder, state, prompt(length), max_new_tokens=20)
        assert state.features is not None
        held = sum(tensor.nbytes for tensor in decoder.drafter.state_dict().values())
        sizes.append((state.features.untyped_storage().nbytes(), held))
    assert sizes[1] == sizes[0]
    spec = decoder.target.spec
    assert sizes[0][0] == len(decoder.taps) * spec.hidden_size * 4


@pytest.mark.parametrize(
    ("arguments", "param"),
    [
        ({"max_new_tokens": 0}, "max_new_tokens"),
        ({"verify_window": 0}, "verify_window"),
        ({"verify_window": 9}, "verify_window"),
        ({"new_ids": []}, "new_ids"),
        ({"new_ids": [5, 97]}, "new_ids"),
        ({"new_ids": [-1]}, "new_ids"),
        ({"params": SamplingParams(logit_bias={97: 1.0})}, "logit_bias"),
    ],
)
def test_bad_arguments_are_refused_and_leave_the_session_alone(
    arguments: dict[str, Any], param: str, make_decoder: Callable[..., Decoder]
) -> None:
    decoder = make_decoder()
    state = decoder.open()
    call: dict[str, Any] = {"new_ids": [1, 2], "params": GREEDY, "max_new_tokens": 5} | arguments
    with pytest.raises(InvalidRequest) as caught:
        decoder.begin(state, call.pop("new_ids"), call.pop("params"), **call)
    assert caught.value.param == param
    assert (state.ids, state.kv.reserved, decoder.pool.reserved) == ([], 0, 0)


def test_dlite_without_a_drafter_is_refused(make_decoder: Callable[..., Decoder]) -> None:
    decoder = make_decoder(drafter=False)
    with pytest.raises(InvalidRequest) as caught:
        decoder.begin(decoder.open(), [1], GREEDY, max_new_tokens=5)
    assert caught.value.param == "mode"


def test_a_drafter_of_another_target_is_refused(tiny: dict[str, Target], tmp_path: Any) -> None:
    other = tiny_model("llama", hidden_size=64, head_dim=16)
    other.save_pretrained(tmp_path)
    stranger = make_drafter(load_tiny(tmp_path).spec)
    with pytest.raises(CheckpointError) as caught:
        Decoder(tiny["llama"], stranger, pool_for(tiny["llama"]))
    assert caught.value.param == "hidden_size"


def test_a_prompt_that_fills_the_context_is_refused(make_decoder: Callable[..., Decoder]) -> None:
    decoder = make_decoder()
    state, limit = decoder.open(), decoder.target.context_limit
    with pytest.raises(ContextOverflow, match=str(limit)):
        decoder.begin(state, prompt(limit), GREEDY, max_new_tokens=5)
    turn, _ = run_turn(decoder, state, prompt(limit - 1), max_new_tokens=5)
    assert (turn.finish, len(turn.generated)) == ("context", 1)


def test_exhausted_memory_leaves_everything_as_it_was(make_decoder: Callable[..., Decoder]) -> None:
    decoder = make_decoder(positions=200)
    state = decoder.open()
    run_turn(decoder, state, prompt(50), max_new_tokens=10)
    ids, kept, kv = list(state.ids), dict(state.kept), state.kv.export()
    reserved = decoder.pool.reserved
    with pytest.raises(KVExhausted):
        decoder.begin(state, prompt(150, 1), GREEDY, max_new_tokens=10)
    assert (state.ids, decoder.pool.reserved, state.kv.reserved) == (ids, reserved, len(ids) - 1)
    assert state.kept.keys() == kept.keys()
    assert torch.equal(state.kv.export(), kv)
    fresh = make_decoder()
    other = fresh.open()
    run_turn(fresh, other, prompt(50), max_new_tokens=10)
    follow = [
        run_turn(d, s, prompt(20, 2), max_new_tokens=10)[0].generated for d, s in ((decoder, state), (fresh, other))
    ]
    assert follow[0] == follow[1], "the session goes on where memory suffices"


def test_a_fork_without_memory_changes_nothing(make_decoder: Callable[..., Decoder]) -> None:
    decoder = make_decoder(positions=100)
    state = decoder.open()
    run_turn(decoder, state, prompt(55), max_new_tokens=5)
    reserved = decoder.pool.reserved
    with pytest.raises(KVExhausted):
        state.fork()
    assert decoder.pool.reserved == reserved
