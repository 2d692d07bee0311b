"""Fixtures that are dear to build, made once a session; none of them may be changed by a test."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from hypothesis import HealthCheck, settings

from dlite_agent.decode.load import load_target
from dlite_agent.decode.rounds import Decoder
from dlite_agent.model.target import Target
from dlite_agent.model.weights import pull_default
from tests.helpers import load_tiny, pool_for, save_model, successor_drafter, tiny_model

torch.set_num_threads(1)  # tiny models: a second thread costs more than it brings, and much more on a busy machine
transformers.utils.logging.disable_progress_bar()

settings.register_profile("test", deadline=None, max_examples=40, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("soak", deadline=None, max_examples=2000, suppress_health_check=list(HealthCheck))
settings.load_profile("test")

FAMILIES = ("llama", "qwen2", "qwen3")


@pytest.fixture(scope="session")
def tiny_folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A predictable tiny target of each family, see `tests.helpers`."""
    root = tmp_path_factory.mktemp("tiny")
    return {family: save_model(tiny_model(family), root / family) for family in FAMILIES}


@pytest.fixture(scope="session")
def tiny(tiny_folders: dict[str, Path]) -> dict[str, Target]:
    return {family: load_tiny(folder) for family, folder in tiny_folders.items()}


@pytest.fixture(scope="session")
def target(tiny: dict[str, Target]) -> Target:
    return tiny["qwen3"]


@pytest.fixture(scope="session")
def make_decoder(target: Target) -> Callable[..., Decoder]:
    """A fresh decoder on the tiny Qwen3 target, by group size; `drafter=False` leaves the drafter out."""
    drafters = {size: successor_drafter(target, group_size=size) for size in (1, 6)}

    def make(group_size: int = 1, *, drafter: bool = True, positions: int = 20_000) -> Decoder:
        return Decoder(target, drafters[group_size] if drafter else None, pool_for(target, positions=positions))

    return make


@pytest.fixture(scope="session")
def default_folder() -> Path:
    return pull_default()


@pytest.fixture(scope="session")
def default_target(default_folder: Path) -> Target:
    return load_target(str(default_folder), dtype="fp32", device="cpu")


@pytest.fixture(scope="session")
def default_tokenizer(default_folder: Path) -> Any:
    return transformers.AutoTokenizer.from_pretrained(default_folder)


@pytest.fixture(scope="session")
def default_reference(default_folder: Path) -> Any:
    """transformers' own default model, fp32."""
    return transformers.AutoModelForCausalLM.from_pretrained(default_folder, dtype=torch.float32).eval()
