"""`dlite-agent serve` as a process of its own, to be killed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import httpx

from tests.serving import MODEL

ROOT = Path(__file__).parents[2]


class Logged:
    """A server's process and the JSON lines of its log, once one of them is `until`; its `url`."""

    def __init__(self, command: Sequence[str], seconds: float, *, until: str = "ready", **environment: str) -> None:
        self._seconds = seconds
        self._process = subprocess.Popen(
            command, stderr=subprocess.PIPE, text=True, cwd=ROOT, env=os.environ | environment
        )
        self.lines: list[dict[str, Any]] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        self.url = f"http://127.0.0.1:{self.wait_for('listening')['port']}"
        self.wait_for(until)

    def _read(self) -> None:
        assert self._process.stderr is not None
        for line in self._process.stderr:
            if line.startswith("{"):
                self.lines.append(json.loads(line))

    def wait_for(self, message: str) -> dict[str, Any]:
        end = time.monotonic() + self._seconds
        while True:
            for line in list(self.lines):
                if line["message"] == message:
                    return line
            assert self._process.poll() is None, self.lines
            assert time.monotonic() < end, self.lines
            time.sleep(0.05)

    def wait(self) -> int:
        """Its exit code, once it has ended."""
        code = self._process.wait(120)
        self._reader.join(10)
        assert self._process.stderr is not None
        self._process.stderr.close()
        return code

    def terminate(self) -> int:
        """SIGTERM, and the exit code."""
        self._process.send_signal(signal.SIGTERM)
        return self.wait()

    def kill(self) -> None:
        if self._process.poll() is None:
            self._process.kill()
            self.wait()


class Served(Logged):
    """A server with the default model on a free port; `kill` is -9."""

    def __init__(self, data: Path, *options: str, until: str = "ready", **environment: str) -> None:
        command = [sys.executable, "-m", "dlite_agent.cli", "serve", "--port", "0", "--dtype", "fp32", "--threads", "1"]
        super().__init__([*command, "--data-dir", str(data), *options], 240, until=until, **environment)

    def chat(self, messages: list[dict[str, Any]], **fields: Any) -> dict[str, Any]:
        body = {"model": MODEL, "messages": messages, "temperature": 0, "max_tokens": 10, "ignore_eos": True} | fields
        response = httpx.post(f"{self.url}/v1/chat/completions", json=body, timeout=240)
        assert response.status_code == 200, response.text
        answer: dict[str, Any] = response.json()
        return answer

    def __enter__(self) -> Served:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.kill()
