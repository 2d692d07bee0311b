"""Is the task solved? Exit code 0 says so."""

import sys
from pathlib import Path

workspace, answer = Path(sys.argv[1]), Path(sys.argv[2]).read_text()

assert (workspace / "greeting.txt").read_text().strip() == "Hello, world!"
