"""From names and options to a decoder that is ready to run."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from dlite_agent.decode.calibrate import best_window
from dlite_agent.decode.costs import cost_model
from dlite_agent.decode.kv import KVPool
from dlite_agent.decode.paged_kv import PagedKVPool
from dlite_agent.decode.planner import Planner
from dlite_agent.decode.precision import choose_precision
from dlite_agent.decode.rounds import UNKNOWN_RATE, Decoder
from dlite_agent.model.catalog import load_drafter
from dlite_agent.model.drafter import Drafter
from dlite_agent.model.flash import FlashAttention, load_flash
from dlite_agent.model.spec import ModelSpec
from dlite_agent.model.target import Target
from dlite_agent.model.weights import DEFAULT_TARGET, FolderWeights, fingerprint, resolve

DEFAULT_KV_BUDGET = 4 << 30


@dataclass(frozen=True)
class Runtime:
    """A decoder and the tokenizer of its target."""

    decoder: Decoder
    tokenizer: Any
    folder: Path


def device_of(name: str) -> torch.device:
    """cpu, cuda, or auto for cuda where there is one."""
    return torch.device(("cuda" if torch.cuda.is_available() else "cpu") if name == "auto" else name)


def load_target(
    model: str,
    *,
    dtype: str = "auto",
    device: str = "auto",
    context_limit: int | None = None,
) -> Target:
    """Load a target for execution.

    Args:
        model: see `resolve`.
        dtype: fp32, bf16, fp16w, packed or auto (see `choose_precision`).
        device: cpu, cuda or auto.
        context_limit: ids a session may hold; the model's own by default.
    """
    folder = resolve(model)
    spec, weights, name = ModelSpec.from_folder(folder), FolderWeights(folder), fingerprint(folder)
    place = device_of(device)
    return Target(
        spec,
        weights,
        precision=choose_precision(dtype, spec, weights, place, name=name),
        device=place,
        fingerprint=name,
        context_limit=context_limit or spec.max_positions,
    )


def describe(model: str) -> dict[str, str]:
    """What `model info` shows of a target, and the precision that measures fastest here."""
    folder = resolve(model)
    spec, weights, name = ModelSpec.from_folder(folder), FolderWeights(folder), fingerprint(folder)
    precision = choose_precision("auto", spec, weights, device_of("auto"), name=name)
    stored = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    return {
        "model": model,
        "architecture": f"{spec.family}: {spec.num_layers} layers, hidden {spec.hidden_size}, {spec.num_heads} heads "
        f"({spec.num_kv_heads} KV) of {spec.head_dim}, vocabulary {spec.vocab_size}",
        "parameters": f"{spec.num_parameters / 1e6:.1f} M",
        "stored": f"{stored / 2**20:.0f} MiB in {len(weights)} tensors",
        "context": str(spec.max_positions),
        "dtype here": f"{precision.name} (linears by {precision.kernel})",
        "fingerprint": name,
    }


def load_runtime(
    *,
    target: str = DEFAULT_TARGET,
    drafter: str = "auto",
    dtype: str = "auto",
    device: str = "auto",
    threads: int | None = None,
    kv_budget: int = DEFAULT_KV_BUDGET,
    context_limit: int | None = None,
    anchor_group_size: int | None = None,
) -> Runtime:
    """Load target, drafter and tokenizer.

    Args:
        threads: CPU threads of torch; None leaves torch's own choice.
        kv_budget: bytes that all sessions together may hold on the device.

    Raises:
        ModelError, CheckpointError: see `load_target` and `load_drafter`.
    """
    if threads is not None:
        torch.set_num_threads(threads)
    folder = resolve(target)
    model = load_target(str(folder), dtype=dtype, device=device, context_limit=context_limit)
    loaded = load_drafter(drafter, model, anchor_group_size=anchor_group_size)
    decoder = make_decoder(model, loaded, kv_budget)
    name = f"{model.fingerprint}/{drafter}"
    prior = [UNKNOWN_RATE] * decoder.proposal_length
    if loaded is not None and "acceptance" in loaded.card:
        prior = loaded.card["acceptance"]
        decoder.verify_window = best_window(decoder, prior, name)
    decoder.planner = Planner(prior, cost_model(decoder, name))
    return Runtime(decoder, load_tokenizer(folder), folder)


def make_decoder(target: Target, drafter: Drafter | None, kv_budget: int) -> Decoder:
    """A decoder with the KV layout of the best attention backend there is: flash-attn's pages, else contiguous."""
    flash = load_flash() if target.device.type == "cuda" and target.dtype == torch.bfloat16 else None
    layout = KVPool if flash is None else PagedKVPool
    pool = layout(
        target.spec,
        dtype=target.dtype,
        device=target.device,
        budget_bytes=kv_budget,
        max_positions=target.max_positions,
    )
    decoder = Decoder(target, drafter, pool)
    if isinstance(pool, PagedKVPool):
        target.attention = FlashAttention(flash)
        target.use_graphs(target.attention, pool.store, scratch_page=pool.scratch_page, tap_layers=decoder.taps)
    return decoder


def load_tokenizer(folder: Path) -> Any:
    """The folder's tokenizer, with its chat template, through transformers."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(str(folder))


def chat_ids(tokenizer: Any, messages: list[dict[str, Any]]) -> list[int]:
    """Token ids of a conversation rendered by the tokenizer's template, ready for the assistant to answer."""
    text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    ids: list[int] = tokenizer.encode(text, add_special_tokens=False)
    return ids
