"""Chat completions on the wire: options, streams, tools and answers held to a schema."""

from __future__ import annotations

import contextlib
import json
from typing import Any

import httpx
import pytest

from tests.serving import HI, MODEL, Live, events

WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Weather of a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "maxLength": 12}, "days": {"type": "integer"}},
            "required": ["city"],
            "additionalProperties": False,
        },
        "strict": True,
    },
}
PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 8}, "age": {"type": "integer", "maximum": 99}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


def stream(server: Live, **fields: Any) -> tuple[str, list[dict[str, Any]]]:
    body = {"model": MODEL, "messages": HI, "temperature": 0, "max_tokens": 4, "stream": True} | fields
    response = server.post("/v1/chat/completions", body)
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    return response.text, events(response.text)


def test_usage_adds_up(server: Live) -> None:
    answer = server.chat(HI)
    usage = answer["usage"]
    block = usage["dlite"]
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    assert usage["completion_tokens"] == 6
    assert block["prefilled_tokens"] + block["restored_tokens"] == usage["prompt_tokens"]
    assert block["rounds"] + block["accepted_tokens"] == usage["completion_tokens"] - 1
    decode = block["draft_seconds"] + block["verify_seconds"] + block["rest_seconds"]
    assert 0 < decode <= block["decode_seconds"] * 1.01
    assert block["finish"] == "length"


def test_whole_numbers_may_be_written_as_floats(server: Live) -> None:
    answer = server.chat(HI, max_tokens=2.0, n=1.0, seed=3.0, dlite={"verify_window": 4.0})
    assert answer["usage"]["completion_tokens"] == 2


def test_a_stream_has_role_pieces_finish_and_usage(server: Live) -> None:
    text, chunks = stream(server)
    assert text.endswith("data: [DONE]\n\n")
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
    assert chunks[-1]["choices"][0]["finish_reason"] == "length"
    assert chunks[-1]["usage"]["completion_tokens"] == 4
    assert len({chunk["id"] for chunk in chunks}) == 1


def test_a_long_prompt_keeps_the_stream_alive(server: Live) -> None:
    messages = [{"role": "user", "content": "word " * 600}]
    text, chunks = stream(server, messages=messages, max_tokens=1)
    assert ": prefill " in text
    assert chunks[-1]["usage"]["completion_tokens"] == 1


def test_n_answers_with_seeds_are_reproducible(server: Live) -> None:
    options = {"n": 2, "seed": 7, "temperature": 1.0, "max_tokens": 4}
    first, second = server.chat(HI, **options), server.chat(HI, **options)
    texts = [choice["message"]["content"] for choice in first["choices"]]
    assert [choice["index"] for choice in first["choices"]] == [0, 1]
    assert texts == [choice["message"]["content"] for choice in second["choices"]]
    assert first["usage"]["completion_tokens"] == 8
    alone = server.chat(HI, seed=8, temperature=1.0, max_tokens=4)
    assert alone["choices"][0]["message"]["content"] == texts[1]


def test_stop_strings_end_the_text_before_them(server: Live) -> None:
    plain = server.chat(HI, max_tokens=8)["choices"][0]["message"]["content"]
    stop = plain[4:7]
    cut = server.chat(HI, max_tokens=8, stop=[stop])["choices"][0]
    assert cut["message"]["content"] == plain[: plain.index(stop)]
    assert cut["finish_reason"] == "stop"


def test_logprobs_list_the_chosen_token_first_when_greedy(server: Live) -> None:
    choice = server.chat(HI, max_tokens=3, logprobs=True, top_logprobs=2)["choices"][0]
    content = choice["logprobs"]["content"]
    assert "".join(item["token"] for item in content) == choice["message"]["content"]
    for item in content:
        assert item["top_logprobs"][0]["token"] == item["token"]
        assert item["top_logprobs"][0]["logprob"] == item["logprob"] <= 0
        assert item["logprob"] >= item["top_logprobs"][1]["logprob"]


def test_logit_bias_forces_a_token(server: Live) -> None:
    token = server.post("/tokenize", {"prompt": " the", "add_special_tokens": False}).json()["tokens"][0]
    answer = server.chat(HI, max_tokens=2, logit_bias={str(token): 100})
    assert answer["choices"][0]["message"]["content"] == " the the"


@pytest.mark.parametrize("temperature", [0, 1])
def test_a_required_call_parses_and_validates(server: Live, temperature: float) -> None:
    answer = server.chat(
        [{"role": "user", "content": "Weather in Rome?"}],
        tools=[WEATHER],
        tool_choice="required",
        parallel_tool_calls=False,
        max_tokens=60,
        temperature=temperature,
        seed=3,
    )
    choice = answer["choices"][0]
    assert choice["finish_reason"] == "tool_calls"
    (call,) = choice["message"]["tool_calls"]
    assert call["function"]["name"] == "get_weather"
    arguments = json.loads(call["function"]["arguments"])
    assert isinstance(arguments["city"], str)
    assert arguments.keys() <= {"city", "days"}


def test_a_call_streams_with_id_name_and_index_first(server: Live) -> None:
    choice = {"type": "function", "function": {"name": "get_weather"}}
    _, chunks = stream(server, tools=[WEATHER], tool_choice=choice, max_tokens=60)
    deltas = [chunk["choices"][0]["delta"].get("tool_calls") for chunk in chunks]
    calls = [delta[0] for delta in deltas if delta]
    assert calls[0]["id"]
    assert calls[0]["function"] == {"name": "get_weather", "arguments": ""}
    assert {call["index"] for call in calls} == {0}
    assert isinstance(json.loads("".join(call["function"]["arguments"] for call in calls)), dict)
    assert chunks[-1]["choices"][0]["finish_reason"] == "tool_calls"


def test_a_streamed_call_loses_no_logprobs(server: Live) -> None:
    options = {"tools": [WEATHER], "tool_choice": "required", "parallel_tool_calls": False, "max_tokens": 60}
    whole = server.chat(HI, logprobs=True, **options)["choices"][0]["logprobs"]["content"]
    _, chunks = stream(server, logprobs=True, **options)
    scores = [chunk["choices"][0]["logprobs"] or {"content": []} for chunk in chunks]
    assert [item["token"] for score in scores for item in score["content"]] == [item["token"] for item in whole]


def test_a_cut_call_is_reported_as_length(server: Live) -> None:
    answer = server.chat(HI, tools=[WEATHER], tool_choice="required", max_tokens=14)
    assert answer["choices"][0]["finish_reason"] == "length"


def test_a_tool_turn_continues_the_session(server: Live) -> None:
    messages: list[dict[str, Any]] = [{"role": "user", "content": "Weather in Rome? Use the tool."}]
    first = server.chat(messages, tools=[WEATHER], tool_choice="required", parallel_tool_calls=False, max_tokens=60)
    message = first["choices"][0]["message"]
    result = {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": '{"sky": "clear"}'}
    second = server.chat([*messages, message, result], tools=[WEATHER], tool_choice="none", max_tokens=3)
    assert second["usage"]["prompt_tokens_details"]["cached_tokens"] >= first["usage"]["total_tokens"] - 1
    assert second["usage"]["dlite"]["divergence"] is None


def test_an_answer_is_held_to_its_schema(server: Live) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "person", "schema": PERSON, "strict": True}}
    answer = server.chat([{"role": "user", "content": "Invent a person."}], response_format=form, max_tokens=60)
    choice = answer["choices"][0]
    assert choice["finish_reason"] == "stop"
    person = json.loads(choice["message"]["content"])
    assert person.keys() == {"name", "age"}
    assert person["age"] <= 99


def test_tools_of_unknown_types_are_skipped_with_a_warning(server: Live) -> None:
    answer = server.chat(HI, tools=[{"type": "web_search"}], max_tokens=1)
    assert answer["usage"]["dlite"]["warnings"] == [
        "tools[0] of type 'web_search' was skipped: only function tools are supported"
    ]


_FLAT = {"name": "f", "parameters": {"type": "object"}}


@pytest.mark.parametrize(
    ("path", "tool", "param"),
    [
        ("/v1/chat/completions", {"function": {"name": "f"}}, "tools[0].type"),
        ("/v1/chat/completions", {"type": "function", "function": {"name": "f"}, "cost": 3}, "tools[0].cost"),
        ("/v1/chat/completions", {"type": "function", "function": {"name": "f", "cost": 3}}, "tools[0].function.cost"),
        ("/v1/responses", _FLAT, "tools[0].type"),
        ("/v1/responses", {"type": "function", **_FLAT, "cost": 3}, "tools[0].cost"),
        ("/v1/messages", {"type": 3, "name": "f", "input_schema": {"type": "object"}}, "tools[0].type"),
        ("/v1/messages", {"name": "f", "input_schema": {"type": "object"}, "cost": 3}, "tools[0].cost"),
    ],
)
def test_what_a_tool_says_beyond_what_is_honoured_is_refused(server: Live, path: str, tool: Any, param: str) -> None:
    said = {"input": "hi"} if path == "/v1/responses" else {"messages": HI, "max_tokens": 1}
    response = server.post(path, {"model": MODEL, **said, "tools": [tool]})
    assert response.status_code == 400, response.text
    assert response.json()["error"]["param"] == param


@pytest.mark.parametrize(
    ("path", "tool"),
    [
        ("/v1/chat/completions", {"type": "function", "function": {"name": "f", "strict": None}}),
        ("/v1/responses", {"type": "function", **_FLAT, "description": None}),
        ("/v1/messages", {"name": "f", "input_schema": {"type": "object"}, "eager_input_streaming": True}),
    ],
)
def test_hints_beside_a_tool_are_let_through(server: Live, path: str, tool: Any) -> None:
    said = {"input": "hi", "max_output_tokens": 16} if path == "/v1/responses" else {"messages": HI, "max_tokens": 1}
    hints = {"cache_control": {"type": "ephemeral"}, "anything": None}
    response = server.post(path, {"model": MODEL, **said, "tools": [tool | hints]})
    assert response.status_code == 200, response.text


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("audio", {"voice": "x"}),
        ("temperature", 3),
        ("temperature", "hot"),
        ("n", 0),
        ("max_tokens", -1),
        ("seed", 2**70),
        ("top_logprobs", 3),
        ("logit_bias", {"99999999": 1}),
        ("response_format", {"type": "xml"}),
        ("tool_choice", "required"),
        ("stop", [1]),
        ("dlite", {"speed": 9}),
        ("messages", []),
        ("messages", [{"role": "wizard", "content": "x"}]),
        ("messages", [{"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}]),
        ("messages", [{"role": "user", "content": "\ud800"}]),
        ("verify_window", 3),
        ("store", 0),
    ],
)
def test_what_cannot_be_honoured_is_refused_by_name(server: Live, field: str, value: Any) -> None:
    body = json.dumps({"model": MODEL, "messages": HI, "max_tokens": 1, field: value}).encode()
    response = server.post_raw("/v1/chat/completions", body)
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert error["type"] == "invalid_request_error"
    assert error["param"].startswith(field)


def test_prompt_and_completion_together_must_fit(server: Live) -> None:
    response = server.post("/v1/chat/completions", {"model": MODEL, "messages": HI, "max_tokens": 8190})
    assert response.status_code == 400
    error = response.json()["error"]
    assert error["code"] == "context_length_exceeded"
    assert "maximum context length is 8192 tokens" in error["message"]


def test_a_timeout_ends_the_turn_and_leaves_the_session_as_it_was(server: Live) -> None:
    body = {"model": MODEL, "messages": HI, "max_tokens": 4000, "ignore_eos": True, "session_id": "in-a-hurry"}
    response = server.post("/v1/chat/completions", body | {"dlite": {"timeout": 1}})
    assert response.status_code == 504
    assert response.json()["error"]["code"] == "deadline_exceeded"
    assert server.get("/v1/sessions/in-a-hurry").status_code == 404


def test_a_full_queue_is_429_with_advice(server: Live) -> None:
    limits = server.service.settings.scheduler
    body = {"model": MODEL, "messages": HI, "max_tokens": 300, "ignore_eos": True, "stream": True}
    with contextlib.ExitStack() as stack:
        statuses = []
        for _ in range(limits.max_running + limits.max_queued + 2):
            held = stack.enter_context(
                httpx.stream("POST", f"{server.url}/v1/chat/completions", json=body, timeout=300)
            )
            statuses.append(held.status_code)
        assert statuses[0] == 200
        assert statuses[-1] == 429
        assert int(held.headers["retry-after"]) >= 1
        held.read()
        assert held.json()["error"]["type"] == "rate_limit_error"
    server.wait_until("the engine to be idle", server.idle)
