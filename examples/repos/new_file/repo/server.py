"""Where the server listens."""

import json
from pathlib import Path


def address():
    settings = json.loads((Path(__file__).parent / "settings.json").read_text())
    return f"{settings['host']}:{settings['port']}"
