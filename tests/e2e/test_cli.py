"""The command line on the default model."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent.parent


def run(*arguments: str, status: int = 0) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHONWARNINGS": "ignore", "OMP_WAIT_POLICY": "passive"}
    done = subprocess.run(
        [sys.executable, "-m", "dlite_agent.cli", *arguments],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env=environment,
        check=False,
    )
    assert done.returncode == status, done.stderr
    return done


@pytest.fixture(scope="module")
def answers(default_folder: Path) -> dict[str, dict[str, Any]]:
    found = {}
    for mode in ("ar", "dlite"):
        done = run(
            "generate", "--prompt", "Name a sorting algorithm.", "--mode", mode, "--dtype", "fp32", "--json",
            "--max-new-tokens", "16", "--threads", "1",
        )  # fmt: skip
        found[mode] = json.loads(done.stdout)
    return found


def test_generate_gives_the_same_greedy_tokens_in_both_modes(answers: dict[str, dict[str, Any]]) -> None:
    assert answers["ar"]["token_ids"] == answers["dlite"]["token_ids"]
    assert len(answers["ar"]["token_ids"]) == 16
    assert answers["ar"]["text"] == answers["dlite"]["text"] != ""


def test_generate_reports_every_figure(answers: dict[str, dict[str, Any]]) -> None:
    ar, dlite = answers["ar"], answers["dlite"]
    assert ar["tau"] == 1.0
    assert ar["rounds"] == 15
    assert dlite["tau"] >= 1.0
    assert sum(int(advance) * count for advance, count in dlite["advances"].items()) == 15
    assert dlite["t_d"] > 0
    assert ar["prefilled"] == dlite["prefilled"] == ar["context"][0]
    assert dlite["t_round"] == pytest.approx(dlite["t_d"] + dlite["t_v"] + dlite["t_s"], rel=0.2)


def test_bench_decode_writes_its_figures(default_folder: Path, tmp_path: Path) -> None:
    prompts, out = tmp_path / "prompts.jsonl", tmp_path / "out.json"
    lines = [{"id": str(n), "messages": [{"role": "user", "content": f"Say {n}."}]} for n in range(2)]
    prompts.write_text("".join(json.dumps(line) + "\n" for line in lines))
    done = run(
        "bench", "decode", "--prompts", str(prompts), "--json", str(out), "--max-new-tokens", "8", "--threads", "1",
        "--dtype", "fp32",
    )  # fmt: skip
    result = json.loads(out.read_text())
    for name in ("tau", "speedup", "mixed_speedup", "t_ar", "t_d", "t_v", "t_s"):
        assert result[name] > 0
    assert result["modes"].keys() == {"dlite", "suffix", "mixed"}
    assert all(found["same_tokens"] == 2 for found in result["modes"].values())
    assert [row["id"] for row in result["rows"]] == ["0", "1"]
    assert result["same_tokens"] == 2
    assert "T_AR" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["generate", "--prompt", "x", "--temperature", "-1"], "[temperature]"),
        (["generate"], "[prompt]"),
        (["generate", "--prompt", "x", "--mode", "fast"], "[mode]"),
        (["generate", "--prompt", "x", "--target", "no/such/folder.gguf"], "[target]"),
        (["bench", "decode", "--prompts", "missing.jsonl"], "[prompts]"),
        (["bench", "device", "--shape", "huge"], "[shape]"),
        (["serve", "--host", "0.0.0.0"], "[host]"),
        (["report", "no-such-file.jsonl"], "no-such-file"),
    ],
)
def test_bad_input_is_one_line_that_names_the_field(arguments: list[str], named: str) -> None:
    done = run(*arguments, status=1)
    assert named in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1


def test_the_example_pauses_and_resumes_without_a_drafter_prefill(default_folder: Path) -> None:
    environment = os.environ | {"PYTHONWARNINGS": "ignore", "OMP_WAIT_POLICY": "passive"}
    example = ROOT / "examples" / "pause_and_resume.py"
    done = subprocess.run([sys.executable, str(example)], capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    assert "none through the drafter" in " ".join(done.stdout.split())
    assert done.stdout.count("decode: verify") == 2
