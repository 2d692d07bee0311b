"""Records: what goes in comes out, and nothing damaged, foreign or of another format is read."""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace

import pytest
import torch

from dlite_agent.decode.sampling import Sampler, SamplingParams
from dlite_agent.session.history import History, Turn
from dlite_agent.session.record import (
    Acceptance,
    BlockKeys,
    BlockRef,
    Refused,
    SamplerState,
    SessionRecord,
    cut_spans,
    decode,
)
from tests.session.stored import FINGERPRINT

PARAMS = SamplingParams(temperature=0.7, logit_bias={3: 1.5}, seed=5, presence_penalty=0.5, verification="rejection")
RECORD = SessionRecord(
    session="s/1 ü",
    epoch=3,
    turn=7,
    fingerprint=FINGERPRINT,
    length=12,
    boundary=11,
    anchor=9,
    history=History("t", (Turn(("user", "assistant"), ("a", "b"), 8, 12),)),
    blocks=(BlockRef("ids", 0, 12, "0" * 32, 48), BlockRef("kv", 0, 11, "1" * 32, 352)),
    sampler=SamplerState(PARAMS, 8),
    acceptance=Acceptance(4, 12, 7, 11),
    odds={"dlite": [[0.6, 1.0, 2.0], [0.1, 0.0, 1 / 3]], "suffix": [[0.5, 7.25, 9.0]]},
    divergence="edited",
)


def test_a_record_survives_its_bytes() -> None:
    assert decode(RECORD.encode(), RECORD.session) == RECORD


def test_every_flipped_bit_is_refused() -> None:
    data = RECORD.encode()
    for at in range(len(data)):
        flipped = bytearray(data)
        flipped[at] ^= 1 << (at % 8)
        with pytest.raises(Refused):
            decode(bytes(flipped), RECORD.session)


def test_cut_short_is_refused() -> None:
    data = RECORD.encode()
    for end in range(len(data)):
        with pytest.raises(Refused):
            decode(data[:end], RECORD.session)


def test_another_format_is_refused_by_name() -> None:
    data = RECORD.encode().replace(b"dlite-session 2 ", b"dlite-session 7 ", 1)
    with pytest.raises(Refused, match="format 7") as caught:
        decode(data, RECORD.session)
    assert caught.value.param == "format"


def test_a_record_of_the_first_format_is_read_as_one_without_odds() -> None:
    _, _, body = RECORD.encode().partition(b"\n")
    value = json.loads(body)
    del value["odds"]
    body = json.dumps(value).encode()
    old = b"dlite-session 1 " + hashlib.sha256(body).hexdigest().encode() + b"\n" + body
    assert decode(old, RECORD.session) == replace(RECORD, odds=None)


def test_another_sessions_record_is_refused() -> None:
    with pytest.raises(Refused, match="another one") as caught:
        decode(RECORD.encode(), "other")
    assert caught.value.param == "session"


def test_fingerprints_name_what_differs() -> None:
    other = replace(FINGERPRINT, drafter="d2", dtype="bf16")
    assert FINGERPRINT.differences(other) == ["drafter", "dtype"]
    assert FINGERPRINT.digest != other.digest


def test_a_sampler_comes_back_with_its_counts() -> None:
    ids = [5, 6, 7, 1, 1, 2]
    before = Sampler(PARAMS, prompt=ids[:3], vocab_size=10, device=torch.device("cpu"))
    before.commit(ids[3:])
    after = SamplerState(PARAMS, 3).sampler(ids, vocab_size=10, device=torch.device("cpu"))
    logits, none = torch.linspace(0, 1, 10).unsqueeze(0), torch.tensor([], dtype=torch.int64)
    assert torch.equal(before.adjusted(logits, none), after.adjusted(logits, none))
    assert before.seed == after.seed


def test_a_key_depends_on_every_id_before_it_and_on_the_model() -> None:
    ids = list(range(50))
    keys = BlockKeys(FINGERPRINT, ids, [20, 40])
    key = keys.key("kv", 20, 40)
    assert key is not None
    assert key == BlockKeys(FINGERPRINT, [*ids, 1], [40]).key("kv", 20, 40)
    for changed in (0, 19, 20, 39):
        other = [*ids[:changed], 99, *ids[changed + 1 :]]
        assert BlockKeys(FINGERPRINT, other, [40]).key("kv", 20, 40) != key
    assert BlockKeys(replace(FINGERPRINT, dtype="bf16"), ids, [40]).key("kv", 20, 40) != key
    assert keys.key("kv", 10, 40) != key
    assert keys.key("features", 20, 40) != key
    assert keys.key("kv", 40, 60) is None


def test_spans_are_cut_at_multiples() -> None:
    assert cut_spans(0, 0, 4) == []
    assert cut_spans(3, 4, 4) == [(3, 4)]
    assert cut_spans(3, 13, 4) == [(3, 4), (4, 8), (8, 12), (12, 13)]
    assert cut_spans(8, 12, 4) == [(8, 12)]
