"""GGUF files written by the gguf package, turned into folders."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from tokenizers.pre_tokenizers import ByteLevel
from transformers import AutoTokenizer

from dlite_agent.errors import ModelError, UnsupportedArchitecture
from dlite_agent.model import gguf as converter
from dlite_agent.model.spec import ModelSpec
from dlite_agent.model.target import Rows
from dlite_agent.model.weights import FolderWeights, resolve
from tests.helpers import load_tiny, pool_for, prompt, relative_error, tiny_model

_NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
}
VOCAB = 261


def gguf_name(name: str) -> str:
    stem, kind = name.rsplit(".", 1)
    if stem.startswith("model.layers."):
        _, _, layer, part = stem.split(".", 3)
        return f"blk.{layer}.{_NAMES[part]}.{kind}"
    return f"{_NAMES[stem]}.{kind}"


def interleaved(weight: np.ndarray[Any, Any], heads: int) -> np.ndarray[Any, Any]:
    """Llama's q and k as GGUF stores them: row 2i of a head is its row i, row 2i + 1 its row half + i."""
    half = weight.shape[0] // heads // 2
    out = np.empty_like(weight)
    for head in range(heads):
        block = weight[head * 2 * half : (head + 1) * 2 * half]
        out[head * 2 * half : (head + 1) * 2 * half : 2] = block[:half]
        out[head * 2 * half + 1 : (head + 1) * 2 * half : 2] = block[half:]
    return out


def write_gguf(path: Path, model: Any, *, architecture: str | None = None, rope_scaling: bool = False) -> Path:
    """`model` with a byte-level tokenizer, fp32; q8_0 for the feed-forward's down projection."""
    config = model.config
    family = architecture or config.model_type
    writer = gguf.GGUFWriter(path, family)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    if config.model_type == "qwen3":
        writer.add_key_length(config.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    if rope_scaling:
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
    tokens = [*sorted(ByteLevel.alphabet()), "<|end|>", "<|start|>", "<|pad|>", "ab", "bc"]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list(tokens)
    writer.add_token_types([1] * 256 + [3, 3, 3, 1, 1])
    writer.add_token_merges(["a b", "b c"])
    writer.add_eos_token_id(256)
    writer.add_bos_token_id(257)
    writer.add_pad_token_id(258)
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        array = tensor.numpy()
        if config.model_type == "llama" and (".q_proj." in name or ".k_proj." in name):
            heads = config.num_attention_heads if ".q_proj." in name else config.num_key_value_heads
            array = interleaved(array, heads)
        if "down_proj" in name:
            kind = gguf.GGMLQuantizationType.Q8_0
            writer.add_tensor(gguf_name(name), gguf.quantize(array, kind), raw_dtype=kind)
        else:
            writer.add_tensor(gguf_name(name), array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def quantised(model: Any) -> Any:
    """The same model with the values that q8_0 leaves of its down projections."""
    kind = gguf.GGMLQuantizationType.Q8_0
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "down_proj" in name:
                parameter.copy_(torch.from_numpy(gguf.dequantize(gguf.quantize(parameter.numpy(), kind), kind)))
    return model


@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("llama", {"head_dim": 12}),
        ("llama", {"head_dim": 12, "tie_word_embeddings": True}),
        ("qwen2", {"head_dim": 12}),
        ("qwen3", {"head_dim": 16}),
    ],
)
def test_a_converted_file_computes_the_same(family: str, options: dict[str, Any], tmp_path: Path) -> None:
    model = tiny_model(family, seed=5, vocab_size=VOCAB, intermediate_size=96, **options)
    path = write_gguf(tmp_path / "model.gguf", model)
    converter.convert(path, tmp_path / "folder")
    target, ids = load_tiny(tmp_path / "folder"), prompt(60, vocab=VOCAB)
    kv = pool_for(target).sequence()
    kv.reserve(100)
    with torch.inference_mode():
        wanted = quantised(model)(torch.tensor([ids])).logits[0]
    assert relative_error(target.forward([Rows(kv, torch.tensor(ids))]).logits, wanted) <= 1e-4
    spec = target.spec
    assert (spec.tied_head, spec.eos_ids) == (bool(options.get("tie_word_embeddings")), (256,))
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "folder")
    assert tokenizer.decode(tokenizer.encode("abc é 語", add_special_tokens=False)) == "abc é 語"


def test_a_file_is_converted_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DLITE_CACHE", str(tmp_path / "cache"))
    path = write_gguf(tmp_path / "m.gguf", tiny_model("qwen2", vocab_size=VOCAB, intermediate_size=96, head_dim=12))
    folder = resolve(str(path))
    before = (folder / "model.safetensors").stat().st_mtime_ns
    assert resolve(str(path)) == folder
    assert (folder / "model.safetensors").stat().st_mtime_ns == before
    assert [entry.name for entry in folder.parent.iterdir()] == [folder.name], "no scratch is left behind"


def test_another_architecture_is_refused_with_the_list(tmp_path: Path) -> None:
    model = tiny_model("qwen2", vocab_size=VOCAB, intermediate_size=96, head_dim=12)
    path = write_gguf(tmp_path / "m.gguf", model, architecture="gemma3")
    with pytest.raises(UnsupportedArchitecture, match=r"gemma3.*llama, qwen2, qwen3"):
        converter.convert(path, tmp_path / "folder")
    assert not (tmp_path / "folder").exists()


def test_rope_scaling_inside_the_file_is_refused(tmp_path: Path) -> None:
    model = tiny_model("qwen2", vocab_size=VOCAB, intermediate_size=96, head_dim=12)
    path = write_gguf(tmp_path / "m.gguf", model, rope_scaling=True)
    with pytest.raises(UnsupportedArchitecture) as caught:
        converter.convert(path, tmp_path / "folder")
    assert caught.value.param == "qwen2.rope.scaling.type"


def test_a_file_that_is_not_gguf_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(b"no such thing" * 10)
    with pytest.raises(ModelError, match="not a readable GGUF"):
        converter.convert(path, tmp_path / "folder")


def test_the_default_target_is_the_pinned_file(default_folder: Path) -> None:
    spec = ModelSpec.from_folder(default_folder)
    assert (spec.family, spec.num_layers, spec.hidden_size, spec.vocab_size) == ("llama", 30, 576, 49152)
    assert spec.tied_head
    assert FolderWeights(default_folder)["model.embed_tokens.weight"].shape == (49152, 576)
