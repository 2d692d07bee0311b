"""Each field of a checkpoint's config that is missing, wrong or made for another target is refused by its name."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from dlite_agent.errors import CheckpointError
from dlite_agent.model.drafter_config import DrafterConfig, target_layer_ids
from dlite_agent.model.spec import RopeSpec
from dlite_agent.model.target import Target
from tests.helpers import make_drafter
from tests.model.checkpoints import LAYERS, TAPS, official_config

TOP = [
    "num_hidden_layers",
    "num_target_layers",
    "block_size",
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "vocab_size",
    "rms_norm_eps",
    "dlite_config",
]
INNER = list(official_config()["dlite_config"])


def broken(key: str, value: Any = ...) -> dict[str, Any]:
    """The official config without `key`, or with another value of it."""
    config = official_config()
    block = config["dlite_config"] if key in INNER else config
    del block[key]
    if value is not ...:
        block[key] = value
    return config


def test_the_official_config_is_read() -> None:
    config = DrafterConfig.from_dict(official_config(6, bias=True))
    assert (config.proposal_length, config.anchor_group_size, config.rank, config.depth) == (7, 6, 10, 2)
    assert config.target_layer_ids == tuple(TAPS)
    assert (config.head_dim, config.head_vocab, config.attention_bias) == (16, 53, True)
    assert DrafterConfig.from_dict(config.to_dict()) == config


@pytest.mark.parametrize("key", [*TOP, *INNER])
def test_a_missing_field_is_named(key: str) -> None:
    with pytest.raises(CheckpointError, match=key) as caught:
        DrafterConfig.from_dict(broken(key))
    assert caught.value.param == key


@pytest.mark.parametrize("key", [*TOP, *INNER])
@pytest.mark.parametrize("value", [None, True, "seven"])
def test_a_field_of_a_wrong_type_is_named(key: str, value: Any) -> None:
    with pytest.raises(CheckpointError, match=key) as caught:
        DrafterConfig.from_dict(broken(key, value))
    assert caught.value.param == key


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("architecture_version", "dlite_v2"),
        ("model_role", "swa_teacher"),
        ("sequential_head", "gru"),
        ("sequential_rank", 0),
        ("anchor_group_size", 0),
        ("chs_num_layers", 1),
        ("chs_num_layers", LAYERS + 1),
        ("chs_num_layers", 4),
        ("target_layer_ids", [0, 1, 4, 6, 7]),
        ("target_layer_ids", [1, 0, 3, 6, 7]),
        ("target_layer_ids", []),
        ("mask_token_id", 53),
        ("mask_token_id", -1),
        ("block_size", 1),
        ("num_hidden_layers", 0),
        ("num_key_value_heads", 3),
        ("num_target_layers", 9),
    ],
)
def test_a_wrong_value_is_named(key: str, value: Any) -> None:
    with pytest.raises(CheckpointError) as caught:
        DrafterConfig.from_dict(broken(key, value))
    assert caught.value.param in (key, "target_layer_ids")


@pytest.mark.parametrize(
    "value",
    [
        {"draft_vocab_size": 0},
        {"draft_vocab_size": 54},
        {"draft_vocab_size": "all"},
        {"other": 1},
        ["draft_vocab_size"],
    ],
)
def test_a_wrong_extension_is_named(value: Any) -> None:
    with pytest.raises(CheckpointError) as caught:
        DrafterConfig.from_dict(official_config() | {"dlite_agent_extensions": value})
    assert caught.value.param in ("dlite_agent_extensions", "draft_vocab_size")


def test_a_missing_group_size_is_stated_knowingly() -> None:
    config = broken("anchor_group_size")
    with pytest.raises(CheckpointError, match="--anchor-group-size"):
        DrafterConfig.from_dict(config)
    assert DrafterConfig.from_dict(config, anchor_group_size=6).anchor_group_size == 6
    with pytest.raises(CheckpointError) as caught:
        DrafterConfig.from_dict(official_config(1), anchor_group_size=6)
    assert caught.value.param == "anchor_group_size"
    assert DrafterConfig.from_dict(official_config(6), anchor_group_size=6).anchor_group_size == 6


def test_sliding_attention_is_refused() -> None:
    config = official_config() | {"layer_types": ["full_attention", "sliding_attention"]}
    with pytest.raises(CheckpointError) as caught:
        DrafterConfig.from_dict(config)
    assert caught.value.param == "layer_types"


@pytest.mark.parametrize(
    ("layers", "taps", "ids"),
    [
        (36, 5, [0, 1, 17, 34, 35]),
        (36, 7, [0, 1, 9, 17, 26, 34, 35]),
        (36, 12, [0, 1, 5, 8, 12, 16, 19, 23, 27, 30, 34, 35]),
        (36, 14, [0, 1, 4, 7, 10, 13, 16, 19, 22, 25, 28, 31, 34, 35]),
        (36, 18, [0, 1, 3, 5, 8, 10, 12, 14, 16, 19, 21, 23, 25, 27, 30, 32, 34, 35]),
        (28, 7, [0, 1, 7, 13, 20, 26, 27]),
        (28, 12, [0, 1, 4, 7, 9, 12, 15, 18, 20, 23, 26, 27]),
        (36, 2, [0, 35]),
        (4, 4, [0, 1, 2, 3]),
    ],
)
def test_the_rule_of_taps(layers: int, taps: int, ids: list[int]) -> None:
    assert target_layer_ids(layers, taps) == tuple(ids)


def test_too_many_taps_are_refused() -> None:
    with pytest.raises(CheckpointError) as caught:
        target_layer_ids(4, 5)
    assert caught.value.param == "chs_num_layers"


@pytest.mark.parametrize("field", ["num_target_layers", "hidden_size", "vocab_size"])
def test_another_target_is_refused_by_the_field(field: str, target: Target) -> None:
    config = make_drafter(target.spec).config
    config.check_target(target.spec)
    with pytest.raises(CheckpointError) as caught:
        replace(config, **{field: getattr(config, field) + 1}).check_target(target.spec)
    assert caught.value.param == field


def test_a_scaled_rope_survives_the_round_trip() -> None:
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
    config = DrafterConfig.from_dict(official_config() | {"rope_scaling": yarn})
    assert config.rope == RopeSpec("yarn", 10000.0, {"factor": 4.0, "original_max_position_embeddings": 32768})
    assert DrafterConfig.from_dict(config.to_dict()).rope == config.rope
