import json
from pathlib import Path

REGISTRY = Path("/root/.notebook-env")


def load() -> dict[str, object]:
    values: dict[str, object] = json.loads(REGISTRY.read_text())
    return values


def save(**changes: object) -> None:
    REGISTRY.write_text(json.dumps({**load(), **changes}))
