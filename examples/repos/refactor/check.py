"""Is the task solved? Exit code 0 says so."""

import sys
from pathlib import Path

workspace, answer = Path(sys.argv[1]), Path(sys.argv[2]).read_text()
sys.path.insert(0, str(workspace))

import shop  # noqa: E402
from shop.report import summary  # noqa: E402

assert shop.order_total([(100, 2), (50, 1)]) == 250
assert summary("Ada", [(1999, 1)]) == "Ada: 19.99"
assert not any("calc_total" in path.read_text() for path in workspace.rglob("*.py"))
