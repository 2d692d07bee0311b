"""Is the task solved? Exit code 0 says so."""

import sys
from pathlib import Path

workspace, answer = Path(sys.argv[1]), Path(sys.argv[2]).read_text()
import json  # noqa: E402

assert json.loads((workspace / "settings.json").read_text()) == {"host": "localhost", "port": 8080}
