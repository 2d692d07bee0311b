"""The parts of a step and its unsplit wall time."""

from __future__ import annotations

import time
from collections.abc import Callable

from dlite_agent.decode.rounds import Decoder
from dlite_agent.decode.timing import StepClock
from tests.helpers import CPU, prompt, run_turn


def test_a_part_lasts_until_the_next_is_entered() -> None:
    clock = StepClock(CPU)
    for _ in range(2):
        clock.start()
        time.sleep(0.002)
        clock.enter("draft")
        time.sleep(0.008)
        clock.enter("verify")
        time.sleep(0.004)
        clock.enter("rest")
        clock.enter("draft")
        time.sleep(0.008)
        seconds = clock.stop()
        assert seconds.draft >= 0.016
        assert seconds.verify >= 0.004
        assert seconds.rest >= 0.002
        assert seconds.wall >= seconds.draft + seconds.verify + seconds.rest
        assert seconds.wall <= (seconds.draft + seconds.verify + seconds.rest) * 1.05 + 0.002


def test_parts_of_every_step_add_up_to_its_wall(make_decoder: Callable[..., Decoder]) -> None:
    decoder = make_decoder()
    _, steps = run_turn(decoder, decoder.open(), prompt(40), prefill_chunk=16)
    began = time.perf_counter()
    _, more = run_turn(decoder, decoder.open(), prompt(40), prefill_chunk=16)
    took = time.perf_counter() - began
    for step in [*steps, *more]:
        parts = (step.seconds.draft, step.seconds.verify, step.seconds.rest)
        assert min(parts) > 0
        assert 0 <= step.seconds.wall - sum(parts) <= 0.05 * step.seconds.wall + 0.005
    assert sum(step.seconds.wall for step in more) <= took


def test_ar_steps_spend_nothing_worth_on_drafts(make_decoder: Callable[..., Decoder]) -> None:
    decoder = make_decoder()
    _, steps = run_turn(decoder, decoder.open(), prompt(10), mode="ar")
    assert sum(step.seconds.draft for step in steps) < 0.2 * sum(step.seconds.wall for step in steps)


def test_the_clock_costs_little_beside_a_step(make_decoder: Callable[..., Decoder]) -> None:
    """Stamps of one step against the shortest step there is, a tiny model's: real ones take a thousand times longer."""
    decoder, clock, count = make_decoder(), StepClock(CPU), 2000
    _, steps = run_turn(decoder, decoder.open(), prompt(10))
    began = time.perf_counter()
    for _ in range(count):
        clock.start()
        clock.enter("draft")
        clock.enter("verify")
        clock.enter("rest")
        clock.stop()
    each = (time.perf_counter() - began) / count
    step = sorted(step.seconds.wall for step in steps)[len(steps) // 2]
    print(f"clock {each * 1e6:.1f} us a step, tiny step {step * 1e6:.0f} us, share {each / step:.2%}")
    assert each < 0.25 * step
