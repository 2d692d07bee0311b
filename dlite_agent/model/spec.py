"""What a dense decoder is made of, read from a Hugging Face `config.json`."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dlite_agent.errors import ModelError, UnsupportedArchitecture

_ROPE_NEEDS = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "yarn": ("factor", "original_max_position_embeddings"),
}

ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}


@dataclass(frozen=True)
class RopeSpec:
    """Rotary embedding: `kind` is default, linear, llama3 or yarn; `options` are its scaling parameters."""

    kind: str
    theta: float
    options: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class ModelSpec:
    """Shapes and constants of one dense decoder (Llama, Qwen2 or Qwen3)."""

    family: str
    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    norm_eps: float
    max_positions: int
    rope: RopeSpec
    tied_head: bool
    qk_norm: bool
    eos_ids: tuple[int, ...]

    @property
    def q_size(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        return self.num_kv_heads * self.head_dim

    @property
    def num_parameters(self) -> int:
        """Weights of the decoder, a tied head counted once."""
        layer = self.hidden_size * (2 * self.q_size + 2 * self.kv_size + 3 * self.intermediate_size)
        return self.num_layers * layer + self.vocab_size * self.hidden_size * (1 if self.tied_head else 2)

    @classmethod
    def from_folder(cls, folder: Path) -> ModelSpec:
        """Read `config.json` and the EOS ids of `generation_config.json`.

        Raises:
            ModelError: a file or key is missing.
            UnsupportedArchitecture: the architecture is not Llama, Qwen2 or Qwen3, or uses sliding windows.
        """
        path = folder / "config.json"
        if not path.is_file():
            raise ModelError(f"{folder} has no config.json; give a Hugging Face model folder or a GGUF file")
        config = json.loads(path.read_text())
        generation = folder / "generation_config.json"
        eos = json.loads(generation.read_text()).get("eos_token_id") if generation.is_file() else None
        return cls.from_config(config, eos_ids=eos)

    @classmethod
    def from_config(cls, config: dict[str, Any], *, eos_ids: int | list[int] | None = None) -> ModelSpec:
        """Build from a parsed config. `eos_ids` of a generation config are joined to the config's own."""
        family = config.get("model_type")
        if family not in ARCHITECTURES:
            supported = ", ".join(ARCHITECTURES.values())
            raise UnsupportedArchitecture(
                f"model_type {family!r} is not supported; supported are {supported}", param="model_type"
            )
        if config.get("use_sliding_window") or "sliding_attention" in (config.get("layer_types") or []):
            raise UnsupportedArchitecture("sliding-window attention is not supported", param="use_sliding_window")
        if config.get("hidden_act", "silu") != "silu":
            raise UnsupportedArchitecture(f"hidden_act {config['hidden_act']!r} is not supported", param="hidden_act")
        try:
            heads = config["num_attention_heads"]
            return cls(
                family=family,
                num_layers=config["num_hidden_layers"],
                hidden_size=config["hidden_size"],
                intermediate_size=config["intermediate_size"],
                num_heads=heads,
                num_kv_heads=config.get("num_key_value_heads") or heads,
                head_dim=config.get("head_dim") or config["hidden_size"] // heads,
                vocab_size=config["vocab_size"],
                norm_eps=config["rms_norm_eps"],
                max_positions=config["max_position_embeddings"],
                rope=rope_spec(config),
                tied_head=bool(config.get("tie_word_embeddings", False)),
                qk_norm=family == "qwen3",
                eos_ids=_eos_ids(config.get("eos_token_id"), eos_ids),
            )
        except KeyError as missing:
            raise ModelError(f"config.json lacks {missing}", param=str(missing.args[0])) from None


def rope_spec(config: dict[str, Any]) -> RopeSpec:
    """Rotary settings from either spelling: `rope_parameters` (transformers 5) or `rope_theta` + `rope_scaling`.

    Raises:
        ModelError: an option that the kind needs is missing.
        UnsupportedArchitecture: another kind, or a rotation of only part of a head.
    """
    options = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    theta = options.pop("rope_theta", None) or config.get("rope_theta") or 10000.0
    kind = options.pop("rope_type", None) or options.pop("type", None) or "default"
    options.pop("type", None)
    if kind not in _ROPE_NEEDS:
        raise UnsupportedArchitecture(
            f"rope type {kind!r} is not supported; supported are {', '.join(_ROPE_NEEDS)}", param="rope_type"
        )
    part = options.pop("partial_rotary_factor", None) or config.get("partial_rotary_factor") or 1.0
    if part != 1.0:
        raise UnsupportedArchitecture(
            f"partial_rotary_factor {part} is not supported: whole heads are rotated", param="partial_rotary_factor"
        )
    if kind == "yarn" and "max_position_embeddings" in config:
        options.setdefault("original_max_position_embeddings", config["max_position_embeddings"])
    if missing := [name for name in _ROPE_NEEDS[kind] if options.get(name) is None]:
        raise ModelError(f"rope type {kind} lacks {missing[0]}", param=missing[0])
    return RopeSpec(kind, float(theta), options)


def _eos_ids(*values: int | list[int] | None) -> tuple[int, ...]:
    ids: list[int] = []
    for value in values:
        ids += [value] if isinstance(value, int) else value or []
    return tuple(dict.fromkeys(ids))
