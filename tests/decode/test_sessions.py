"""Pause, resume, fork and truncation, by the number of forwards they cost and the tokens they give."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from dlite_agent.config import Mode
from dlite_agent.decode.rounds import Decoder
from dlite_agent.decode.sampling import SamplingParams
from dlite_agent.model.target import Rows
from tests.helpers import GREEDY, advances, prompt, relative_error, run_turn


class Forwards:
    """Target and drafter forwards since the last look."""

    def __init__(self, decoder: Decoder) -> None:
        self._decoder = decoder
        self._seen = (decoder.target_forwards, decoder.drafter_forwards)

    def since(self) -> tuple[int, int]:
        before, self._seen = self._seen, (self._decoder.target_forwards, self._decoder.drafter_forwards)
        return self._seen[0] - before[0], self._seen[1] - before[1]


SAMPLED = SamplingParams(temperature=3.0, seed=8)
REJECTION = replace(SAMPLED, verification="rejection")


@pytest.mark.parametrize("group_size", [1, 6])
@pytest.mark.parametrize("params", [GREEDY, SAMPLED, REJECTION], ids=["greedy", "match", "rejection"])
def test_a_pause_changes_no_token_and_no_run(
    group_size: int, params: SamplingParams, make_decoder: Callable[..., Decoder]
) -> None:
    """Paused at any round and resumed with nothing new, acceptance equals the uninterrupted run token for token."""
    decoder = make_decoder(group_size)
    whole, steps = run_turn(decoder, decoder.open(), prompt(20), params, max_new_tokens=50)
    runs = advances(steps, whole)
    count = Forwards(decoder)
    for rounds in (1, 2, 5):
        emitted = 1 + sum(runs[:rounds])
        state = decoder.open()
        first = decoder.begin(state, prompt(20), params, max_new_tokens=50)
        for _ in range(1 + rounds):
            decoder.step([first])
        decoder.finish(first)
        assert state.kv.reserved == state.boundary
        count.since()
        second, more = run_turn(decoder, state, [], params, max_new_tokens=50 - emitted)
        assert first.generated + second.generated == whole.generated
        assert [row.advance for step in more for row in step.rows] == runs[rounds:]
        assert count.since() == (len(runs) - rounds, sum(row.drafted > 0 for step in more for row in step.rows))
        assert not any(row.prefilled for step in more for row in step.rows)


@pytest.mark.parametrize("group_size", [1, 6])
def test_a_tool_output_is_all_that_is_prefilled(group_size: int, make_decoder: Callable[..., Decoder]) -> None:
    decoder = make_decoder(group_size)
    state = decoder.open()
    run_turn(decoder, state, prompt(60), max_new_tokens=20)
    before, count = len(state.ids), Forwards(decoder)
    turn = decoder.begin(state, prompt(31, 1), GREEDY, max_new_tokens=30)
    (row,) = decoder.step([turn]).rows
    assert (row.context, row.prefilled, row.advance) == (before - 1, 31 + 1, 1), "the new ids and the anchor"
    assert count.since() == (1, 0), "the drafter has nothing to prefill"
    (row,) = decoder.step([turn]).rows
    assert row.drafted == 7
    assert count.since() == (1, 1)
    while turn.finish is None:
        decoder.step([turn])
    decoder.finish(turn)
    ids = state.ids[: before + 31]
    fresh, _ = run_turn(decoder, decoder.open(), ids, max_new_tokens=30)
    assert turn.generated == fresh.generated


@pytest.mark.parametrize("drafter", [True, False])
def test_a_retry_at_a_kept_boundary_runs_no_target_forward(drafter: bool, make_decoder: Callable[..., Decoder]) -> None:
    """n > 1 and retries: the head alone gives the boundary's logits, so the first token costs no forward."""
    decoder = make_decoder(drafter=drafter)
    mode: Mode = "dlite" if drafter else "ar"
    state, ids = decoder.open(), prompt(25)
    first, _ = run_turn(decoder, state, ids, SAMPLED, mode=mode)
    state.truncate(25)
    assert state.boundary == 25
    count = Forwards(decoder)
    turn = decoder.begin(state, [], SAMPLED, max_new_tokens=40, mode=mode)
    (row,) = decoder.step([turn]).rows
    assert count.since() == (0, 0)
    assert (row.prefilled, row.advance, turn.generated) == (0, 1, first.generated[:1])
    kv = decoder.pool.sequence()
    kv.reserve(25)
    logits = decoder.target.forward([Rows(kv, torch.tensor(ids))]).logits[-1]
    assert state.features is not None
    assert relative_error(decoder.target.head(state.features[-1:])[0], logits) <= 1e-5
    while turn.finish is None:
        decoder.step([turn])
    decoder.finish(turn)
    assert turn.generated == first.generated


@pytest.mark.parametrize("length", [3, 24, 26, 40])
def test_elsewhere_exactly_one_token_is_computed_again(length: int, make_decoder: Callable[..., Decoder]) -> None:
    decoder = make_decoder(6)
    state = decoder.open()
    run_turn(decoder, state, prompt(25), max_new_tokens=30)
    ids = state.ids[:length]
    assert length not in state.kept
    state.truncate(length)
    assert (state.boundary, state.pending) == (length - 1, ids[-1:])
    turn = decoder.begin(state, [], GREEDY, max_new_tokens=30)
    count = Forwards(decoder)
    (row,) = decoder.step([turn]).rows
    assert row.prefilled + row.verified - row.drafted == 1, "one row besides drafts"
    assert count.since()[0] == 1
    while turn.finish is None:
        decoder.step([turn])
    fresh, _ = run_turn(decoder, decoder.open(), ids, max_new_tokens=30)
    assert turn.generated == fresh.generated


def test_truncation_with_new_ids_is_the_shorter_session(make_decoder: Callable[..., Decoder]) -> None:
    decoder = make_decoder()
    for length in (25, 30, 12, 0):
        state = decoder.open()
        run_turn(decoder, state, prompt(25), max_new_tokens=20)
        state.truncate(length)
        ids = list(state.ids)
        turn, steps = run_turn(decoder, state, prompt(9, 3))
        fresh, _ = run_turn(decoder, decoder.open(), ids + prompt(9, 3))
        assert turn.generated == fresh.generated
        assert steps[0].rows[0].prefilled == 9 + (0 if length in (25, 0) else 1)


def test_truncation_beyond_the_ids_is_refused(make_decoder: Callable[..., Decoder]) -> None:
    state = make_decoder().open()
    with pytest.raises(ValueError, match="cannot truncate"):
        state.truncate(1)


def test_forks_are_independent(make_decoder: Callable[..., Decoder]) -> None:
    decoder = make_decoder(6)
    state = decoder.open()
    run_turn(decoder, state, prompt(30), max_new_tokens=20)
    fork, ids = state.fork(), list(state.ids)
    assert decoder.pool.reserved == state.kv.reserved + fork.kv.reserved
    count = Forwards(decoder)
    left, _ = run_turn(decoder, state, prompt(10, 1))
    assert fork.ids == ids
    right, _ = run_turn(decoder, fork, prompt(12, 2))
    forwards = count.since()
    for turn, new in ((left, prompt(10, 1)), (right, prompt(12, 2))):
        fresh, _ = run_turn(decoder, decoder.open(), ids + new)
        assert turn.generated == fresh.generated
    assert count.since() == forwards, "a fork costs no forward of its own"
    fork.kv.free()
    again, _ = run_turn(decoder, state, [], max_new_tokens=5)
    assert len(again.generated) == 5


@pytest.mark.parametrize("steps", [0, 1, 2, 4])
def test_an_aborted_turn_never_was(steps: int, make_decoder: Callable[..., Decoder]) -> None:
    decoder = make_decoder(6)
    state, twin = decoder.open(), decoder.open()
    for each in (state, twin):
        run_turn(decoder, each, prompt(30), max_new_tokens=12)
    length, reserved = len(state.ids), decoder.pool.reserved
    turn = decoder.begin(state, prompt(40, 5), GREEDY, max_new_tokens=30)
    for _ in range(steps):
        decoder.step([turn], prefill_chunk=25)
    decoder.abort(turn, length)
    assert (state.ids, state.boundary) == (twin.ids, twin.boundary)
    assert decoder.pool.reserved == reserved
    count = Forwards(decoder)
    runs = []
    for each in (state, twin):
        after, _ = run_turn(decoder, each, [], max_new_tokens=20)
        runs.append((after.generated, count.since()))
    assert runs[0] == runs[1]


def test_an_exported_session_goes_on_elsewhere(make_decoder: Callable[..., Decoder]) -> None:
    """What a boundary holds is enough: rows, features, ids and the seed, on another decoder."""
    here, there = make_decoder(), make_decoder()
    state = here.open()
    turn = here.begin(state, prompt(20), SAMPLED, max_new_tokens=40)
    for _ in range(5):
        here.step([turn])
    here.finish(turn)
    moved = there.open()
    moved.kv.load(state.kv.export())
    moved.ids, moved.features = list(state.ids), state.features
    rest = [run_turn(d, s, [], SAMPLED, max_new_tokens=20) for d, s in ((here, state), (there, moved))]
    assert rest[0][0].generated == rest[1][0].generated
    assert advances(rest[0][1], rest[0][0]) == advances(rest[1][1], rest[1][0])
