"""A drafter checkpoint in the official layout, written by hand from the format's description, and its forward pass
written out a second time, plainly: one row, one head, one step at a time."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

HIDDEN, INNER, HEADS, KV_HEADS, DIM, VOCAB, LAYERS, RANK, DEPTH, BLOCK = 32, 48, 4, 2, 16, 53, 8, 10, 2, 8
TAPS = [0, 1, 3, 6, 7]
MASK_ID = 50
EPS = 1e-6
THETA = 10000.0


def official_config(group_size: int = 1, *, bias: bool = False) -> dict[str, Any]:
    return {
        "architectures": ["DLiteDraftModel"],
        "model_type": "qwen3",
        "attention_bias": bias,
        "attention_dropout": 0.0,
        "block_size": BLOCK,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "head_dim": DIM,
        "hidden_act": "silu",
        "hidden_size": HIDDEN,
        "initializer_range": 0.02,
        "intermediate_size": INNER,
        "layer_types": ["full_attention"] * DEPTH,
        "max_position_embeddings": 40960,
        "num_attention_heads": HEADS,
        "num_hidden_layers": DEPTH,
        "num_key_value_heads": KV_HEADS,
        "num_target_layers": LAYERS,
        "rms_norm_eps": EPS,
        "rope_scaling": None,
        "rope_theta": THETA,
        "sliding_window": None,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "use_cache": True,
        "use_sliding_window": False,
        "vocab_size": VOCAB,
        "dlite_config": {
            "architecture_version": "dlite_v1",
            "model_role": "pivot_q_student",
            "anchor_group_size": group_size,
            "chs_num_layers": len(TAPS),
            "target_layer_ids": TAPS,
            "sequential_head": "rnn",
            "sequential_rank": RANK,
            "mask_token_id": MASK_ID,
        },
    }


def official_shapes(*, bias: bool = False) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {
        "norm.weight": (HIDDEN,),
        "context_norm.weight": (HIDDEN,),
        "layer_depth_embedding.weight": (LAYERS, HIDDEN),
        "sequential_head.prev_token_embedding.weight": (VOCAB, RANK),
        "sequential_head.output_proj.weight": (VOCAB, RANK),
        "sequential_head.state_proj.weight": (2 * RANK, 2 * RANK),
        "sequential_head.state_proj.bias": (2 * RANK,),
        "sequential_head.state_hidden_mlp.weight": (RANK, RANK + HIDDEN),
        "sequential_head.state_hidden_mlp.bias": (RANK,),
    }
    for i in range(DEPTH):
        at = f"layers.{i}."
        shapes |= {
            at + "self_attn.q_proj.weight": (HEADS * DIM, HIDDEN),
            at + "self_attn.k_proj.weight": (KV_HEADS * DIM, HIDDEN),
            at + "self_attn.v_proj.weight": (KV_HEADS * DIM, HIDDEN),
            at + "self_attn.o_proj.weight": (HIDDEN, HEADS * DIM),
            at + "self_attn.q_norm.weight": (DIM,),
            at + "self_attn.k_norm.weight": (DIM,),
            at + "mlp.gate_proj.weight": (INNER, HIDDEN),
            at + "mlp.up_proj.weight": (INNER, HIDDEN),
            at + "mlp.down_proj.weight": (HIDDEN, INNER),
            at + "input_layernorm.weight": (HIDDEN,),
            at + "post_attention_layernorm.weight": (HIDDEN,),
        }
        if bias:
            shapes |= {
                at + "self_attn.q_proj.bias": (HEADS * DIM,),
                at + "self_attn.k_proj.bias": (KV_HEADS * DIM,),
                at + "self_attn.v_proj.bias": (KV_HEADS * DIM,),
                at + "self_attn.o_proj.bias": (HIDDEN,),
            }
    return shapes


def official_tensors(*, bias: bool = False, seed: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, shape in official_shapes(bias=bias).items():
        noise = torch.randn(shape, generator=generator)
        if "norm" in name:
            noise = 1 + 0.3 * noise
        elif "embedding" not in name and len(shape) == 2:
            noise = noise * shape[1] ** -0.5
        tensors[name] = noise.to(torch.bfloat16)
    return tensors


def write_checkpoint(folder: Path, config: dict[str, Any], tensors: dict[str, Tensor]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors")
    return folder


def _norm(x: Tensor, weight: Tensor) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean() + EPS) * weight


def _turned(x: Tensor, position: int) -> Tensor:
    out = x.clone()
    half = DIM // 2
    for i in range(half):
        angle = position * THETA ** (-2 * i / DIM)
        out[i] = x[i] * math.cos(angle) - x[i + half] * math.sin(angle)
        out[i + half] = x[i + half] * math.cos(angle) + x[i] * math.sin(angle)
    return out


def _linear(w: dict[str, Tensor], name: str, x: Tensor) -> Tensor:
    return w[f"{name}.weight"] @ x + w.get(f"{name}.bias", torch.zeros(()))


def reference_draft(
    tensors: dict[str, Tensor], group_size: int, features: Tensor, tokens: Sequence[int], embedding: Tensor
) -> tuple[list[int], Tensor]:
    """Greedy drafts and their logits [7, V] for one row: features [S, H], the last real ids, anchor last."""
    w = {name: tensor.double() for name, tensor in tensors.items()}
    embedding = embedding.double()
    real = len(tokens)
    context = [
        _norm(feature.double() + w["layer_depth_embedding.weight"][layer], w["context_norm.weight"])
        for feature, layer in zip(features, TAPS, strict=True)
    ]
    xs = [embedding[token] for token in tokens] + [embedding[MASK_ID]] * (BLOCK - 1)
    positions = [max(real - 2, 0)] * len(context) + list(range(len(xs)))
    for i in range(DEPTH):
        at = f"layers.{i}."
        normed = [_norm(x, w[at + "input_layernorm.weight"]) for x in xs]
        keys, values = [], []
        for source, position in zip([*context, *normed], positions, strict=True):
            k = _linear(w, at + "self_attn.k_proj", source).view(KV_HEADS, DIM)
            keys.append([_turned(_norm(head, w[at + "self_attn.k_norm.weight"]), position) for head in k])
            values.append(_linear(w, at + "self_attn.v_proj", source).view(KV_HEADS, DIM))
        after = []
        for x, source, position in zip(xs, normed, range(len(xs)), strict=True):
            q = _linear(w, at + "self_attn.q_proj", source).view(HEADS, DIM)
            heads = []
            for h in range(HEADS):
                query = _turned(_norm(q[h], w[at + "self_attn.q_norm.weight"]), position)
                group = h * KV_HEADS // HEADS
                scores = torch.stack([query @ key[group] for key in keys]) / math.sqrt(DIM)
                heads.append((scores.softmax(0)[:, None] * torch.stack([v[group] for v in values])).sum(0))
            x = x + _linear(w, at + "self_attn.o_proj", torch.cat(heads))
            y = _norm(x, w[at + "post_attention_layernorm.weight"])
            gate, up = _linear(w, at + "mlp.gate_proj", y), _linear(w, at + "mlp.up_proj", y)
            after.append(x + _linear(w, at + "mlp.down_proj", gate * torch.sigmoid(gate) * up))
        xs = after
    hidden = [_norm(x, w["norm.weight"]) for x in xs[real:]]
    state = torch.zeros(RANK, dtype=torch.float64)

    def advanced(state: Tensor, token: int) -> Tensor:
        embedded = w["sequential_head.prev_token_embedding.weight"][token]
        both = _linear(w, "sequential_head.state_proj", torch.cat((state, embedded)))
        gate = torch.sigmoid(both[:RANK])
        return gate * state + (1 - gate) * torch.tanh(both[RANK:])

    if group_size > 1 and real > 1:
        state = advanced(state, tokens[-2])
    previous, drafts, logits = tokens[-1], [], []
    for out in hidden:
        state = advanced(state, previous)
        mixed = _linear(w, "sequential_head.state_hidden_mlp", torch.cat((state, out)))
        logits.append(w["sequential_head.output_proj.weight"] @ mixed)
        previous = int(logits[-1].argmax())
        drafts.append(previous)
    return drafts, torch.stack(logits)
