"""Official checkpoints: they load unchanged and compute what the format describes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from dlite_agent.errors import CheckpointError
from dlite_agent.model.drafter import Drafter
from dlite_agent.model.linear import Precision
from tests.helpers import CPU, FP32, relative_error
from tests.model.checkpoints import (
    HIDDEN,
    TAPS,
    VOCAB,
    official_config,
    official_shapes,
    official_tensors,
    reference_draft,
    write_checkpoint,
)


def inputs(rows: int, real: int, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Features [N, S, H], real tokens [N, real] and an embedding table [V, H]."""
    generator = torch.Generator().manual_seed(seed)
    features = torch.randn(rows, len(TAPS), HIDDEN, generator=generator)
    tokens = torch.randint(0, VOCAB, (rows, real), generator=generator)
    return features, tokens, torch.randn(VOCAB, HIDDEN, generator=generator)


def recording_greedy(seen: list[Tensor]) -> Callable[[int, Tensor], Tensor]:
    def choose(_step: int, logits: Tensor) -> Tensor:
        seen.append(logits)
        return logits.argmax(-1)

    return choose


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(
    ("group_size", "real", "bias"),
    [
        (1, 1, False),
        (1, 1, True),
        (6, 6, False),
        (6, 6, True),
        (2, 2, False),
        (6, 1, False),
        (6, 2, False),
        (6, 5, False),
    ],
)
def test_a_checkpoint_computes_what_the_format_says(
    group_size: int, real: int, bias: bool, packed: bool, tmp_path: Path
) -> None:
    """Fewer real tokens than G stand at the start of a sequence."""
    tensors = official_tensors(bias=bias)
    drafter = Drafter.load(write_checkpoint(tmp_path, official_config(group_size, bias=bias), tensors))
    if packed:
        drafter.pack(FP32, CPU)
    features, tokens, embedding = inputs(2, real)
    seen: list[Tensor] = []
    with torch.inference_mode():
        drafts = drafter.draft(features, tokens, embedding, 7, recording_greedy(seen))
    logits = torch.stack(seen, dim=1)
    for row in range(2):
        wanted, wanted_logits = reference_draft(tensors, group_size, features[row], tokens[row].tolist(), embedding)
        assert drafts[row].tolist() == wanted
        assert relative_error(logits[row], wanted_logits) <= 1e-4


def test_a_shorter_draft_is_the_beginning_of_the_whole(tmp_path: Path) -> None:
    drafter = Drafter.load(write_checkpoint(tmp_path, official_config(), official_tensors()))
    features, tokens, embedding = inputs(3, 1)
    seen: list[Tensor] = []
    with torch.inference_mode():
        whole = drafter.draft(features, tokens, embedding, 7, recording_greedy([]))
        short = drafter.draft(features, tokens, embedding, 3, recording_greedy(seen))
    assert torch.equal(short, whole[:, :3])
    assert len(seen) == 3, "the head stops early"


def test_teacher_forcing_follows_the_same_path(tmp_path: Path) -> None:
    drafter = Drafter.load(write_checkpoint(tmp_path, official_config(6), official_tensors()))
    features, tokens, embedding = inputs(2, 6)
    seen: list[Tensor] = []
    with torch.inference_mode():
        drafts = drafter.draft(features, tokens, embedding, 7, recording_greedy(seen))
        forced = drafter(features, tokens, embedding, drafts[:, :-1])
    assert relative_error(forced, torch.stack(seen, dim=1)) <= 1e-5


def test_rows_do_not_see_each_other(tmp_path: Path) -> None:
    drafter = Drafter.load(write_checkpoint(tmp_path, official_config(6), official_tensors()))
    features, tokens, embedding = inputs(5, 6)
    with torch.inference_mode():
        together = drafter.draft(features, tokens, embedding, 7, recording_greedy([]))
        alone = [
            drafter.draft(features[i : i + 1], tokens[i : i + 1], embedding, 7, recording_greedy([])) for i in range(5)
        ]
    assert torch.equal(together, torch.cat(alone))


@pytest.mark.parametrize("name", official_shapes(bias=True))
def test_each_missing_or_misshapen_tensor_is_named(name: str, tmp_path: Path) -> None:
    config, tensors = official_config(bias=True), official_tensors(bias=True)
    whole = tensors.pop(name)
    with pytest.raises(CheckpointError, match="lacks the tensor") as caught:
        Drafter.load(write_checkpoint(tmp_path, config, tensors))
    assert caught.value.param == name
    tensors[name] = torch.cat((whole, whole))
    with pytest.raises(CheckpointError, match="has shape") as caught:
        Drafter.load(write_checkpoint(tmp_path, config, tensors))
    assert caught.value.param == name


def test_an_unknown_tensor_is_named(tmp_path: Path) -> None:
    tensors = official_tensors() | {"history_norm.weight": torch.ones(HIDDEN)}
    with pytest.raises(CheckpointError) as caught:
        Drafter.load(write_checkpoint(tmp_path, official_config(), tensors))
    assert caught.value.param == "history_norm.weight"


def test_biases_without_attention_bias_are_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="unknown tensor"):
        Drafter.load(write_checkpoint(tmp_path, official_config(bias=False), official_tensors(bias=True)))


@pytest.mark.parametrize("break_file", ["no config", "torn config", "no weights", "torn weights"])
def test_an_unreadable_folder_is_refused(break_file: str, tmp_path: Path) -> None:
    write_checkpoint(tmp_path, official_config(), official_tensors())
    file = tmp_path / ("config.json" if "config" in break_file else "model.safetensors")
    data = file.read_bytes()
    file.unlink()
    if "torn" in break_file:
        file.write_bytes(data[: len(data) // 2])
    with pytest.raises(CheckpointError) as caught:
        Drafter.load(tmp_path)
    assert caught.value.param == "drafter"


def test_saving_keeps_names_shapes_and_values(tmp_path: Path) -> None:
    tensors = official_tensors(bias=True)
    drafter = Drafter.load(write_checkpoint(tmp_path / "a", official_config(6, bias=True), tensors))
    drafter.save(tmp_path / "b", {"tau": 2.0})
    saved = load_file(tmp_path / "b" / "model.safetensors")
    assert saved.keys() == tensors.keys()
    assert all(torch.equal(saved[name], tensors[name]) for name in tensors)
    assert Drafter.load(tmp_path / "b").config == drafter.config


def test_a_reduced_vocabulary_maps_to_token_ids(tmp_path: Path) -> None:
    """Our named extension: the head knows only some ids, and drafts are ids of the target."""
    known = torch.tensor([3, 8, 21, 50])
    config: dict[str, Any] = official_config() | {"dlite_agent_extensions": {"draft_vocab_size": 4}}
    tensors = official_tensors() | {"draft_vocab_ids": known.to(torch.int32)}
    name = "sequential_head.output_proj.weight"
    tensors[name] = tensors[name][known].contiguous()
    drafter = Drafter.load(write_checkpoint(tmp_path / "a", config, tensors))
    features, tokens, embedding = inputs(4, 1)
    seen: list[Tensor] = []
    with torch.inference_mode():
        drafts = drafter.draft(features, tokens, embedding, 7, recording_greedy(seen))
    assert torch.equal(drafts, known[torch.stack(seen, dim=1).argmax(-1)])
    drafter.save(tmp_path / "b", {})
    again = Drafter.load(tmp_path / "b")
    assert again.draft_vocab_ids is not None
    assert again.draft_vocab_ids.tolist() == known.tolist()


def test_a_packed_drafter_in_bf16_stays_near(tmp_path: Path) -> None:
    tensors = official_tensors()
    drafter = Drafter.load(write_checkpoint(tmp_path, official_config(), tensors))
    drafter.pack(Precision("bf16", "plain"), CPU)
    features, tokens, embedding = inputs(1, 1)
    seen: list[Tensor] = []
    with torch.inference_mode():
        drafter.draft(features.bfloat16(), tokens, embedding.bfloat16(), 1, recording_greedy(seen))
    _, wanted = reference_draft(tensors, 1, features[0], tokens[0].tolist(), embedding)
    assert relative_error(seen[0][0], wanted[0]) <= 0.1
