"""Whole layers in one native call: forwards of the target, and drafts.

Prompt chunks stay with torch where the processor has no tiles (AMX); both use the same packed weights and KV memory.
Everything here is fp32 but the weights, which may be fp16.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import POINTER, Structure, c_float, c_int64, c_void_p
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor

from dlite_agent.model.attention import ContiguousKV, Span
from dlite_agent.model.drafter_config import DrafterConfig
from dlite_agent.model.native import CLinear, NativeLinear, library
from dlite_agent.model.packing import BLOCK, PANEL
from dlite_agent.model.rope import RotaryTable
from dlite_agent.model.spec import ModelSpec

MAX_ROWS = 64
"""Rows that go through the layers together."""
PROMPT_ROWS = 32
"""Above it a sequence's rows are a prompt's on a processor with tiles: weights are unpacked once for all of them."""
CHUNK = 256
"""Positions that attention treats at once; `CHUNK` of native/decoder.h."""


def _integers(*names: str) -> tuple[tuple[str, type[c_int64]], ...]:
    return tuple((name, c_int64) for name in names)


def _pointers(*names: str) -> tuple[tuple[str, type[c_void_p]], ...]:
    return tuple((name, c_void_p) for name in names)


class _Layer(Structure):
    _fields_ = (
        *((name, CLinear) for name in ("qkv", "o", "gate_up", "down")),
        *_pointers("input_norm", "post_norm", "q_norm", "k_norm"),
    )


class _Model(Structure):
    _fields_ = (
        *_integers("layers", "hidden", "heads", "kv_heads", "head_dim", "inner"),
        ("eps", c_float),
        ("layer", POINTER(_Layer)),
        ("head", CLinear),
        *_pointers("final_norm", "cos", "sin"),
    )


class _Span(Structure):
    _fields_ = (
        *_pointers("keys", "values"),
        *_integers("layer_stride", "head_stride", "first", "count", "start", "context_at"),
    )


class _Batch(Structure):
    _fields_ = (
        *_integers("rows", "spans", "chunks"),
        ("span", POINTER(_Span)),
        *_pointers("x", "scratch"),
        *_integers("context_rows"),
        *_pointers("context"),
        *_integers("prompt"),
    )


class _Pass(Structure):
    _fields_ = (
        ("batch", _Batch),
        *_integers("taps", "wanted"),
        *_pointers("tap_layer", "wanted_row", "tapped", "logits"),
    )


class _Head(Structure):
    _fields_ = (
        *((name, CLinear) for name in ("state", "from_state", "from_hidden", "output")),
        *_integers("rank"),
        *_pointers("embedding", "vocab"),
    )


class _Draft(Structure):
    _fields_ = (
        ("batch", _Batch),
        *_integers("steps", "placeholders"),
        *_pointers("anchor", "seed", "ids", "sure", "head_scratch"),
    )


@dataclass(frozen=True)
class Widths:
    """Sizes of a decoder's layers."""

    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    inner: int
    eps: float

    @classmethod
    def of(cls, shape: ModelSpec | DrafterConfig) -> Widths:
        return cls(
            shape.hidden_size,
            shape.num_heads,
            shape.num_kv_heads,
            shape.head_dim,
            shape.intermediate_size,
            shape.norm_eps,
        )

    @property
    def suit(self) -> bool:
        """Whether the native layers can be of these sizes."""
        return not (self.head_dim % PANEL or self.hidden % PANEL or self.inner % PANEL)


@dataclass(frozen=True)
class LayerParts:
    """One layer's products and norms. q_norm and k_norm may be missing."""

    qkv: NativeLinear
    o: NativeLinear
    gate_up: NativeLinear
    down: NativeLinear
    input_norm: Tensor
    post_norm: Tensor
    q_norm: Tensor | None
    k_norm: Tensor | None

    @property
    def nbytes(self) -> int:
        """Bytes of the products' weights."""
        return self.qkv.nbytes + self.o.nbytes + self.gate_up.nbytes + self.down.nbytes

    def to_c(self) -> _Layer:
        norms = (self.input_norm, self.post_norm, self.q_norm, self.k_norm)
        pointers = (None if norm is None else norm.data_ptr() for norm in norms)
        return _Layer(self.qkv.c, self.o.c, self.gate_up.c, self.down.c, *pointers)


class _Scratch:
    """Memory that calls share; it grows to the largest of them."""

    def __init__(self) -> None:
        self._memory = torch.empty(0)

    def of(self, floats: int) -> int:
        if self._memory.shape[0] < floats:
            self._memory = torch.empty(floats)
        return self._memory.data_ptr()


class FusedLayers:
    """The layers of one decoder in native form, with its final norm, rotary table and, for a target, LM head."""

    def __init__(
        self,
        widths: Widths,
        layers: Sequence[LayerParts],
        *,
        final_norm: Tensor,
        rotary: RotaryTable,
        head: NativeLinear | None = None,
    ) -> None:
        lib = library()
        assert lib is not None
        self.lib = lib
        self.widths = widths
        self.nbytes = sum(layer.nbytes for layer in layers) + (0 if head is None else head.nbytes)
        self._kept = (layers, final_norm, rotary, head)  # C holds bare pointers into these
        self._model = _Model(
            len(layers),
            widths.hidden,
            widths.heads,
            widths.kv_heads,
            widths.head_dim,
            widths.inner,
            widths.eps,
            (_Layer * len(layers))(*(layer.to_c() for layer in layers)),
            CLinear() if head is None else head.c,
            *(tensor.data_ptr() for tensor in (final_norm, rotary.cos, rotary.sin)),
        )
        self.c = ctypes.byref(self._model)
        self._scratch = _Scratch()

    def batch(self, x: Tensor, spans: Sequence[_Span], chunks: int, context: Tensor | None, threads: int) -> _Batch:
        """A batch of embeddings x [N, hidden], which the layers overwrite; context [spans, S, hidden] for a drafter."""
        vectors = 0 if context is None else context.shape[0] * context.shape[1]
        size = self.lib.dlite_scratch(self.c, x.shape[0], vectors, chunks, threads)
        return _Batch(
            x.shape[0],
            len(spans),
            chunks,
            (_Span * len(spans))(*spans),
            x.data_ptr(),
            self._scratch.of(size),
            *((0, None) if context is None else (context.shape[1], context.data_ptr())),
        )


class FusedForward:
    """A target's forward for batches of at most MAX_ROWS rows, or for one prompt of any number.

    Attributes:
        prompts: whether more than PROMPT_ROWS rows of a sequence are a prompt here.
    """

    def __init__(self, layers: FusedLayers, vocab_size: int) -> None:
        self._layers = layers
        self._vocab_size = vocab_size
        self.nbytes = layers.nbytes
        self.prompts = not layers.widths.head_dim % BLOCK and bool(layers.lib.dlite_prompts())

    def run(
        self, spans: Sequence[Span], x: Tensor, rows: Tensor | None, tap_layers: Sequence[int]
    ) -> tuple[Tensor, Tensor]:
        """Logits [wanted, vocab] and taps [wanted, tapped layers, hidden] of embeddings x [N, hidden].

        Args:
            rows: the wanted rows (int64); None for all.
            tap_layers: ascending layer ids.
        """
        threads, hidden = torch.get_num_threads(), x.shape[1]
        wanted = torch.arange(x.shape[0]) if rows is None else rows.contiguous()
        taps = torch.tensor(tuple(tap_layers), dtype=torch.int64)
        logits = x.new_empty(wanted.shape[0], self._vocab_size)
        tapped = x.new_empty(wanted.shape[0], taps.shape[0], hidden)
        prompt = self.prompts and spans[0].count > PROMPT_ROWS
        chunks = 1 if prompt else max(-(-(span.start + span.count) // CHUNK) for span in spans)
        batch = self._layers.batch(x, [_span(span) for span in spans], chunks, None, threads)
        batch.prompt = prompt
        pointers = (tensor.data_ptr() for tensor in (taps, wanted, tapped, logits))
        native = _Pass(batch, taps.shape[0], wanted.shape[0], *pointers)
        self._layers.lib.dlite_forward(self._layers.c, ctypes.byref(native), threads)
        return logits, tapped


def _span(span: Span) -> _Span:
    keys, values = cast(ContiguousKV, span.kv).memory()
    return _Span(
        keys.data_ptr(), values.data_ptr(), keys.stride(0), keys.stride(1), span.first, span.count, span.start, 0
    )


@dataclass(frozen=True)
class HeadParts:
    """The recurrent head's products and tables: embedding [V, r] fp32, and the ids of the output rows if not all."""

    state: NativeLinear
    from_state: NativeLinear
    from_hidden: NativeLinear
    output: NativeLinear
    embedding: Tensor
    vocab: Tensor | None

    @property
    def nbytes(self) -> int:
        """Bytes of the weights that every step of a draft reads."""
        return self.state.nbytes + self.from_state.nbytes + self.output.nbytes


class FusedDraft:
    """Greedy drafts: backbone and head in one call."""

    def __init__(self, layers: FusedLayers, head: HeadParts) -> None:
        self._layers = layers
        self._kept = head
        self.nbytes = (layers.nbytes + head.from_hidden.nbytes, head.nbytes)
        self._rank = head.embedding.shape[1]
        self._head = _Head(
            *(part.c for part in (head.state, head.from_state, head.from_hidden, head.output)),
            self._rank,
            head.embedding.data_ptr(),
            None if head.vocab is None else head.vocab.data_ptr(),
        )
        self._scratch = _Scratch()

    def run(self, x: Tensor, context: Tensor, tokens: Tensor, seed: Tensor | None, steps: int) -> tuple[Tensor, Tensor]:
        """Token ids [N, steps], each the head's likeliest, and its probabilities of them.

        Args:
            x: embeddings [N, g + P, H] of the last real tokens and at least `steps` placeholders; overwritten.
            context: normed context vectors [N, S, H].
            tokens: the last real ids [N, g], anchor last.
            seed: ids [N] that seed the head's state, if any do.
        """
        layers, widths, threads = self._layers, self._layers.widths, torch.get_num_threads()
        (count, queries, hidden), taps = x.shape, context.shape[1]
        real, slots = tokens.shape[1], taps + queries
        memory = torch.empty(2, count, widths.kv_heads, slots, widths.head_dim)
        spans = [
            _Span(
                memory[0, i].data_ptr(),
                memory[1, i].data_ptr(),
                0,
                slots * widths.head_dim,
                i * queries,
                queries,
                taps,
                max(real - 2, 0),
            )
            for i in range(count)
        ]
        context, anchor = context.contiguous(), tokens[:, -1].contiguous()
        seed = None if seed is None else seed.contiguous()
        ids, sure = torch.empty(count, steps, dtype=torch.int64), torch.empty(count, steps)
        head = ctypes.byref(self._head)
        size = layers.lib.dlite_draft_scratch(head, count, steps, hidden, threads)
        batch = layers.batch(x.flatten(0, 1), spans, 1, context, threads)
        native = _Draft(
            batch,
            steps,
            queries - real,
            anchor.data_ptr(),
            None if seed is None else seed.data_ptr(),
            ids.data_ptr(),
            sure.data_ptr(),
            self._scratch.of(size),
        )
        layers.lib.dlite_draft(layers.c, head, ctypes.byref(native), threads)
        return ids, sure
