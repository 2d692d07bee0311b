"""One turn of one session, start to end: the plain loop that the command line and benchmarks use."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from dlite_agent.config import Mode
from dlite_agent.decode.figures import RunFigures
from dlite_agent.decode.rounds import Decoder
from dlite_agent.decode.sampling import SamplingParams
from dlite_agent.decode.state import DecodeState, Turn
from dlite_agent.decode.text import TextStream


def generate(
    decoder: Decoder,
    state: DecodeState,
    new_ids: Sequence[int],
    params: SamplingParams,
    *,
    max_new_tokens: int,
    mode: Mode,
    verify_window: int | None = None,
    text: TextStream | None = None,
    ignore_eos: bool = False,
    on_step: Callable[[Turn], None] | None = None,
) -> tuple[Turn, RunFigures]:
    """Run one turn on `state` and leave the session paused at its end.

    Args:
        on_step: called after every step, for streaming.

    Raises:
        InvalidRequest, ContextOverflow, KVExhausted: see `Decoder.begin`.
    """
    figures = RunFigures()
    turn = decoder.begin(
        state,
        new_ids,
        params,
        max_new_tokens=max_new_tokens,
        mode=mode,
        verify_window=verify_window,
        text=text,
        ignore_eos=ignore_eos,
    )
    while turn.finish is None:
        figures.add(decoder.step([turn]))
        if on_step is not None:
            on_step(turn)
    decoder.finish(turn)
    return turn, figures
