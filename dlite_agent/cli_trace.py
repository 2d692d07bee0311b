"""`dlite-agent report`, `convert` and `replay`: where the time of recorded sessions went, and the same played again."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import Annotated

import typer

from dlite_agent.errors import DliteError, InvalidRequest
from dlite_agent.options import Device, DrafterOption, Dtype, Target, Threads

Sessions = Annotated[list[Path], typer.Argument(help="Event logs or session files of a known format.")]
MODES = ("decode", "tools", "view")


def report(
    sessions: Sessions,
    fmt: Annotated[str, typer.Option("--format", help="table, json or html.")] = "table",
    out: Annotated[Path | None, typer.Option(help="Write here instead of printing.")] = None,
) -> None:
    """Where the time of sessions went, and what faster decoding can bring at most (Amdahl)."""
    from dlite_agent.trace.report import report_command

    text = report_command(sessions, fmt, out)
    if out is None:
        print(text)


def convert(
    source: Annotated[Path, typer.Argument(help="A session file; its format is told from its content.")],
    out: Annotated[
        str, typer.Argument(help="The file to write; for otel also an OTLP/HTTP receiver, http://HOST:4318.")
    ],
    to: Annotated[str, typer.Option(help="dlite, atif, otel or chrome.")] = "dlite",
    session: Annotated[str | None, typer.Option(help="Only this session of the file.")] = None,
) -> None:
    """Turn a session file of one format into another."""
    from dlite_agent.trace import formats

    if out.startswith(("http://", "https://")):
        formats.post(source, to, out, session=session)
    else:
        formats.convert(source, to, Path(out), session=session)


def replay(
    sessions: Sessions,
    mode: Annotated[
        str, typer.Option(help="decode runs the model for real, tools runs the tools for real, view only shows.")
    ] = "decode",
    session: Annotated[str | None, typer.Option(help="Only this session of the files.")] = None,
    compare: Annotated[str, typer.Option(help="Sides: ar, dlite, dlite:verify_window=N; commas between.")] = "ar,dlite",
    wait: Annotated[str, typer.Option(help="Waits: original, scaled (over --speed) or none.")] = "none",
    speed: Annotated[float, typer.Option(help="How much faster than recorded waits, or the view, go by.")] = 1.0,
    changes: Annotated[
        list[str] | None, typer.Option("--set", help="key=value: sampling, scheduler or model settings.")
    ] = None,
    arrivals: Annotated[
        str | None, typer.Option(help="Play all sessions at once: original, or seconds between arrivals.")
    ] = None,
    copies: Annotated[int, typer.Option(help="Play each session so many times.")] = 1,
    workspace: Annotated[
        Path | None, typer.Option(help="tools: folder as it was at the session's start; a copy is worked on.")
    ] = None,
    output_bytes: Annotated[int, typer.Option(help="tools: bytes of one observation, as when recorded.")] = 8000,
    fmt: Annotated[str, typer.Option("--format", help="table or json.")] = "table",
    save: Annotated[Path | None, typer.Option(help="Write the replay's own event log here.")] = None,
    target: Target = "smollm2-135m",
    drafter: DrafterOption = "auto",
    dtype: Dtype = "auto",
    device: Device = "auto",
    threads: Threads = None,
) -> None:
    """Play recorded sessions again: measure the model with recorded tools, run the tools of recorded turns, or look."""
    from dlite_agent.bench import replay_commands as commands
    from dlite_agent.bench.replay import Plan, parse_sides
    from dlite_agent.config import ModelSettings
    from dlite_agent.trace.log import dump_lines

    if mode not in MODES:
        raise InvalidRequest(f"There is no replay mode {mode!r}; choose decode, tools or view.", param="mode")
    if fmt not in ("table", "json"):
        raise InvalidRequest(f"There is no replay format {fmt!r}; choose table or json.", param="format")
    found = commands.read_scripts(sessions, session, copies)
    if mode == "view":
        from dlite_agent.trace.replay_view import show

        Plan((), {}, wait, speed)  # type: ignore[arg-type]  # checked by Plan
        for script in found:
            print(f"session {script.session}: {len(script.turns)} turns, {script.timeline.wall:.2f} s")
            show(script, _plainly, wait=wait, speed=speed)
        return
    if mode == "tools":
        from dlite_agent.agent.run_spec import RunLimits

        limits = RunLimits(output_bytes=output_bytes)
        log = asyncio.run(commands.replay_all_tools(found, workspace, limits, _progress))
    else:
        model = ModelSettings(target=target, drafter=drafter, dtype=dtype, device=device, threads=threads)
        log = commands.replay_decode(
            found,
            parse_sides(compare),
            commands.read_changes(changes or [], model),
            wait=wait,  # type: ignore[arg-type]  # checked by Plan
            speed=speed,
            at_once=arrivals,
            progress=_progress,
        )
    _progress(None)
    if save is not None:
        try:
            save.write_text(dump_lines(log.events))
        except OSError as error:
            raise DliteError(f"Cannot write {save.name!r}: {error.strerror}.", param="save") from error
    print(commands.present(log, found, mode, fmt))


def _progress(text: str | None) -> None:
    """One line that is written over in a terminal, and a line each elsewhere; None ends it."""
    if sys.stderr.isatty():
        print("\r\033[K" + (text or ""), end="", file=sys.stderr, flush=True)
    elif text is not None:
        print(text, file=sys.stderr, flush=True)


def _plainly(text: str) -> None:
    from dlite_agent.trace.wording import printable

    print("\n".join(printable(line) for line in text.split("\n")), flush=True)
