"""Schemathesis from the app's own OpenAPI document, all checks: whatever is sent, the server keeps to what it says."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.serving import live, tiny

KEY = "key-of-fuzzers"
CONFIG = """
[checks]
# As long as a request may take at all: 10 s would measure the machine.
max_response_time = 120.0

[checks.positive_data_acceptance]
# What a schema allows may still be refused: fields that contradict each other, a prompt that does not fit.
expected-statuses = ["2xx", 400, 404, 409, 429]
"""


def fuzz(folder: Path, *options: str) -> None:
    """A key is asked for, so that requests without one are tried too. Event streams that never end are left out."""
    with live(tiny(folder / "model", context_limit=64, api_keys=(KEY,))) as server:
        (folder / "schemathesis.toml").write_text(CONFIG)
        command = [
            str(Path(sys.executable).with_name("schemathesis")),
            "run",
            f"{server.url}/openapi.json",
            "--checks=all",
            f"--header=Authorization: Bearer {KEY}",
            "--exclude-path-regex=/events$",
            "--request-timeout=120",
            "--seed=1",
            "--no-color",
            *options,
        ]
        environment = os.environ | {"CI": "1"}
        run = subprocess.run(command, capture_output=True, text=True, cwd=folder, check=False, env=environment)
        assert run.returncode == 0, run.stdout[-8000:] + run.stderr[-2000:]
        print("\n".join(run.stdout.splitlines()[-6:]))
        answered = server.service.recorder.metrics.text().decode()
        assert "vllm:request_success_total{" in answered, "no request came through to the engine"


def test_a_few_requests_to_each_route(tmp_path: Path) -> None:
    fuzz(tmp_path, "--phases=fuzzing", "--max-examples=2")


@pytest.mark.soak
def test_many_requests_to_each_route(tmp_path: Path) -> None:
    fuzz(tmp_path, "--phases=coverage,fuzzing,stateful", "--max-examples=50")
