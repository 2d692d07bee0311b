"""`DliteEnvironment` behaves as mini-swe-agent expects of an environment, and confines."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from pydantic import ValidationError

from dlite_agent.agent.environment import SUBMIT_SENTINEL, DliteEnvironment
from dlite_agent.errors import InvalidRequest
from tests.agent.support import workspace_in


@pytest.fixture
def environment(tmp_path: Path) -> Iterator[DliteEnvironment]:
    environment = DliteEnvironment(cwd=str(workspace_in(tmp_path)), env={"GIVEN": "yes"}, timeout=20)
    yield environment
    environment.close()


def test_execute(environment: DliteEnvironment, tmp_path: Path) -> None:
    answer = environment.execute({"command": "echo $GIVEN; pwd; mkdir sub; exit 3"})
    assert answer["output"] == f"yes\n{workspace_in(tmp_path)}\n"
    assert (answer["returncode"], answer["exception_info"]) == (3, "")
    assert answer["extra"]["level"] == str(environment.level)
    assert environment.execute({"command": "pwd"}, cwd="sub")["output"] == f"{workspace_in(tmp_path)}/sub\n"


def test_limits_and_refusals_are_answers(environment: DliteEnvironment, tmp_path: Path) -> None:
    late = environment.execute({"command": "echo partial; sleep 30"}, timeout=1)
    assert (late["output"], late["returncode"]) == ("partial\n", -1)
    assert "more than 1 s" in late["exception_info"]
    outside = environment.execute({"command": "true"}, cwd=str(tmp_path))
    assert (outside["returncode"], outside["extra"]["exception_type"]) == (-1, "PathEscape")
    senseless = environment.execute({"command": "true"}, timeout=-1)
    assert (senseless["returncode"], "hard_seconds" in senseless["exception_info"]) == (-1, True)


def test_submission_ends_the_run(environment: DliteEnvironment) -> None:
    exceptions = pytest.importorskip("minisweagent.exceptions")
    with pytest.raises(exceptions.Submitted) as caught:
        environment.execute({"command": f"echo {SUBMIT_SENTINEL}; echo the answer"})
    message = caught.value.messages[0]
    assert message["extra"] == {"exit_status": "Submitted", "submission": "the answer\n"}
    failed = environment.execute({"command": f"echo {SUBMIT_SENTINEL}; exit 1"})
    assert failed["returncode"] == 1


def test_what_the_harness_records(environment: DliteEnvironment) -> None:
    record = json.loads(json.dumps(environment.serialize()))["info"]
    assert record["config"]["environment_type"] == "dlite_agent.agent.environment.DliteEnvironment"
    assert record["config"]["environment"]["timeout"] == 20
    assert record["sandbox"]["level"] == str(environment.level)
    variables = environment.get_template_vars(task="t")
    assert (variables["task"], variables["sandbox_level"]) == ("t", str(environment.level))
    assert "PATH" not in variables


def test_unknown_settings_and_running_loops_are_refused(tmp_path: Path, environment: DliteEnvironment) -> None:
    with pytest.raises(ValidationError, match="timeoutt"):
        DliteEnvironment(cwd=str(tmp_path), timeoutt=3)

    answer = asyncio.run(_answer(environment))
    assert "event loop" in answer["exception_info"]
    with pytest.raises(InvalidRequest, match="event loop"):
        asyncio.run(_open(tmp_path))


async def _answer(environment: DliteEnvironment) -> dict[str, str]:
    return environment.execute({"command": "true"})


async def _open(folder: Path) -> None:
    DliteEnvironment(cwd=str(folder))
