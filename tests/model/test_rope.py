"""Rotary frequencies and the rotation itself against transformers' own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from dlite_agent.model.rope import RotaryTable, frequencies, rotate
from dlite_agent.model.spec import RopeSpec, rope_spec
from tests.helpers import CPU

YARN = {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "original_max_position_embeddings": 2048}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 5e5,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 2048,
}
CASES: list[dict[str, Any]] = [
    {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.5},
    LLAMA3,
    LLAMA3 | {"factor": 32.0, "original_max_position_embeddings": 8192},
    YARN,
    YARN | {"beta_fast": 16.0, "beta_slow": 2.0},
    YARN | {"attention_factor": 0.9},
    YARN | {"mscale": 0.7, "mscale_all_dim": 1.1},
    YARN | {"truncate": False},
]


@pytest.mark.parametrize("parameters", CASES, ids=lambda p: " ".join(f"{k}={v}" for k, v in p.items()))
def test_frequencies_equal_transformers(parameters: dict[str, Any]) -> None:
    config = LlamaConfig(
        hidden_size=512, num_attention_heads=8, max_position_embeddings=8192, rope_parameters=dict(parameters)
    )
    wanted, factor = ROPE_INIT_FUNCTIONS[parameters["rope_type"]](config, CPU)
    found, found_factor = frequencies(rope_spec(config.to_dict()), 64)
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=0)
    assert found_factor == pytest.approx(factor, rel=1e-6)


def test_rotation_equals_transformers() -> None:
    torch.manual_seed(0)
    rope, positions = RopeSpec("default", 10000.0), torch.tensor([0, 3, 17, 250])
    x = torch.randn(4, 6, 32)
    cos, sin = RotaryTable(rope, 32, size=300, device=CPU, dtype=torch.float32).at(positions)
    angles = torch.outer(positions.float(), frequencies(rope, 32)[0])
    full = torch.cat((angles, angles), dim=-1)
    wanted, _ = apply_rotary_pos_emb(x, x, full.cos(), full.sin())
    torch.testing.assert_close(rotate(x, cos, sin), wanted)
