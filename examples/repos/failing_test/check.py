"""Is the task solved? Exit code 0 says so."""

import sys
from pathlib import Path

workspace, answer = Path(sys.argv[1]), Path(sys.argv[2]).read_text()
sys.path.insert(0, str(workspace))

from calc import add, scale  # noqa: E402

assert add(2, 3) == 5
assert add(-1, 1) == 0
assert scale(4, 3) == 12
