"""mini-swe-agent, unchanged, drives a task by its documented local-model path (litellm, an OpenAI base URL)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

from tests.serving import MODEL, Live

_AGENT = """
import json, sys
from minisweagent.agents.default import DefaultAgent
from minisweagent.models.litellm_model import LitellmModel

class Told:
    # Runs nothing and tells the same story each time: what a small model writes should not be run.

    def execute(self, action, cwd="", *, timeout=None):
        return {"output": "total 1\\nnotes.txt", "returncode": 0, "exception_info": None}

    def get_template_vars(self, **kwargs):
        return {}

    def serialize(self):
        return {}

model = LitellmModel(
    model_name="openai/" + sys.argv[2],
    cost_tracking="ignore_errors",
    model_kwargs={
        "api_base": sys.argv[1] + "/v1",
        "api_key": "none",
        "temperature": 0.0,
        "max_tokens": 120,
        "tool_choice": "required",
        "parallel_tool_calls": False,
    },
)
agent = DefaultAgent(
    model, Told(), system_template="You work in a shell.", instance_template="List the files. {{task}}", step_limit=2
)
result = agent.run("Use bash.")
usages = [m["extra"]["response"]["usage"] for m in agent.messages if "response" in m.get("extra", {})]
print(json.dumps({"status": result["exit_status"], "usages": usages}))
"""


def test_every_turn_continues_the_session(server: Live, tmp_path: Path) -> None:
    environment = os.environ | {
        "MSWEA_GLOBAL_CONFIG_DIR": str(tmp_path),
        "MSWEA_SILENT_STARTUP": "1",
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",
        "MSWEA_CONFIGURED": "true",
    }
    command = [sys.executable, "-W", "ignore", "-c", _AGENT, server.url, MODEL]
    run = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=400, check=False)
    assert run.returncode == 0, run.stderr[-3000:]
    result = json.loads(run.stdout.strip().splitlines()[-1])
    assert result["status"] == "LimitsExceeded"
    usages = result["usages"]
    assert len(usages) == 2
    for before, after in pairwise(usages):
        assert after["prompt_tokens_details"]["cached_tokens"] >= before["total_tokens"] - 1
