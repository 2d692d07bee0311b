"""The teacher: a drafter that also sees fused states of the tokens before the boundary. It teaches, and never serves.

Names follow the recipe (role `swa_teacher`). Its middle history layer is the tap nearest the target's middle, so that
it reads nothing a student's cache does not hold.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from dlite_agent.errors import CheckpointError
from dlite_agent.model.drafter import Drafter
from dlite_agent.model.drafter_config import DrafterConfig
from dlite_agent.model.rope import RotaryTable

ROLE = "swa_teacher"


class Teacher(Drafter):
    """A drafter whose `features` are [N, S + 3 (W - 1), H]: boundary features, then the history, oldest token first.

    History covers tokens anchor - W .. anchor - 2, three states each (see `history_layer_ids`), fused to one vector.
    Each anchor needs W tokens before it. Positions are those of the text, up to one shift, which rotation ignores.
    """

    def __init__(self, config: DrafterConfig, window: int) -> None:
        super().__init__(config)
        self.window = window
        self.history_fuse = nn.Linear(3 * config.hidden_size, config.hidden_size, bias=False)
        self.history_norm = nn.RMSNorm(config.hidden_size, eps=config.norm_eps)

    def backbone(self, features: Tensor, tokens: Tensor, embedding: Tensor, placeholders: int | None = None) -> Tensor:
        """Hidden states [N, P, H] of the placeholders; see `Drafter.backbone`."""
        config = self.config
        count = config.proposal_length if placeholders is None else placeholders
        taps = len(config.target_layer_ids)
        past = features[:, taps:].reshape(features.shape[0], self.window - 1, -1)
        context = torch.cat(
            (
                self.history_norm(self.history_fuse(past)),
                self.context_norm(features[:, :taps] + self.layer_depth_embedding(self.tap_ids)),
            ),
            dim=1,
        )
        masks = embedding[config.mask_token_id].expand(features.shape[0], count, -1)
        x = torch.cat((embedding[tokens], masks), dim=1).to(features.dtype)
        cos, sin = self._local_angles(tokens.shape[1], count, x)
        for layer in self.layers:
            x = layer(x, context, cos, sin)
        hidden: Tensor = self.norm(x[:, -count:])
        return hidden

    def _local_angles(self, real: int, placeholders: int, like: Tensor) -> tuple[Tensor, Tensor]:
        """cos and sin for the history, S context vectors at the boundary, real tokens and placeholders."""
        if (real, placeholders) not in self._angles:
            config, window = self.config, self.window
            size = window + 1 + placeholders
            table = RotaryTable(config.rope, config.head_dim, size=size, device=like.device, dtype=like.dtype)
            boundary = [window - 1] * len(config.target_layer_ids)
            positions = [*range(window - 1), *boundary, *range(window + 1 - real, size)]
            self._angles[real, placeholders] = table.at(torch.tensor(positions, device=like.device))
        return self._angles[real, placeholders]

    def save(self, folder: Path, card: dict[str, Any]) -> None:
        """As a drafter's, with the teacher's role, so that a server refuses it by name."""
        super().save(folder, card)
        config = self.config.to_dict()
        config["dlite_config"] |= {
            "model_role": ROLE,
            "swa_window_size": self.window,
            "history_layer_ids": list(history_layer_ids(self.config)),
        }
        (folder / "config.json").write_text(json.dumps(config, indent=1) + "\n")

    @classmethod
    def load(cls, folder: Path, *, anchor_group_size: int | None = None) -> Teacher:
        """Read what `save` wrote, fp32.

        Raises:
            CheckpointError: the folder holds no teacher, or a damaged one.
        """
        try:
            config: dict[str, Any] = json.loads((folder / "config.json").read_text())
            dlite = config["dlite_config"]
            if dlite["model_role"] != ROLE:
                raise CheckpointError(
                    f"{folder} holds a {dlite['model_role']}, not a teacher: train one with route teacher",
                    param="two_stage.teacher",
                )
            dlite["model_role"] = "pivot_q_student"
            shapes = DrafterConfig.from_dict(config, anchor_group_size=anchor_group_size)
            teacher = cls(shapes, int(dlite["swa_window_size"]))
            wanted = teacher.state_dict()
            tensors = load_file(folder / "model.safetensors")
            teacher.load_state_dict({name: tensor.to(wanted[name].dtype) for name, tensor in tensors.items()})
        except (OSError, ValueError, KeyError, TypeError, RuntimeError, SafetensorError) as error:
            raise CheckpointError(f"{folder} is not a readable teacher: {error}", param="two_stage.teacher") from error
        return teacher


def history_layer_ids(config: DrafterConfig) -> tuple[int, int, int]:
    """The first tap, the one nearest the target's middle, and the last."""
    taps, middle = config.target_layer_ids, config.num_target_layers // 2
    return taps[0], min(taps, key=lambda layer: abs(layer - middle)), taps[-1]
