"""The events by which a response streams in the Responses API."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from dlite_agent.api.items import call_item, message_item, reasoning_item, text_part
from dlite_agent.api.stream import frame
from dlite_agent.api.turns import Answer
from dlite_agent.errors import DliteError
from dlite_agent.session.deltas import ArgumentsDelta, CallStart, Delta, ReasoningDelta, TextDelta

Complete = Callable[[Answer, list[dict[str, Any]]], dict[str, Any]]


class Output:
    """Turns deltas into events: items open and close one after another, every event has a sequence number.

    Args:
        head: the response as it is at the start.
        complete: makes the whole response of an answer and its output items, and stores it.
    """

    def __init__(
        self, request_id: str, head: dict[str, Any], complete: Callable[[Answer, list[dict[str, Any]]], dict[str, Any]]
    ) -> None:
        self._request_id = request_id
        self._head = head
        self._complete = complete
        self._sequence = -1
        self._items = 0
        self._done: list[dict[str, Any]] = []
        self._kind = ""
        self._item_id = ""
        self._text = ""
        self._call = ("", "")

    def _event(self, kind: str, **fields: Any) -> bytes:
        self._sequence += 1
        return frame({"type": kind, "sequence_number": self._sequence, **fields}, kind)

    def _at(self) -> dict[str, Any]:
        return {"item_id": self._item_id, "output_index": self._items - 1}

    def start(self) -> list[bytes]:
        """The response exists."""
        return [self._event(f"response.{state}", response=self._head) for state in ("created", "in_progress")]

    def take(self, item: Delta) -> list[bytes]:
        """Events of one delta."""
        if isinstance(item, TextDelta):
            out = self._open("message")
            self._text += item.text
            at = self._at() | {"content_index": 0}
            return [*out, self._event("response.output_text.delta", **at, delta=item.text, logprobs=[])]
        if isinstance(item, ReasoningDelta):
            out = self._open("reasoning")
            self._text += item.text
            return [*out, self._event("response.reasoning_text.delta", **self._at(), content_index=0, delta=item.text)]
        if isinstance(item, CallStart):
            self._call = (item.id, item.name)
            return self._open(f"call {item.index}")
        if isinstance(item, ArgumentsDelta):
            self._text += item.text
            return [self._event("response.function_call_arguments.delta", **self._at(), delta=item.text)]
        return self._close("incomplete" if item.status == "cut" else "completed")

    def _open(self, kind: str) -> list[bytes]:
        if self._kind == kind:
            return []
        out = self._close("completed")
        self._kind, self._text = kind, ""
        self._items += 1
        if kind == "message":
            self._item_id = f"msg_{self._request_id}_{self._items}"
            item = message_item(self._item_id, "", "in_progress")
        elif kind == "reasoning":
            self._item_id = f"rs_{self._request_id}_{self._items}"
            item = reasoning_item(self._item_id, "", "in_progress")
        else:
            self._item_id = f"fc_{self._request_id}_{self._items}"
            item = call_item(self._item_id, *self._call, "", "in_progress")
        out.append(self._event("response.output_item.added", output_index=self._items - 1, item=item))
        if kind == "message":
            part = text_part("")
            out.append(self._event("response.content_part.added", **self._at(), content_index=0, part=part))
        return out

    def _close(self, status: str) -> list[bytes]:
        if not self._kind:
            return []
        kind, text, at = self._kind, self._text, self._at()
        self._kind = ""
        if kind == "message":
            item, part = message_item(self._item_id, text, status), text_part(text)
            out = [
                self._event("response.output_text.done", **at, content_index=0, text=text, logprobs=[]),
                self._event("response.content_part.done", **at, content_index=0, part=part),
            ]
        elif kind == "reasoning":
            item = reasoning_item(self._item_id, text, status)
            out = [self._event("response.reasoning_text.done", **at, content_index=0, text=text)]
        else:
            item = call_item(self._item_id, *self._call, text, status)
            done = "response.function_call_arguments.done"
            out = [self._event(done, **at, name=self._call[1], arguments=text)]
        self._done.append(item)
        return [*out, self._event("response.output_item.done", output_index=self._items - 1, item=item)]

    def finish(self, answer: Answer) -> list[bytes]:
        """The last events."""
        status = "incomplete" if answer.finish == "length" else "completed"
        out = [] if self._items else self._open("message")
        out += self._close(status)
        body = self._complete(answer, self._done)
        return [*out, self._event(f"response.{body['status']}", response=body)]

    def fail(self, error: DliteError) -> bytes:
        """The response failed."""
        detail = {"code": error.code, "message": error.message}
        return self._event("response.failed", response={**self._head, "status": "failed", "error": detail})
