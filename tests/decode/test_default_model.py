"""The default model: greedy DLite, greedy AR and transformers' greedy give the same tokens, near ties apart."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from dlite_agent.config import Mode
from dlite_agent.decode.rounds import Decoder
from dlite_agent.model.catalog import load_drafter
from dlite_agent.model.target import Rows, Target
from tests.helpers import GREEDY, MODES, make_drafter, pool_for, run_turn

NEAR_TIE = 1e-3
PROMPTS = [
    "Write a Python function that merges two sorted lists.",
    "The test suite fails with `KeyError: 'user_id'`. What do I check first?",
    "def read_config(path):\n    ",
]
SUBJECTS = [
    "a queue",
    "binary search",
    "a CSV file",
    "git rebase",
    "a race condition",
    "a Makefile",
    "JSON",
    "a regex",
    "an HTTP retry",
    "unit tests",
]
FORMS = [
    "Explain {} to a new colleague.",
    "Write Python code for {}.",
    "List three pitfalls of {}.",
    "$ grep -n '{}' notes.md\n",
    "Fix this bug about {}:\n```python\n",
]


@pytest.fixture(scope="module")
def decoder(default_target: Target) -> Decoder:
    drafter = make_drafter(default_target.spec, group_size=2, taps=4, depth=1, rank=32, mask_token_id=2)
    drafter.pack(default_target.precision, default_target.device)
    return Decoder(default_target, drafter, pool_for(default_target, positions=8192))


def chat(tokenizer: Any, text: str) -> list[int]:
    ids: list[int] = tokenizer.apply_chat_template(
        [{"role": "user", "content": text}], add_generation_prompt=True, tokenize=True, return_dict=False
    )
    return ids


def assert_same(decoder: Decoder, ids: Sequence[int], found: list[int], wanted: list[int], what: str) -> None:
    """Equal up to the first near tie: there both tokens' logits must be within NEAR_TIE."""
    at = next((i for i, (a, b) in enumerate(zip(found, wanted, strict=False)) if a != b), None)
    if at is None:
        assert len(found) == len(wanted)
        return
    kv = decoder.pool.sequence()
    history = [*ids, *wanted[:at]]
    kv.reserve(len(history))
    logits = decoder.target.forward([Rows(kv, torch.tensor(history))]).logits[-1]
    kv.free()
    gap = float((logits[found[at]] - logits[wanted[at]]).abs())
    print(f"{what} differs at {at}: {found[at]} for {wanted[at]}, logits {gap:.2e} apart")
    assert gap <= NEAR_TIE


def compare(decoder: Decoder, reference: Any, ids: list[int], count: int) -> None:
    with torch.inference_mode():
        out = reference.generate(torch.tensor([ids]), max_new_tokens=count, do_sample=False)[0, len(ids) :].tolist()
    for mode in MODES:
        state = decoder.open()
        turn, _ = run_turn(decoder, state, ids, max_new_tokens=count, mode=mode)
        state.kv.free()
        assert_same(decoder, ids, turn.generated, out, mode)


@pytest.mark.parametrize("which", range(len(PROMPTS)))
def test_greedy_is_greedy(which: int, decoder: Decoder, default_reference: Any, default_tokenizer: Any) -> None:
    compare(decoder, default_reference, chat(default_tokenizer, PROMPTS[which]), 32)


@pytest.fixture(scope="module")
def shipped(default_target: Target) -> Decoder:
    drafter = load_drafter("auto", default_target)
    assert drafter is not None
    return Decoder(default_target, drafter, pool_for(default_target, positions=8192))


def answers(decoder: Decoder, prompts: Sequence[list[int]], mode: Mode) -> list[list[int]]:
    """Greedy answers of 128 tokens, all prompts in one batch."""
    states = [decoder.open() for _ in prompts]
    turns = [
        decoder.begin(state, ids, GREEDY, max_new_tokens=128, mode=mode)
        for state, ids in zip(states, prompts, strict=True)
    ]
    while running := [turn for turn in turns if turn.finish is None]:
        decoder.step(running)
    for state in states:
        state.kv.free()
    return [turn.generated for turn in turns]


@pytest.mark.soak
@pytest.mark.parametrize("subject", SUBJECTS)
def test_greedy_is_greedy_at_length_with_the_shipped_drafter(
    subject: str, shipped: Decoder, default_reference: Any, default_tokenizer: Any
) -> None:
    """128 tokens; transformers judges the autoregressive tokens in one pass, which also looks behind a near tie."""
    prompts = [chat(default_tokenizer, form.format(subject)) for form in FORMS]
    ar, dlite = (answers(shipped, prompts, mode) for mode in MODES)
    for form, ids, plain, drafted in zip(FORMS, prompts, ar, dlite, strict=True):
        what = f"{form.format(subject)!r}"
        assert_same(shipped, ids, drafted, plain, f"{what}: dlite")
        with torch.inference_mode():
            logits = default_reference(torch.tensor([ids + plain])).logits[0, len(ids) - 1 : -1]
        gaps = logits.amax(-1) - logits.gather(1, torch.tensor(plain).unsqueeze(1)).squeeze(1)
        for at in gaps.nonzero().flatten().tolist():
            print(f"{what}: transformers differs at {at}, logits {float(gaps[at]):.2e} apart")
        assert float(gaps.max()) <= NEAR_TIE
