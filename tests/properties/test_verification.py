"""What a verify pass emits, for any drafts and any number of windows."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from dlite_agent.decode.sampling import Sampler, SamplingParams, Window, verify
from tests.helpers import CPU

VOCAB = 5
token = st.integers(0, VOCAB - 1)
PARAMS = st.sampled_from(
    [
        SamplingParams(),
        SamplingParams(presence_penalty=1.0, frequency_penalty=0.5),
        SamplingParams(temperature=1.0, seed=5),
        SamplingParams(temperature=1.0, seed=6, verification="rejection"),
        SamplingParams(temperature=1.0, seed=7, top_k=2, verification="rejection"),
    ]
)


@st.composite
def windows(draw: st.DrawFn) -> tuple[SamplingParams, int, list[int], torch.Tensor, torch.Tensor | None]:
    params, drafts = draw(PARAMS), draw(st.lists(token, max_size=7))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 1000)))
    logits = torch.randn(len(drafts) + 1, VOCAB, generator=generator)
    q = None
    if params.verification == "rejection" and drafts:
        q = torch.rand(len(drafts), VOCAB, generator=generator) + 0.01
        q = q / q.sum(-1, keepdim=True)
    return params, draw(st.integers(0, 10**6)), drafts, logits, q


def window_of(case: tuple[SamplingParams, int, list[int], torch.Tensor, torch.Tensor | None]) -> Window:
    params, position, drafts, _, q = case
    sampler = Sampler(params, prompt=[0], vocab_size=VOCAB, device=CPU)
    return Window(sampler, position, torch.tensor(drafts, dtype=torch.int64), q)


@given(st.lists(windows(), min_size=1, max_size=5))
def test_a_run_is_accepted_drafts_and_one_token_more(
    cases: list[tuple[SamplingParams, int, list[int], torch.Tensor, torch.Tensor | None]],
) -> None:
    logits = torch.cat([case[3] for case in cases])
    runs = verify([window_of(case) for case in cases], logits)
    for case, run in zip(cases, runs, strict=True):
        drafts = case[2]
        assert 1 <= len(run) <= len(drafts) + 1
        assert run[:-1] == drafts[: len(run) - 1]
        assert all(0 <= each < VOCAB for each in run)
        if len(run) <= len(drafts):
            assert run[-1] != drafts[len(run) - 1] or case[4] is not None
        assert verify([window_of(case)], case[3]) == [run], "mates change nothing"


@given(windows())
def test_without_q_a_run_is_what_single_decisions_give(
    case: tuple[SamplingParams, int, list[int], torch.Tensor, torch.Tensor | None],
) -> None:
    """Match verification emits the tokens of as many one-token steps."""
    params, position, drafts, logits, _ = case
    window = window_of(case)
    (run,) = verify([Window(window.sampler, position, window.drafts)], logits)
    sampler = Sampler(params, prompt=[0], vocab_size=VOCAB, device=CPU)
    single = []
    for i in range(len(run)):
        single += verify([Window(sampler, position + i, window.drafts[:0])], logits[i : i + 1])[0]
        sampler.commit(single[-1:])
    assert run == single
    assert len(run) == len(drafts) + 1 or single[-1] != drafts[len(run) - 1]
