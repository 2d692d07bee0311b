"""The small made-up files of each importable format."""

from __future__ import annotations

from pathlib import Path

from dlite_agent.trace.formats import load
from dlite_agent.trace.log import Log
from dlite_agent.trace.phases import Timeline, timelines

DATA = Path(__file__).parent / "data"

FORMATS = {
    "pi.jsonl": "pi",
    "claude_code.jsonl": "claude-code",
    "mini_v2.traj.json": "mini-swe-agent",
    "mini_v1.traj.json": "mini-swe-agent",
    "swe_agent.traj": "swe-agent",
    "atif.json": "atif",
    "tracelab.csv": "workload-csv",
    "workload.csv": "workload-csv",
    "openai_chat.jsonl": "openai-chat",
    "openai_messages.json": "openai-chat",
}


def read(name: str) -> tuple[Log, list[Timeline]]:
    log = load(DATA / name)
    return log, timelines(log)


def nonzero(view: Timeline) -> dict[str, float]:
    return {phase: round(seconds, 6) for phase, seconds in view.seconds().items() if seconds > 1e-9}
