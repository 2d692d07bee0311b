"""Schemathesis from the app's own OpenAPI document: whatever is sent, the server does not fail."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.serving import Live


def fuzz(server: Live, folder: Path, examples: int) -> None:
    command = [
        str(Path(sys.executable).with_name("schemathesis")),
        "run",
        f"{server.url}/openapi.json",
        "--checks=not_a_server_error,status_code_conformance,content_type_conformance",
        f"--max-examples={examples}",
        "--phases=examples,fuzzing",
        "--exclude-path-regex=/events$",
        "--request-timeout=60",
        "--seed=1",
        "--workers=1",
        "--no-color",
    ]
    run = subprocess.run(command, capture_output=True, text=True, cwd=folder, check=False, env=os.environ | {"CI": "1"})
    assert run.returncode == 0, run.stdout[-6000:] + run.stderr[-2000:]


def test_a_few_requests_to_each_route(server: Live, tmp_path: Path) -> None:
    fuzz(server, tmp_path, 6)


@pytest.mark.soak
def test_many_requests_to_each_route(server: Live, tmp_path: Path) -> None:
    fuzz(server, tmp_path, 200)
