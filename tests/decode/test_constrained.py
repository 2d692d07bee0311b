"""Grammar masks inside rounds: drafts, bonus token and rejection verification stay inside the grammar."""

from __future__ import annotations

import json
from typing import Any

import pytest

from dlite_agent.decode.grammar import Constraint, Grammars, json_answer
from dlite_agent.decode.rounds import Decoder
from dlite_agent.decode.sampling import SamplingParams
from dlite_agent.decode.state import Turn
from dlite_agent.model.target import Target
from tests.helpers import make_drafter, pool_for

SCHEMA = {
    "type": "object",
    "properties": {"ok": {"type": "boolean"}, "kind": {"enum": ["circle", "square"]}},
    "required": ["ok", "kind"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def decoder(default_target: Target) -> Decoder:
    """The default target with a drafter that knows nothing, but part of the vocabulary only."""
    drafter = make_drafter(default_target.spec, block_size=4, draft_vocab_size=4096)
    drafter.pack(default_target.precision, default_target.device)
    return Decoder(default_target, drafter, pool_for(default_target, positions=4000))


@pytest.fixture(scope="module")
def grammars(default_target: Target, default_tokenizer: Any) -> Grammars:
    spec = default_target.spec
    return Grammars(default_tokenizer, vocab_size=spec.vocab_size, stop_ids=spec.eos_ids)


def generate(decoder: Decoder, grammars: Grammars, ids: list[int], params: SamplingParams, **options: Any) -> Turn:
    constraint: Constraint = json_answer(SCHEMA)
    state = decoder.open()
    matcher = grammars.matcher(constraint)
    turn = decoder.begin(state, ids, params, max_new_tokens=40, matcher=matcher, **options)
    while turn.finish is None:
        decoder.step([turn])
    state.kv.free()
    return turn


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(),
        SamplingParams(temperature=0.3, seed=3),
        SamplingParams(temperature=0.3, seed=3, verification="rejection"),
    ],
    ids=["greedy", "match", "rejection"],
)
def test_answers_stay_in_the_schema_with_drafts_on(
    decoder: Decoder, grammars: Grammars, default_tokenizer: Any, params: SamplingParams
) -> None:
    ids = default_tokenizer.encode("A shape as JSON: ")
    turn = generate(decoder, grammars, ids, params, mode="dlite", top_scores=1)
    assert turn.finish == "eos"
    value = json.loads(default_tokenizer.decode(turn.generated, skip_special_tokens=True))
    assert value.keys() == {"ok", "kind"}
    assert value["kind"] in ("circle", "square")
    assert [score.token for score in turn.scores] == turn.generated
    if params.verification == "match":
        plain = generate(decoder, grammars, ids, params, mode="ar")
        assert plain.generated == turn.generated
