"""What starting a command costs at each level of the sandbox: `python -m tests.agent.sandbox_cost`."""

from __future__ import annotations

import asyncio
import statistics
import tempfile
from pathlib import Path

from dlite_agent.agent.sandbox import Level, Policy, Sandbox, probe

ROUNDS = 25


async def main() -> None:
    """Medians and best of `true`; the levels take turns, so that a busy moment of the machine is every level's."""
    with tempfile.TemporaryDirectory() as folder:
        boxes: dict[Level, Sandbox] = {}
        for level in Level:
            if (failure := await probe(level)) is not None:
                print(f"{level}: not here ({failure})")
                continue
            workspace = Path(folder) / str(level)
            workspace.mkdir()
            boxes[level] = await Sandbox.open(Policy(workspace, level=level, protect_git=False))
        seconds: dict[Level, list[float]] = {level: [] for level in boxes}
        setup: dict[Level, list[float]] = {level: [] for level in boxes}
        for _ in range(ROUNDS):
            for level, box in boxes.items():
                result = await box.run(["/bin/true"])
                seconds[level].append(result.ended - result.started)
                setup[level].append(result.setup_seconds or 0.0)
        plain = statistics.median(seconds[Level.PLAIN])
        for level, box in boxes.items():
            whole = statistics.median(seconds[level])
            before = statistics.median(setup[level])
            times = f"{1e3 * whole:.1f} ms a command, {1e3 * before:.1f} ms of it before it begins"
            print(f"{level}: {times}; {whole / plain:.2f} x plain; fastest {1e3 * min(seconds[level]):.1f} ms")
            box.close()


if __name__ == "__main__":
    asyncio.run(main())
