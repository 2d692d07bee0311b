"""T_AR measured with real steps, and the probes that keep it known while everything drafts."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from dlite_agent.decode.rounds import Decoder, StepFigures
from dlite_agent.decode.sampling import SamplingParams
from dlite_agent.decode.step_times import Probe, measure
from dlite_agent.trace.amdahl import StepTimes, autoregressive
from dlite_agent.trace.events import Round
from tests.helpers import GREEDY, prompt, run_turn


def test_a_point_for_each_batch_and_context_that_fits(make_decoder: Callable[..., Decoder]) -> None:
    decoder = make_decoder(positions=700)
    points = measure(decoder, contexts=(16, 64, 4096), batches=(1, 2, 32), repeats=3)
    # 4096 is more than the model holds, so its longest stands in; memory is short for two of it, and for 32 of any.
    assert [(context, batch) for context, batch, _, _ in points] == [(16, 1), (64, 1), (507, 1), (16, 2), (64, 2)]
    assert all(seconds > 0 and error >= 0 for *_, seconds, error in points)
    assert decoder.pool.reserved == 0
    assert not StepTimes(tuple(points)).at(100, 1).extrapolated


def rounds(steps: list[StepFigures]) -> list[Round]:
    return [
        Round(0.0, step.seconds.wall, step.seconds.draft, step.seconds.verify, 0.0, row.advance, row.drafted, 1, 0, 1)
        for step in steps
        for row in step.rows
        if row.verified
    ]


def test_real_autoregressive_steps_are_known_as_such(make_decoder: Callable[..., Decoder]) -> None:
    decoder = make_decoder()
    _, plain = run_turn(decoder, decoder.open(), prompt(20), mode="ar", max_new_tokens=30)
    assert StepTimes.measured(rounds(plain)) is not None
    _, drafted = run_turn(decoder, decoder.open(), prompt(20), mode="dlite", max_new_tokens=30)
    # Only the last round, which has room for one token, may have had no draft.
    assert sum(map(autoregressive, rounds(drafted))) <= 1


@pytest.mark.parametrize(
    "params", [GREEDY, SamplingParams(temperature=0.8, seed=3)], ids=["greedy", "sampled and matched"]
)
def test_probes_change_no_token(make_decoder: Callable[..., Decoder], params: SamplingParams) -> None:
    found = []
    for every in (3, 10**9):
        decoder = make_decoder()
        decoder.observer = Probe(every)
        turn, steps = run_turn(decoder, decoder.open(), prompt(20), params, max_new_tokens=60)
        found.append((turn.generated, [row.drafted == 0 for step in steps for row in step.rows if row.verified]))
        assert turn.verify_window == decoder.verify_window
    (probed, plain), (wanted, _) = found
    assert probed == wanted
    # Three rounds with drafts, one without, and so on.
    assert [index for index, bare in enumerate(plain[:-1]) if bare] == list(range(3, len(plain) - 1, 4))


def test_turns_verified_by_rejection_are_left_alone(make_decoder: Callable[..., Decoder]) -> None:
    decoder = make_decoder()
    decoder.observer = Probe(1)
    params = SamplingParams(temperature=0.8, seed=3, verification="rejection")
    _, steps = run_turn(decoder, decoder.open(), prompt(20), params, max_new_tokens=40)
    drafted = [row.drafted for step in steps for row in step.rows if row.verified]
    assert all(drafted[:-1])
