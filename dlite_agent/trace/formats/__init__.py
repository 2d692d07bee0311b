"""Importers and exporters of session files, one module a format; the format of a file is told from its content."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from dlite_agent.errors import InvalidRequest
from dlite_agent.trace.events import KINDS, AnyEvent
from dlite_agent.trace.formats import atif, chrome, claude_code, mini_swe, openai_chat, otel, pi, swe_agent, workload
from dlite_agent.trace.formats.build import Document
from dlite_agent.trace.log import Log, dump_lines, parse_lines

OWN = "dlite"


class _Importer(NamedTuple):
    matches: Callable[[Document], bool]
    load: Callable[[Document], list[AnyEvent]]


# Order matters where a looser test would also accept a stricter format's files.
_IMPORTERS: dict[str, _Importer] = {
    str(module.NAME): _Importer(module.matches, module.load)
    for module in (atif, mini_swe, swe_agent, pi, claude_code, openai_chat, workload)
}
_EXPORTERS: dict[str, Callable[[Log], str]] = {
    OWN: lambda log: dump_lines(log.events),
    atif.NAME: lambda log: json.dumps(atif.to_atif(log), indent=1) + "\n",
    otel.NAME: lambda log: json.dumps(otel.to_otlp(log), separators=(",", ":")) + "\n",
    chrome.NAME: lambda log: json.dumps(chrome.to_chrome(log), separators=(",", ":")) + "\n",
}

IMPORTS = (OWN, *_IMPORTERS)
EXPORTS = tuple(_EXPORTERS)


def detect(document: Document) -> str:
    """Name of the format of a file. Raises InvalidRequest when it is none that can be read."""
    if any(str(record.get("kind")) in KINDS for record in document.records[:1]):
        return OWN
    for name, importer in _IMPORTERS.items():
        if importer.matches(document):
            return name
    raise InvalidRequest(f"The file is of no session format this program reads ({', '.join(IMPORTS)}).", param="path")


def load(path: Path) -> Log:
    """Read a session file of any importable format.

    Raises NotFound without a file, InvalidRequest for a format or a value that cannot be read.
    """
    return loads(Document.read(path))


def loads(document: Document) -> Log:
    """Like `load`, from a document that was read already."""
    name = detect(document)
    if name == OWN:
        return parse_lines(document.data)
    try:
        events = _IMPORTERS[name].load(document)
    except (LookupError, TypeError, ValueError, AttributeError, OverflowError) as error:
        # Foreign files follow no schema we could check first, so any odd shape ends here.
        raise InvalidRequest(
            f"The file looks like {name} but does not have its shape ({error}); correct or re-export it.", param="path"
        ) from error
    return Log(events, name, problems=list(document.problems))


def convert(path: Path, to: str, out: Path, *, session: str | None = None) -> Log:
    """Read a session file of any importable format and write it as `to`; what was read.

    Args:
        path: the file to read.
        to: one of `EXPORTS`.
        out: the file to write; its folder must exist.
        session: only this session of the file.

    Raises InvalidRequest for an unknown `to`, a file that cannot be read or written, or a log the format cannot carry.
    """
    if to not in _EXPORTERS:
        raise InvalidRequest(f"There is no export {to!r}; choose one of {', '.join(EXPORTS)}.", param="to")
    log = load(path)
    text = _EXPORTERS[to](log if session is None else log.of_session(session))
    try:
        out.write_text(text, encoding="utf-8")
    except OSError as error:
        raise InvalidRequest(f"Cannot write {out.name!r}: {error.strerror}.", param="out") from error
    return log


def post(path: Path, to: str, endpoint: str, *, session: str | None = None) -> Log:
    """Read a session file of any importable format and send it to an OTLP/HTTP receiver; what was read.

    Raises InvalidRequest unless `to` is "otel", and when the receiver cannot be reached or refuses.
    """
    if to != otel.NAME:
        raise InvalidRequest(f"Only otel goes to a receiver; {to!r} goes to a file.", param="to")
    log = load(path)
    otel.send(endpoint, otel.to_otlp(log if session is None else log.of_session(session)))
    return log
