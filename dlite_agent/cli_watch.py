"""`dlite-agent watch`: one session of a running server in the terminal, turn by turn, as it happens."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator, Sequence
from typing import Annotated, Any
from urllib.parse import quote

import httpx
import typer
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from dlite_agent.errors import DliteError, InvalidRequest, NotFound
from dlite_agent.trace.events import AnyEvent, Event, SessionStart, parse
from dlite_agent.trace.log import Log
from dlite_agent.trace.phases import PHASES, timelines
from dlite_agent.trace.summary import SessionSummary, TurnSummary, summarise
from dlite_agent.trace.wording import figures, printable

_STYLES = {
    "queue": "grey58",
    "restore": "cyan",
    "prefill": "blue",
    "decode": "magenta",
    "mask": "red",
    "stream": "bright_cyan",
    "model": "magenta",
    "tool": "dark_orange",
    "other": "yellow",
}
_BAR = 28
_PAUSE = 0.2


class Unreachable(DliteError):
    """The server does not answer, or does not let us in."""

    status = 503
    code = "unreachable"


def watch(
    session: Annotated[str | None, typer.Argument(help="Id or name; by default the one used last.")] = None,
    url: Annotated[str, typer.Option(help="Where the server listens; its key is taken from DLITE_API_KEY.")] = (
        "http://127.0.0.1:8000"
    ),
    turns: Annotated[int, typer.Option(help="Latest turns to show.")] = 12,
    once: Annotated[bool, typer.Option("--once", help="Show it as it is now, and end.")] = False,
) -> None:
    """Watch where the time of a session goes while it runs."""
    if turns < 1:
        raise InvalidRequest("turns must be at least 1", param="turns")
    key = os.environ.get("DLITE_API_KEY")
    headers = {"authorization": f"Bearer {key}"} if key else {}
    try:
        with httpx.Client(base_url=url, headers=headers, timeout=httpx.Timeout(10.0, read=None)) as client:
            _watch(client, session or _latest(client), turns, once)
    except (httpx.TransportError, httpx.InvalidURL, httpx.UnsupportedProtocol) as error:
        raise Unreachable(f"Cannot reach {url} ({error}): is the server running?", param="url") from error


def _watch(client: httpx.Client, session: str, turns: int, once: bool) -> None:
    console = Console()
    events: list[AnyEvent] = []
    follow = "false" if once else "true"
    place = f"/v1/sessions/{quote(session, safe='')}/events"
    with client.stream("GET", place, params={"follow": follow}) as response:
        _check(response)
        if once:
            events += [event for event in received(response.iter_lines()) if event is not None]
            console.print(screen(events, turns))
            return
        shown = 0.0
        with Live(console=console, auto_refresh=False, transient=False) as live:
            for event in received(response.iter_lines()):
                if event is not None:
                    events.append(event)
                # A turn's events come in a burst, and a keep-alive comment after any burst.
                if event is None or time.monotonic() - shown > _PAUSE:
                    live.update(screen(events, turns), refresh=True)
                    shown = time.monotonic()
            live.update(screen(events, turns), refresh=True)
    console.print("The server ended the stream.")


def _latest(client: httpx.Client) -> str:
    response = client.get("/v1/sessions")
    _check(response)
    cards: list[dict[str, Any]] = response.json()["data"]
    if not cards:
        raise NotFound("The server has no session yet: send it a request first.", param="session")
    return str(cards[0]["id"])


def _check(response: httpx.Response) -> None:
    if response.status_code == 200:
        return
    response.read()
    try:
        message = str(response.json()["error"]["message"])
    except (ValueError, LookupError, TypeError):
        message = f"The server answered {response.status_code}."
    if response.status_code == 404:
        raise NotFound(message, param="session")
    raise Unreachable(message, param="url")


def received(lines: Iterator[str]) -> Iterator[AnyEvent | None]:
    """The events of a stream of server-sent events; None for a comment."""
    for line in lines:
        if line.startswith("data: "):
            yield parse(json.loads(line[6:]))
        elif line.startswith(":"):
            yield None


def screen(events: Sequence[AnyEvent], turns: int) -> RenderableType:
    """What is known of the session by now."""
    views = timelines(Log(list(events)))
    if not views:
        return Text("Nothing has happened in this session yet.")
    summary = summarise(views).sessions[0]
    work = sum(value for phase, value in summary.seconds.items() if phase not in ("client", "outage"))
    head = Text(printable(f"{summary.session}  {summary.target or ''}"), style="bold")
    head.append(f"  {len(summary.turns)} turns, {work:.2f} s of work in {summary.wall:.2f} s", style="default")
    if not any(isinstance(event, SessionStart) for event in events if isinstance(event, Event)):
        head.append("  (only the latest turns are known)", style="yellow")
    lines = [Text(line) for line in figures(summary.amdahl, summary.means, summary.ceiling)]
    return Group(head, _bar(summary.seconds, 72), _legend(summary), *lines, _turns(summary, turns))


def _bar(seconds: dict[str, float], width: int) -> Text:
    """Phases side by side in proportion, the seconds that are nobody's work left out."""
    parts = {phase: seconds[phase] for phase in PHASES if phase in _STYLES and seconds[phase] > 0}
    whole = sum(parts.values())
    bar = Text()
    done = drawn = 0.0
    for phase, value in parts.items():
        done += value
        cells = round(width * done / whole) - int(drawn)
        drawn += cells
        bar.append("█" * cells, style=_STYLES[phase])
    return bar


def _legend(summary: SessionSummary) -> Text:
    text = Text()
    for phase in PHASES:
        if summary.seconds[phase] > 0:
            text.append("■ ", style=_STYLES.get(phase, "grey42"))
            inferred = ", inferred" if summary.inferred[phase] > 0 else ""
            text.append(f"{phase} {summary.seconds[phase]:.2f} s{inferred}   ")
    return text


def _turns(summary: SessionSummary, wanted: int) -> Table:
    table = Table(box=None, pad_edge=False)
    for name in ("turn", "where the time went", "seconds", "TTFT", "tau", "prompt", "cached", "answer", "from", "end"):
        table.add_column(name, justify="left" if name in ("where the time went", "from", "end") else "right")
    shown = summary.turns[-wanted:]
    longest = max((_work(turn) for turn in shown), default=0.0)
    for turn in shown:
        work = _work(turn)
        width = max(1, round(_BAR * work / longest)) if longest > 0 else 1
        cached = (
            f"{100 * turn.cached_tokens // max(turn.prompt_tokens, 1)} %"
            if turn.cached_tokens is not None and (turn.prompt_tokens)
            else ""
        )
        table.add_row(
            str(turn.turn),
            _bar(turn.seconds, width),
            f"{work:.2f}",
            "" if turn.ttft is None else f"{turn.ttft:.2f}",
            "" if turn.means is None else f"{turn.means.tau:.2f}",
            "" if turn.prompt_tokens is None else str(turn.prompt_tokens),
            cached,
            "" if turn.output_tokens is None else str(turn.output_tokens),
            Text(printable(", ".join(turn.tiers))),
            Text(printable(turn.finish_reason or "…")),
        )
    return table


def _work(turn: TurnSummary) -> float:
    return sum(value for phase, value in turn.seconds.items() if phase in _STYLES)
