"""Masks over drafted windows against an oracle that takes one token at a time, with real tokenizers."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dlite_agent.decode.grammar import (
    CallFormat,
    Constraint,
    Grammars,
    Matcher,
    calls_only,
    json_answer,
    text_with_calls,
)
from dlite_agent.errors import DliteError, InvalidRequest, ModelError
from tests.tokenizers import load

# Width of the logits: Qwen3's are wider than its tokenizer.
WIDTH = {"smollm2": 49152, "qwen3": 151936}
SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
CALL = CallFormat('<tool_call>\n{"name": "weather", "arguments": ', SCHEMA, "}\n</tool_call>")
OTHER = CallFormat('<tool_call>\n{"name": "other", "arguments": ', {"type": "object"}, "}\n</tool_call>")
ANSWER = '{"city": "Paris", "days": 12}'
CALLED = f'<tool_call>\n{{"name": "weather", "arguments": {ANSWER}}}\n</tool_call>'

CASES: dict[str, tuple[Constraint, str]] = {
    "json": (json_answer(SCHEMA), ANSWER),
    "json behind reasoning": (json_answer(SCHEMA, reasoning="open"), f"I think {{\n</think>\n\n{ANSWER}"),
    "json, reasoning or not": (json_answer(SCHEMA, reasoning="optional"), f"<think>\nhm\n</think>\n\n{ANSWER}"),
    "required": (calls_only([CALL, OTHER]), f"{CALLED}\n{CALLED}"),
    "named": (calls_only([CALL], several=False), CALLED),
    "auto": (text_with_calls([CALL, OTHER], trigger="<tool_call>"), f"Let me see.\n{CALLED} Done."),
    "auto behind reasoning": (
        text_with_calls([CALL], trigger="<tool_call>", reasoning="open"),
        f"A <tool_call>?</think>\n{CALLED}",
    ),
}


@cache
def grammars(name: str) -> Grammars:
    return Grammars(load(name), vocab_size=WIDTH[name], stop_ids=[load(name).eos_token_id])


def encode(name: str, text: str) -> list[int]:
    ids: list[int] = load(name).encode(text, add_special_tokens=False)
    return ids


def allowed(masks: torch.Tensor, row: int, token: int) -> bool:
    return bool(int(masks[row, token // 32].item()) >> (token % 32) & 1)


def takes(matcher: Matcher, ids: Sequence[int]) -> bool:
    taken = 0
    for token in ids:
        if not matcher.push(token):
            break
        taken += 1
    matcher.pop(taken)
    return taken == len(ids)


class Oracle:
    """Masks by replaying a whole response from the start, one token after another, in a matcher of its own."""

    def __init__(self, name: str, constraint: Constraint) -> None:
        self._name, self._constraint = name, constraint

    def row(self, ids: Sequence[int]) -> torch.Tensor | None:
        matcher = grammars(self._name).matcher(self._constraint)
        for token in ids:
            if not matcher.push(token):
                return None
        return None if matcher.finished else matcher.window([])[0][0]


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("name", WIDTH)
def test_the_intended_response_passes_token_by_token(name: str, case: str) -> None:
    constraint, text = CASES[case]
    eos = load(name).eos_token_id
    matcher = grammars(name).matcher(constraint)
    ids = [*encode(name, text), eos]
    for token in ids:
        masks, _ = matcher.window([])
        assert allowed(masks, 0, token)
        assert not any(allowed(masks, 0, v) for v in range(len(load(name)), WIDTH[name]))
        assert not allowed(masks, 0, load(name).convert_tokens_to_ids("<|im_start|>"))
        matcher.commit([token])
    assert matcher.finished
    assert not matcher.push(ids[0])


@pytest.mark.parametrize(
    ("case", "texts"),
    [
        ("json", ["Sure", '{"days"', '{"city": 3', '{"city": "a", "days": 1.5', '{"city": "a"}', "[", " {"]),
        ("json behind reasoning", [f"thought</think>{ANSWER} more", "a</think>\n\nSure"]),
        ("required", ["Sure", "<tool_call>\n{}", CALLED.replace("weather", "rain"), f"{CALLED} more"]),
        ("named", [f"{CALLED}\n{CALLED}", CALLED.replace("weather", "other")]),
        ("auto", ["Hi <tool_call>{", CALLED.replace("12", "true"), CALLED.replace("weather", "rain")]),
    ],
)
def test_what_breaks_the_grammar_does_not_pass(case: str, texts: list[str]) -> None:
    matcher = grammars("smollm2").matcher(CASES[case][0])
    for text in texts:
        assert not takes(matcher, encode("smollm2", text))


@pytest.mark.parametrize(
    ("case", "texts"),
    [
        ("json, reasoning or not", [ANSWER, f"<think></think>{ANSWER}"]),
        ("required", [CALLED, CALLED.replace("weather", "other").replace(ANSWER, '{"x": [1, {}]}')]),
        ("auto", ["No call.", "a < b", CALLED, f"{CALLED} and {CALLED}"]),
    ],
)
def test_every_way_that_is_meant_passes(case: str, texts: list[str]) -> None:
    eos = load("smollm2").eos_token_id
    for text in texts:
        assert takes(grammars("smollm2").matcher(CASES[case][0]), [*encode("smollm2", text), eos])


def drafts(data: st.DataObject, name: str, ids: list[int], at: int) -> list[int]:
    """What a drafter may propose: the right tokens for a while, then anything; stop tokens anywhere."""
    right = ids[at : at + data.draw(st.integers(0, 7))]
    pool = [*encode(name, ' {"city":\n</think><tool_call>Hi'), load(name).eos_token_id, 0, 5, WIDTH[name] - 1]
    wrong = data.draw(st.lists(st.sampled_from(pool), max_size=7 - len(right)))
    return [*right, *wrong]


@pytest.mark.parametrize("name", WIDTH)
@given(case=st.sampled_from(sorted(CASES)), data=st.data())
@settings(max_examples=25, deadline=None)
def test_windows_equal_single_steps(name: str, case: str, data: st.DataObject) -> None:
    constraint, text = CASES[case]
    ids = [*encode(name, text), load(name).eos_token_id]
    matcher, oracle = grammars(name).matcher(constraint), Oracle(name, constraint)
    done: list[int] = []
    while not matcher.finished:
        proposed = drafts(data, name, ids, len(done))
        masks, taken = matcher.window(proposed)
        for row in range(len(proposed) + 1):
            expected = oracle.row([*done, *proposed[:row]])
            assert (row <= taken) or expected is None
            if expected is None:
                expected = torch.full_like(masks[0], -1)
            assert torch.equal(masks[row], expected)
        accepted = 0
        rest = ids[len(done) :]
        while accepted < min(taken, len(rest)) and proposed[accepted] == rest[accepted]:
            accepted += 1
        bonus = rest[accepted : accepted + 1]
        matcher.commit([*proposed[:accepted], *bonus])
        done += [*proposed[:accepted], *bonus]
    assert done == ids


def test_a_drafter_may_sample_its_way_and_come_back() -> None:
    matcher = grammars("smollm2").matcher(CASES["named"][0])
    ids = [*encode("smollm2", CALLED), load("smollm2").eos_token_id]
    before = matcher.window([])[0]
    for i, token in enumerate(ids):
        assert torch.equal(matcher.window([])[0][0], grammars_row("named", ids[:i]))
        assert matcher.push(token)
    assert matcher.finished
    assert matcher.window([1, 2])[1] == 0
    assert torch.equal(matcher.window([1, 2])[0], torch.full((3, WIDTH["smollm2"] // 32), -1, dtype=torch.int32))
    matcher.pop(len(ids))
    assert torch.equal(matcher.window([])[0], before)


def grammars_row(case: str, ids: Sequence[int]) -> torch.Tensor:
    row = Oracle("smollm2", CASES[case][0]).row(ids)
    assert row is not None
    return row


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_logits_are_masked_in_place(dtype: torch.dtype) -> None:
    matcher = grammars("smollm2").matcher(CASES["json"][0])
    ids = encode("smollm2", ANSWER)
    proposed = [*ids[:3], encode("smollm2", "Sure")[0], ids[4]]
    logits = torch.randn(6, WIDTH["smollm2"], generator=torch.Generator().manual_seed(0)).to(dtype)
    before = logits.clone()
    assert matcher.mask(logits, proposed) == 3
    masks, _ = matcher.window(proposed)
    bits = (masks[:, :, None] >> torch.arange(32) & 1).bool().reshape(6, -1)
    assert torch.equal(logits, before.masked_fill(~bits, float("-inf")))
    assert bits[:4].sum(1).max() < WIDTH["smollm2"]
    assert bits[4:].all()
    assert logits[3, proposed[3]] == float("-inf")
    one = before[:1].clone()
    assert matcher.mask(one) == 0
    assert torch.equal(one, logits[:1])


def test_a_view_of_wider_logits_is_masked_and_nothing_else_is_touched() -> None:
    matcher = grammars("smollm2").matcher(CASES["json"][0])
    wide = torch.zeros(3, WIDTH["smollm2"] + 8)
    matcher.mask(wide[:2, : WIDTH["smollm2"]], encode("smollm2", ANSWER)[:1])
    assert wide[:2, : WIDTH["smollm2"]].isfinite().sum() < 10
    assert wide[2].isfinite().all()
    assert wide[:, WIDTH["smollm2"] :].isfinite().all()


@pytest.mark.parametrize(
    "logits",
    [torch.zeros(1, 8), torch.zeros(3, WIDTH["smollm2"]), torch.zeros(WIDTH["smollm2"], 2).T],
    ids=["width", "rows", "strides"],
)
def test_logits_that_would_be_masked_wrongly_are_refused(logits: torch.Tensor) -> None:
    with pytest.raises(ValueError, match="do not fit"):
        grammars("smollm2").matcher(CASES["json"][0]).mask(logits, [0])


def test_a_random_walk_always_ends_in_a_valid_document() -> None:
    schema = {
        "type": "object",
        "properties": {
            "kind": {"enum": ["a", "b"]},
            "count": {"type": "integer", "minimum": 1, "maximum": 40},
            "on": {"type": "boolean"},
            "pair": {"type": "array", "items": {"type": "null"}, "minItems": 2, "maxItems": 2},
            "name": {"type": "string", "maxLength": 4},
        },
        "required": ["kind", "count", "on", "pair", "name"],
        "additionalProperties": False,
    }
    random = np.random.default_rng(1)
    for _ in range(4):
        matcher, ids = grammars("smollm2").matcher(json_answer(schema)), list[int]()
        while not matcher.finished:
            logits = torch.zeros(1, WIDTH["smollm2"])
            matcher.mask(logits)
            ids.append(int(random.choice(np.flatnonzero(logits[0].numpy() == 0))))
            matcher.commit(ids[-1:])
        document: dict[str, Any] = json.loads(load("smollm2").decode(ids[:-1]))
        assert list(document) == ["kind", "count", "on", "pair", "name"]
        assert document["kind"] in ("a", "b")
        assert document["count"] in range(1, 41)
        assert document["pair"] == [None, None]
        assert len(document["name"]) <= 4


def test_committing_against_the_grammar_is_an_error() -> None:
    matcher = grammars("smollm2").matcher(CASES["json"][0])
    with pytest.raises(DliteError, match="against the response's grammar"):
        matcher.commit(encode("smollm2", "Sure"))


def test_schemas_that_cannot_be_held_are_refused() -> None:
    with pytest.raises(InvalidRequest, match=r"properties\.a\.not cannot be enforced"):
        json_answer({"type": "object", "properties": {"a": {"not": {}}}})
    with pytest.raises(InvalidRequest, match="Unsupported type") as caught:
        grammars("smollm2").matcher(json_answer({"type": "frob"}))
    assert caught.value.param == "schema"
    with pytest.raises(InvalidRequest, match="no tools"):
        calls_only([])


def test_a_model_without_a_stop_token_is_refused() -> None:
    with pytest.raises(ModelError, match="no stop token"):
        Grammars(load("smollm2"), vocab_size=WIDTH["smollm2"], stop_ids=[])


def test_any_object_is_an_object() -> None:
    matcher = grammars("smollm2").matcher(json_answer(None))
    eos = load("smollm2").eos_token_id
    assert takes(matcher, [*encode("smollm2", '{"a": [1, {"b": null}], "c": "d"}'), eos])
    assert not takes(matcher, encode("smollm2", "[1]"))
