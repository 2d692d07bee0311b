"""Configs read from both spellings, and refusals that name the field."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from dlite_agent.errors import ModelError, UnsupportedArchitecture
from dlite_agent.model.spec import ModelSpec, RopeSpec, rope_spec

CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "num_hidden_layers": 2,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "vocab_size": 50,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 128,
}


def test_defaults_that_configs_leave_out() -> None:
    spec = ModelSpec.from_config(CONFIG)
    assert (spec.num_kv_heads, spec.head_dim, spec.tied_head, spec.qk_norm) == (4, 8, False, False)
    assert spec.rope == RopeSpec("default", 10000.0)
    assert spec.eos_ids == ()


@pytest.mark.parametrize("key", [key for key in CONFIG if key != "model_type"])
def test_a_missing_key_is_named(key: str) -> None:
    with pytest.raises(ModelError) as caught:
        ModelSpec.from_config({name: value for name, value in CONFIG.items() if name != key})
    assert caught.value.param == key


@pytest.mark.parametrize("family", ["mixtral", "gemma3", None])
def test_another_architecture_is_refused_with_the_list(family: str | None) -> None:
    with pytest.raises(UnsupportedArchitecture, match="LlamaForCausalLM, Qwen2ForCausalLM, Qwen3ForCausalLM") as caught:
        ModelSpec.from_config(CONFIG | {"model_type": family})
    assert caught.value.param == "model_type"


@pytest.mark.parametrize(
    ("extra", "param"),
    [
        ({"use_sliding_window": True}, "use_sliding_window"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "use_sliding_window"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"rope_scaling": {"rope_type": "longrope", "factor": 4.0}}, "rope_type"),
        ({"rope_scaling": {"type": "dynamic", "factor": 4.0}}, "rope_type"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.25}}, "partial_rotary_factor"),
    ],
)
def test_what_the_executor_does_not_do_is_refused(extra: dict[str, Any], param: str) -> None:
    with pytest.raises(UnsupportedArchitecture) as caught:
        ModelSpec.from_config(CONFIG | extra)
    assert caught.value.param == param


@pytest.mark.parametrize(
    ("rope", "missing"),
    [
        ({"rope_type": "linear"}, "factor"),
        ({"rope_type": "yarn"}, "factor"),
        (
            {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
            "original_max_position_embeddings",
        ),
        (
            {"rope_type": "llama3", "factor": 8.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64},
            "low_freq_factor",
        ),
    ],
)
def test_a_missing_rope_option_is_named(rope: dict[str, Any], missing: str) -> None:
    with pytest.raises(ModelError) as caught:
        ModelSpec.from_config(CONFIG | {"rope_scaling": rope})
    assert caught.value.param == missing


def test_both_spellings_of_rope_are_one() -> None:
    old = {"rope_theta": 500.0, "rope_scaling": {"type": "linear", "factor": 2.0}}
    new = {"rope_parameters": {"rope_type": "linear", "rope_theta": 500.0, "factor": 2.0}}
    assert rope_spec(CONFIG | old) == rope_spec(CONFIG | new) == RopeSpec("linear", 500.0, {"factor": 2.0})


def test_eos_ids_of_both_files_are_joined(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG | {"eos_token_id": 3}))
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [3, 7, 9]}))
    assert ModelSpec.from_folder(tmp_path).eos_ids == (3, 7, 9)


def test_a_folder_without_config_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"config\.json"):
        ModelSpec.from_folder(tmp_path)
