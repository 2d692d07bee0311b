"""Real decoding, measured: it agrees with the replay, accounts for every token, and groups rounds by their text."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from dlite_agent.decode.kv import KVPool
from dlite_agent.decode.rounds import Decoder
from dlite_agent.errors import InvalidRequest
from dlite_agent.model.target import Target
from dlite_agent.train.evaluate import replay
from dlite_agent.train.lookup import lookup_rounds, propose
from dlite_agent.train.measure import kind_of_text, measure
from dlite_agent.train.store import open_shards
from dlite_agent.train.trainer import TargetTables, Trainer
from tests.train.conftest import encode, requests, run_settings

MAX_NEW = 24


def _text(ids: list[int]) -> str:
    return "".join("```" if i % 7 == 0 else "x" for i in ids)


def test_real_decoding_agrees_with_the_replay_and_accounts_for_every_token(
    train_cache: Path, held_out_cache: Path, target: Target, tables: TargetTables, tmp_path: Path
) -> None:
    drafter = Trainer(run_settings(train_cache, steps=40, batch=32), tmp_path, tables).train()
    asked = requests(6, name="held", temperature=0.0)
    pool = KVPool(target.spec, dtype=torch.float32, device=target.device, budget_bytes=1 << 22, max_positions=256)
    found = measure(Decoder(target, drafter, pool), asked, encode, _text, max_new=MAX_NEW)
    rows = {(row["by"], row["group"]): row for row in found.rows()}
    whole = rows["all", "everything"]
    replayed = replay(drafter, open_shards(held_out_cache), tables.embedding)
    assert abs(whole["tau"] - replayed["all"].tau) < 0.2
    for by in ("prompt", "text", "context"):
        parts = [row for (name, _), row in rows.items() if name == by]
        assert sum(row["rounds"] for row in parts) == whole["rounds"]
        assert sum(sum(row["lookup_advances"]) for row in parts) == sum(whole["lookup_advances"])
    assert rows["all", "without loops"]["rounds"] <= whole["rounds"]
    drafted, looked_up = (sum((i + 1) * n for i, n in enumerate(whole[key])) for key in ("advances", "lookup_advances"))
    assert len(asked) * 12 < looked_up == drafted <= len(asked) * (MAX_NEW - 1)
    speed = found.speed()
    assert speed["speedup"] == pytest.approx(
        sum(run.decode_seconds for run in found.ar) / sum(run.decode_seconds for run in found.dlite), rel=0.05
    )
    assert min(speed["t_ar"], speed["t_d"], speed["t_v"], speed["t_s"]) > 0
    assert pool.free == pool.capacity
    alone = measure(Decoder(target, drafter, pool), asked[:2], encode, _text, max_new=MAX_NEW, ar=False)
    assert alone.speed()["speedup"] is None
    with pytest.raises(InvalidRequest, match="needs a drafter"):
        measure(Decoder(target, None, pool), asked, encode, _text)


def test_lookup_copies_what_followed_the_latest_equal_tail() -> None:
    assert propose([1, 2, 3, 9, 1, 2, 4, 5, 1, 2], 3) == [4, 5, 1]
    assert propose([3, 1, 2, 9, 7, 2, 8, 1, 2], 2) == [9, 7]
    assert propose([1, 2, 3], 4) == []
    assert propose([5], 4) == []


def test_lookup_rounds_emit_every_token_once() -> None:
    prompt, answer = [1, 2, 3, 4, 5, 6, 7], [8, 2, 3, 4, 9, 9, 9, 9, 9]
    rounds = list(lookup_rounds(prompt, answer, 3))
    assert rounds[:2] == [(1, 0, 0), (2, 2, 3)]
    assert 1 + sum(hits + 1 for _, hits, _ in rounds) == len(answer)
    assert [at for at, _, _ in rounds] == [1, *(at + hits + 1 for at, hits, _ in rounds[:-1])]


@pytest.mark.parametrize(
    ("written", "kind"),
    [
        ("Here it is:\n```python\nx", "code"),
        ("```\nx\n```\nso", "prose"),
        (' {"name": "run"', "tool call"),
        ("<tool_call>\n{", "tool call"),
        ("", "prose"),
    ],
)
def test_kinds_of_text_go_by_what_is_written(written: str, kind: str) -> None:
    (request,) = requests(1, name="kind")
    assert kind_of_text(request, written) == kind
    request.messages.append({"role": "tool", "content": "ok"})
    assert kind_of_text(request, written) == "after tool output"
