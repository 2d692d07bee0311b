"""States whose KV rows and features are a function of their ids, so that a wrong restore cannot look right."""

from __future__ import annotations

import torch
from torch import Tensor

from dlite_agent.decode.kv import KVPool, SequenceKV
from dlite_agent.decode.state import DecodeState
from dlite_agent.model.spec import ModelSpec, RopeSpec
from dlite_agent.session.history import History, Turn
from dlite_agent.session.persist import Persister
from dlite_agent.session.record import Fingerprint, kv_layout
from dlite_agent.session.restore import Loaded
from dlite_agent.session.snapshot import Facts
from dlite_agent.session.store.base import SessionStore

LAYERS, KV_HEADS, HEAD_DIM, TAPS, HIDDEN = 2, 1, 4, 2, 6
CPU = torch.device("cpu")
FINGERPRINT = Fingerprint("target", "drafter", "tokenizer", "template", "fp32", kv_layout(LAYERS, KV_HEADS, HEAD_DIM))
BYTES_PER_POSITION = 2 * LAYERS * KV_HEADS * HEAD_DIM * 4
SPEC = ModelSpec(
    family="llama",
    num_layers=LAYERS,
    hidden_size=HIDDEN,
    intermediate_size=8,
    num_heads=1,
    num_kv_heads=KV_HEADS,
    head_dim=HEAD_DIM,
    vocab_size=1000,
    norm_eps=1e-5,
    max_positions=8192,
    rope=RopeSpec("default", 10_000.0),
    tied_head=True,
    qk_norm=False,
    eos_ids=(0,),
)


def pool() -> KVPool:
    return KVPool(SPEC, dtype=torch.float32, device=CPU, budget_bytes=1 << 30, max_positions=8192)


def _rolling(ids: list[int]) -> Tensor:
    """[n]: a number for each position that depends on all ids up to it."""
    value, out = 1, []
    for token in ids:
        value = (value * 1_000_003 + token + 1) % 8_388_593
        out.append(value)
    return torch.tensor(out, dtype=torch.float32)


def rows_for(ids: list[int]) -> Tensor:
    shape = (2, LAYERS, KV_HEADS, 1, HEAD_DIM)
    offsets = torch.arange(2 * LAYERS * KV_HEADS * HEAD_DIM, dtype=torch.float32).reshape(shape)
    return _rolling(ids).reshape(1, 1, 1, -1, 1) + offsets


def features_for(ids: list[int], boundary: int) -> Tensor:
    return _rolling(ids[:boundary])[-1] + torch.arange(TAPS * HIDDEN, dtype=torch.float32).reshape(TAPS, HIDDEN) / 16


def grow(state: DecodeState, ids: list[int]) -> None:
    """Go on with ids as a turn does: all but the last go through the target, and its end keeps its features."""
    state.ids += ids
    boundary = len(state.ids) - 1
    if boundary > state.boundary:
        state.kv.load(rows_for(state.ids[:boundary])[:, :, :, state.boundary :])
    state.features = features_for(state.ids, boundary) if boundary else None
    state.keep()


def new_state(kv: SequenceKV, ids: list[int]) -> DecodeState:
    state = DecodeState(kv)
    grow(state, ids)
    return state


def facts(*ends: int, divergence: str | None = None) -> Facts:
    """Facts of a session whose turns end at these positions."""
    turns = tuple(Turn(("user", "assistant"), (f"u{i}", f"a{i}"), max(end - 1, 0), end) for i, end in enumerate(ends))
    return Facts(History("tools", turns), divergence=divergence)


def persister(local: SessionStore, shared: SessionStore | None = None, *, owner: str = "one") -> Persister:
    return Persister(
        local, FINGERPRINT, bytes_per_position=BYTES_PER_POSITION, owner=owner, shared=shared, lease_ttl_s=30.0
    )


def save(keeper: Persister, session: str, state: DecodeState, *ends: int) -> None:
    keeper.hold(session)
    keeper.commit(keeper.snapshot(session, state, facts(*ends)))


def check(loaded: Loaded, ids: list[int]) -> DecodeState:
    """Put a session on the device and assert that all that came back belongs to its ids."""
    state = loaded.apply(pool().sequence(), CPU)
    assert state.ids == ids[: len(state.ids)]
    assert state.boundary == loaded.report.tokens
    torch.testing.assert_close(state.kv.export(), rows_for(state.ids[: state.boundary]), rtol=0, atol=0)
    for boundary, features in state.kept.items():
        torch.testing.assert_close(features, features_for(ids, boundary), rtol=0, atol=0)
    if state.features is not None:
        assert torch.equal(state.features, state.kept[state.boundary])
    assert state.pending or state.features is not None
    return state
