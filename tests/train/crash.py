"""Training processes that may be killed or work together; forked from one that has imported everything."""

from __future__ import annotations

import json
import os
import socket
import sys
from pathlib import Path
from typing import Any

import torch

from dlite_agent.model.spec import ModelSpec
from dlite_agent.train.parallel import Processes
from dlite_agent.train.settings import History, Shape, TwoStage
from dlite_agent.train.trainer import TargetTables, Trainer
from tests.train.conftest import CONFIG, run_settings, tiny_weights


def tell(*words: object) -> None:
    os.write(1, f"{' '.join(map(str, words))}\n".encode())


def run(cache: str, folder: str, changes: dict[str, Any]) -> None:
    """Train in a folder, or continue what is there."""
    for key, kind in (("shape", Shape), ("two_stage", TwoStage), ("history", History)):
        if key in changes:
            changes[key] = kind(**changes[key])
    spec = ModelSpec.from_config(CONFIG)
    embedding = tiny_weights(spec.vocab_size)["model.embed_tokens.weight"]
    tables = TargetTables(spec, "tiny", embedding, embedding)
    processes = Processes.join("cpu")
    Trainer(run_settings(Path(cache), **changes), Path(folder), tables, processes=processes).train()
    processes.leave()


def fork(world: int, order: tuple[str, str, dict[str, Any]]) -> list[int]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    children = []
    for rank in range(world):
        child = os.fork()
        if child == 0:
            names = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "MASTER_ADDR": "127.0.0.1"}
            os.environ |= {name: str(value) for name, value in names.items()} | {"MASTER_PORT": port}
            if world == 1:
                del os.environ["RANK"]
            try:
                run(*order)
                os._exit(0)
            finally:
                os._exit(1)
        children.append(child)
    return children


def main() -> None:
    """For each line [world, cache, folder, changes] as many processes; tells their ids, and how each ended."""
    torch.set_num_threads(1)
    torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))])  # imports the compiler: once here, not in every child
    for line in sys.stdin:
        world, *order = json.loads(line)
        children = fork(world, (order[0], order[1], order[2]))
        tell("running", *children)
        tell("ended", *(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children))


if __name__ == "__main__":
    main()
