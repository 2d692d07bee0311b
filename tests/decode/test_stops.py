"""Ends inside an accepted run: nothing behind one is emitted, counted or kept in KV."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from dlite_agent.decode.rounds import Decoder
from dlite_agent.decode.state import DecodeState
from dlite_agent.decode.text import TextStream
from tests.helpers import GREEDY, advances, load_tiny, pool_for, prompt, run_turn, successor_drafter

LENGTH = 48


class Words:
    """A tokenizer in which id n is the word `<n>`."""

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = False, **_options: bool) -> str:
        return "".join(f"<{token}>" for token in ids)


def whole_run(decoder: Decoder) -> tuple[list[int], list[int], DecodeState]:
    """The uninterrupted turn: its ids, its advances and its state."""
    state = decoder.open()
    turn, steps = run_turn(decoder, state, prompt(10, 4), max_new_tokens=LENGTH, ignore_eos=True)
    return turn.generated, advances(steps, turn), state


def inside_of_runs(generated: list[int], runs: list[int]) -> list[int]:
    """Indices that a turn reaches for the first time in the middle of an accepted run, their ids not seen before."""
    found, at = [], 1
    for run in runs:
        found += [i for i in range(at, at + run - 1) if generated[i] not in generated[:i]]
        at += run
    return found


def assert_ends(decoder: Decoder, state: DecodeState, generated: list[int], whole: list[int], end: int) -> None:
    assert generated == whole[: end + 1]
    assert state.ids == prompt(10, 4) + whole[: end + 1]
    assert state.boundary == state.kv.reserved == len(state.ids) - 1
    assert decoder.pool.reserved == state.boundary
    assert state.boundary in state.kept


@pytest.fixture(scope="module")
def reference(make_decoder: Callable[..., Decoder]) -> tuple[list[int], list[int]]:
    generated, runs, _ = whole_run(make_decoder())
    assert len(inside_of_runs(generated, runs)) >= 3
    return generated, runs


def with_eos(source: Path, folder: Path, eos: list[int]) -> Decoder:
    """The same target and drafter, with EOS ids in the generation config."""
    shutil.copytree(source, folder)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": eos}))
    target = load_tiny(folder)
    return Decoder(target, successor_drafter(target), pool_for(target))


@pytest.mark.parametrize("which", [0, 1])
def test_any_eos_id_ends_inside_a_run(
    which: int, reference: tuple[list[int], list[int]], tiny_folders: dict[str, Path], tmp_path: Path
) -> None:
    whole, runs = reference
    unused = next(token for token in range(97) if token not in whole)
    for end in inside_of_runs(whole, runs)[:3]:
        eos = [whole[end], unused] if which == 0 else [unused, whole[end]]
        decoder = with_eos(tiny_folders["qwen3"], tmp_path / str(end), eos)
        state = decoder.open()
        turn, steps = run_turn(decoder, state, prompt(10, 4), max_new_tokens=LENGTH)
        assert turn.finish == "eos"
        assert_ends(decoder, state, turn.generated, whole, end)
        assert 1 + sum(advances(steps, turn)) == end + 1, "advances count what was emitted"
        again = decoder.open()
        ignoring, _ = run_turn(decoder, again, prompt(10, 4), max_new_tokens=LENGTH, ignore_eos=True)
        assert ignoring.generated == whole


def test_a_stop_string_ends_inside_a_run(
    reference: tuple[list[int], list[int]], make_decoder: Callable[..., Decoder]
) -> None:
    whole, runs = reference
    for end in inside_of_runs(whole, runs)[:4]:
        decoder, text = make_decoder(), TextStream(Words(), [f"{whole[end - 1]}><{whole[end]}", "never"])
        state = decoder.open()
        turn, steps = run_turn(decoder, state, prompt(10, 4), max_new_tokens=LENGTH, text=text)
        assert turn.finish == "stop"
        assert_ends(decoder, state, turn.generated, whole, end)
        assert 1 + sum(advances(steps, turn)) == end + 1
        assert text.finish() == Words().decode(whole[: end - 1]) + "<"


class Halves(Words):
    """Words, each followed by half a character when it comes last."""

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = False, **_options: bool) -> str:
        return super().decode(ids) + "\ufffd" * bool(ids)


def test_a_stop_string_that_shows_only_at_the_end_is_the_reason(
    reference: tuple[list[int], list[int]], make_decoder: Callable[..., Decoder]
) -> None:
    whole, _ = reference
    decoder, text = make_decoder(), TextStream(Halves(), [f"<{whole[9]}>"])
    turn, _ = run_turn(decoder, decoder.open(), prompt(10, 4), max_new_tokens=10, text=text)
    assert turn.finish == "stop"
    assert turn.generated == whole[:10]
    assert text.text == Words().decode(whole[: whole.index(whole[9])])
    assert text.stopped == f"<{whole[9]}>"


@pytest.mark.parametrize("count", range(1, 20))
def test_max_new_tokens_is_kept_to_the_token(
    count: int, reference: tuple[list[int], list[int]], make_decoder: Callable[..., Decoder]
) -> None:
    decoder = make_decoder()
    state = decoder.open()
    turn, _ = run_turn(decoder, state, prompt(10, 4), max_new_tokens=count)
    assert turn.finish == "length"
    assert_ends(decoder, state, turn.generated, reference[0], count - 1)


@pytest.mark.parametrize("room", range(1, 12))
def test_the_context_ends_inside_a_run(room: int, make_decoder: Callable[..., Decoder]) -> None:
    decoder = make_decoder()
    limit = decoder.target.context_limit
    ids = prompt(limit - room, 8)
    state = decoder.open()
    turn, _ = run_turn(decoder, state, ids, max_new_tokens=LENGTH)
    assert turn.finish == "context"
    assert len(state.ids) == limit
    assert state.boundary == limit - 1
    assert len(turn.generated) == room


def test_a_resume_after_an_end_inside_a_run_goes_on_as_if_it_had_been_fed(
    reference: tuple[list[int], list[int]], make_decoder: Callable[..., Decoder]
) -> None:
    """Rows behind the end would show here: the next turn attends over them if they had stayed."""
    whole, runs = reference
    end = inside_of_runs(whole, runs)[1]
    decoder = make_decoder()
    state = decoder.open()
    run_turn(decoder, state, prompt(10, 4), GREEDY, text=TextStream(Words(), [f"<{whole[end]}>"]))
    assert len(state.ids) == 10 + end + 1
    follow, _ = run_turn(decoder, state, prompt(15, 9))
    fresh, _ = run_turn(decoder, decoder.open(), prompt(10, 4) + whole[: end + 1] + prompt(15, 9))
    assert follow.generated == fresh.generated
