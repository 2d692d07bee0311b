"""A GGUF file turned into a Hugging Face folder, once: dense fp32 weights, config, tokenizer and template."""

from __future__ import annotations

import json
import shutil
import tempfile
from pathlib import Path
from typing import Any

import gguf
import torch
from safetensors.torch import save_file
from torch import Tensor

from dlite_agent.errors import ModelError, UnsupportedArchitecture
from dlite_agent.model.spec import ARCHITECTURES

_BLOCK_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_TOP_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}


def convert(path: Path, folder: Path) -> None:
    """Write `folder` (config.json, model.safetensors, tokenizer) from a GGUF file; it appears whole or not at all.

    Raises:
        ModelError: not a readable GGUF file, or a tensor type without a dequantiser.
        UnsupportedArchitecture: its architecture or rope scaling is not supported.
    """
    try:
        reader = gguf.GGUFReader(path)
    except (OSError, ValueError) as error:
        raise ModelError(f"{path} is not a readable GGUF file: {error}") from error
    fields = {
        name: field.contents() for name, field in reader.fields.items() if not name.startswith("tokenizer.ggml.t")
    }
    config = _config(fields, {tensor.name for tensor in reader.tensors}, _vocab_size(reader))
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".converting-") as scratch:
        work = Path(scratch) / "model"
        work.mkdir()
        save_file(_tensors(reader, config), work / "model.safetensors", metadata={"format": "pt"})
        (work / "config.json").write_text(json.dumps(config, indent=1))
        _save_tokenizer(path, work)
        if folder.exists():
            shutil.rmtree(folder)
        work.replace(folder)


def _vocab_size(reader: gguf.GGUFReader) -> int:
    for tensor in reader.tensors:
        if tensor.name == "token_embd.weight":
            return int(tensor.shape[1])
    raise ModelError("the GGUF file has no token_embd.weight", param="token_embd.weight")


def _config(fields: dict[str, Any], tensors: set[str], vocab_size: int) -> dict[str, Any]:
    family = fields.get("general.architecture")
    if family not in ARCHITECTURES:
        supported = ", ".join(ARCHITECTURES)
        raise UnsupportedArchitecture(
            f"GGUF architecture {family!r} is not supported; supported are {supported}", param="general.architecture"
        )
    if fields.get(f"{family}.rope.scaling.type", "none") != "none" or "rope_freqs.weight" in tensors:
        raise UnsupportedArchitecture(
            "rope scaling inside a GGUF file is not supported; give the Hugging Face folder of this model",
            param=f"{family}.rope.scaling.type",
        )

    def value(key: str) -> Any:
        try:
            return fields[f"{family}.{key}"]
        except KeyError:
            raise ModelError(f"the GGUF file lacks {family}.{key}", param=f"{family}.{key}") from None

    heads = value("attention.head_count")
    hidden = value("embedding_length")
    return {
        "architectures": [ARCHITECTURES[family]],
        "model_type": family,
        "hidden_size": hidden,
        "intermediate_size": value("feed_forward_length"),
        "num_hidden_layers": value("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": fields.get(f"{family}.attention.head_count_kv", heads),
        "head_dim": fields.get(f"{family}.attention.key_length", hidden // heads),
        "vocab_size": vocab_size,
        "rms_norm_eps": value("attention.layer_norm_rms_epsilon"),
        "max_position_embeddings": value("context_length"),
        "rope_theta": fields.get(f"{family}.rope.freq_base", 10000.0),
        "tie_word_embeddings": "output.weight" not in tensors,
        "attention_bias": "blk.0.attn_q.bias" in tensors,
        "eos_token_id": fields.get("tokenizer.ggml.eos_token_id"),
        "bos_token_id": fields.get("tokenizer.ggml.bos_token_id"),
        "torch_dtype": "float32",
    }


def _tensors(reader: gguf.GGUFReader, config: dict[str, Any]) -> dict[str, Tensor]:
    found = {}
    for tensor in reader.tensors:
        try:
            dense = torch.tensor(gguf.dequantize(tensor.data, tensor.tensor_type), dtype=torch.float32)
        except NotImplementedError as error:
            raise ModelError(f"{tensor.name}: {error}", param=tensor.name) from error
        name = _name(tensor.name)
        if config["model_type"] == "llama" and (".q_proj." in name or ".k_proj." in name):
            heads = config["num_attention_heads" if ".q_proj." in name else "num_key_value_heads"]
            dense = _undo_interleave(dense, heads)
        found[name] = dense.contiguous()
    return found


def _name(name: str) -> str:
    parts = name.split(".")
    if parts[0] == "blk":
        return f"model.layers.{parts[1]}.{_BLOCK_NAMES[parts[2]]}.{parts[3]}"
    return f"{_TOP_NAMES[parts[0]]}.{parts[1]}"


def _undo_interleave(weight: Tensor, heads: int) -> Tensor:
    """GGUF stores Llama's q and k with rotary pairs side by side; Hugging Face keeps the halves apart."""
    pairs = weight.reshape(heads, weight.shape[0] // heads // 2, 2, *weight.shape[1:])
    return pairs.swapaxes(1, 2).reshape(weight.shape)


def _save_tokenizer(path: Path, folder: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(str(path.parent), gguf_file=path.name)
    tokenizer.save_pretrained(str(folder))
