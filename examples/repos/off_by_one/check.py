"""Is the task solved? Exit code 0 says so."""

import sys
from pathlib import Path

workspace, answer = Path(sys.argv[1]), Path(sys.argv[2]).read_text()
sys.path.insert(0, str(workspace))

from pages import page, page_count  # noqa: E402

assert [page_count(n, 4) for n in (0, 1, 4, 5, 8, 9)] == [0, 1, 1, 2, 2, 3]
assert page(list(range(7)), 1, 3) == [0, 1, 2]
assert page(list(range(7)), 3, 3) == [6]
