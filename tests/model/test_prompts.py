"""Prompts by tiles: any cut of a long text, in any company, gives what transformers gives."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from dlite_agent.decode.kv import SequenceKV
from dlite_agent.model import native
from dlite_agent.model.fused import CHUNK, PROMPT_ROWS
from dlite_agent.model.linear import Precision
from dlite_agent.model.target import Rows, Target
from tests.helpers import load_tiny, pool_for, prompt, relative_error, save_model, tiny_model
from tests.model.test_target import TOLERANCE

PACKED = Precision("packed", "native-packed")
LENGTH = 2 * CHUNK + 90
TAPS = (0, 2, 3)
SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "q4": ("Q4_1", {"num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 32}),
    "q8": ("Q8_0", {"num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 64}),
    "bf16": ("BF16", {"num_attention_heads": 5, "num_key_value_heads": 1, "head_dim": 96}),
    "dense": ("F32", {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 128}),
}

KERNELS = native.library()
pytestmark = pytest.mark.skipif(
    KERNELS is None or not KERNELS.dlite_prompts(), reason="no AMX processor, or no C compiler"
)


class Case:
    """A target whose products are all of one kind, and what transformers makes of a text of LENGTH ids."""

    def __init__(self, kind: str, shape: dict[str, Any], folder: Path) -> None:
        model = tiny_model("qwen3", seed=3, hidden_size=64, intermediate_size=96, max_position_embeddings=1024, **shape)
        for name, parameter in model.named_parameters():
            if parameter.ndim == 2 and "embed" not in name and kind != "F32":
                grid = gguf.GGMLQuantizationType[kind]
                parameter.data = torch.from_numpy(gguf.dequantize(gguf.quantize(parameter.data.numpy(), grid), grid))
        self.target = load_tiny(save_model(model, folder), context_limit=LENGTH, precision=PACKED)
        self.ids = prompt(LENGTH)
        with torch.inference_mode():
            out = model(torch.tensor([self.ids]), output_hidden_states=True)
        self.logits = out.logits[0]
        self.taps = torch.stack([out.hidden_states[layer + 1][0] for layer in TAPS], dim=1)

    def sequence(self) -> SequenceKV:
        kv = pool_for(self.target).sequence()
        kv.reserve(LENGTH)
        return kv

    def rows(self, kv: SequenceKV, count: int) -> Rows:
        return Rows(kv, torch.tensor(self.ids[kv.length : kv.length + count]))


@pytest.fixture(scope="module", params=SHAPES)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    return Case(*SHAPES[request.param], tmp_path_factory.mktemp(request.param))


@pytest.fixture(params=[1, 3])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


@pytest.mark.parametrize(
    "sizes",
    [(LENGTH,), (PROMPT_ROWS + 1, 100, PROMPT_ROWS, 47, 7, 1, 200), (CHUNK, CHUNK, 90), (CHUNK - 1, 48, CHUNK)],
    ids=str,
)
def test_prompts_equal_transformers(case: Case, threads: int, sizes: tuple[int, ...]) -> None:
    kv = case.sequence()
    for size in sizes:
        at = slice(kv.length, kv.length + size)
        out = case.target.forward([case.rows(kv, size)], tap_layers=TAPS)
        assert relative_error(out.logits, case.logits[at]) <= TOLERANCE
        assert relative_error(out.taps, case.taps[at]) <= TOLERANCE


@settings(max_examples=15)
@given(cuts=st.lists(st.integers(1, LENGTH - 1), min_size=1, max_size=6, unique=True))
def test_every_cut_gives_the_same_rows(case: Case, cuts: list[int]) -> None:
    kv = case.sequence()
    parts: list[Tensor] = []
    for start, end in pairwise([0, *sorted(cuts), LENGTH]):
        parts.append(case.target.forward([case.rows(kv, end - start)]).logits)
    assert relative_error(torch.cat(parts), case.logits) <= TOLERANCE


def test_a_prompt_does_not_depend_on_its_company(case: Case) -> None:
    """To the bit, before and behind windows and other prompts."""
    sizes = [5, 80, 1, 20, PROMPT_ROWS + 1, 8, 150]

    def begun(target: Target, size: int) -> Rows:
        kv = case.sequence()
        target.forward([case.rows(kv, 10 + size)])
        return case.rows(kv, size)

    alone = [case.target.forward([begun(case.target, size)], tap_layers=TAPS) for size in sizes]
    rows = torch.tensor([0, 4, 84, 85, 105, 106, 139, 146, sum(sizes) - 1])
    both = [begun(case.target, size) for size in sizes]
    out = case.target.forward(both, logit_rows=rows, tap_layers=TAPS, tap_rows=rows)
    assert torch.equal(out.logits, torch.cat([part.logits for part in alone])[rows])
    assert torch.equal(out.taps, torch.cat([part.taps for part in alone])[rows])
