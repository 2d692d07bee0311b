"""Harnesses of others, unchanged, on our server and in our sandbox: each example runs as it is shipped."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from tests.serving import Live, live, tiny

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    """A server of a tiny random model: the grammar makes its calls, and what they say does not matter here."""
    with live(tiny(tmp_path_factory.mktemp("tiny"))) as served:
        yield served


def run(command: list[str], cwd: Path, **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", *command],
        cwd=cwd,
        capture_output=True,
        text=True,
        env=os.environ | environment,
        timeout=400,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout.strip().splitlines()[-1]


def test_openai_agents_sdk(server: Live, tmp_path: Path) -> None:
    said = json.loads(run([str(EXAMPLES / "agents_sdk.py"), server.url, server.service.model], tmp_path))
    assert said["asked"]
    (first, _), (second, cached) = said["usages"][:2]
    assert cached >= first
    assert second > first


_MINI = """
import json, sys
from pathlib import Path
import yaml
from minisweagent.agents.default import DefaultAgent
from minisweagent.environments import get_environment
from minisweagent.models import get_model

config = yaml.safe_load(Path(sys.argv[1]).read_text())
model = get_model(config=config["model"])
environment = get_environment(config["environment"])
agent = DefaultAgent(model, environment, **config["agent"])
result = agent.run("List the files.")
outputs = [message for message in agent.messages if message["role"] == "tool"]
print(json.dumps({"status": result["exit_status"], "level": str(environment.level), "outputs": outputs}))
"""


def test_mini_swe_agent_with_our_model_and_our_sandbox(server: Live, tmp_path: Path) -> None:
    config = yaml.safe_load((EXAMPLES / "mini_swe_agent.yaml").read_text())
    config["model"]["model_name"] = f"openai/{server.service.model}"
    config["model"]["model_kwargs"] |= {"api_base": f"{server.url}/v1", "max_tokens": 40}
    config["agent"]["step_limit"] = 2
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(config))
    workspace = tmp_path / "work"
    workspace.mkdir()
    (workspace / "notes.txt").write_text("hello\n")
    line = run(
        ["-c", _MINI, str(tmp_path / "config.yaml")],
        workspace,
        MSWEA_GLOBAL_CONFIG_DIR=str(tmp_path),
        MSWEA_SILENT_STARTUP="1",
        MSWEA_CONFIGURED="true",
        LITELLM_LOCAL_MODEL_COST_MAP="True",
    )
    result = json.loads(line)
    assert result["level"] in ("bubblewrap", "unshare", "landlock")
    assert result["status"] in ("LimitsExceeded", "Submitted")
