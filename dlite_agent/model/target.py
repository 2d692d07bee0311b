"""The target: a dense decoder executed on ragged batches.

One forward takes rows of several sequences together (prompt chunks and verify windows alike), returns logits only for
wanted rows and hidden states only for tapped layers at wanted rows. The tap of the last layer is taken after the final
norm, as DLite checkpoints expect: it is the last entry of Hugging Face's `hidden_states`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from dlite_agent.errors import ModelError
from dlite_agent.model.attention import KV, Attend, Attention, SdpaAttention, Span
from dlite_agent.model.flash import PAGE, FlashAttention, PagedPlan
from dlite_agent.model.fused import MAX_ROWS, PROMPT_ROWS, FusedForward, FusedLayers, LayerParts, Widths
from dlite_agent.model.graphs import DecodeGraphs
from dlite_agent.model.linear import Matmul, Precision
from dlite_agent.model.native import NativeLinear
from dlite_agent.model.rope import RotaryTable, rotate
from dlite_agent.model.spec import ModelSpec

WINDOW_SLACK = 64
"""Positions past the context limit that a verify window may touch."""


@dataclass(frozen=True)
class Rows:
    """New token ids [n] (int64, on the device) to append to one sequence's KV; space must have been reserved."""

    kv: KV
    ids: Tensor


@dataclass(frozen=True)
class Forward:
    """logits [wanted logit rows, vocab] and taps [wanted tap rows, tapped layers, hidden], in the activation dtype."""

    logits: Tensor
    taps: Tensor


@dataclass(frozen=True)
class _Layer:
    input_norm: Tensor
    qkv: Matmul
    q_norm: Tensor | None
    k_norm: Tensor | None
    o: Matmul
    post_norm: Tensor
    gate_up: Matmul
    down: Matmul


def passes(spans: Sequence[Span], alone: int = MAX_ROWS) -> list[list[Span]]:
    """Sequences in runs of at most MAX_ROWS rows; one that has more than `alone` is a run of its own."""
    runs: list[list[Span]] = []
    rows = MAX_ROWS
    for span in spans:
        if rows + span.count > MAX_ROWS or span.count > alone:
            runs.append([])
            rows = 0
        runs[-1].append(span)
        rows += MAX_ROWS if span.count > alone else span.count
    return runs


def _joined(parts: Sequence[Forward]) -> Forward:
    return Forward(torch.cat([part.logits for part in parts]), torch.cat([part.taps for part in parts]))


class Target:
    """Executor of one dense decoder (Llama, Qwen2, Qwen3) on one device.

    Args:
        weights: Hugging Face names -> tensors; read once, packed for `precision`, and not kept where a kernel packs.
        context_limit: ids a session may hold.
    """

    def __init__(
        self,
        spec: ModelSpec,
        weights: Mapping[str, Tensor],
        *,
        precision: Precision,
        device: torch.device,
        fingerprint: str,
        context_limit: int,
    ) -> None:
        self.spec = spec
        self.precision = precision
        self.device = device
        self.dtype = precision.dtype
        self.fingerprint = fingerprint
        self.context_limit = context_limit
        self.attention: Attention = SdpaAttention(spec.num_heads, spec.num_kv_heads, spec.head_dim)
        self._graphs: DecodeGraphs | None = None
        self._rotary = RotaryTable(spec.rope, spec.head_dim, size=self.max_positions, device=device, dtype=self.dtype)
        self._weights = weights
        self.embedding = self._tensor("model.embed_tokens.weight")
        self._layers = [self._load_layer(f"model.layers.{i}.") for i in range(spec.num_layers)]
        self._final_norm = self._tensor("model.norm.weight")
        self._head = self._linear("model.embed_tokens" if spec.tied_head else "lm_head")
        del self._weights
        self._fused = self._fuse()

    def _fuse(self) -> FusedForward | None:
        """The native forward for small batches, where the linears are native ones and the widths suit it."""
        head, widths = self._head, Widths.of(self.spec)
        if not isinstance(head, NativeLinear) or not widths.suit:
            return None
        parts = [LayerParts(**vars(layer)) for layer in self._layers]
        layers = FusedLayers(widths, parts, final_norm=self._final_norm, rotary=self._rotary, head=head)
        return FusedForward(layers, self.spec.vocab_size)

    @property
    def max_positions(self) -> int:
        """Positions a sequence may touch: the context and a verify window past its end."""
        return self.context_limit + WINDOW_SLACK

    @property
    def weight_bytes(self) -> int | None:
        """Bytes of packed weights that every step reads; None where the native kernels do not serve."""
        return None if self._fused is None else self._fused.nbytes

    def _tensor(self, name: str) -> Tensor:
        try:
            return self._weights[name].to(self.device, self.dtype)
        except KeyError:
            raise ModelError(f"the model's weights lack {name}", param=name) from None

    def _linear(self, *names: str) -> Matmul:
        """One product for several weights with the same input, stacked."""
        stacked = torch.cat([self._tensor(f"{name}.weight") for name in names])
        bias = None
        if f"{names[0]}.bias" in self._weights:
            bias = torch.cat([self._tensor(f"{name}.bias") for name in names])
        return self.precision.linear(stacked, bias)

    def _load_layer(self, at: str) -> _Layer:
        qk_norm = self.spec.qk_norm
        attention, mlp = at + "self_attn.", at + "mlp."
        return _Layer(
            input_norm=self._tensor(at + "input_layernorm.weight"),
            qkv=self._linear(attention + "q_proj", attention + "k_proj", attention + "v_proj"),
            q_norm=self._tensor(attention + "q_norm.weight") if qk_norm else None,
            k_norm=self._tensor(attention + "k_norm.weight") if qk_norm else None,
            o=self._linear(attention + "o_proj"),
            post_norm=self._tensor(at + "post_attention_layernorm.weight"),
            gate_up=self._linear(mlp + "gate_proj", mlp + "up_proj"),
            down=self._linear(mlp + "down_proj"),
        )

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return F.rms_norm(x, (x.shape[-1],), weight, self.spec.norm_eps)

    def head(self, hidden: Tensor) -> Tensor:
        """Logits [n, vocab] of final-norm hidden states [n, hidden]."""
        return self._head(hidden)

    @torch.inference_mode()
    def forward(
        self,
        batch: Sequence[Rows],
        *,
        logit_rows: Tensor | None = None,
        tap_layers: Sequence[int] = (),
        tap_rows: Tensor | None = None,
    ) -> Forward:
        """Append each sequence's rows to its KV.

        Args:
            logit_rows: indices into the concatenated rows that want logits (int64, ascending); None for all.
            tap_layers: ascending layer ids whose outputs are returned at `tap_rows` (None for all rows).
        """
        spans, first = [], 0
        for rows in batch:
            spans.append(Span(rows.kv, first, rows.ids.shape[0], rows.kv.length))
            first += rows.ids.shape[0]
        ids = torch.cat([rows.ids for rows in batch]) if len(batch) > 1 else batch[0].ids
        positions = torch.cat(
            [torch.arange(s.start, s.start + s.count, device=self.device, dtype=torch.int64) for s in spans]
        )
        if self._graphs is not None and logit_rows is None and tap_rows is None and self._graphs.fits(spans):
            out = Forward(*self._graphs.run(spans, ids))
        elif self._fused is not None and (logit_rows is tap_rows or not tap_layers):
            alone = PROMPT_ROWS if self._fused.prompts else MAX_ROWS
            parts = [self._pass(part, ids, positions, logit_rows, tap_layers) for part in passes(spans, alone)]
            out = parts[0] if len(parts) == 1 else _joined(parts)
        else:
            attend = self.attention.plan(spans, device=self.device, dtype=self.dtype)
            out = self._run(ids, positions, attend, logit_rows, tap_layers, tap_rows)
        for span in spans:
            span.kv.advance(span.count)
        return out

    def _pass(
        self, spans: Sequence[Span], ids: Tensor, positions: Tensor, rows: Tensor | None, tap_layers: Sequence[int]
    ) -> Forward:
        """The part of a forward that is these spans; `rows` are indices into all of its rows."""
        first, end = spans[0].first, spans[-1].first + spans[-1].count
        wanted = rows
        if (first, end) != (0, ids.shape[0]):
            spans = [replace(span, first=span.first - first) for span in spans]
            ids, positions = ids[first:end], positions[first:end]
            wanted = None if rows is None else rows[(rows >= first) & (rows < end)] - first
        assert self._fused is not None
        if end - first <= MAX_ROWS or self._fused.prompts:
            return Forward(*self._fused.run(spans, self.embedding[ids], wanted, tap_layers))
        attend = self.attention.plan(spans, device=self.device, dtype=self.dtype)
        return self._run(ids, positions, attend, wanted, tap_layers, wanted)

    def use_graphs(self, flash: FlashAttention, store: Tensor, *, scratch_page: int, tap_layers: Sequence[int]) -> None:
        """Replay CUDA graphs for decode shapes from now on; every forward must then ask for these taps."""

        def body(ids: Tensor, positions: Tensor, plan: PagedPlan) -> tuple[Tensor, ...]:
            out = self._run(ids, positions, flash.attend(store, plan), None, tap_layers, None)
            return out.logits, out.taps

        pages = -(-self.max_positions // PAGE)
        self._graphs = DecodeGraphs(body, device=self.device, scratch_page=scratch_page, max_pages=pages)

    def _run(
        self,
        ids: Tensor,
        positions: Tensor,
        attend: Attend,
        logit_rows: Tensor | None,
        tap_layers: Sequence[int],
        tap_rows: Tensor | None,
    ) -> Forward:
        hidden, tapped = self._decoder(ids, positions, attend, tap_layers, tap_rows)
        logits = self._head(hidden if logit_rows is None else hidden[logit_rows])
        shape = (0, 0, self.spec.hidden_size)
        return Forward(logits, torch.stack(tapped, dim=1) if tapped else hidden.new_empty(shape))

    def _decoder(
        self, ids: Tensor, positions: Tensor, attend: Attend, tap_layers: Sequence[int], tap_rows: Tensor | None
    ) -> tuple[Tensor, list[Tensor]]:
        spec = self.spec
        q_heads, kv_heads = spec.num_heads, spec.num_kv_heads
        cos, sin = self._rotary.at(positions)
        x = self.embedding[ids]
        last = spec.num_layers - 1
        tapped: list[Tensor] = []
        for i, layer in enumerate(self._layers):
            heads = layer.qkv(self._norm(x, layer.input_norm)).view(-1, q_heads + 2 * kv_heads, spec.head_dim)
            qk, v = heads[:, : q_heads + kv_heads], heads[:, q_heads + kv_heads :]
            if layer.q_norm is not None and layer.k_norm is not None:
                qk = torch.cat(
                    (self._norm(qk[:, :q_heads], layer.q_norm), self._norm(qk[:, q_heads:], layer.k_norm)), dim=1
                )
            qk = rotate(qk, cos, sin)
            x = x + layer.o(attend(i, qk[:, :q_heads], qk[:, q_heads:], v))
            gate, up = layer.gate_up(self._norm(x, layer.post_norm)).chunk(2, dim=-1)
            x = x + layer.down(F.silu(gate) * up)
            if i in tap_layers and i != last:
                tapped.append(x if tap_rows is None else x[tap_rows])
        x = self._norm(x, self._final_norm)
        if last in tap_layers:
            tapped.append(x if tap_rows is None else x[tap_rows])
        return x, tapped
