"""A long prompt beside decoding turns: it never holds one of them up for longer than a chunk."""

from __future__ import annotations

import queue
from collections.abc import Callable
from pathlib import Path

from dlite_agent.config import SchedulerSettings
from dlite_agent.decode.engine import Engine
from dlite_agent.decode.jobs import Finished, Generation, Piece, Reply
from dlite_agent.decode.load import Runtime
from dlite_agent.decode.rounds import Decoder, StepFigures
from tests.decode.test_engine import SECONDS, Letters, drain
from tests.helpers import GREEDY, prompt


def test_a_long_prompt_runs_in_chunks_beside_decoding_turns(make_decoder: Callable[..., Decoder]) -> None:
    decoder, steps = make_decoder(), list[StepFigures]()
    settings = SchedulerSettings(prefill_chunk=64, prefill_chunk_beside=16)
    engine = Engine(settings, lambda: Runtime(decoder, Letters(), Path()), observer=steps.append)
    engine.start()
    try:
        replies: list[queue.SimpleQueue[Reply]] = []
        for name, ids in (("/a", prompt(20, 1)), ("/b", prompt(20, 2)), ("/long", prompt(320, 3))):
            answers: queue.SimpleQueue[Reply] = queue.SimpleQueue()
            tokens = 8 if name == "/long" else 150
            engine.submit(
                Generation(id=name, key=name, ids=ids, params=GREEDY, max_new_tokens=tokens, reply=answers.put)
            )
            replies.append(answers)
            while name != "/long" and not isinstance(answers.get(timeout=SECONDS), Piece):
                pass
        assert all(isinstance(drain(answers)[-1], Finished) for answers in replies)
    finally:
        engine.close()
    beside = [
        step for step in steps if any(row.verified for row in step.rows) and any(row.prefilled for row in step.rows)
    ]
    chunks = [sum(row.prefilled for row in step.rows) for step in beside]
    assert sum(chunks) >= 320
    assert max(chunks) <= 16
    assert all(row.advance >= 1 for step in beside for row in step.rows if row.verified)
