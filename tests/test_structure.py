"""The house rules that a machine can check: floors, and docs/structure.md naming what there is."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "dlite_agent"
FLOORS = (
    ("errors", "paths", "config"),
    ("model",),
    ("decode",),
    ("session",),
    ("trace",),
    ("agent",),
    ("train",),
    ("bench",),
    ("api",),
    (
        "tables",
        "options",
        "cli_bench",
        "cli_run_view",
        "cli_run",
        "cli_sessions",
        "cli_trace",
        "cli_train",
        "cli_watch",
        "cli",
    ),
)
FLOOR_OF = {name: height for height, names in enumerate(FLOORS) for name in names}


def modules() -> Iterator[Path]:
    return (path for path in PACKAGE.rglob("*.py") if path.name != "__init__.py" and "content" not in path.parts)


def imported(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            yield node.module


def test_a_file_imports_only_from_its_own_floor_or_below() -> None:
    wrong = []
    for path in modules():
        own = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
        for name in imported(path):
            parts = name.split(".")
            if parts[0] == "dlite_agent" and len(parts) > 1 and FLOOR_OF[parts[1]] > FLOOR_OF[own]:
                wrong.append(f"{path.relative_to(ROOT)} imports {name}")
    assert wrong == []


def test_the_structure_document_names_every_module() -> None:
    text = (ROOT / "docs" / "structure.md").read_text()
    missing = [str(path.relative_to(PACKAGE)) for path in modules() if f"`{path.relative_to(PACKAGE)}`" not in text]
    assert missing == []


def test_no_tool_or_session_content_can_be_imported_as_a_package() -> None:
    assert not list((ROOT / "tools").glob("__init__.py"))
    assert not list((ROOT / "sessions").glob("__init__.py"))
