"""Tiny targets and drafters, made fresh from a seed, and the few drives that several test files share.

A tiny target is random but predictable: its head answers token x with `successor(x)` unless the layers' contribution
overrules it, which happens every few tokens. A drafter that knows the successor therefore sees accepted runs of every
length, while KV, positions and features still decide what comes out.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from dlite_agent.config import Mode
from dlite_agent.decode.kv import KVPool
from dlite_agent.decode.rounds import Decoder, StepFigures
from dlite_agent.decode.sampling import SamplingParams
from dlite_agent.decode.state import DecodeState, Turn
from dlite_agent.decode.text import TextStream
from dlite_agent.model.drafter import Drafter
from dlite_agent.model.drafter_config import DrafterConfig
from dlite_agent.model.linear import Precision
from dlite_agent.model.spec import ModelSpec
from dlite_agent.model.target import Target
from dlite_agent.model.weights import FolderWeights, fingerprint

VOCAB = 97
CONTEXT = 512
MASK = 96
FP32 = Precision("fp32", "plain")
CPU = torch.device("cpu")
GREEDY = SamplingParams()
MODES: tuple[Mode, ...] = ("ar", "dlite")

_FAMILIES = {
    "llama": (LlamaConfig, LlamaForCausalLM),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM),
}


def successor(token: int | Tensor) -> Any:
    return (token * 3 + 7) % VOCAB


def tiny_model(family: str, *, seed: int = 0, scale: float = 1.0, **config: Any) -> Any:
    """A transformers model with every parameter random, norms and biases included."""
    config_class, model_class = _FAMILIES[family]
    shape: dict[str, Any] = {
        "vocab_size": VOCAB,
        "hidden_size": 48,
        "intermediate_size": 80,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": CONTEXT,
        "tie_word_embeddings": False,
        "eos_token_id": None,
        "bos_token_id": None,
        "pad_token_id": None,
    }
    model = model_class(config_class(**(shape | config))).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if "norm" in name:
                parameter.copy_(1 + 0.2 * noise)
            elif name.endswith("bias"):
                parameter.copy_(0.2 * noise)
            elif "embed_tokens" in name:
                parameter.copy_(noise)
            else:
                parameter.copy_(noise * scale * parameter.shape[1] ** -0.5)
        if not model.config.tie_word_embeddings:
            tokens = torch.arange(model.config.vocab_size)
            model.lm_head.weight[successor(tokens) % model.config.vocab_size] = model.model.embed_tokens.weight
    return model


def save_model(model: Any, folder: Path, **options: Any) -> Path:
    model.save_pretrained(folder, **options)
    return folder


def load_tiny(folder: Path, *, context_limit: int = CONTEXT, precision: Precision = FP32) -> Target:
    return Target(
        ModelSpec.from_folder(folder),
        FolderWeights(folder),
        precision=precision,
        device=CPU,
        fingerprint=fingerprint(folder),
        context_limit=context_limit,
    )


def pool_for(target: Target, *, positions: int = 20_000) -> KVPool:
    per_position = 2 * target.spec.num_layers * target.spec.kv_size * target.dtype.itemsize
    return KVPool(
        target.spec,
        dtype=target.dtype,
        device=target.device,
        budget_bytes=positions * per_position,
        max_positions=target.max_positions,
    )


def make_drafter(spec: ModelSpec, *, group_size: int = 1, seed: int = 0, **config: Any) -> Drafter:
    """A drafter with random weights, unpacked."""
    options: dict[str, Any] = {"mask_token_id": min(MASK, spec.vocab_size - 1), "depth": 2, "taps": 3, "rank": 16}
    drafter = Drafter(DrafterConfig.for_target(spec, anchor_group_size=group_size, **(options | config)))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in drafter.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if "norm" in name:
                parameter.copy_(1 + 0.2 * noise)
            elif "embedding" in name or name.endswith("bias"):
                parameter.copy_(0.3 * noise)
            else:
                parameter.copy_(noise * parameter.shape[-1] ** -0.5)
    return drafter


def successor_drafter(target: Target, *, group_size: int = 1, hidden_share: float = 0.7) -> Drafter:
    """A drafter, ready to serve, whose head expects `successor` and is swayed by its hidden states.

    The recurrence is opened (gate shut, candidate the previous token's embedding), so the head is a bigram table with
    the backbone's opinion added.
    """
    rank = 64
    drafter = make_drafter(target.spec, group_size=group_size, rank=rank, seed=7)
    head = drafter.sequential_head
    generator = torch.Generator().manual_seed(11)
    table = torch.randn(target.spec.vocab_size, rank, generator=generator)
    with torch.no_grad():
        head.prev_token_embedding.weight.copy_(table)
        head.state_proj.weight.zero_()
        head.state_proj.weight[rank:, rank:] = torch.eye(rank)
        head.state_proj.bias.zero_()
        head.state_proj.bias[:rank] = -30.0
        head.state_hidden_mlp.weight[:, :rank] = torch.eye(rank)
        head.state_hidden_mlp.weight[:, rank:] *= hidden_share
        head.state_hidden_mlp.bias.zero_()
        head.output_proj.weight[successor(torch.arange(target.spec.vocab_size))] = torch.tanh(table)
    drafter.pack(target.precision, target.device)
    return drafter


def run_turn(
    decoder: Decoder,
    state: DecodeState,
    new_ids: Sequence[int],
    params: SamplingParams = GREEDY,
    *,
    max_new_tokens: int = 40,
    mode: Mode = "dlite",
    verify_window: int | None = None,
    text: TextStream | None = None,
    ignore_eos: bool = False,
    prefill_chunk: int = 512,
) -> tuple[Turn, list[StepFigures]]:
    """One turn from begin to finish, alone."""
    turn = decoder.begin(
        state,
        new_ids,
        params,
        max_new_tokens=max_new_tokens,
        mode=mode,
        verify_window=verify_window,
        text=text,
        ignore_eos=ignore_eos,
    )
    steps = []
    while turn.finish is None:
        steps.append(decoder.step([turn], prefill_chunk=prefill_chunk))
    decoder.finish(turn)
    return turn, steps


def run_batch(decoder: Decoder, turns: Sequence[Turn], *, prefill_chunk: int = 512) -> list[StepFigures]:
    """All turns together until each has finished."""
    steps = []
    while running := [turn for turn in turns if turn.finish is None]:
        steps.append(decoder.step(running, prefill_chunk=prefill_chunk))
    for turn in turns:
        decoder.finish(turn)
    return steps


def advances(steps: Sequence[StepFigures], turn: Turn) -> list[int]:
    """Tokens a turn emitted in each of its rounds; the token of the prefill is not one."""
    return [row.advance for step in steps for row in step.rows if row.turn is turn and row.verified]


def prompt(length: int, seed: int = 0, vocab: int = VOCAB) -> list[int]:
    generator = torch.Generator().manual_seed(1000 + seed)
    ids: list[int] = torch.randint(0, vocab, (length,), generator=generator).tolist()
    return ids


def relative_error(found: Tensor, wanted: Tensor) -> float:
    """Largest difference over the largest wanted magnitude."""
    return float((found.float() - wanted.float()).abs().max() / wanted.float().abs().max())


def parameters_of(module: nn.Module) -> dict[str, list[int]]:
    return {name: list(parameter.shape) for name, parameter in module.named_parameters()}


def read_json(path: Path) -> Any:
    return json.loads(path.read_text())
