"""Plans follow odds and costs: copies where they are right, the drafter where it is, nothing where nothing pays."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from dlite_agent.config import Mode
from dlite_agent.decode.costs import CostModel, Curve
from dlite_agent.decode.planner import MAX_DRAFT, Odds, Plan, Planner
from dlite_agent.decode.rounds import Decoder
from dlite_agent.decode.sampling import SamplingParams
from dlite_agent.decode.suffix import Match
from dlite_agent.model.target import Target
from tests.helpers import GREEDY, make_drafter, pool_for, prompt, run_batch, run_turn, successor_drafter

FLAT = [(1, 1.0), (64, 1.0)]
STEEP = [(1, 1.0), (64, 64.0)]
RISING = [(1, 1.0), (64, 7.3)]
CHEAP_DRAFT = [(1, 0.01), (7, 0.02)]


def decoder_with(target: Target, costs: CostModel | None, rate: float = 0.6) -> Decoder:
    decoder = Decoder(target, successor_drafter(target), pool_for(target))
    decoder.planner = Planner([rate] * decoder.proposal_length, costs)
    return decoder


def sources(decoder: Decoder, mode: Mode, ids: list[int], count: int = 60) -> tuple[list[int], Counter[str]]:
    turn, steps = run_turn(decoder, decoder.open(), ids, mode=mode, max_new_tokens=count)
    return turn.generated, Counter(row.plan.source for step in steps for row in step.rows if row.verified)


@pytest.mark.parametrize("mode", ["suffix", "mixed"])
@pytest.mark.parametrize("params", [GREEDY, SamplingParams(temperature=2.0, seed=5)])
def test_every_mode_gives_the_tokens_of_ar(mode: Mode, params: SamplingParams, target: Target) -> None:
    decoder = decoder_with(target, CostModel(FLAT, 0.0, CHEAP_DRAFT))
    ids = prompt(30) * 2
    ar, _ = run_turn(decoder, decoder.open(), ids, params, mode="ar", max_new_tokens=80)
    other, steps = run_turn(decoder, decoder.open(), ids, params, mode=mode, max_new_tokens=80)
    assert other.generated == ar.generated
    assert any(row.drafted for step in steps for row in step.rows)


def test_a_batch_of_all_modes_gives_each_its_own_tokens(target: Target) -> None:
    decoder = decoder_with(target, CostModel(FLAT, 0.0, CHEAP_DRAFT))
    modes: tuple[Mode, ...] = ("ar", "dlite", "suffix", "mixed", "mixed")
    prompts = [prompt(20 + i, seed=i) * 2 for i in range(len(modes))]
    alone = [run_turn(decoder, decoder.open(), ids, mode="ar", max_new_tokens=40)[0].generated for ids in prompts]
    turns = [
        decoder.begin(decoder.open(), ids, GREEDY, max_new_tokens=40, mode=mode)
        for ids, mode in zip(prompts, modes, strict=True)
    ]
    run_batch(decoder, turns)
    assert [turn.generated for turn in turns] == alone


def test_nothing_is_drafted_where_rows_cost_too_much(target: Target) -> None:
    _, seen = sources(decoder_with(target, CostModel(STEEP, 0.0, CHEAP_DRAFT)), "mixed", prompt(30))
    assert seen.keys() == {"none"}


@pytest.mark.parametrize(("a_further", "drafts"), [(0.0, True), (5.0, False)])
def test_what_further_rows_read_of_the_context_counts(a_further: float, drafts: bool, target: Target) -> None:
    """At 100 positions and more, each row beyond the first costs here more than a whole pass, or nothing."""
    costs = CostModel(FLAT, 0.01, CHEAP_DRAFT, a_further=a_further)
    _, seen = sources(decoder_with(target, costs), "mixed", prompt(100))
    assert (seen["dlite"] > seen["none"]) == drafts


def test_a_dear_drafter_leaves_the_field_to_copies(target: Target) -> None:
    costs = CostModel(FLAT, 0.0, [(1, 50.0), (7, 50.0)])
    _, seen = sources(decoder_with(target, costs), "mixed", prompt(30) * 3, count=100)
    assert seen["dlite"] == 0
    assert seen["suffix"] > 0


def test_a_drafter_that_pays_is_used(target: Target) -> None:
    _, seen = sources(decoder_with(target, CostModel(FLAT, 0.0, CHEAP_DRAFT)), "mixed", prompt(30))
    assert seen["dlite"] > seen["none"]


def test_rejection_turns_do_not_follow_load(target: Target) -> None:
    """Their tokens depend on their drafts, so costs must not change these."""
    params = SamplingParams(temperature=2.0, seed=3, verification="rejection")
    runs = []
    for verify in (FLAT, STEEP):
        decoder = decoder_with(target, CostModel(verify, 0.0, CHEAP_DRAFT))
        runs.append(run_turn(decoder, decoder.open(), prompt(30), params, mode="mixed")[0].generated)
    assert runs[0] == runs[1]


def test_without_a_drafter_mixed_copies(target: Target) -> None:
    decoder = Decoder(target, None, pool_for(target))
    ids = prompt(25) * 3
    ar, _ = run_turn(decoder, decoder.open(), ids, mode="ar")
    mixed, _ = run_turn(decoder, decoder.open(), ids, mode="mixed")
    assert mixed.generated == ar.generated


def test_odds_follow_what_happened() -> None:
    odds, match = Odds([0.5] * 7), Match(4, 3)
    before = odds.suffix(match)
    assert len(before) == MAX_DRAFT
    for _ in range(40):
        odds.record(Plan("suffix", 8, match), 8)
        odds.record(Plan("dlite", 7), 0)
    assert odds.suffix(match)[7] > before[7] + 2
    assert odds.suffix(Match(4, 20)) == Odds([]).suffix(Match(4, 20)), "other match lengths have their own odds"
    first, *_, last = odds.dlite()
    assert last - 1 < 0.3
    assert first < 1.2


def test_odds_count_the_draft_after_the_last_right_one_as_wrong() -> None:
    odds = Odds([0.5] * 3)
    for _ in range(200):
        odds.record(Plan("dlite", 3), 1)
    one, two, three = odds.dlite()
    assert one > 1.9
    assert two - one < 0.1
    assert three - two < 0.05


@pytest.mark.parametrize(
    ("verify", "sure", "kept"),
    [
        (FLAT, [0.95, 0.05, 0.05], 3),
        (RISING, [0.95, 0.9, 0.05, 0.9], 2),
        (RISING, [0.05, 0.95], 0),
        (RISING, [0.95] * 7, 7),
    ],
)
def test_drafts_that_the_head_is_unsure_of_are_cut(
    verify: list[tuple[int, float]], sure: list[float], kept: int, target: Target
) -> None:
    decoder = decoder_with(target, CostModel(verify, 0.0, CHEAP_DRAFT))
    turn = decoder.begin(decoder.open(), prompt(30), GREEDY, max_new_tokens=9, mode="mixed")
    planner, plans = decoder.planner, {id(turn): Plan("dlite", len(sure))}
    planner.plan([turn])
    (found,) = planner.cut([turn], plans, {id(turn): torch.tensor(sure)}).values()
    assert (found.source, found.length, found.made) == ("dlite", kept, len(sure))
    turn.mode = "dlite"
    assert planner.cut([turn], plans, {id(turn): torch.tensor(sure)}) == plans, "a fixed window stays fixed"


def test_cutting_changes_no_token_and_spares_rows(target: Target) -> None:
    """The head of a drafter with random weights is sure of nothing."""
    params = SamplingParams(temperature=2, seed=7)
    plain, decoder = (Decoder(target, make_drafter(target.spec), pool_for(target)) for _ in range(2))
    decoder.planner = Planner([0.6] * decoder.proposal_length, CostModel(RISING, 0.0, CHEAP_DRAFT))
    ar, _ = run_turn(plain, plain.open(), prompt(30), params, mode="ar", max_new_tokens=150)
    mixed, steps = run_turn(decoder, decoder.open(), prompt(30), params, mode="mixed", max_new_tokens=150)
    assert mixed.generated == ar.generated
    drafts = [row for step in steps for row in step.rows if row.plan.source == "dlite"]
    assert any(row.drafted < row.plan.made for row in drafts)
    assert all(row.drafted == row.plan.length for row in drafts)


def test_a_position_does_not_look_good_for_being_tried_when_sure() -> None:
    """Half of the drafts are right, and the head knows which: those that are wrong are cut."""
    odds = Odds([0.9])
    for _ in range(300):
        odds.record(Plan("dlite", 1, sure=(0.97,)), 1)
        odds.record(Plan("dlite", 0, sure=(0.03,)), 0)
    assert odds.sure(0.97) > 0.95
    assert odds.sure(0.03) == 0.05, "nothing was learned where nothing was tried"
    assert 1.4 < odds.dlite()[0] < 1.6


def test_costs_follow_a_change_of_load_within_a_dozen_rounds() -> None:
    curve = Curve([(1, 1.0), (8, 2.0)])
    assert curve(1) == 1.0
    assert curve(4) == pytest.approx(1 + 3 / 7)
    for _ in range(12):
        curve.observe(1, 3.0)
    assert 2.5 < curve(1) < 3.5
    assert 5 < curve(8) < 7, "load moves all row counts"
    for _ in range(500):
        curve.observe(1, 3.0)
    assert curve(1) == pytest.approx(3.0, rel=0.01)


def test_an_interrupted_round_moves_little() -> None:
    curve = Curve([(1, 1.0), (8, 2.0)])
    curve.observe(1, 1000.0)
    assert curve(1) < 1.5
