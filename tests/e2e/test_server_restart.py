"""A server that is killed goes on where its last answer ended, as if nothing had been."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx

from tests.e2e.processes import Served
from tests.serving import MODEL, Live

OPENING = [
    {"role": "system", "content": "You are a careful assistant that works on files. " * 8},
    {"role": "user", "content": "Look at the file notes.txt and tell what it says."},
]
TOOLS = ["The file says: seven apples.", "The file says: two pears.", "The file says: nothing more."]


def further(messages: list[dict[str, Any]], answer: dict[str, Any], said: str) -> list[dict[str, Any]]:
    return [*messages, answer["choices"][0]["message"], {"role": "user", "content": said}]


def check_resumed(before: dict[str, Any], after: dict[str, Any], tier: str) -> None:
    """Everything but the anchor came back, nothing of it was computed again, and drafting went on at once."""
    block = after["usage"]["dlite"]
    whole = before["usage"]["prompt_tokens"] + before["usage"]["completion_tokens"]
    assert after["usage"]["prompt_tokens_details"]["cached_tokens"] >= whole - 1
    assert block["restored_from"] == tier
    assert block["restore_reason"] is None
    assert block["prefilled_tokens"] <= after["usage"]["prompt_tokens"] - (whole - 1)
    assert block["session_id"] == before["usage"]["dlite"]["session_id"]
    assert block["turn"] == before["usage"]["dlite"]["turn"] + 1
    assert block["divergence"] is None


def streamed(server: Served, messages: list[dict[str, Any]]) -> dict[str, Any]:
    """An answer put together from its stream, which is left at its last event."""
    body = {"model": MODEL, "messages": messages, "temperature": 0, "max_tokens": 10, "ignore_eos": True}
    url = f"{server.url}/v1/chat/completions"
    text = ""
    usage: dict[str, Any] = {}
    with httpx.stream("POST", url, json=body | {"stream": True, "session_id": "mine"}, timeout=240) as stream:
        for line in stream.iter_lines():
            if line == "data: [DONE]":
                break
            if line.startswith("data: "):
                chunk = json.loads(line.removeprefix("data: "))
                text += chunk["choices"][0]["delta"].get("content", "")
                usage = chunk.get("usage") or usage
    return {"choices": [{"message": {"role": "assistant", "content": text, "refusal": None}}], "usage": usage}


def test_killed_between_turns_and_during_one(server: Live, tmp_path: Path) -> None:
    options = {"max_tokens": 10, "ignore_eos": True}
    messages, whole = OPENING, []
    for said in (*TOOLS, ""):
        whole.append(server.chat(messages, session_id=str(tmp_path), **options))
        messages = further(messages, whole[-1], said)

    with Served(tmp_path) as first:
        # Killed at the moment the last byte of its answer arrives.
        answers = [streamed(first, OPENING)]
        first.kill()
        messages = further(OPENING, answers[0], TOOLS[0])
    with Served(tmp_path) as second:
        answers.append(second.chat(messages, session_id="mine"))
        check_resumed(answers[0], answers[1], "disk")
        messages = further(messages, answers[1], TOOLS[1])
        body = {"model": MODEL, "messages": messages, "temperature": 0, "stream": True, "session_id": "mine"}
        url = f"{second.url}/v1/chat/completions"
        with httpx.stream("POST", url, json=body | {"max_tokens": 400, "ignore_eos": True}, timeout=120) as stream:
            lines = stream.iter_lines()
            while '"content":"' not in next(lines):
                pass
            second.kill()
    with Served(tmp_path) as third:
        answers.append(third.chat(messages))  # The conversation alone finds its session.
        check_resumed(answers[1], answers[2], "disk")
        messages = further(messages, answers[2], TOOLS[2])
        answers.append(third.chat(messages, session_id="mine"))
        check_resumed(answers[2], answers[3], "device")
        assert third.terminate() == 0

    for found, wanted in zip(answers, whole, strict=True):
        assert found["choices"][0]["message"] == wanted["choices"][0]["message"]


def test_a_stored_response_is_continued_after_a_kill(tmp_path: Path) -> None:
    def respond(server: Served, said: Any, **fields: Any) -> httpx.Response:
        body = {"model": MODEL, "input": said, "temperature": 0, "max_output_tokens": 6, **fields}
        return httpx.post(f"{server.url}/v1/responses", json=body, timeout=240)

    rules = {"instructions": "You are terse."}
    with Served(tmp_path) as first:
        made = respond(first, "Name a fruit.", **rules).json()
        gone = respond(first, "Name a tree.", session_id="gone").json()
        assert httpx.delete(f"{first.url}/v1/sessions/gone", timeout=60).status_code == 200
        first.kill()
    with Served(tmp_path) as second:
        assert httpx.get(f"{second.url}/v1/responses/{made['id']}", timeout=60).json() == made
        further = respond(second, "Another.", previous_response_id=made["id"], **rules).json()
        usage = further["usage"]
        assert usage["input_tokens_details"]["cached_tokens"] == made["usage"]["total_tokens"] - 1
        assert usage["dlite"]["session_id"] == made["usage"]["dlite"]["session_id"]
        assert usage["dlite"]["restored_from"] == "disk"
        # Under other instructions all is rendered anew, so the words must have been kept, not only the ids.
        other = respond(second, "Another.", previous_response_id=made["id"], instructions="Be verbose.").json()
        again = [{"role": "user", "content": "Name a fruit."}, *made["output"], {"role": "user", "content": "Another."}]
        whole = respond(second, again, instructions="Be verbose.").json()
        assert other["usage"]["input_tokens"] == whole["usage"]["input_tokens"]
        assert other["output"][0]["content"] == whole["output"][0]["content"]
        missing = respond(second, "Another.", previous_response_id=gone["id"]).json()["error"]
        assert (missing["code"], missing["param"]) == ("not_found", "previous_response_id")
        assert "send the conversation's items" in missing["message"]
        assert second.terminate() == 0
