"""The executor against transformers, and against itself by chunks, batches, truncation and forks."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from dlite_agent.decode.kv import SequenceKV
from dlite_agent.errors import ModelError
from dlite_agent.model.spec import ModelSpec
from dlite_agent.model.target import Rows, Target
from dlite_agent.model.weights import FolderWeights
from tests.helpers import CPU, FP32, load_tiny, pool_for, prompt, relative_error, save_model, tiny_model

TOLERANCE = 1e-4

ROPES: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default", "rope_theta": 5000.0},
    "linear": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 3.0},
    "llama3": {
        "rope_type": "llama3",
        "rope_theta": 500.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    "yarn": {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 4.0,
        "original_max_position_embeddings": 128,
    },
}

MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama tied": ("llama", {"tie_word_embeddings": True}),
    "llama attention and mlp bias": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama without groups": ("llama", {"num_key_value_heads": 4}),
    "qwen2": ("qwen2", {}),
    "qwen2 tied": ("qwen2", {"tie_word_embeddings": True}),
    "qwen3": ("qwen3", {}),
    "qwen3 tied": ("qwen3", {"tie_word_embeddings": True}),
    "qwen3 attention bias": ("qwen3", {"attention_bias": True}),
    "qwen3 wide heads": ("qwen3", {"head_dim": 32}),
    **{f"llama rope {kind}": ("llama", {"rope_parameters": rope}) for kind, rope in ROPES.items()},
    "qwen3 rope yarn": ("qwen3", {"rope_parameters": ROPES["yarn"]}),
    "qwen2 rope linear": ("qwen2", {"rope_parameters": ROPES["linear"]}),
}


def reserved(target: Target, positions: int = 400) -> SequenceKV:
    kv = pool_for(target).sequence()
    kv.reserve(positions)
    return kv


def feed(target: Target, kv: SequenceKV, ids: Sequence[int]) -> Tensor:
    """Logits [n, V] of all rows."""
    return target.forward([Rows(kv, torch.tensor(ids))]).logits


@pytest.mark.parametrize("name", MODELS)
def test_logits_equal_transformers(name: str, tmp_path: Path) -> None:
    family, config = MODELS[name]
    model = tiny_model(family, seed=3, scale=1.5, **config)
    target = load_tiny(save_model(model, tmp_path))
    ids = prompt(200)
    with torch.inference_mode():
        wanted = model(torch.tensor([ids])).logits[0]
    assert relative_error(feed(target, reserved(target), ids), wanted) <= TOLERANCE


def test_position_matters_to_the_comparison(tiny: dict[str, Target]) -> None:
    """The comparison above would see a wrong rotation: swapped ids give other logits at the end."""
    target, ids = tiny["llama"], prompt(50)
    one = feed(target, reserved(target), ids)[-1]
    other = feed(target, reserved(target), [*ids[:10][::-1], *ids[10:]])[-1]
    assert relative_error(one, other) > 100 * TOLERANCE


def test_default_model_equals_transformers(
    default_target: Target, default_reference: Any, default_tokenizer: Any
) -> None:
    ids = default_tokenizer.encode("def fib(n):\n    return n if n < 2 else fib(n - 1) + fib(n - 2)\n\nprint(fib(10))")
    with torch.inference_mode():
        wanted = default_reference(torch.tensor([ids])).logits[0]
    assert relative_error(feed(default_target, reserved(default_target), ids), wanted) <= TOLERANCE


@pytest.mark.parametrize("sizes", [(1,) * 24, (8, 8, 8), (17, 7), (23, 1), (2, 16, 6)])
def test_chunks_equal_the_whole(tiny: dict[str, Target], sizes: tuple[int, ...]) -> None:
    """Sizes lie on both sides of the row count at which attention changes its method."""
    target, ids = tiny["llama"], prompt(24)
    whole = feed(target, reserved(target), ids)
    kv, parts, at = reserved(target), [], 0
    for size in sizes:
        parts.append(feed(target, kv, ids[at : at + size]))
        at += size
    assert relative_error(torch.cat(parts), whole) <= TOLERANCE
    assert kv.length == 24


def test_a_ragged_batch_equals_single_sequences(tiny: dict[str, Target]) -> None:
    target = tiny["qwen2"]
    histories, news = [0, 30, 5, 64], [40, 1, 8, 17]
    pairs = [(prompt(h, i), prompt(n, 50 + i)) for i, (h, n) in enumerate(zip(histories, news, strict=True))]
    single, batch = [], []
    for history, new in pairs:
        alone, together = reserved(target), reserved(target)
        for kv in (alone, together):
            if history:
                feed(target, kv, history)
        single.append(feed(target, alone, new))
        batch.append(Rows(together, torch.tensor(new)))
    out = target.forward(batch)
    assert relative_error(out.logits, torch.cat(single)) <= TOLERANCE
    assert [rows.kv.length for rows in batch] == [h + n for h, n in zip(histories, news, strict=True)]


def test_after_truncate_nothing_of_the_cut_rows_is_left(target: Target) -> None:
    ids, other = prompt(40), prompt(20, 9)
    kv = reserved(target)
    feed(target, kv, ids)
    kv.truncate(25)
    found = feed(target, kv, other)
    assert relative_error(found, feed(target, reserved(target), [*ids[:25], *other])[25:]) <= TOLERANCE


def test_forks_go_their_own_way(target: Target) -> None:
    ids, left, right = prompt(30), prompt(12, 1), prompt(12, 2)
    kv = reserved(target)
    feed(target, kv, ids)
    fork = kv.fork()
    fork.reserve(100)
    for branch, new in ((kv, left), (fork, right)):
        found = feed(target, branch, new)
        assert relative_error(found, feed(target, reserved(target), [*ids, *new])[30:]) <= TOLERANCE


def test_only_wanted_rows_come_back(target: Target) -> None:
    ids = torch.tensor(prompt(20))
    everything = target.forward([Rows(reserved(target), ids)], tap_layers=(0, 2, 3))
    wanted = torch.tensor([4, 19])
    some = target.forward(
        [Rows(reserved(target), ids)], logit_rows=wanted, tap_layers=(0, 2, 3), tap_rows=torch.tensor([7])
    )
    assert everything.logits.shape == (20, target.spec.vocab_size)
    assert everything.taps.shape == (20, 3, target.spec.hidden_size)
    assert relative_error(some.logits, everything.logits[wanted]) <= 1e-6
    assert relative_error(some.taps, everything.taps[7:8]) <= 1e-6
    none = target.forward([Rows(reserved(target), ids)], logit_rows=wanted[:0])
    assert none.logits.shape == (0, target.spec.vocab_size)
    assert none.taps.shape[0] == 0


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_taps_are_layer_outputs_and_the_last_is_normed(family: str, tiny_folders: dict[str, Path]) -> None:
    """Layer id i is entry i + 1 of transformers' hidden_states, whose last entry has been through the final norm."""
    model = tiny_model(family)
    target, ids = load_tiny(tiny_folders[family]), prompt(33)
    with torch.inference_mode():
        states = model(torch.tensor([ids]), output_hidden_states=True).hidden_states
        raw = []
        hook = model.model.layers[-1].register_forward_hook(lambda _m, _i, out: raw.append(out))
        model(torch.tensor([ids]))
        hook.remove()
    layers = range(target.spec.num_layers)
    found = target.forward([Rows(reserved(target), torch.tensor(ids))], tap_layers=tuple(layers)).taps
    for layer in layers:
        assert relative_error(found[:, layer], states[layer + 1][0]) <= TOLERANCE
        assert relative_error(found[:, layer], states[layer][0]) > 0.01
    before_norm = raw[0][0] if isinstance(raw[0], tuple) else raw[0]
    assert relative_error(found[:, -1], before_norm.reshape(found[:, -1].shape)) > 0.01


def test_the_head_on_the_last_tap_gives_the_logits(target: Target) -> None:
    out = target.forward([Rows(reserved(target), torch.tensor(prompt(9)))], tap_layers=(3,))
    assert relative_error(target.head(out.taps[:, -1]), out.logits) <= 1e-6


def test_a_missing_weight_is_named(tiny_folders: dict[str, Path]) -> None:
    weights = dict(FolderWeights(tiny_folders["qwen3"]))
    del weights["model.layers.2.self_attn.q_norm.weight"]
    with pytest.raises(ModelError) as caught:
        Target(
            ModelSpec.from_folder(tiny_folders["qwen3"]),
            weights,
            precision=FP32,
            device=CPU,
            fingerprint="x",
            context_limit=64,
        )
    assert caught.value.param == "model.layers.2.self_attn.q_norm.weight"
