"""Prefill memory in a process of its own: beyond KV and one chunk, a long prompt needs no more than a short one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import torch

from tests.helpers import load_tiny, pool_for, prompt, run_turn, save_model, successor_drafter, tiny_model

_BACKGROUND = """
import sys
from tests.decode.test_memory import peaks
from pathlib import Path
peaks(Path(sys.argv[1]), Path(sys.argv[2]))
"""
SHORT, LONG = 1024, 8192


def peaks(folder: Path, out: Path) -> None:
    """Write the peak of resident bytes that a prefill of each length adds, KV rows taken off."""
    from dlite_agent.decode.rounds import Decoder

    torch.set_num_threads(1)
    target = load_tiny(folder, context_limit=LONG + 200)
    decoder = Decoder(target, successor_drafter(target), pool_for(target, positions=40_000))
    run_turn(decoder, decoder.open(), prompt(600), max_new_tokens=10)
    found = {}
    for length in (SHORT, LONG):
        state, before = decoder.open(), _reset_peak()
        run_turn(decoder, state, prompt(length), max_new_tokens=1)
        found[length] = _peak() - before - state.boundary * decoder.pool.bytes_per_position
    out.write_text(json.dumps([found[SHORT], found[LONG]]))


def _reset_peak() -> int:
    Path("/proc/self/clear_refs").write_text("5")
    return _status("VmRSS")


def _peak() -> int:
    return _status("VmHWM")


def _status(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(field))


def test_a_long_prompt_needs_no_more_than_a_short_one(tmp_path: Path) -> None:
    model = tiny_model(
        "qwen3",
        num_hidden_layers=3,
        hidden_size=256,
        intermediate_size=4096,
        num_attention_heads=8,
        num_key_value_heads=1,
        max_position_embeddings=LONG + 200,
    )
    folder = save_model(model, tmp_path / "model")
    out = tmp_path / "peaks.json"
    # Every larger buffer goes back to the system at once, so that what is resident is what is in use.
    environment = os.environ | {"MALLOC_MMAP_THRESHOLD_": "65536"}
    run = subprocess.run(
        [sys.executable, "-c", _BACKGROUND, str(folder), str(out)],
        cwd=Path(__file__).parents[2],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    short, long = json.loads(out.read_text())
    print(f"prefill of {SHORT}: {short / 2**20:.2f} MiB beyond KV, of {LONG}: {long / 2**20:.2f} MiB")
    assert short > 512 * 256 * 4, "a chunk's activations must show, or nothing was measured"
    assert long <= short * 1.1
