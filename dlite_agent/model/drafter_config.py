"""The DLite checkpoint's config, checked strictly: a drafter that does not fit is refused by the field's name.

The layout is the official one (`architecture_version` dlite_v1): the target's Qwen3 config at the top level with the
drafter's depth, and a `dlite_config` block. One named extension is ours: `dlite_agent_extensions.draft_vocab_size`
says that the head predicts only the ids listed in the tensor `draft_vocab_ids`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from dlite_agent.errors import CheckpointError
from dlite_agent.model.spec import ModelSpec, RopeSpec, rope_spec


@dataclass(frozen=True)
class DrafterConfig:
    """Shapes of a DLite drafter. `block_size` counts the anchor, so K = block_size - 1 tokens are proposed."""

    num_target_layers: int
    depth: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    norm_eps: float
    rope: RopeSpec
    attention_bias: bool
    block_size: int
    anchor_group_size: int
    target_layer_ids: tuple[int, ...]
    rank: int
    mask_token_id: int
    draft_vocab_size: int | None = None

    @property
    def proposal_length(self) -> int:
        return self.block_size - 1

    @property
    def head_vocab(self) -> int:
        """Rows of the head's output: the reduced draft vocabulary if there is one."""
        return self.draft_vocab_size or self.vocab_size

    @classmethod
    def for_target(
        cls,
        spec: ModelSpec,
        *,
        mask_token_id: int,
        depth: int = 2,
        taps: int = 8,
        rank: int = 256,
        anchor_group_size: int = 1,
        block_size: int = 8,
        draft_vocab_size: int | None = None,
    ) -> DrafterConfig:
        """A fresh drafter in the geometry of a target."""
        return cls(
            num_target_layers=spec.num_layers,
            depth=depth,
            hidden_size=spec.hidden_size,
            intermediate_size=spec.intermediate_size,
            num_heads=spec.num_heads,
            num_kv_heads=spec.num_kv_heads,
            head_dim=spec.head_dim,
            vocab_size=spec.vocab_size,
            norm_eps=spec.norm_eps,
            rope=RopeSpec("default", spec.rope.theta),
            attention_bias=False,
            block_size=block_size,
            anchor_group_size=anchor_group_size,
            target_layer_ids=target_layer_ids(spec.num_layers, taps),
            rank=rank,
            mask_token_id=mask_token_id,
            draft_vocab_size=draft_vocab_size,
        )

    @classmethod
    def from_dict(cls, config: dict[str, Any], *, anchor_group_size: int | None = None) -> DrafterConfig:
        """Read and check a checkpoint's `config.json`.

        Args:
            anchor_group_size: G as the user states it, for checkpoints whose config lacks it; never overrides.

        Raises:
            CheckpointError: a field is missing, wrong or unsupported; `param` names it.
        """
        dlite = _need(config, "dlite_config", dict)
        _expect(dlite, "architecture_version", "dlite_v1")
        _expect(dlite, "model_role", "pivot_q_student")
        _expect(dlite, "sequential_head", "rnn")
        layers = _need(config, "num_target_layers", int)
        taps = _need(dlite, "chs_num_layers", int)
        if not 2 <= taps <= layers:
            raise CheckpointError(f"chs_num_layers must be 2..{layers}, not {taps}", param="chs_num_layers")
        ids = tuple(_need(dlite, "target_layer_ids", list))
        if ids != (rule := target_layer_ids(layers, taps)):
            raise CheckpointError(
                f"target_layer_ids are {list(ids)}; {taps} taps of {layers} layers must be {list(rule)}",
                param="target_layer_ids",
            )
        rank = _need(dlite, "sequential_rank", int)
        if rank <= 0:
            raise CheckpointError(f"sequential_rank must be positive, not {rank}", param="sequential_rank")
        block = _need(config, "block_size", int)
        if block < 2:
            raise CheckpointError(f"block_size must be at least 2, not {block}", param="block_size")
        if set(config.get("layer_types") or []) - {"full_attention"}:
            raise CheckpointError("layer_types must all be full_attention", param="layer_types")
        vocab = _need(config, "vocab_size", int)
        mask = _need(dlite, "mask_token_id", int)
        if not 0 <= mask < vocab:
            raise CheckpointError(f"mask_token_id {mask} is outside the {vocab} embedding rows", param="mask_token_id")
        heads, kv_heads = _need(config, "num_attention_heads", int), _need(config, "num_key_value_heads", int)
        if kv_heads < 1 or heads % kv_heads:
            raise CheckpointError(
                f"num_key_value_heads must divide {heads} heads, not be {kv_heads}", param="num_key_value_heads"
            )
        depth = _need(config, "num_hidden_layers", int)
        if depth < 1:
            raise CheckpointError(f"num_hidden_layers must be at least 1, not {depth}", param="num_hidden_layers")
        hidden = _need(config, "hidden_size", int)
        return cls(
            num_target_layers=layers,
            depth=depth,
            hidden_size=hidden,
            intermediate_size=_need(config, "intermediate_size", int),
            num_heads=heads,
            num_kv_heads=kv_heads,
            head_dim=config.get("head_dim") or hidden // heads,
            vocab_size=vocab,
            norm_eps=_need(config, "rms_norm_eps", float),
            rope=rope_spec(config),
            attention_bias=bool(config.get("attention_bias", False)),
            block_size=block,
            anchor_group_size=_group_size(dlite, anchor_group_size),
            target_layer_ids=ids,
            rank=rank,
            mask_token_id=mask,
            draft_vocab_size=_draft_vocab_size(config, vocab),
        )

    def to_dict(self) -> dict[str, Any]:
        """The official layout (plus the named extension if used), as `from_dict` reads it."""
        config: dict[str, Any] = {
            "architectures": ["DLiteDraftModel"],
            "model_type": "qwen3",
            "num_hidden_layers": self.depth,
            "num_target_layers": self.num_target_layers,
            "block_size": self.block_size,
            "layer_types": ["full_attention"] * self.depth,
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_attention_heads": self.num_heads,
            "num_key_value_heads": self.num_kv_heads,
            "head_dim": self.head_dim,
            "vocab_size": self.vocab_size,
            "rms_norm_eps": self.norm_eps,
            "rope_theta": self.rope.theta,
            "rope_scaling": None if self.rope.kind == "default" else {"rope_type": self.rope.kind, **self.rope.options},
            "attention_bias": self.attention_bias,
            "dlite_config": {
                "architecture_version": "dlite_v1",
                "model_role": "pivot_q_student",
                "anchor_group_size": self.anchor_group_size,
                "chs_num_layers": len(self.target_layer_ids),
                "target_layer_ids": list(self.target_layer_ids),
                "sequential_head": "rnn",
                "sequential_rank": self.rank,
                "mask_token_id": self.mask_token_id,
            },
        }
        if self.draft_vocab_size is not None:
            config["dlite_agent_extensions"] = {"draft_vocab_size": self.draft_vocab_size}
        return config

    def check_target(self, spec: ModelSpec) -> None:
        """Raise CheckpointError unless layers, width and vocabulary are the target's."""
        for field, ours, theirs in (
            ("num_target_layers", self.num_target_layers, spec.num_layers),
            ("hidden_size", self.hidden_size, spec.hidden_size),
            ("vocab_size", self.vocab_size, spec.vocab_size),
        ):
            if ours != theirs:
                raise CheckpointError(
                    f"the drafter was made for a target with {field} {ours}, this target has {theirs}", param=field
                )


def target_layer_ids(num_layers: int, taps: int) -> tuple[int, ...]:
    """The format's rule: first and last layer, the rest spread over 1..L-2 with Python's rounding.

    Raises:
        CheckpointError: `taps` distinct layers do not exist.
    """
    middle = taps - 2
    fractions = [0.5] if middle == 1 else [i / (middle - 1) for i in range(middle)]
    ids = {0, num_layers - 1} | {1 + round(fraction * (num_layers - 3)) for fraction in fractions}
    if len(ids) != taps:
        raise CheckpointError(f"{taps} distinct taps do not fit {num_layers} layers", param="chs_num_layers")
    return tuple(sorted(ids))


def _group_size(dlite: dict[str, Any], stated: int | None) -> int:
    if "anchor_group_size" not in dlite and stated is None:
        raise CheckpointError(
            "dlite_config lacks anchor_group_size and it cannot be guessed: if you know the G this drafter was trained "
            "with, state it with --anchor-group-size",
            param="anchor_group_size",
        )
    size = dlite.get("anchor_group_size", stated)
    if stated is not None and size != stated:
        raise CheckpointError(
            f"anchor_group_size is {size} in the checkpoint, {stated} was stated", param="anchor_group_size"
        )
    if not isinstance(size, int) or isinstance(size, bool) or size < 1:
        raise CheckpointError(f"anchor_group_size must be a whole number >= 1, not {size!r}", param="anchor_group_size")
    return size


def _draft_vocab_size(config: dict[str, Any], vocab: int) -> int | None:
    if config.get("dlite_agent_extensions") is None:
        return None
    extensions = _need(config, "dlite_agent_extensions", dict)
    if unknown := set(extensions) - {"draft_vocab_size"}:
        raise CheckpointError(f"unknown extension {min(unknown)!r}", param="dlite_agent_extensions")
    size: int = _need(extensions, "draft_vocab_size", int)
    if not 1 <= size <= vocab:
        raise CheckpointError(f"draft_vocab_size must be 1..{vocab}, not {size}", param="draft_vocab_size")
    return size


def _need(block: dict[str, Any], key: str, kind: type[Any]) -> Any:
    if key not in block:
        raise CheckpointError(f"the checkpoint's config lacks {key}", param=key)
    value = block[key]
    if not isinstance(value, kind) or isinstance(value, bool):
        raise CheckpointError(f"{key} must be of type {kind.__name__}, not {value!r}", param=key)
    return value


def _expect(block: dict[str, Any], key: str, wanted: str) -> None:
    if (found := _need(block, key, str)) != wanted:
        raise CheckpointError(f"{key} must be {wanted!r}, not {found!r}", param=key)
