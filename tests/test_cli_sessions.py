"""`dlite-agent sessions` on a folder that a server might have left."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from dlite_agent.cli_sessions import sessions_app
from dlite_agent.errors import Conflict, DliteError, InvalidRequest, NotFound
from dlite_agent.session.snapshot import Facts
from dlite_agent.session.store.disk import DiskStore
from tests.session.stored import facts, new_state, persister, pool

IDS = [(13 * i) % 1000 for i in range(400)]


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """Two sessions of 300 and 400 ids, the second named by its client."""
    store = DiskStore(tmp_path / "sessions")
    keeper = persister(store)
    for name, length, label in (("sess_a", 300, ""), ("sess_b", 400, "build")):
        keeper.hold(name)
        about = Facts(facts(length).history, owner="me", name=label)
        keeper.commit(keeper.snapshot(name, new_state(pool().sequence(), IDS[:length]), about))
    store.close()
    return tmp_path


def run(*arguments: str | Path, code: int = 0) -> str:
    result = CliRunner().invoke(sessions_app, [str(argument) for argument in arguments])
    if isinstance(result.exception, DliteError):
        raise result.exception
    assert result.exit_code == code, result.output
    return result.output


def as_json(*arguments: str | Path, code: int = 0) -> Any:
    return json.loads(run(*arguments, "--json", code=code))


def test_list_and_show(data: Path) -> None:
    listed = as_json("list", "--data-dir", data)
    assert [(row["id"], row["name"], row["turns"], row["tokens"]) for row in listed] == [
        ("sess_b", "build", 1, 400),
        ("sess_a", None, 1, 300),
    ]
    shown = as_json("show", "build", "--data-dir", data)
    assert (shown["session"], shown["tokens"], shown["kv_tokens"], shown["boundaries"]) == ("sess_b", 400, 399, [399])
    assert "sess_b" in run("list", "--data-dir", data)
    assert "399" in run("show", "sess_b", "--data-dir", data)


def test_verify_says_what_is_wrong_and_exits_with_1(data: Path) -> None:
    assert all(not verdict["problems"] for verdict in as_json("verify", "--data-dir", data))
    segment = max((data / "sessions" / "segments").iterdir(), key=lambda path: path.stat().st_size)
    content = bytearray(segment.read_bytes())
    content[len(content) // 2] ^= 1
    segment.write_bytes(content)
    verdicts = as_json("verify", "--data-dir", data, code=1)
    assert sum(bool(verdict["problems"]) for verdict in verdicts) >= 1
    run("verify", "--data-dir", data, code=1)


def test_a_session_travels(data: Path, tmp_path: Path) -> None:
    file, other = tmp_path / "one.session", tmp_path / "other"
    assert str(file.name) in run("export", "build", file, "--data-dir", data).replace("\n", "")
    run("import", file, "--data-dir", other)
    run("import", file, "--data-dir", other, "--as", "copy")
    assert {row["id"] for row in as_json("list", "--data-dir", other)} == {"sess_b", "copy"}
    assert as_json("verify", "copy", "--data-dir", other)[0]["problems"] == []
    with pytest.raises(InvalidRequest, match="exists already"):
        run("import", file, "--data-dir", other)


def test_gc_removes_what_is_idle_or_too_much(data: Path) -> None:
    assert as_json("gc", "--data-dir", data, "--idle-hours", "1")["sessions"] == 0
    size = sum(path.stat().st_size for path in (data / "sessions" / "segments").iterdir())
    swept = as_json("gc", "--data-dir", data, "--max-gib", str((size - 1) / 2**30))
    assert swept["sessions"] >= 1
    assert as_json("gc", "--data-dir", data, "--idle-hours", "0")["sessions"] <= 1
    assert as_json("list", "--data-dir", data) == []


def test_clear_errors(data: Path, tmp_path: Path) -> None:
    with pytest.raises(NotFound, match="no session"):
        run("show", "nobody", "--data-dir", data)
    for command in ("list", "verify", "gc"):
        with pytest.raises(InvalidRequest, match="holds no sessions"):
            run(command, "--data-dir", tmp_path / "nowhere")
    owner = DiskStore(data / "sessions")
    assert len(as_json("list", "--data-dir", data)) == 2
    with pytest.raises(Conflict, match="Another process"):
        run("gc", "--data-dir", data)
    owner.close()
