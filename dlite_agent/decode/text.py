"""Text of a token stream, piece by piece, and stop strings found in it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

_CONTEXT = 6
"""Ids decoded again before new ones, so that spacing and split characters come out as in one whole decode."""


class TextStream:
    """Decodes ids as they come and watches for stop strings.

    `text` is what may be shown so far: it never ends inside a character or inside what may become a stop string, until
    `finish` is called. Text from a stop string on is dropped.
    """

    def __init__(self, tokenizer: Any, stop: Sequence[str] = (), *, skip_special_tokens: bool = True) -> None:
        self._tokenizer = tokenizer
        self._stop = [s for s in stop if s]
        self._skip = skip_special_tokens
        self._ids: list[int] = []
        self._decoded = 0
        self._raw = ""
        self.text = ""
        self.stopped: str | None = None

    def push(self, token: int) -> bool:
        """Add one id; True when a stop string is complete: later ids must not be pushed."""
        self._ids.append(token)
        start = max(self._decoded - _CONTEXT, 0)
        known = self._decode(self._ids[start : self._decoded])
        now = self._decode(self._ids[start:])
        if now.endswith("\ufffd"):
            return False
        self._decoded = len(self._ids)
        return self._append(now[len(known) :])

    def _decode(self, ids: list[int]) -> str:
        text: str = self._tokenizer.decode(ids, skip_special_tokens=self._skip, clean_up_tokenization_spaces=False)
        return text

    def _append(self, piece: str) -> bool:
        searched = max(len(self._raw) - max((len(s) for s in self._stop), default=0), 0)
        self._raw += piece
        # The stop that was complete first wins, so that the outcome does not depend on how ids split the text.
        hits = [(at + len(s), at, s) for s in self._stop if (at := self._raw.find(s, searched)) >= 0]
        if hits:
            _, at, self.stopped = min(hits)
            self._raw = self.text = self._raw[:at]
            return True
        held = max((self._overlap(s) for s in self._stop), default=0)
        self.text = self._raw[: len(self._raw) - held]
        return False

    def _overlap(self, stop: str) -> int:
        """Length of the longest end of the text that begins `stop`."""
        for length in range(min(len(stop) - 1, len(self._raw)), 0, -1):
            if self._raw.endswith(stop[:length]):
                return length
        return 0

    def finish(self) -> str:
        """No more ids will come: everything held back is text after all."""
        if self.stopped is None and self._decoded < len(self._ids):
            start = max(self._decoded - _CONTEXT, 0)
            known = self._decode(self._ids[start : self._decoded])
            self._decoded = len(self._ids)
            self._append(self._decode(self._ids[start:])[len(known) :])
        self.text = self._raw
        return self.text
