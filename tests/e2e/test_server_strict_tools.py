"""Strict tools with the default model: every call parses and validates, drafts on, greedy or sampled."""

from __future__ import annotations

import itertools
import json
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jsonschema
import pytest

from tests.serving import MODEL, Live

SUBJECTS = ["the weather in Rome", "a file called notes.txt", "the last commit", "two numbers", "a hotel in Oslo"]
VERBS = ["Look up", "Tell me about", "Check", "Search for", "Work with"]


def strict(name: str, properties: dict[str, Any], required: list[str]) -> dict[str, Any]:
    parameters = {"type": "object", "properties": properties, "required": required, "additionalProperties": False}
    return {"type": "function", "function": {"name": name, "parameters": parameters, "strict": True}}


WORD = {"type": "string", "maxLength": 12}
TOOLS = [
    strict("read_file", {"path": WORD, "lines": {"type": "integer", "minimum": 1, "maximum": 99}}, ["path"]),
    strict(
        "get_weather", {"city": WORD, "unit": {"type": "string", "enum": ["celsius", "fahrenheit"]}}, ["city", "unit"]
    ),
    strict(
        "add", {"numbers": {"type": "array", "items": {"type": "number"}, "minItems": 2, "maxItems": 3}}, ["numbers"]
    ),
    strict(
        "book",
        {
            "guest": {
                "type": "object",
                "properties": {"name": WORD, "vip": {"type": "boolean"}},
                "required": ["name", "vip"],
                "additionalProperties": False,
            },
            "note": {"anyOf": [WORD, {"type": "null"}]},
        },
        ["guest", "note"],
    ),
    strict("run", {"command": {"type": "string", "pattern": "^(ls|cat|pwd)( [a-z]{1,6}){0,2}$"}}, ["command"]),
]
SCHEMAS = {tool["function"]["name"]: tool["function"]["parameters"] for tool in TOOLS}


def call(server: Live, number: int, temperature: float) -> tuple[int, str]:
    """One forced call with all tools or one named; drafted tokens, and the name of the tool that was called."""
    verb, subject = VERBS[number % len(VERBS)], SUBJECTS[number // len(VERBS) % len(SUBJECTS)]
    named = TOOLS[number % len(TOOLS)]["function"]["name"]
    choice = {"type": "function", "function": {"name": named}} if number % 2 else "required"
    answer = server.chat(
        [{"role": "user", "content": f"{verb} {subject} ({number})."}],
        tools=TOOLS,
        tool_choice=choice,
        parallel_tool_calls=False,
        temperature=temperature,
        seed=number,
        max_tokens=160,
    )
    (made,) = answer["choices"]
    assert made["finish_reason"] == "tool_calls", made
    (function,) = (item["function"] for item in made["message"]["tool_calls"])
    if number % 2:
        assert function["name"] == named
    jsonschema.validate(json.loads(function["arguments"]), SCHEMAS[function["name"]])
    return answer["usage"]["dlite"]["drafted_tokens"], function["name"]


def calls(server: Live, numbers: range) -> None:
    jobs = list(itertools.product(numbers, (0.0, 1.0)))
    with ThreadPoolExecutor(8) as pool:
        made = list(pool.map(lambda job: call(server, *job), jobs))
    assert len(made) == len(jobs)
    assert sum(drafted for drafted, _ in made) > 0
    names = sorted({name for _, name in made})
    print(f"\n{len(made)} of {len(jobs)} strict calls parsed and validated, to {', '.join(names)}")


def test_every_strict_call_validates(server: Live) -> None:
    calls(server, range(3))


@pytest.mark.soak
def test_two_hundred_strict_calls_validate(server: Live) -> None:
    calls(server, range(100))


def test_cut_arguments_are_no_call_in_any_shape(server: Live) -> None:
    ask = [{"role": "user", "content": "Read notes.txt."}]
    function = TOOLS[0]["function"]
    chat = server.chat(ask, tools=TOOLS[:1], tool_choice="required", max_tokens=14)
    assert chat["choices"][0]["finish_reason"] == "length"
    body: dict[str, Any] = {
        "model": MODEL,
        "input": ask,
        "tools": [{"type": "function", **function}],
        "tool_choice": "required",
    }
    response = server.post("/v1/responses", body | {"max_output_tokens": 14}).json()
    assert response["status"] == "incomplete"
    assert [item["status"] for item in response["output"]] == ["incomplete"]
    tool = {"name": function["name"], "input_schema": function["parameters"], "strict": True}
    body = {"model": MODEL, "messages": ask, "tools": [tool], "tool_choice": {"type": "any"}, "max_tokens": 14}
    assert server.post("/v1/messages", body).json()["stop_reason"] == "max_tokens"
