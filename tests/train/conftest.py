"""A tiny random target and caches made with it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from dlite_agent.model.drafter import Drafter
from dlite_agent.model.drafter_config import DrafterConfig, target_layer_ids
from dlite_agent.model.linear import Precision
from dlite_agent.model.spec import ModelSpec
from dlite_agent.model.target import Target
from dlite_agent.train.collect import Collector, build_cache
from dlite_agent.train.data import Request
from dlite_agent.train.settings import Optimizer, Settings, Shape
from dlite_agent.train.teacher import Teacher
from dlite_agent.train.trainer import TargetTables

CONFIG = {
    "model_type": "llama",
    "num_hidden_layers": 4,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 96,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 256,
    "tie_word_embeddings": True,
    "eos_token_id": 2,
}
TAPS = target_layer_ids(4, 3)


@pytest.fixture(scope="session")
def spec() -> ModelSpec:
    return ModelSpec.from_config(CONFIG)


@pytest.fixture(scope="session")
def weights(spec: ModelSpec) -> dict[str, torch.Tensor]:
    return tiny_weights(spec.vocab_size)


def tiny_weights(vocab_size: int) -> dict[str, torch.Tensor]:
    """Random weights of a model with CONFIG, but for the size of its vocabulary."""
    spec = ModelSpec.from_config({**CONFIG, "vocab_size": vocab_size})
    rng = torch.Generator().manual_seed(5)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=rng).mul(2.0 / shape[-1] ** 0.5)

    hidden, inner = spec.hidden_size, spec.intermediate_size
    tensors = {"model.embed_tokens.weight": random(spec.vocab_size, hidden), "model.norm.weight": torch.ones(hidden)}
    for i in range(spec.num_layers):
        at = f"model.layers.{i}."
        tensors |= {
            f"{at}input_layernorm.weight": torch.ones(hidden),
            f"{at}post_attention_layernorm.weight": torch.ones(hidden),
            f"{at}self_attn.q_proj.weight": random(spec.q_size, hidden),
            f"{at}self_attn.k_proj.weight": random(spec.kv_size, hidden),
            f"{at}self_attn.v_proj.weight": random(spec.kv_size, hidden),
            f"{at}self_attn.o_proj.weight": random(hidden, spec.q_size),
            f"{at}mlp.gate_proj.weight": random(inner, hidden),
            f"{at}mlp.up_proj.weight": random(inner, hidden),
            f"{at}mlp.down_proj.weight": random(hidden, inner),
        }
    return tensors


@pytest.fixture(scope="session")
def target(spec: ModelSpec, weights: dict[str, torch.Tensor]) -> Target:
    return Target(
        spec,
        weights,
        precision=Precision("fp32", "plain"),
        device=torch.device("cpu"),
        fingerprint="tiny",
        context_limit=256,
    )


@pytest.fixture(scope="session")
def tables(spec: ModelSpec, weights: dict[str, torch.Tensor]) -> TargetTables:
    embedding = weights["model.embed_tokens.weight"]
    return TargetTables(spec, "tiny", embedding, embedding)


def encode(messages: list[dict[str, str]]) -> list[int]:
    """Ids 3.. of the letters of all contents."""
    return [3 + ord(letter) % 90 for message in messages for letter in message["content"]]


def requests(count: int, *, name: str, temperature: float | None = None) -> list[Request]:
    """Requests of different lengths from as many sources, greedy and sampled in turn."""
    return [
        Request(
            id=f"{i:04x}",
            split="train",
            source=f"{name}-{i}",
            kind=("code", "prose")[i % 2],
            temperature=temperature if temperature is not None else (0.0, 1.0)[i % 2],
            messages=[{"role": "user", "content": f"{name} {i} " + "abcdefgh"[: 1 + i % 8] * 2}],
        )
        for i in range(count)
    ]


def collector(target: Target, *, slots: int = 4, max_new: int = 24) -> Collector:
    return Collector(target, encode, tap_layers=TAPS, eos=target.spec.eos_ids, slots=slots, max_new=max_new)


@pytest.fixture(scope="session")
def train_cache(target: Target, tmp_path_factory: pytest.TempPathFactory) -> Path:
    cache = tmp_path_factory.mktemp("train")
    build_cache(collector(target), requests(24, name="train"), cache)
    return cache


@pytest.fixture(scope="session")
def held_out_cache(target: Target, tmp_path_factory: pytest.TempPathFactory) -> Path:
    cache = tmp_path_factory.mktemp("held_out")
    build_cache(collector(target), requests(6, name="held", temperature=0.0), cache)
    return cache


def _config(spec: ModelSpec, group: int, taps: int, vocab: int | None = None) -> DrafterConfig:
    return DrafterConfig.for_target(
        spec,
        mask_token_id=1,
        depth=1,
        taps=taps,
        rank=8,
        anchor_group_size=group,
        block_size=5,
        draft_vocab_size=vocab,
    )


def drafter(spec: ModelSpec, *, group: int = 1, taps: int = 3, vocab: torch.Tensor | None = None) -> Drafter:
    """An untrained drafter with K = 4."""
    made = Drafter(_config(spec, group, taps, None if vocab is None else len(vocab)))
    made.draft_vocab_ids = vocab
    return made


def teacher(spec: ModelSpec, *, window: int) -> Teacher:
    """An untrained teacher with K = 4."""
    return Teacher(_config(spec, 1, 3), window)


def run_settings(train: Path, held_out: Path | None = None, **changes: object) -> Settings:
    """A short run on a tiny cache."""
    base = Settings(
        target="tiny",
        cache=str(train),
        held_out=str(held_out) if held_out else "",
        mask_token_id=1,
        steps=12,
        batch=16,
        evaluate_steps=6,
        shape=Shape(depth=1, taps=3, rank=8, anchor_group_size=1, block_size=5, draft_vocab=64),
        optimizer=Optimizer(lr=3e-3, warmup=3),
    )
    return replace(base, **changes)  # type: ignore[arg-type]
