"""From recorded sessions to a drafter that accepts more on later sessions of the same kind."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from dlite_agent.decode.kv import KVPool
from dlite_agent.decode.load import chat_ids, load_runtime, load_target
from dlite_agent.decode.rounds import Decoder
from dlite_agent.decode.sampling import SamplingParams
from dlite_agent.errors import InvalidRequest
from dlite_agent.model.drafter import Drafter
from dlite_agent.model.weights import DEFAULT_TARGET
from dlite_agent.train.anchors import Examples
from dlite_agent.train.commands import build_corpus, write_corpus
from dlite_agent.train.data import Plan, read_prompts
from dlite_agent.train.finetune import train_on_sessions
from dlite_agent.train.store import open_shards
from dlite_agent.train.trainer import TargetTables, Trainer
from tests.train.conftest import requests, run_settings
from tests.train.test_commands import model
from tests.train.test_recorded import turns, write_log

__all__ = ["model"]
TEXT = "the tests of the parser fail in the lexer because the token table is not built before the first call "


def record(decoder: Decoder, folder: Path, session: str, prompts: list[list[int]], target: str, length: int) -> None:
    """Really decode a session of several turns, each prompt appended to what was said, and log it."""
    folder.mkdir(exist_ok=True)
    state = decoder.open()
    parts = []
    for prompt in prompts:
        known = len(state.ids)
        turn = decoder.begin(state, prompt, SamplingParams(temperature=0.0), max_new_tokens=length, mode="ar")
        while turn.finish is None:
            decoder.step([turn])
        decoder.finish(turn)
        parts.append((known, prompt, list(turn.generated)))
    state.kv.free()
    write_log(folder / f"{session}.jsonl", *turns(session, *parts, target=target))


@pytest.fixture(scope="module")
def logs(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Sessions that begin with the same file, as those of one repository do, and go on with another each."""
    target = load_target(str(model), dtype="fp32")
    pool = KVPool(target.spec, dtype=torch.float32, device=target.device, budget_bytes=1 << 25, max_positions=1024)
    folder = tmp_path_factory.mktemp("logs") / "repository"
    for i in range(10):
        prompts = [[3 + ord(letter) % 90 for letter in TEXT[start : start + 40]] for start in (0, i + 7)]
        record(Decoder(target, None, pool), folder, f"s{i}", prompts, str(model), 40)
    return folder


@pytest.fixture(scope="module")
def base(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A drafter that has hardly been trained, on other text."""
    folder = tmp_path_factory.mktemp("base")
    plan = Plan(roots=(), sources=0, with_questions=False)
    write_corpus(folder / "corpus", plan, requests(4, name="other"), str(model))
    build_corpus(folder / "corpus", target=str(model), taps=3, max_new=12, slots=4)
    shape = replace(run_settings(folder).shape, draft_vocab=0)
    cache = folder / "corpus" / "train"
    settings = run_settings(cache, target=str(model), mask_token_id=263, steps=1, shape=shape)
    Trainer(settings, folder / "run", TargetTables.load(str(model))).train()
    return folder / "run" / "drafter"


def test_tau_rises_on_later_sessions_that_were_not_trained_on(
    model: Path, logs: Path, base: Path, tmp_path: Path
) -> None:
    result = train_on_sessions(
        logs, tmp_path / "run", target=str(model), drafter=str(base), steps=60, batch=48, lr=2e-2
    )
    assert result["sessions"] == {"train": 8, "held_out": 2}
    before, after = result["before"], result["after"]
    assert (before["step"], after["step"]) == (0, 60)
    assert after["held_out_tau"] > before["held_out_tau"] + 0.1
    shards = open_shards(tmp_path / "run" / "corpus" / "held_out")
    assert {labels.source for shard in shards for labels in shard.conversations} == {"session: s8", "session: s9"}
    drafter = Drafter.load(tmp_path / "run" / "drafter")
    assert drafter.card["tau"] == after["held_out_tau"]
    trained = Examples(open_shards(tmp_path / "run" / "corpus" / "train"), drafter)
    assert len(trained.generated) == result["generated"]["train"]
    again = train_on_sessions(logs, tmp_path / "run", target=str(model), drafter=str(base), steps=60, batch=48, lr=2e-2)
    assert again == result
    assert Drafter.load(tmp_path / "run" / "drafter").card == drafter.card


def test_ids_that_the_target_lacks_are_refused(model: Path, base: Path, tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    for name, ids in (("a", [1, 2]), ("b", [1, 264])):
        write_log(tmp_path / "logs" / f"{name}.jsonl", *turns(name, (0, ids, [3, 4]), target=str(model)))
    with pytest.raises(InvalidRequest, match="session: b has ids that this target lacks"):
        train_on_sessions(tmp_path / "logs", tmp_path / "run", target=str(model), drafter=str(base))
    assert not (tmp_path / "run" / "corpus" / "plan.jsonl").exists()


def test_one_session_is_not_enough(model: Path, logs: Path, base: Path, tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="at least two are needed") as refusal:
        train_on_sessions(logs / "s1.jsonl", tmp_path, target=str(model), drafter=str(base))
    assert refusal.value.param == "sessions"


@pytest.mark.soak
def test_the_shipped_drafter_learns_a_repository(tmp_path: Path) -> None:
    """Sessions about one kind of work each: all prompts of a kind but the last are trained on."""
    runtime = load_runtime(drafter="none", dtype="fp32", threads=1)
    asked = read_prompts(Path(__file__).parent.parent / "data" / "heldout_prompts.jsonl")
    chosen = sorted((r for r in asked if r.kind in ("explain", "edit", "tests")), key=lambda r: r.id.rsplit("-")[-1])
    for request in chosen:
        prompt = chat_ids(runtime.tokenizer, request.messages)
        record(runtime.decoder, tmp_path / "logs", f"{chosen.index(request):02d}", [prompt], DEFAULT_TARGET, 96)
    result = train_on_sessions(tmp_path / "logs", tmp_path / "run", target=DEFAULT_TARGET, steps=80, batch=64)
    print(json.dumps({key: result[key] for key in ("sessions", "generated")}))
    print(*(result[when]["held_out_tau"] for when in ("before", "after")))
    assert result["after"]["held_out_tau"] > result["before"]["held_out_tau"]
