"""A session written by hand, whose every second is known: 10.0 s in two turns with one tool between them."""

from __future__ import annotations

from dlite_agent.trace.events import (
    AnyEvent,
    Calibration,
    Divergence,
    Note,
    Prefill,
    Queue,
    Restore,
    Round,
    Rounds,
    Segment,
    SessionEnd,
    SessionStart,
    Stream,
    ToolEnd,
    ToolStart,
    TurnEnd,
    TurnStart,
)
from dlite_agent.trace.log import Log

SEGMENT = "seg0"
WALL = 1_800_000_000.0


def rounds(
    start: float,
    n: int,
    *,
    session: str = "s",
    turn: int = 0,
    advance: int = 4,
    t_d: float = 0.004,
    t_v: float = 0.012,
    t_s: float = 0.004,
    context: int = 100,
    batch: int = 1,
    segment: str = SEGMENT,
) -> Rounds:
    """`n` equal dlite rounds one after the other."""
    wall = t_d + t_v + t_s
    rows = [Round(start + i * wall, wall, t_d, t_v, t_s, advance, 7, 8, context + i * advance, batch) for i in range(n)]
    return Rounds.of(segment, session, turn, rows)


def plain_rounds(start: float, n: int, seconds: float, *, session: str = "s", turn: int = 0) -> Rounds:
    """`n` autoregressive steps."""
    rows = [Round(start + i * seconds, seconds, 0.0, seconds, 0.0, 1, 0, 1, 100 + i, 1) for i in range(n)]
    return Rounds.of(SEGMENT, session, turn, rows, mode="ar")


def events(session: str = "s") -> list[AnyEvent]:
    """Queue 0.5, restore 0.5, prefill 1.0, decode 2.0 (100 rounds), tool 3.0, queue 0.5, prefill 0.5, decode 2.0."""
    g = SEGMENT
    call = {"id": "c1", "type": "function", "function": {"name": "bash", "arguments": '{"command": "ls"}'}}
    return [
        Segment(segment=g, t=50.0, wall=WALL),
        SessionStart(segment=g, t=100.0, session=session, target="qwen", drafter="dlite"),
        TurnStart(
            segment=g,
            t=100.0,
            session=session,
            turn=0,
            request_id="r0",
            trigger="user",
            prompt_tokens=100,
            cached_tokens=40,
            new_tokens=60,
            messages=[{"role": "system", "content": "be brief"}, {"role": "user", "content": "list <files>"}],
            new_ids=[1, 2, 3],
        ),
        Queue(segment=g, t=100.0, end=100.5, session=session, turn=0),
        Restore(
            segment=g, t=100.5, end=101.0, session=session, turn=0, tier="disk", tokens=40, wanted=90, reason="evicted"
        ),
        Prefill(segment=g, t=101.0, end=102.0, session=session, turn=0, tokens=60, context=40),
        rounds(102.0, 100, session=session),
        TurnEnd(
            segment=g,
            t=104.0,
            session=session,
            turn=0,
            request_id="r0",
            finish_reason="tool_calls",
            output_tokens=400,
            first_token=102.02,
            message={"role": "assistant", "content": "looking", "reasoning_content": "hm", "tool_calls": [call]},
            output_ids=[4, 5, 6],
        ),
        ToolStart(
            segment=g,
            t=104.0,
            session=session,
            turn=0,
            call_id="c1",
            name="bash",
            sandbox="bubblewrap",
            arguments={"command": "ls"},
        ),
        ToolEnd(segment=g, t=107.0, session=session, turn=0, call_id="c1", exit_code=0, output="a b"),
        TurnStart(
            segment=g,
            t=107.0,
            session=session,
            turn=1,
            request_id="r1",
            trigger="tool",
            prompt_tokens=520,
            cached_tokens=500,
            new_tokens=20,
            messages=[{"role": "tool", "tool_call_id": "c1", "content": "a b"}],
        ),
        Divergence(segment=g, t=107.0, session=session, turn=1, reason="edited", position=17),
        Queue(segment=g, t=107.0, end=107.5, session=session, turn=1),
        Prefill(segment=g, t=107.5, end=108.0, session=session, turn=1, tokens=20, context=500),
        rounds(108.0, 100, session=session, turn=1, context=520),
        Stream(segment=g, t=109.5, end=110.0, session=session, turn=1, chunks=3),
        TurnEnd(
            segment=g,
            t=110.0,
            session=session,
            turn=1,
            request_id="r1",
            finish_reason="stop",
            output_tokens=400,
            first_token=108.02,
            message={"role": "assistant", "content": "two files"},
        ),
        Note(segment=g, t=110.0, session=session, text="looks right"),
        SessionEnd(segment=g, t=110.0, session=session, reason="done"),
    ]


def log(session: str = "s") -> Log:
    return Log(events(session))


def calibration(seconds: float = 0.010, error: float = 0.0005) -> Calibration:
    """T_AR that depends on nothing."""
    return Calibration(segment=SEGMENT, t=50.0, points=[(0, 1, seconds, error), (4096, 1, seconds, error)])
