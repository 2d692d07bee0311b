"""Sessions of any size, made of the trace's own event classes from a seed."""

from __future__ import annotations

import random
from typing import Any

from dlite_agent.trace.events import (
    AnyEvent,
    Calibration,
    ClientIdle,
    Divergence,
    Mask,
    Note,
    Prefill,
    Queue,
    Restore,
    Round,
    Rounds,
    Segment,
    SessionStart,
    ToolEnd,
    ToolStart,
    TurnEnd,
    TurnStart,
)
from dlite_agent.trace.log import dump_lines

TOOLS = ("view_file", "grep", "edit", "run_tests", "shell")
SEGMENT = "seg0"
T_AR = 0.022


class Writer:
    """Writes one session turn by turn; `t` is where its clock stands."""

    def __init__(self, session: str, *, seed: int = 0, mode: str = "dlite", segment: str = SEGMENT) -> None:
        self.session = session
        self.random = random.Random(seed)
        self.mode = mode
        self.segment = segment
        self.t = 100.0
        self.turn = 0
        self.tokens = 640
        self.held = 0
        self.events: list[AnyEvent] = [
            Segment(segment=segment, t=90.0, wall=1_790_000_000.0),
            Calibration(segment=segment, t=91.0, points=[(0, 1, T_AR, 0.0004), (32768, 1, T_AR * 1.4, 0.0008)]),
            SessionStart(segment=segment, t=self.t, session=session, target="smollm2-135m", drafter="dlite-135m"),
        ]

    def place(self) -> dict[str, Any]:
        return {"segment": self.segment, "session": self.session, "turn": self.turn}

    def span(self, seconds: float) -> dict[str, Any]:
        """Fields of a span that begins now; the clock goes on to its end."""
        start = self.t
        self.t += seconds
        return {**self.place(), "t": start, "end": self.t}

    def begin(self, new_tokens: int, *, tier: str = "device", messages: Any = None, diverged: bool = False) -> None:
        """Request, queue, restore and prefill of a turn."""
        lost = self.held // 3 if diverged else 0
        cached = max(0, self.held - lost)
        self.tokens = cached + lost + new_tokens
        where = self.place()
        start = TurnStart(
            **where,
            t=self.t,
            request_id=f"req_{self.turn}",
            trigger="user" if self.turn == 0 else "tool",
            prompt_tokens=self.tokens,
            cached_tokens=cached,
            new_tokens=self.tokens - cached,
            messages=messages,
        )
        self.events.append(start)
        if diverged:
            self.events.append(Divergence(**where, t=self.t, reason="compacted", position=cached))
        self.events.append(Queue(**self.span(self.random.uniform(0.001, 0.08))))
        if cached:
            seconds = {"device": 0.0006, "host": 0.03, "disk": 0.35}[tier]
            reason = "history diverged" if diverged else None
            wanted = self.tokens
            self.events.append(Restore(**self.span(seconds), tier=tier, tokens=cached, wanted=wanted, reason=reason))
        self.events.append(
            Prefill(**self.span((self.tokens - cached) * 0.0011), tokens=self.tokens - cached, context=cached)
        )

    def decode(self, rounds: int, *, masked: bool = False) -> None:
        """Rounds whose acceptance drifts, as between code that repeats and prose that does not."""
        self.first_token = self.t + 0.03
        level = self.random.uniform(0.15, 0.9)
        rows, context = [], self.tokens
        for _ in range(rounds):
            level = min(0.95, max(0.05, level + self.random.uniform(-0.08, 0.08)))
            advance, drafted = 1, 0
            if self.mode == "dlite":
                drafted = 7
                while advance < 8 and self.random.random() < level:
                    advance += 1
                parts = (0.0055, 0.0235 + 2e-7 * context, 0.0021)
            else:
                parts = (0.0, T_AR + 2e-7 * context, 0.0005)
            scale = self.random.uniform(0.93, 1.15)
            t_d, t_v, t_s = (part * scale for part in parts)
            rows.append(Round(self.t, t_d + t_v + t_s, t_d, t_v, t_s, advance, drafted, drafted + 1, context, 1))
            self.t += t_d + t_v + t_s + 2e-5
            context += advance
        event = Rounds.of(self.segment, self.session, self.turn, rows, mode=self.mode)  # type: ignore[arg-type]
        self.events.append(event)
        if masked:
            at = [row.start - rows[0].start + 0.001 for row in rows]
            self.events.append(Mask(**self.place(), t=rows[0].start, end=self.t, at=at, seconds=[0.0004] * len(at)))
        self.generated = context - self.tokens

    def end(self, message: Any, *, tools: bool, error: str | None = None) -> None:
        self.held = self.tokens + self.generated
        self.events.append(
            TurnEnd(
                **self.place(),
                t=self.t,
                request_id=f"req_{self.turn}",
                finish_reason=None if error else "tool_calls" if tools else "stop",
                output_tokens=self.generated,
                first_token=self.first_token,
                error=error,
                message=message,
            )
        )

    def tool(
        self, name: str, seconds: float, output: str, *, call_id: str, exit_code: int = 0, after: float = 0.0
    ) -> float:
        """One call that begins `after` seconds from now; the time it ends. The clock stays."""
        start, end = self.t + after, self.t + after + seconds
        arguments = {"path": "src/parser.py", "line": 120 + self.turn}
        self.events.append(
            ToolStart(**self.place(), t=start, call_id=call_id, name=name, sandbox="bubblewrap", arguments=arguments)
        )
        self.events.append(ToolEnd(**self.place(), t=end, call_id=call_id, exit_code=exit_code, output=output))
        return end

    def next(self) -> None:
        self.turn += 1


def agent_session(
    session: str = "fix-the-parser",
    *,
    turns: int = 24,
    rounds: int = 40,
    seed: int = 0,
    mode: str = "dlite",
    idle: float = 0.0,
    tool_seconds: float = 1.0,
) -> list[AnyEvent]:
    """A coding agent's session: reads, greps, edits, runs tests; some calls overlap, some fail, one turn diverges."""
    writer = Writer(session, seed=seed, mode=mode)
    shape = random.Random(seed)  # of its own, so that both modes get the same turns
    for turn in range(turns):
        asked = [{"role": "user", "content": "The parser loses the last token. Find out why and mend it."}]
        answered = [{"role": "tool", "tool_call_id": f"call_{turn - 1}_0", "content": f"output of turn {turn - 1}"}]
        tier = "disk" if turn and turn % 11 == 0 else "host" if turn % 5 == 4 else "device"
        writer.begin(
            640 if turn == 0 else shape.randrange(30, 400),
            tier=tier,
            messages=asked if turn == 0 else answered,
            diverged=turn > 0 and turn % 17 == 13,
        )
        wanted = max(3, round(rounds * shape.uniform(0.4, 1.6)) * (3 if mode == "ar" else 1))
        writer.decode(wanted, masked=turn % 3 == 1)
        last = turn == turns - 1
        names = [] if last else [shape.choice(TOOLS) for _ in range(3 if turn % 7 == 2 else 1)]
        calls = [
            {"id": f"call_{turn}_{i}", "type": "function", "function": {"name": name, "arguments": "{}"}}
            for i, name in enumerate(names)
        ]
        text = f"Turn {turn}: I look at the tokenizer first." if not last else "The last token is kept now."
        writer.end({"role": "assistant", "content": text, "tool_calls": calls or None}, tools=bool(names))
        begun = writer.t
        for i, name in enumerate(names):
            seconds = tool_seconds * shape.uniform(0.05, 1.8) * (4 if name == "run_tests" else 1)
            output = f"{name} in turn {turn}\n" + "\n".join(f"{n:4d}  token = next(stream)" for n in range(30))
            failed = int(turn % 9 == 5)
            end = writer.tool(name, seconds, output, call_id=f"call_{turn}_{i}", exit_code=failed, after=0.02 * i)
            begun = max(begun, end)
        writer.t = begun + 0.001
        if idle and turn == turns // 2:
            span = writer.span(idle)
            writer.events.append(ClientIdle(**span, waiting="user"))
        writer.next()
    writer.turn -= 1
    writer.events.append(Note(segment=SEGMENT, t=writer.t, session=session, text="Recorded for the tests."))
    return writer.events


def hostile_session() -> list[AnyEvent]:
    """Names and texts that try to be markup, to steer a terminal, to reorder text, or to be too much."""
    script = "<script>document.title='pwned'</script><img src=x onerror=\"document.title='pwned'\">"
    writer = Writer(f"{script}\u202eevil", seed=3)
    writer.begin(100, messages=[{"role": "user", "content": f"{script}\x1b[2J\x00\u202etxt.exe\u2066 \ud800 end"}])
    writer.decode(20)
    call = {"id": "c", "type": "function", "function": {"name": script, "arguments": script}}
    writer.end({"role": "assistant", "content": f"{script} javascript:alert(1)", "tool_calls": [call]}, tools=True)
    output = f"{script}\n" + "\x1b[31mred\x07 \u202e" * 10 + "x" * (5 << 20) + "THE END"
    writer.t = writer.tool(script, 0.5, output, call_id="c", exit_code=2)
    writer.next()
    writer.begin(50, messages=[])
    writer.decode(10)
    writer.end(None, tools=False, error=script)
    return writer.events


def lines(events: list[AnyEvent]) -> str:
    """The text of a log."""
    return dump_lines(events)
