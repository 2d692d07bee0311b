"""Replay of a session's tools: the recorded calls run for real, in the sandbox, and what they say is compared.

Stands on this floor since it drives the agent's tools.
"""

from __future__ import annotations

import asyncio
import re
import shutil
import tempfile
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

from dlite_agent.agent import wording
from dlite_agent.agent.run_spec import RunLimits, RunSpec
from dlite_agent.agent.runs import known_bundles
from dlite_agent.agent.toolbox import Toolbox, bundle_folders
from dlite_agent.errors import DliteError, InvalidRequest
from dlite_agent.trace.comparison import RECORDING
from dlite_agent.trace.events import (
    AnyEvent,
    KnownEvent,
    Mismatch,
    Replayed,
    Segment,
    SessionStart,
    ToolEnd,
    ToolStart,
    TurnEnd,
    TurnStart,
)
from dlite_agent.trace.log import Log
from dlite_agent.trace.script import RecordedCall, RecordedTurn, Script

SIDE = "tools"

_SECONDS = re.compile(r"\b\d+(?:\.\d+)? ?(?:s|ms|seconds)\b")
_EXCERPT = 80


async def replay_tools(
    script: Script,
    workspace: Path | None,
    *,
    limits: RunLimits | None = None,
    progress: Callable[[str], None] = lambda _: None,
) -> Log:
    """Run a session's recorded tool calls again, on a copy of a workspace; the log says how long and what differs.

    The calls of one turn run together, as the agent runs them. Observations are equal if they are so but for durations
    (`0.12s`) and the workspace's own path.

    Args:
        workspace: the folder as it was when the session began; an empty one if None. It is not changed.
        limits: bounds of each call.

    Raises:
        NotReplayable: there are no calls, or their arguments were not recorded.
        SandboxUnavailable: no level of confinement works here.
    """
    script.need_calls()
    if workspace is not None and not workspace.is_dir():
        raise InvalidRequest(f"There is no folder {str(workspace)!r}.", param="workspace")
    with tempfile.TemporaryDirectory(prefix="dlite-replay-") as scratch:
        copy = Path(scratch) / "workspace"
        if workspace is None:
            copy.mkdir()
        else:
            await asyncio.to_thread(shutil.copytree, workspace, copy, symlinks=True)
        spec = RunSpec(task="replay", workspace=str(copy), limits=limits or RunLimits())
        folder = Path(scratch) / "run"
        folder.mkdir()
        tools = await Toolbox.open(spec, copy, bundle_folders(spec.bundles, known_bundles()), folder)
        try:
            return await _Replay(script, tools).run(progress)
        finally:
            await tools.close()


class _Replay:
    def __init__(self, script: Script, tools: Toolbox) -> None:
        self._script = script
        self._tools = tools
        self._events: list[KnownEvent] = []
        self._place: dict[str, Any] = {"segment": uuid.uuid4().hex[:12], "session": f"{script.session}@{SIDE}"}

    async def run(self, progress: Callable[[str], None]) -> Log:
        begin = time.monotonic()
        head: list[AnyEvent] = [
            Segment(segment=self._place["segment"], t=begin, wall=time.time()),
            SessionStart(**self._place, t=begin),
            Replayed(**self._place, t=begin, original=self._script.session, side=SIDE),
        ]
        for number, turn in enumerate(self._script.turns):
            progress(f"turn {number + 1} of {len(self._script.turns)}: {len(turn.calls)} calls")
            place = {**self._place, "turn": turn.turn, "t": time.monotonic()}
            self._events.append(TurnStart(**place, messages=turn.messages))
            self._events.append(TurnEnd(**place, finish_reason=turn.finish_reason, message=turn.message))
            await asyncio.gather(*(self._call(turn, call) for call in turn.calls if call.answered))
        return Log([*head, *self._events])

    async def _call(self, turn: RecordedTurn, call: RecordedCall) -> None:
        place: dict[str, Any] = {**self._place, "turn": turn.turn, "call_id": call.call_id}
        where = self._tools.where(call.name)
        start = ToolStart(**place, t=time.monotonic(), name=call.name, sandbox=where, arguments=call.arguments)
        self._events.append(start)
        code, error = None, None
        try:
            arguments = call.arguments if isinstance(call.arguments, dict) else {}
            self._tools.check(call.name, arguments)
            outcome = await self._tools.call(call.name, arguments)
        except DliteError as failure:
            output, error = f"The tool could not be run: {failure.message}", failure.code
        else:
            output, code = wording.result(outcome), outcome.exit_code
            error = None if outcome.reason == "exit" else outcome.reason
        end = ToolEnd(**place, t=time.monotonic(), exit_code=code, error=error, output=output)
        self._events.append(end)
        if call.output is not None:
            self._compare(place, end.t, self._plain(str(call.output)), self._plain(output))

    def _plain(self, text: str) -> str:
        root = str(self._tools.root)
        return _SECONDS.sub("0s", text.replace(f"{root}/", "").replace(root, "."))

    def _compare(self, place: dict[str, Any], at: float, expected: str, found: str) -> None:
        if expected == found:
            return
        first = next(
            (i for i, (a, b) in enumerate(zip(expected, found, strict=False)) if a != b),
            min(len(expected), len(found)),
        )
        self._events.append(
            Mismatch(
                **place,
                t=at,
                what="observation",
                against=RECORDING,
                position=first,
                count=abs(len(expected) - len(found)) + sum(a != b for a, b in zip(expected, found, strict=False)),
                expected=expected[first : first + _EXCERPT],
                found=found[first : first + _EXCERPT],
            )
        )
