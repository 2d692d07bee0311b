"""What every peer of `dlite-agent bench peers` does: read a JSON line, decode, answer a JSON line."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

# Whatever a library prints from here on goes to stderr, so that answers stay readable.
_answers = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)

Decode = Callable[[Sequence[int], int], Iterable[int]]
"""(whole prompt, number of new ids) -> the new ids, each yielded when it is known."""


def serve(decode: Decode, reset: Callable[[], None], **about: Any) -> None:
    """Answer until the input ends; `about` is said first."""

    def answer(found: dict[str, Any]) -> None:
        _answers.write(json.dumps(found) + "\n")
        _answers.flush()

    answer(about)
    for line in sys.stdin:
        request = json.loads(line)
        if request.get("reset"):
            reset()
            answer({})
            continue
        start, first, ids = time.perf_counter(), 0.0, []
        for token in decode(request["ids"], request["new_tokens"]):
            first = first or time.perf_counter() - start
            ids.append(int(token))
        answer({"ids": ids, "first": first, "seconds": time.perf_counter() - start})
