"""Sessions of tool turns at once against the same alone: equal answers, near ties apart, and nobody starves."""

from __future__ import annotations

import statistics
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import pytest

from tests.serving import Live

NEAR_TIE = 1e-3
"""Log-probabilities this close may fall either way: batched and single kernels round differently."""
READ: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "read",
        "description": "Read a file.",
        "parameters": {
            "type": "object",
            "properties": {"path": {"type": "string", "maxLength": 8}},
            "required": ["path"],
            "additionalProperties": False,
        },
        "strict": True,
    },
}


@dataclass
class Turn:
    """An answer: its tokens as text, the likeliest tokens beside each with their log-probabilities, and seconds."""

    tokens: list[str]
    top: list[dict[str, float]]
    seconds: float
    completion: int


def run_session(server: Live, number: int, label: str, count: int) -> list[Turn]:
    """Turns that call a tool and turns that tell what it said, in alternation."""
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": f"You are agent {number}. Answer in a few words."},
        {"role": "user", "content": f"Look at file {number}.txt and tell what it says."},
    ]
    turns: list[Turn] = []
    known = 0
    for index in range(count):
        choice = "none" if index % 2 else "required"
        options = {"tool_choice": choice, "parallel_tool_calls": False, "max_tokens": 24 if index % 2 else 48}
        begin = time.monotonic()
        answer = server.chat(
            messages, session_id=f"{label}-{number}", tools=[READ], logprobs=True, top_logprobs=8, **options
        )
        seconds = time.monotonic() - begin
        made, usage = answer["choices"][0], answer["usage"]
        scores = made["logprobs"]["content"]
        top = [{item["token"]: item["logprob"] for item in [*score["top_logprobs"], score]} for score in scores]
        turns.append(Turn([score["token"] for score in scores], top, seconds, usage["completion_tokens"]))
        assert usage["dlite"]["divergence"] is None
        assert usage["prompt_tokens_details"]["cached_tokens"] >= known - 1
        known = usage["total_tokens"]
        messages.append(made["message"])
        for call in made["message"].get("tool_calls", ()):
            result = f"Line {index} of file {number} says that all is fine."
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": result})
        if index % 2:
            messages.append({"role": "user", "content": f"Now file {number}-{index}.txt."})
    return turns


def first_difference(alone: list[Turn], together: list[Turn]) -> tuple[int, int, float] | None:
    """Turn and token at which two runs of a session part, and how far apart the two tokens were in the first run."""
    for index, (one, other) in enumerate(zip(alone, together, strict=True)):
        if one.tokens != other.tokens:
            at = next(i for i, (a, b) in enumerate(zip(one.tokens, other.tokens, strict=False)) if a != b)
            top = one.top[at]
            return index, at, abs(top[one.tokens[at]] - top.get(other.tokens[at], float("-inf")))
    return None


def compare(server: Live, sessions: int, turns: int) -> None:
    begin = time.monotonic()
    alone = [run_session(server, number, "alone", turns) for number in range(sessions)]
    middle = time.monotonic()
    with ThreadPoolExecutor(sessions) as pool:
        together = list(pool.map(lambda number: run_session(server, number, "together", turns), range(sessions)))
    end = time.monotonic()
    found = [first_difference(one, other) for one, other in zip(alone, together, strict=True)]
    ties = [(number, *where) for number, where in enumerate(found) if where is not None]
    rates = [
        sum(turn.completion for session in side for turn in session) / seconds
        for side, seconds in ((alone, middle - begin), (together, end - middle))
    ]
    seconds = [turn.seconds for session in together for turn in session]
    median = statistics.median(seconds)
    print(f"\n{sessions} sessions x {turns} turns; parted at (session, turn, token, apart): {ties or 'nowhere'}")
    print(f"tokens a second: {rates[0]:.1f} one at a time, {rates[1]:.1f} together, ratio {rates[1] / rates[0]:.2f}")
    print(
        f"seconds a turn together: median {median:.2f}, max {max(seconds):.2f}, max/median {max(seconds) / median:.2f}"
    )
    assert all(apart <= NEAR_TIE for *_, apart in ties)


def test_three_sessions_equal_each_alone(server: Live) -> None:
    compare(server, 3, 2)


@pytest.mark.soak
def test_sixteen_sessions_equal_each_alone_and_nobody_starves(server: Live) -> None:
    compare(server, 16, 8)
