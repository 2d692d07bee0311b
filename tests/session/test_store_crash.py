"""kill -9 of a writer at random moments: no committed turn is lost, and nothing wrong comes back."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from dlite_agent.session.restore import Loaded
from dlite_agent.session.store.disk import DiskStore
from dlite_agent.session.store.redis import RedisStore
from tests.session.crash import SESSIONS, TURNS, all_ids
from tests.session.servers import RedisServer
from tests.session.stored import check, persister


def crash(root: Path, kills: int, url: str | None = None, server: RedisServer | None = None) -> int:
    """Kill a writer again and again; returns how many commits were found that had not been told of."""
    command = [sys.executable, "-m", "tests.session.crash"]
    home = Path(__file__).parents[2]
    with subprocess.Popen(command, cwd=home, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as nursery:
        try:
            return _crash(nursery, root, kills, url, server)
        finally:
            nursery.kill()


def _crash(nursery: subprocess.Popen[str], root: Path, kills: int, url: str | None, server: RedisServer | None) -> int:
    assert nursery.stdin is not None
    assert nursery.stdout is not None
    source, turns, unheard = random.Random(kills), dict.fromkeys(SESSIONS, 0), 0
    for number in range(kills):
        print(json.dumps([str(root), url, number]), file=nursery.stdin, flush=True)
        words = nursery.stdout.readline().split()
        while words[0] != "writer":
            turns[words[0]] = int(words[1])
            words = nursery.stdout.readline().split()
        writer = int(words[1])
        time.sleep(source.random() * 0.3)
        os.kill(writer, signal.SIGKILL)
        while (words := nursery.stdout.readline().split())[0] != "ended":
            turns[words[0]] = int(words[1])
        if server is not None and number % 3 == 2:
            server.kill()
            server.start()
        store = DiskStore(root)
        shared = None if url is None else RedisStore(url)
        keeper = persister(store, shared, owner="writer")
        for session in SESSIONS:
            keeper.hold(session)
            found = keeper.read(session)
            if not isinstance(found, Loaded):
                assert turns[session] <= 0 or turns[session] == TURNS, f"{session} is gone: {found}"
                turns[session] = 0
                continue
            have = len(found.record.history.turns)
            # A removal or a commit may have been done without the writer's having told of it.
            assert have >= turns[session] or turns[session] == TURNS
            assert have <= max(turns[session], 0) + 1
            assert found.report.reason is None
            assert found.report.tokens == found.report.of - 1
            check(found, all_ids(session, have))
            unheard += have > turns[session] >= 0
            turns[session] = have
        keeper.close()
    return unheard


def test_killed_writers_lose_no_turn(tmp_path: Path) -> None:
    crash(tmp_path, 20)
    assert any((tmp_path / "segments").iterdir()), "no writer came to commit anything"


def test_killed_writers_beside_a_killed_redis_lose_no_turn(tmp_path: Path) -> None:
    with RedisServer(tmp_path / "redis", persistent=True) as server:
        crash(tmp_path / "store", 6, server.url, server)


@pytest.mark.soak
@pytest.mark.parametrize("persistent", [True, False, None])
def test_two_hundred_kills(tmp_path: Path, persistent: bool | None) -> None:
    if persistent is None:
        assert crash(tmp_path, 200) > 0, "no kill fell between a commit and its report"
        return
    with RedisServer(tmp_path / "redis", persistent=persistent) as server:
        crash(tmp_path / "store", 200, server.url, server)
