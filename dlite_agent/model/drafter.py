"""The DLite drafter (arXiv 2610.23787): a parallel backbone and a low-rank recurrent head, in the official weights.

The backbone reads S tapped hidden states of the target at the boundary, the last G real tokens and K placeholders, and
sees nothing else: no history, no KV cache, so its cost and memory do not depend on the context. The head then restores
the order inside the block, one cheap step a token. Training and serving run this same module; `pack` only swaps the
linears for measured kernels.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import torch
import torch.nn.functional as F
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from dlite_agent.errors import CheckpointError
from dlite_agent.model.drafter_config import DrafterConfig
from dlite_agent.model.fused import CHUNK, FusedDraft, FusedLayers, HeadParts, LayerParts, Widths
from dlite_agent.model.linear import Matmul, Precision, plain
from dlite_agent.model.native import NativeLinear
from dlite_agent.model.packing import PANEL
from dlite_agent.model.rope import RotaryTable, rotate

Choose = Callable[[int, Tensor], Tensor]
"""(step, logits [N, head_vocab]) -> what was chosen for each row [N]."""


class Attention(nn.Module):
    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        hidden, head, bias = config.hidden_size, config.head_dim, config.attention_bias
        self.q_proj = nn.Linear(hidden, config.num_heads * head, bias=bias)
        self.k_proj = nn.Linear(hidden, config.num_kv_heads * head, bias=bias)
        self.v_proj = nn.Linear(hidden, config.num_kv_heads * head, bias=bias)
        self.o_proj = nn.Linear(config.num_heads * head, hidden, bias=bias)
        self.q_norm = nn.RMSNorm(head, eps=config.norm_eps)
        self.k_norm = nn.RMSNorm(head, eps=config.norm_eps)


class MLP(nn.Module):
    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        hidden, inner = config.hidden_size, config.intermediate_size
        self.gate_proj = nn.Linear(hidden, inner, bias=False)
        self.up_proj = nn.Linear(hidden, inner, bias=False)
        self.down_proj = nn.Linear(inner, hidden, bias=False)


class Layer(nn.Module):
    """One block. Context vectors are keys and values only: they are neither updated nor normalised again."""

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.self_attn = Attention(config)
        self.mlp = MLP(config)
        self.input_layernorm = nn.RMSNorm(config.hidden_size, eps=config.norm_eps)
        self.post_attention_layernorm = nn.RMSNorm(config.hidden_size, eps=config.norm_eps)
        self._heads = (config.num_heads, config.num_kv_heads, config.head_dim)
        self._packed: dict[str, Matmul] | None = None

    def _stacked(self) -> dict[str, tuple[Tensor, Tensor | None]]:
        attention, mlp = self.self_attn, self.mlp
        projections = (attention.q_proj, attention.k_proj, attention.v_proj)
        qkv_bias = None if attention.q_proj.bias is None else torch.cat([linear.bias for linear in projections])
        return {
            "qkv": (torch.cat([linear.weight for linear in projections]), qkv_bias),
            "o": (attention.o_proj.weight, attention.o_proj.bias),
            "gate_up": (torch.cat((mlp.gate_proj.weight, mlp.up_proj.weight)), None),
            "down": (mlp.down_proj.weight, None),
        }

    def pack(self, precision: Precision) -> None:
        self._packed = {name: precision.linear(w, b) for name, (w, b) in self._stacked().items()}

    def native(self) -> LayerParts:
        """The parts of a layer that is packed with native linears."""
        ops, attention = cast("dict[str, NativeLinear]", self._packed), self.self_attn
        return LayerParts(
            ops["qkv"],
            ops["o"],
            ops["gate_up"],
            ops["down"],
            self.input_layernorm.weight,
            self.post_attention_layernorm.weight,
            attention.q_norm.weight,
            attention.k_norm.weight,
        )

    def forward(self, x: Tensor, context: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """x [N, Q, H] and context [N, S, H], rotated by cos and sin [S + Q, 1, head_dim] -> [N, Q, H]."""
        ops = self._packed or {name: plain(w, b) for name, (w, b) in self._stacked().items()}
        heads, kv_heads, head_dim = self._heads
        rows, taps = x.shape[0], context.shape[1]
        joined = torch.cat((context, self.input_layernorm(x)), dim=1)
        qkv = _rowwise(ops["qkv"], joined).view(rows, -1, heads + 2 * kv_heads, head_dim)
        attention = self.self_attn
        q = rotate(attention.q_norm(qkv[:, taps:, :heads]), cos[taps:], sin[taps:])
        k = rotate(attention.k_norm(qkv[:, :, heads : heads + kv_heads]), cos, sin)
        v = qkv[:, :, heads + kv_heads :]
        out = F.scaled_dot_product_attention(
            q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), enable_gqa=heads != kv_heads
        )
        x = x + _rowwise(ops["o"], out.transpose(1, 2).flatten(2))
        gate, up = _rowwise(ops["gate_up"], self.post_attention_layernorm(x)).chunk(2, dim=-1)
        return x + _rowwise(ops["down"], F.silu(gate) * up)


class SequentialHead(nn.Module):
    """Gated recurrence of rank r over the block: state' = sig(g) * state + (1 - sig(g)) * tanh(c)."""

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        rank = config.rank
        self.prev_token_embedding = nn.Embedding(config.vocab_size, rank)
        self.output_proj = nn.Linear(rank, config.head_vocab, bias=False)
        self.state_proj = nn.Linear(2 * rank, 2 * rank)
        self.state_hidden_mlp = nn.Linear(rank + config.hidden_size, rank)
        self._rank = rank
        self._packed: dict[str, Matmul] | None = None

    def pack(self, precision: Precision) -> None:
        mlp = self.state_hidden_mlp
        self._packed = {
            "output": precision.linear(self.output_proj.weight),
            "state": precision.linear(self.state_proj.weight, self.state_proj.bias),
            "from_state": precision.linear(mlp.weight[:, : self._rank]),
            "from_hidden": precision.linear(mlp.weight[:, self._rank :], mlp.bias),
        }

    def native(self, vocab: Tensor | None) -> HeadParts:
        """The parts of a head that is packed with native linears; `vocab` maps its output rows to ids."""
        ops = cast("dict[str, NativeLinear]", self._packed)
        table = self.prev_token_embedding.weight
        return HeadParts(ops["state"], ops["from_state"], ops["from_hidden"], ops["output"], table, vocab)

    def _ops(self) -> dict[str, Matmul]:
        if self._packed is not None:
            return self._packed
        mlp = self.state_hidden_mlp
        return {
            "output": plain(self.output_proj.weight, None),
            "state": plain(self.state_proj.weight, self.state_proj.bias),
            "from_state": plain(mlp.weight[:, : self._rank], None),
            "from_hidden": plain(mlp.weight[:, self._rank :], mlp.bias),
        }

    def _advance(self, ops: dict[str, Matmul], state: Tensor, embedded: Tensor) -> Tensor:
        gate, candidate = ops["state"](torch.cat((state, embedded), dim=-1)).chunk(2, dim=-1)
        return torch.lerp(torch.tanh(candidate), state, torch.sigmoid(gate))

    def _start(self, ops: dict[str, Matmul], rows: Tensor, seed: Tensor | None) -> Tensor:
        """Zero state, or for G > 1 the state after one step on the token before the anchor."""
        state = rows.new_zeros(rows.shape[0], self._rank)
        return state if seed is None else self._advance(ops, state, self.prev_token_embedding(seed))

    def forward(self, hidden: Tensor, previous: Tensor, seed: Tensor | None) -> Tensor:
        """Teacher-forced logits [N, K, head_vocab] of hidden [N, K, H] after `previous` ids [N, K], anchor first."""
        ops = self._ops()
        state = self._start(ops, hidden, seed)
        embedded = self.prev_token_embedding(previous)  # one lookup: each would have a gradient of the whole table
        states = []
        for k in range(previous.shape[1]):
            state = self._advance(ops, state, embedded[:, k])
            states.append(state)
        mixed = _rowwise(ops["from_state"], torch.stack(states, dim=1)) + _rowwise(ops["from_hidden"], hidden)
        return _rowwise(ops["output"], mixed)

    def draft(self, hidden: Tensor, anchor: Tensor, seed: Tensor | None, choose: Choose) -> Tensor:
        """Token ids [N, K] drafted one after another from hidden [N, K, H]; `choose` returns token ids [N]."""
        ops = self._ops()
        state = self._start(ops, hidden, seed)
        from_hidden = _rowwise(ops["from_hidden"], hidden)
        ids, previous = [], anchor
        for k in range(hidden.shape[1]):
            state = self._advance(ops, state, self.prev_token_embedding(previous))
            previous = choose(k, ops["output"](ops["from_state"](state) + from_hidden[:, k]))
            ids.append(previous)
        return torch.stack(ids, dim=1)


class Drafter(nn.Module):
    """A DLite drafter for one target; parameters carry the official names.

    Attributes:
        card: what the checkpoint's card.json says (target fingerprint, tau, acceptance by position); may be empty.
    """

    draft_vocab_ids: Tensor | None
    tap_ids: Tensor

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.config = config
        self.card: dict[str, Any] = {}
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.depth))
        self.norm = nn.RMSNorm(config.hidden_size, eps=config.norm_eps)
        self.context_norm = nn.RMSNorm(config.hidden_size, eps=config.norm_eps)
        self.layer_depth_embedding = nn.Embedding(config.num_target_layers, config.hidden_size)
        self.sequential_head = SequentialHead(config)
        vocab = None if config.draft_vocab_size is None else torch.arange(config.draft_vocab_size)
        self.register_buffer("draft_vocab_ids", vocab)
        self.register_buffer("tap_ids", torch.tensor(config.target_layer_ids), persistent=False)
        self._angles: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}
        self._fused: FusedDraft | None = None

    def pack(self, precision: Precision, device: torch.device) -> None:
        """Make ready for serving: linears become measured kernels; the module cannot be trained or saved afterwards."""
        self.to(device, precision.dtype).requires_grad_(False).eval()
        self._angles.clear()
        for module in self.modules():
            if isinstance(module, Layer | SequentialHead):
                module.pack(precision)
        for module in self.modules():
            if isinstance(module, nn.Linear):
                module.weight = nn.Parameter(module.weight.new_empty(0), requires_grad=False)
        self._fused = self._fuse(precision)

    def _fuse(self, precision: Precision) -> FusedDraft | None:
        """The native draft, where the linears are native ones and the widths suit it."""
        config = self.config
        widths = Widths.of(config)
        queries = config.anchor_group_size + config.proposal_length
        few = len(config.target_layer_ids) + queries <= CHUNK
        if not precision.native or not widths.suit or config.rank % PANEL or not few:
            return None
        rotary = RotaryTable(
            config.rope, config.head_dim, size=queries, device=self.tap_ids.device, dtype=precision.dtype
        )
        parts = [layer.native() for layer in self.layers if isinstance(layer, Layer)]
        layers = FusedLayers(widths, parts, final_norm=self.norm.weight, rotary=rotary)
        return FusedDraft(layers, self.sequential_head.native(self.draft_vocab_ids))

    @property
    def weight_bytes(self) -> tuple[int, int] | None:
        """Bytes of packed weights that a draft reads once, and again for every token; None without native kernels."""
        return None if self._fused is None else self._fused.nbytes

    def placeholders(self, steps: int) -> int:
        """Placeholders with which to draft `steps` tokens: K, or no more than the steps for a drafter that was trained
        on short blocks as well (its card's `short_block`). That costs less, and the first drafts come out better."""
        return steps if self.card.get("short_block") else self.config.proposal_length

    def backbone(self, features: Tensor, tokens: Tensor, embedding: Tensor, placeholders: int | None = None) -> Tensor:
        """Hidden states [N, P, H] of P placeholders, K by default.

        Args:
            features: boundary features [N, S, H], the target's tapped states of the token before the anchor.
            tokens: the last real ids [N, g], anchor last; g is G, or less at the start of a sequence.
            embedding: the target's embedding table [V, H].
        """
        count = self.config.proposal_length if placeholders is None else placeholders
        context, x = self._inputs(features, tokens, embedding, count)
        cos, sin = self._local_angles(tokens.shape[1], count, x)
        for layer in self.layers:
            x = layer(x, context, cos, sin)
        hidden: Tensor = self.norm(x[:, -count:])
        return hidden

    def _inputs(self, features: Tensor, tokens: Tensor, embedding: Tensor, count: int) -> tuple[Tensor, Tensor]:
        """Context vectors [N, S, H] and query embeddings [N, g + count, H]."""
        context = self.context_norm(features + self.layer_depth_embedding(self.tap_ids))
        placeholders = embedding[self.config.mask_token_id].expand(features.shape[0], count, -1)
        return context, torch.cat((embedding[tokens], placeholders), dim=1).to(features.dtype)

    def _local_angles(self, real: int, placeholders: int, like: Tensor) -> tuple[Tensor, Tensor]:
        """cos and sin for S context vectors, all at the token before the anchor, then real tokens and placeholders."""
        if (real, placeholders) not in self._angles:
            config = self.config
            query = real + placeholders
            table = RotaryTable(config.rope, config.head_dim, size=query, device=like.device, dtype=like.dtype)
            positions = [max(real - 2, 0)] * len(config.target_layer_ids) + list(range(query))
            self._angles[real, placeholders] = table.at(torch.tensor(positions, device=like.device))
        return self._angles[real, placeholders]

    def _seed(self, tokens: Tensor) -> Tensor | None:
        """Ids before the anchor that seed the head's state, used by checkpoints with G > 1."""
        return tokens[:, -2] if self.config.anchor_group_size > 1 and tokens.shape[1] > 1 else None

    def forward(self, features: Tensor, tokens: Tensor, embedding: Tensor, following: Tensor) -> Tensor:
        """Teacher-forced logits [N, K, head_vocab]; `following` [N, K - 1] are the ids after the anchor."""
        hidden = self.backbone(features, tokens, embedding)
        previous = torch.cat((tokens[:, -1:], following), dim=1)
        logits: Tensor = self.sequential_head(hidden, previous, self._seed(tokens))
        return logits

    def draft(self, features: Tensor, tokens: Tensor, embedding: Tensor, steps: int, choose: Choose) -> Tensor:
        """Draft token ids [N, steps], steps <= K.

        `choose(step, logits [N, head_vocab])` returns rows of the head's vocabulary [N]; they are mapped to token ids.
        """
        vocab = self.draft_vocab_ids

        def choose_id(step: int, logits: Tensor) -> Tensor:
            rows = choose(step, logits)
            return rows if vocab is None else vocab[rows]

        hidden = self.backbone(features, tokens, embedding, self.placeholders(steps))[:, :steps]
        return self.sequential_head.draft(hidden, tokens[:, -1], self._seed(tokens), choose_id)

    def draft_greedy(self, features: Tensor, tokens: Tensor, embedding: Tensor, steps: int) -> tuple[Tensor, Tensor]:
        """`draft` with the likeliest token at every step; ids and the head's probabilities of them, both [N, steps]."""
        if self._fused is None:
            sure: list[Tensor] = []

            def choose(_: int, logits: Tensor) -> Tensor:
                most, rows = logits.float().softmax(-1).max(-1)
                sure.append(most)
                return rows

            return self.draft(features, tokens, embedding, steps, choose), torch.stack(sure, dim=1)
        context, x = self._inputs(features, tokens, embedding, self.placeholders(steps))
        return self._fused.run(x, context, tokens, self._seed(tokens), steps)

    def save(self, folder: Path, card: dict[str, Any]) -> None:
        """Write config.json, model.safetensors (bf16) and card.json."""
        folder.mkdir(parents=True, exist_ok=True)
        tensors = {
            name: (tensor.detach().to(torch.bfloat16) if tensor.is_floating_point() else tensor.to(torch.int32))
            for name, tensor in self.state_dict().items()
        }
        save_file({name: tensor.contiguous().cpu() for name, tensor in tensors.items()}, folder / "model.safetensors")
        (folder / "config.json").write_text(json.dumps(self.config.to_dict(), indent=1) + "\n")
        (folder / "card.json").write_text(json.dumps(card, indent=1) + "\n")

    @classmethod
    def load(cls, folder: Path, *, anchor_group_size: int | None = None) -> Drafter:
        """Read a checkpoint folder in the official layout, fp32, strictly.

        Raises:
            CheckpointError: a file, config field or tensor is missing, unknown or misshapen; `param` names it.
        """
        try:
            config = DrafterConfig.from_dict(
                json.loads((folder / "config.json").read_text()), anchor_group_size=anchor_group_size
            )
            tensors = load_file(folder / "model.safetensors")
        except (OSError, ValueError, SafetensorError) as error:
            raise CheckpointError(f"{folder} is not a readable drafter checkpoint: {error}", param="drafter") from error
        drafter = cls(config)
        wanted = drafter.state_dict()
        for name, tensor in wanted.items():
            if name not in tensors:
                raise CheckpointError(f"the checkpoint lacks the tensor {name}", param=name)
            found, asked = list(tensors[name].shape), list(tensor.shape)
            if found != asked:
                raise CheckpointError(f"{name} has shape {found}, the config asks for {asked}", param=name)
        if unknown := sorted(set(tensors) - set(wanted)):
            raise CheckpointError(f"the checkpoint has an unknown tensor {unknown[0]}", param=unknown[0])
        drafter.load_state_dict(
            {name: tensor.to(wanted[name].dtype) for name, tensor in tensors.items()}, strict=True, assign=True
        )
        card = folder / "card.json"
        drafter.card = json.loads(card.read_text()) if card.is_file() else {}
        return drafter


def _rowwise(op: Matmul, x: Tensor) -> Tensor:
    """Apply a kernel that wants a matrix to x [N, R, in]."""
    return op(x.flatten(0, 1)).view(*x.shape[:2], -1)
