"""Folders of safetensors, whole and sharded; fingerprints; names that lead nowhere."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from dlite_agent.errors import ModelError
from dlite_agent.model.target import Rows
from dlite_agent.model.weights import DEFAULT_TARGET, FolderWeights, fingerprint, resolve
from tests.helpers import load_tiny, pool_for, prompt, save_model, tiny_model


def test_shards_compute_as_the_whole(tmp_path: Path, tiny_folders: dict[str, Path]) -> None:
    folder = save_model(tiny_model("qwen3"), tmp_path, max_shard_size="60KB")
    assert len(list(folder.glob("*.safetensors"))) > 2
    logits = []
    for place in (folder, tiny_folders["qwen3"]):
        target = load_tiny(place)
        kv = pool_for(target).sequence()
        kv.reserve(20)
        logits.append(target.forward([Rows(kv, torch.tensor(prompt(20)))]).logits)
    assert torch.equal(*logits)
    assert dict(FolderWeights(folder)).keys() == dict(FolderWeights(tiny_folders["qwen3"])).keys()


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    folder = save_model(tiny_model("qwen3"), tmp_path, max_shard_size="60KB")
    shard = sorted(folder.glob("*.safetensors"))[1]
    shard.unlink()
    with pytest.raises(ModelError) as caught:
        FolderWeights(folder)
    assert caught.value.param == shard.name


def test_a_torn_file_is_refused(tmp_path: Path, tiny_folders: dict[str, Path]) -> None:
    data = (tiny_folders["llama"] / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(data[: len(data) // 2])
    with pytest.raises(ModelError, match="cannot be read as safetensors"):
        FolderWeights(tmp_path)


def test_a_fingerprint_tells_models_apart_and_survives_a_copy(tmp_path: Path, tiny_folders: dict[str, Path]) -> None:
    source, copy = tiny_folders["qwen2"], tmp_path / "copy"
    shutil.copytree(source, copy)
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps(config | {"transformers_version": "9.9", "_name_or_path": "x"}))
    assert fingerprint(copy) == fingerprint(source)
    tensors = load_file(copy / "model.safetensors")
    tensors["model.norm.weight"][0] += 1e-3
    save_file(tensors, copy / "model.safetensors")
    assert fingerprint(copy) != fingerprint(source)
    assert len({fingerprint(folder) for folder in tiny_folders.values()}) == 3


def test_the_default_must_have_been_pulled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DLITE_CACHE", str(tmp_path))
    with pytest.raises(ModelError, match="model pull") as caught:
        resolve(DEFAULT_TARGET)
    assert caught.value.param == "target"


def test_a_missing_gguf_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="does not exist"):
        resolve(str(tmp_path / "none.gguf"))
