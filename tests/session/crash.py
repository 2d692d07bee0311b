"""A process that commits turns of four sessions until it is killed; forked from one that has imported everything."""

from __future__ import annotations

import json
import os
import random
import sys
from pathlib import Path

import torch

from dlite_agent.decode.state import DecodeState
from dlite_agent.session.restore import Loaded
from dlite_agent.session.store.disk import DiskStore
from dlite_agent.session.store.redis import RedisStore
from tests.session.stored import CPU, facts, grow, persister, pool

SESSIONS = ("a", "b", "c", "d")
TURNS = 8
"""Turns after which a session is removed and begun again."""


def ids_of(session: str, turn: int) -> list[int]:
    """What a session's turn adds: the same in every process, so that an oracle needs no memory."""
    source = random.Random(f"{session} {turn}")
    return [source.randrange(1000) for _ in range(source.randrange(1, 150))]


def all_ids(session: str, turns: int) -> list[int]:
    return [token for turn in range(1, turns + 1) for token in ids_of(session, turn)]


def tell(*words: object) -> None:
    os.write(1, f"{' '.join(map(str, words))}\n".encode())


def run(root: Path, url: str | None, seed: int) -> None:
    """Restore, then commit turns for ever; tells of every commit after it returned."""
    source = random.Random(seed)
    store = DiskStore(root)
    shared = None if url is None else RedisStore(url, timeout_s=5)
    keeper = persister(store, shared, owner="writer")
    states: dict[str, DecodeState] = {}
    ends: dict[str, list[int]] = {}
    for session in SESSIONS:
        keeper.hold(session)
        found = keeper.read(session)
        if isinstance(found, Loaded):
            states[session] = found.apply(pool().sequence(), CPU)
            ends[session] = [turn.end for turn in found.record.history.turns]
        else:
            states[session], ends[session] = DecodeState(pool().sequence()), []
    while True:
        session = source.choice(SESSIONS)
        if len(ends[session]) >= TURNS:
            keeper.delete(session)
            tell(session, -1)
            states[session], ends[session] = DecodeState(pool().sequence()), []
        state = states[session]
        grow(state, ids_of(session, len(ends[session]) + 1))
        ends[session].append(len(state.ids))
        keeper.commit(keeper.snapshot(session, state, facts(*ends[session])))
        tell(session, len(ends[session]))


def main() -> None:
    """For each line [root, url, seed] a writer; tells its process id, and of its end."""
    torch.set_num_threads(1)
    for line in sys.stdin:
        root, url, seed = json.loads(line)
        writer = os.fork()
        if writer == 0:
            try:
                run(Path(root), url, seed)
            finally:
                os._exit(1)
        tell("writer", writer)
        os.waitpid(writer, 0)
        tell("ended", writer)


if __name__ == "__main__":
    main()
