"""`dlite-agent sessions ...`: what is stored in a data folder, checked, moved and cleared away."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from dlite_agent.errors import InvalidRequest

if TYPE_CHECKING:
    from dlite_agent.session.store.disk import DiskStore

sessions_app = typer.Typer(no_args_is_help=True, help="Stored sessions of a data folder, served or not.")

DataDir = Annotated[Path, typer.Option("--data-dir", help="The folder that `serve --data-dir` was given.")]
Reference = Annotated[str, typer.Argument(help="A session's id, or the name its client gave it if no other has it.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]


@contextlib.contextmanager
def _store(data_dir: Path, *, writable: bool = False, create: bool = False) -> Iterator[DiskStore]:
    from dlite_agent.session.opening import SESSIONS_FOLDER
    from dlite_agent.session.store.disk import DiskStore

    folder = data_dir / SESSIONS_FOLDER
    if not folder.is_dir() and not create:
        raise InvalidRequest(f"{data_dir} holds no sessions: give the folder of `serve --data-dir`.", param="data_dir")
    store = DiskStore(folder, writable=writable)
    try:
        yield store
    finally:
        store.close()


def _id_of(store: DiskStore, reference: str) -> str:
    """A session's id by the id or by its name. Raises InvalidRequest where several owners use the name."""
    named = [entry.session for entry in store.entries() if entry.name == reference]
    if store.load(reference) is not None or not named:
        return reference
    if len(named) > 1:
        raise InvalidRequest(f"{len(named)} sessions are named {reference!r}: {', '.join(named)}.", param="session")
    return named[0]


def _print(rows: list[dict[str, Any]]) -> None:
    table = Table(*(name.replace("_", " ") for name in rows[0])) if rows else Table("no sessions")
    for row in rows:
        table.add_row(*("" if value is None else str(value) for value in row.values()))
    Console().print(table)


@sessions_app.command("list")
def list_sessions(data_dir: DataDir, as_json: AsJson = False) -> None:
    """All sessions, the latest used first."""
    with _store(data_dir) as store:
        entries = store.entries()
    rows = [
        {
            "id": entry.session,
            "name": entry.name or None,
            "turns": entry.turn,
            "tokens": entry.tokens,
            "bytes": entry.bytes,
            "idle_s": round(entry.idle_s, 1),
        }
        for entry in entries
    ]
    print(json.dumps(rows)) if as_json else _print(rows)


@sessions_app.command("show")
def show_session(session: Reference, data_dir: DataDir, as_json: AsJson = False) -> None:
    """Tokens, boundaries, bytes by kind, and why the last request left the stored conversation, if it did."""
    from dlite_agent.session.store.manage import show

    with _store(data_dir) as store:
        shown = asdict(show(store, _id_of(store, session)))
    if as_json:
        print(json.dumps(shown))
        return
    table = Table(show_header=False)
    for name, value in shown.items():
        if name == "bytes":
            value = ", ".join(f"{kind} {size}" for kind, size in value.items())
        elif name == "boundaries":
            value = " ".join(map(str, value))
        table.add_row(name.replace("_", " "), "none" if value is None else str(value))
    Console().print(table)


@sessions_app.command("verify")
def verify_sessions(
    data_dir: DataDir,
    session: Annotated[list[str] | None, typer.Argument(help="Ids or names; all sessions if none is given.")] = None,
    as_json: AsJson = False,
) -> None:
    """Read everything and check every checksum and key. Exit code 1 if anything is wrong; nothing is changed."""
    from dlite_agent.session.store.manage import verify

    with _store(data_dir) as store:
        names = [_id_of(store, name) for name in session] if session else [e.session for e in store.entries()]
        verdicts = [verify(store, name) for name in names]
    if as_json:
        print(json.dumps([asdict(verdict) for verdict in verdicts]))
    else:
        _print([{"id": v.session, "blocks": v.blocks, "problems": "; ".join(v.problems) or "none"} for v in verdicts])
    if any(verdict.problems for verdict in verdicts):
        raise typer.Exit(1)


@sessions_app.command("export")
def export_session(session: Reference, file: Path, data_dir: DataDir) -> None:
    """Write one session to a single file."""
    from dlite_agent.session.store.manage import export

    with _store(data_dir) as store:
        size = export(store, _id_of(store, session), file)
    print(f"{file}: {size} bytes")


@sessions_app.command("import")
def import_session(
    file: Path,
    data_dir: DataDir,
    session: Annotated[str | None, typer.Option("--as", help="Its id there; the exported one by default.")] = None,
) -> None:
    """Read an exported session into a folder that no server is using."""
    from dlite_agent.session.store.manage import load_export

    with _store(data_dir, writable=True, create=True) as store:
        record = load_export(store, file, name=session)
    print(f"{record.session}: {record.length} tokens, {record.size} bytes")


@sessions_app.command("gc")
def collect(
    data_dir: DataDir,
    idle_hours: Annotated[float | None, typer.Option(help="Remove sessions that nobody has used for so long.")] = None,
    max_gib: Annotated[float | None, typer.Option(help="Then the longest idle ones until the files fit.")] = None,
    as_json: AsJson = False,
) -> None:
    """Remove old sessions and rewrite files that are mostly dead, in a folder that no server is using."""
    with _store(data_dir, writable=True) as store:
        swept = store.gc(
            ttl_s=None if idle_hours is None else idle_hours * 3600,
            max_bytes=None if max_gib is None else int(max_gib * 2**30),
        )
    print(json.dumps(asdict(swept)) if as_json else f"{swept.sessions} sessions removed, {swept.bytes} bytes freed")
