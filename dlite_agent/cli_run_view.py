"""A run as one watches it: turns, tools, phases, tokens per second and tau; live on a terminal, else line by line."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Group
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

_SHOWN_TURNS = 12
_SHOWN_TEXT = 600
_PHASES = ("queue", "restore", "prefill", "decode", "tool")


@dataclass
class TurnView:
    """One turn: seconds by phase, its rounds, its tools."""

    number: int
    prompt: int = 0
    cached: int = 0
    tokens: int = 0
    emitted: int = 0
    rounds: int = 0
    phases: dict[str, float] = field(default_factory=lambda: dict.fromkeys(_PHASES, 0.0))
    tools: dict[str, str] = field(default_factory=dict)
    finish: str = ""

    @property
    def speed(self) -> float | None:
        """Tokens a second of decoding."""
        seconds = self.phases["decode"]
        return self.emitted / seconds if seconds > 0 else None

    @property
    def tau(self) -> float | None:
        """Mean advance of the rounds."""
        return self.emitted / self.rounds if self.rounds else None


class RunView:
    """Takes the events of a run, as its stream sends them.

    Args:
        say: where plain lines go; None for a live view, which is drawn from `render`.
    """

    def __init__(self, say: Callable[[str], None] | None = None) -> None:
        self.turns: list[TurnView] = []
        self.card: dict[str, Any] = {}
        self._say = say or (lambda line: None)
        self._text = ""
        self._text_ended = False
        self._began: dict[str, tuple[float, str, TurnView]] = {}

    def feed(self, kind: str, data: dict[str, Any]) -> None:
        """One event of the stream."""
        handler = getattr(self, f"_on_{kind}", None)
        if handler is not None:
            handler(data)

    @property
    def _turn(self) -> TurnView:
        if not self.turns:
            self.turns.append(TurnView(0))
        return self.turns[-1]

    def _span(self, phase: str, data: dict[str, Any]) -> None:
        self._turn.phases[phase] += data["end"] - data["t"]

    def _on_state(self, data: dict[str, Any]) -> None:
        if data["state"] != self.card.get("state"):
            self._say(f"{data['id']}: {data['state']} (sandbox {data['sandbox']['level']})")
        self.card = data

    def _on_turn_start(self, data: dict[str, Any]) -> None:
        prompt, cached = data.get("prompt_tokens") or 0, data.get("cached_tokens") or 0
        self.turns.append(TurnView(data["turn"], prompt, cached))
        self._say(f"turn {data['turn']}: prompt {prompt} tokens, {cached} of them restored")

    def _on_queue(self, data: dict[str, Any]) -> None:
        self._span("queue", data)

    def _on_restore(self, data: dict[str, Any]) -> None:
        self._span("restore", data)

    def _on_prefill(self, data: dict[str, Any]) -> None:
        self._span("prefill", data)

    def _on_rounds(self, data: dict[str, Any]) -> None:
        self._span("decode", data)
        self._turn.rounds += len(data["advance"])
        self._turn.emitted += sum(data["advance"])

    def _on_turn_end(self, data: dict[str, Any]) -> None:
        turn, self._text_ended = self._turn, True
        turn.tokens, turn.finish = data.get("output_tokens") or 0, data.get("finish_reason") or data.get("error") or ""
        message = data.get("message") or {}
        for call in message.get("tool_calls") or ():
            self._say(f"  calls {call['function']['name']} {call['function']['arguments']}")
        if content := (message.get("content") or "").strip():
            self._say("  says " + content.replace("\n", "\n       "))
        self._say(
            f"  {turn.tokens} tokens, {_number(turn.speed)} tokens/s, tau {_number(turn.tau, 2)}; "
            + ", ".join(f"{phase} {turn.phases[phase]:.2f} s" for phase in _PHASES[:-1])
        )

    def _on_tool_start(self, data: dict[str, Any]) -> None:
        self._turn.tools[data["call_id"]] = f"{data['name']} ..."
        self._began[data["call_id"]] = (data["t"], data["name"], self._turn)

    def _on_tool_end(self, data: dict[str, Any]) -> None:
        if data["call_id"] not in self._began:
            return
        began, name, turn = self._began.pop(data["call_id"])
        error = data.get("error")
        how = error or ("ok" if data.get("exit_code") == 0 else f"exit {data.get('exit_code')}")
        if error == "interrupted":
            turn.tools[data["call_id"]] = f"{name} interrupted by an outage"
        else:
            turn.phases["tool"] += data["t"] - began
            turn.tools[data["call_id"]] = f"{name} {how} {data['t'] - began:.2f} s"
        self._say(f"  tool {turn.tools[data['call_id']]}")

    def _on_outage(self, data: dict[str, Any]) -> None:
        seconds = data.get("seconds")
        self._say(f"outage of {_number(seconds)} s: {data.get('reason') or 'unknown'}")

    def _on_text(self, data: dict[str, Any]) -> None:
        self._write(data["text"])

    def _on_call(self, data: dict[str, Any]) -> None:
        self._write(f"\n-> {data['name']} ")

    def _on_arguments(self, data: dict[str, Any]) -> None:
        self._write(data["text"])

    def _write(self, text: str) -> None:
        # A turn's first words may come before its start, which waits until its prompt's figures are known.
        if self._text_ended:
            self._text, self._text_ended = "", False
        self._text = (self._text + text)[-_SHOWN_TEXT:]

    def render(self) -> Group:
        """The view as it stands, for 80 columns and more: phases that took no time are left out."""
        shown = self.turns[-_SHOWN_TURNS:]
        phases = [phase for phase in _PHASES if any(turn.phases[phase] >= 0.005 for turn in shown)]
        table = Table(box=SIMPLE_HEAD, padding=0, pad_edge=False)
        for name in ("turn", "prompt", "restored", "tokens", "tok/s", "tau", *phases):
            table.add_column(name, min_width=len(name), justify="right")
        table.add_column("tools", overflow="fold")
        for turn in shown:
            figures = [str(turn.number), str(turn.prompt), str(turn.cached), str(turn.tokens)]
            figures += [_number(turn.speed), _number(turn.tau, 2)]
            figures += [f"{turn.phases[phase]:.2f}" for phase in phases]
            table.add_row(*figures, Text("\n".join(turn.tools.values())))
        about = self.card
        title = f"{about.get('id', '')}  {about.get('state', '')}  sandbox {about.get('sandbox', {}).get('level')}"
        return Group(Panel(Text(str(about.get("task", ""))), title=title), table, Text(self._text))


def _number(value: float | None, digits: int = 1) -> str:
    return "-" if value is None else f"{value:.{digits}f}"
