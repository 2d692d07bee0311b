"""Is the task solved? Exit code 0 says so."""

import sys
from pathlib import Path

workspace, answer = Path(sys.argv[1]), Path(sys.argv[2]).read_text()
sys.path.insert(0, str(workspace))

from greet import greeting  # noqa: E402

assert greeting("Ada") == "Hello, Ada!"
