"""The images as far as they can be tried without an engine: what they copy, start, check and are composed of."""

from __future__ import annotations

import inspect
import json
import os
import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from dlite_agent import cli
from tests.e2e.processes import ROOT, Logged

DOCKER = ROOT / "docker"
FILES = ("Dockerfile", "Dockerfile.cuda")


def instructions(name: str) -> list[tuple[str, str]]:
    """Keyword and arguments of each instruction, in order."""
    text = re.sub(r"^#.*\n", "", (DOCKER / name).read_text(), flags=re.MULTILINE).replace("\\\n", " ")
    return [(word, rest.strip()) for word, _, rest in (line.partition(" ") for line in text.splitlines() if line)]


def last(name: str, keyword: str) -> str:
    return [rest for word, rest in instructions(name) if word == keyword][-1]


def health(name: str) -> list[str]:
    command: list[str] = json.loads(last(name, "HEALTHCHECK").partition("CMD ")[2])
    return command


@pytest.mark.parametrize("name", FILES)
def test_what_the_wheel_is_built_from_is_copied(name: str) -> None:
    copied = {
        source
        for word, rest in instructions(name)
        if word == "COPY" and not rest.startswith("--from")
        for source in rest.split()[:-1]
    }
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    wheel = project["tool"]["hatch"]["build"]["targets"]["wheel"]
    assert copied == {
        "pyproject.toml",
        project["project"]["readme"],
        *project["project"]["license-files"],
        *wheel["packages"],
        *wheel["force-include"],
    }
    assert all((ROOT / source).exists() for source in copied)


@pytest.mark.parametrize("name", FILES)
def test_steps_are_shell_and_the_user_has_no_rights(name: str) -> None:
    for word, rest in instructions(name):
        if word == "RUN":
            subprocess.run(["/bin/sh", "-n", "-c", rest], check=True)
    made = re.search(r"useradd .*--uid (\d+)", " ".join(rest for word, rest in instructions(name) if word == "RUN"))
    assert made is not None
    assert last(name, "USER") == made[1] != "0"
    port = inspect.signature(cli.serve).parameters["port"].default
    assert last(name, "EXPOSE") == str(port)
    assert f"127.0.0.1:{port}/ready" in health(name)[-1]
    start = last(name, "ENTRYPOINT")
    options = set(re.findall(r"--[a-z-]+", start + last(name, "CMD")))
    known = {"--" + option.replace("_", "-") for option in inspect.signature(cli.serve).parameters}
    assert options <= known
    assert set(json.loads(last(name, "VOLUME"))) == {"/data", "/models"}


def test_services_fit_the_image() -> None:
    composed: dict[str, Any] = yaml.safe_load((DOCKER / "compose.yaml").read_text())
    server = composed["services"]["server"]
    build = server["build"]
    assert (DOCKER / build["context"] / build["dockerfile"]).resolve() == DOCKER / "Dockerfile"
    mounted = {target: volume for volume, _, target in (item.partition(":") for item in server["volumes"])}
    assert mounted.keys() == set(json.loads(last("Dockerfile", "VOLUME")))
    for service in composed["services"].values():
        assert all(item.partition(":")[0] in composed["volumes"] for item in service["volumes"])
        assert service["cap_drop"] == ["ALL"]
    (secret,) = server["secrets"]
    assert f"/run/secrets/{secret}" in json.loads(last("Dockerfile", "CMD"))
    ignored = (DOCKER / ".gitignore").read_text().split()
    assert Path(composed["secrets"][secret]["file"]).name in [line.lstrip("/") for line in ignored]
    drain = inspect.signature(cli.serve).parameters["drain_seconds"].default
    assert int(server["stop_grace_period"].removesuffix("s")) > drain
    assert all(name in composed["services"] for name in server["depends_on"])


def test_the_container_s_commands_start_check_and_stop(tmp_path: Path) -> None:
    """Entry point, command and health check as written, with a folder for the volume and a free port."""
    keys = tmp_path / "api_keys"
    keys.write_text("a-key-for-the-container\n")
    start: list[str] = json.loads(last("Dockerfile", "ENTRYPOINT"))
    script = start[2].replace("/data", shlex.quote(str(tmp_path / "data")))
    command = [item.replace("/run/secrets/api_keys", str(keys)) for item in json.loads(last("Dockerfile", "CMD"))]
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    running = Logged([*start[:2], script, *start[3:], *command, "--port", "0"], 240, PATH=path)
    try:
        port = running.url.rpartition(":")[2]
        check = [item.replace(":8000/", f":{port}/") for item in health("Dockerfile")]
        environment = os.environ | {"PATH": path}
        assert subprocess.run(check, check=False, env=environment, timeout=60).returncode == 0
    finally:
        running.kill()
    down = subprocess.run(check, check=False, env=environment, timeout=60, capture_output=True)
    assert down.returncode != 0
