"""`bench device`: what a round costs beside an autoregressive step, with random weights in real shapes.

Acceptance does not matter here: every row drafts, verifies a whole window and keeps what it keeps; T_AR, T_D, T_V and
T_S are taken from alternating steps at one context length. The round overhead (T_D + T_V + T_S) / T_AR is what tau must
exceed for a speed-up.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from dlite_agent.config import Mode
from dlite_agent.decode.load import make_decoder
from dlite_agent.decode.precision import choose_precision
from dlite_agent.decode.rounds import Decoder, StepFigures
from dlite_agent.decode.sampling import SamplingParams
from dlite_agent.decode.state import DecodeState
from dlite_agent.errors import InvalidRequest
from dlite_agent.model.drafter import Drafter
from dlite_agent.model.drafter_config import DrafterConfig
from dlite_agent.model.spec import ModelSpec, RopeSpec
from dlite_agent.model.target import Target

YARN = RopeSpec("yarn", 1e6, {"factor": 4.0, "original_max_position_embeddings": 32768})


@dataclass(frozen=True)
class Shape:
    """A target's shapes, and depth, taps and rank of the drafter beside it."""

    spec: ModelSpec
    depth: int
    taps: int
    rank: int


SHAPES = {
    "qwen3-8b": Shape(
        ModelSpec(
            family="qwen3",
            num_layers=36,
            hidden_size=4096,
            intermediate_size=12288,
            num_heads=32,
            num_kv_heads=8,
            head_dim=128,
            vocab_size=151936,
            norm_eps=1e-6,
            max_positions=131072,
            rope=YARN,
            tied_head=False,
            qk_norm=True,
            eos_ids=(),
        ),
        depth=5,
        taps=12,
        rank=512,
    ),
    "smollm2-135m": Shape(
        ModelSpec(
            family="llama",
            num_layers=30,
            hidden_size=576,
            intermediate_size=1536,
            num_heads=9,
            num_kv_heads=3,
            head_dim=64,
            vocab_size=49152,
            norm_eps=1e-5,
            max_positions=131072,
            rope=RopeSpec("default", 1e5),
            tied_head=True,
            qk_norm=False,
            eos_ids=(),
        ),
        depth=2,
        taps=8,
        rank=256,
    ),
}


class _RandomWeights(dict[str, Tensor]):
    """Weights made when asked for, on the device, so that a large target never exists twice.

    Numbers lie on the grids of 4-bit blocks, so that they can be packed as a quantised file's.
    """

    def __init__(self, spec: ModelSpec, device: torch.device) -> None:
        super().__init__()
        self._device = device
        hidden, inner = spec.hidden_size, spec.intermediate_size
        self._shapes = {
            "embed_tokens": (spec.vocab_size, hidden),
            "lm_head": (spec.vocab_size, hidden),
            "q_proj": (spec.q_size, hidden),
            "k_proj": (spec.kv_size, hidden),
            "v_proj": (spec.kv_size, hidden),
            "o_proj": (hidden, spec.q_size),
            "gate_proj": (inner, hidden),
            "up_proj": (inner, hidden),
            "down_proj": (hidden, inner),
            "q_norm": (spec.head_dim,),
            "k_norm": (spec.head_dim,),
        }

    def __contains__(self, name: object) -> bool:
        return not str(name).endswith(".bias")

    def __getitem__(self, name: str) -> Tensor:
        shape = self._shapes.get(name.split(".")[-2])
        if shape is None:
            return torch.ones(self._shapes["o_proj"][0], device=self._device)
        if len(shape) == 1:
            return torch.ones(shape, device=self._device)
        steps = torch.randint(0, 16, shape, device=self._device, dtype=torch.float32)
        steps[:, ::32], steps[:, 1::32] = 0, 15
        return steps * 2**-8 - 2**-5


def bench_device(
    shape: str,
    *,
    device: str,
    dtype: str,
    contexts: Sequence[int],
    batches: Sequence[int],
    steps: int = 12,
    layers: int | None = None,
    on_row: Callable[[dict[str, Any]], None] | None = None,
) -> dict[str, Any]:
    """Medians of `steps` AR steps and rounds, alternating, per context length and batch.

    Args:
        layers: use fewer target layers, for small machines; recorded in the result.

    Raises:
        InvalidRequest: an unknown shape. KVExhausted: the device cannot hold a row's KV.
    """
    if shape not in SHAPES:
        raise InvalidRequest(f"shape must be one of {', '.join(SHAPES)}", param="shape")
    chosen = SHAPES[shape]
    spec = replace(chosen.spec, num_layers=layers or chosen.spec.num_layers)
    place = torch.device(device)
    weights = _RandomWeights(spec, place)
    precision = choose_precision(dtype, spec, weights, place, name=f"random {shape}")
    target = Target(
        spec,
        weights,
        precision=precision,
        device=place,
        fingerprint="random",
        context_limit=max(contexts) + 4 * steps * 8,
    )
    config = DrafterConfig.for_target(
        spec, mask_token_id=0, depth=chosen.depth, taps=min(chosen.taps, spec.num_layers), rank=chosen.rank
    )
    drafter = Drafter(config).bfloat16()
    drafter.pack(precision, place)
    per_position = 2 * spec.num_layers * spec.kv_size * precision.dtype.itemsize
    decoder = make_decoder(target, drafter, max(batches) * target.max_positions * per_position)
    rows = []
    for context in contexts:
        for batch in batches:
            rows.append(_row(decoder, context, batch, steps))
            if on_row is not None:
                on_row(rows[-1])
    name = torch.cuda.get_device_name() if place.type == "cuda" else f"cpu, {torch.get_num_threads()} threads"
    return {
        "shape": shape,
        "layers": spec.num_layers,
        "device": name,
        "dtype": precision.name,
        "attention": type(target.attention).__name__,
        "verify_window": config.block_size,
        "rows": rows,
    }


def _row(decoder: Decoder, context: int, batch: int, steps: int) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(context * 1000 + batch)
    states = [decoder.open() for _ in range(batch)]
    try:
        for state in states:
            ids = torch.randint(decoder.target.spec.vocab_size, (context,), generator=generator).tolist()
            _advance(decoder, [state], ids, "ar", 1)
        _advance(decoder, states, [], "ar", 2)  # warm-up: kernels, graphs
        _advance(decoder, states, [], "dlite", 2)
        ar: list[StepFigures] = []
        dlite: list[StepFigures] = []
        for _ in range(steps):
            ar += _advance(decoder, states, [], "ar", 1)
            dlite += _advance(decoder, states, [], "dlite", 1)
    finally:
        for state in states:
            state.kv.free()
    t_ar = statistics.median(step.seconds.wall for step in ar)
    parts = {part: statistics.median(getattr(s.seconds, part) for s in dlite) for part in ("draft", "verify", "rest")}
    return {
        "context": context,
        "batch": batch,
        "t_ar": t_ar,
        "t_d": parts["draft"],
        "t_v": parts["verify"],
        "t_s": parts["rest"],
        "overhead": sum(parts.values()) / t_ar,
    }


def _advance(
    decoder: Decoder, states: list[DecodeState], new_ids: list[int], mode: Mode, rounds: int
) -> list[StepFigures]:
    """Figures of `rounds` rounds of a fresh turn on every state; prompt chunks are run but not returned."""
    params = SamplingParams()
    budget = 8 * (rounds + 1)
    turns = [decoder.begin(s, new_ids, params, max_new_tokens=budget, mode=mode, ignore_eos=True) for s in states]
    done: list[StepFigures] = []
    while len(done) < rounds:
        figures = decoder.step(turns)
        if all(row.verified for row in figures.rows):
            done.append(figures)
        elif all(turn.decoding for turn in turns) and new_ids:
            break
    for turn in turns:
        decoder.finish(turn)
    return done
