"""The bounded buffer agrees with keeping everything, however the output is cut into chunks."""

from __future__ import annotations

import tempfile
from pathlib import Path

from hypothesis import example, given, settings
from hypothesis import strategies as st

from dlite_agent.agent.sandbox_output import BoundedOutput


@settings(max_examples=80, deadline=None)
@example(chunks=[b"five.", b"!"], limit=5, spool_limit=1)
@given(chunks=st.lists(st.binary(max_size=60), max_size=30), limit=st.integers(1, 100), spool_limit=st.integers(1, 400))
def test_head_tail_count_and_spool(chunks: list[bytes], limit: int, spool_limit: int) -> None:
    whole = b"".join(chunks)
    with tempfile.TemporaryDirectory() as folder:
        output = BoundedOutput(limit, Path(folder) / "spool", spool_limit)
        for chunk in chunks:
            output.write(chunk)
        output.close()
        assert output.total == len(whole)
        assert output.overflowing == (len(whole) > spool_limit)
        if len(whole) <= limit:
            assert (output.text(), output.elided, output.full_path) == (whole.decode("utf-8", "replace"), 0, None)
            assert list(Path(folder).iterdir()) == []
            return
        head = limit // 5
        tail = limit - head
        assert output.elided == len(whole) - limit
        first, last = whole[:head].decode("utf-8", "replace"), whole[-tail:].decode("utf-8", "replace")
        assert output.text() == f"{first}\n[... {output.elided} bytes elided ...]\n{last}"
        assert output.full_path is not None
        assert output.full_path.read_bytes() == whole[: max(spool_limit, 0)]
