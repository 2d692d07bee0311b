"""Messages as clients send them again: whole dumps of what they were given, with every field their library adds."""

from __future__ import annotations

import os
from typing import Any

import anthropic
import openai
import pytest
from pydantic import BaseModel

from tests.serving import MODEL, Live

GREEDY: dict[str, Any] = {"model": MODEL, "temperature": 0}
THEN = {"role": "user", "content": "Another."}


class Read(BaseModel):
    """Read a file."""

    path: str


class Point(BaseModel):
    x: int


def test_openai_chat_dumps_with_parsed_calls(client: openai.OpenAI) -> None:
    tools = [openai.pydantic_function_tool(Read)]
    messages: list[Any] = [{"role": "user", "content": "Read the file a."}]
    first = client.chat.completions.parse(
        **GREEDY, messages=messages, tools=tools, tool_choice="required", parallel_tool_calls=False, max_tokens=120
    )
    message = first.choices[0].message.model_dump(warnings=False)
    (call,) = message["tool_calls"]
    assert call["function"]["parsed_arguments"] is not None
    assert {"parsed", "refusal", "annotations", "audio", "function_call"} <= message.keys()
    messages += [message, {"role": "tool", "tool_call_id": call["id"], "content": "42"}]
    second = client.chat.completions.create(
        **GREEDY, messages=messages, tools=tools, tool_choice="none", max_tokens=2
    ).usage
    assert first.usage is not None
    assert second is not None
    assert second.prompt_tokens_details is not None
    assert (second.prompt_tokens_details.cached_tokens or 0) >= first.usage.total_tokens - 1


def test_openai_chat_dumps_of_parsed_answers(client: openai.OpenAI) -> None:
    messages: list[Any] = [{"role": "user", "content": "A point near zero."}]
    first = client.chat.completions.parse(**GREEDY, messages=messages, response_format=Point, max_tokens=60)
    assert first.choices[0].message.parsed is not None
    messages += [first.choices[0].message.model_dump(warnings=False), THEN]
    second = client.chat.completions.create(**GREEDY, messages=messages, max_tokens=2).usage
    assert first.usage is not None
    assert second is not None
    assert second.prompt_tokens_details is not None
    assert second.prompt_tokens_details.cached_tokens == first.usage.total_tokens - 1


def test_openai_response_items_whole(client: openai.OpenAI) -> None:
    items: list[Any] = [{"role": "user", "content": "A point near one."}]
    first = client.responses.parse(**GREEDY, input=items, text_format=Point, max_output_tokens=60, store=False)
    dumped = [item.model_dump(warnings=False) for item in first.output]
    assert dumped[0]["content"][0]["parsed"] is not None
    items += [*dumped, THEN]
    second = client.responses.create(**GREEDY, input=items, max_output_tokens=2, store=False).usage
    assert first.usage is not None
    assert second is not None
    assert second.input_tokens_details.cached_tokens == first.usage.total_tokens - 1


def test_anthropic_blocks_whole(claude: anthropic.Anthropic) -> None:
    tool: Any = {"name": "read", "input_schema": Read.model_json_schema() | {"additionalProperties": False}}
    messages: list[Any] = [{"role": "user", "content": "Read the file b."}]
    first = claude.messages.create(
        model=MODEL,
        messages=messages,
        tools=[tool | {"strict": True}],
        tool_choice={"type": "any", "disable_parallel_tool_use": True},
        max_tokens=120,
        extra_body={"temperature": 0},
    )
    blocks: list[Any] = [block.model_dump() for block in first.content]
    blocks[-1]["cache_control"] = {"type": "ephemeral"}
    result = {"type": "tool_result", "tool_use_id": blocks[-1]["id"], "content": [{"type": "text", "text": "42"}]}
    messages += [{"role": "assistant", "content": blocks}, {"role": "user", "content": [result]}]
    second = claude.messages.create(
        model=MODEL,
        messages=messages,
        tools=[tool | {"strict": True}],
        tool_choice={"type": "none"},
        max_tokens=2,
        extra_body={"temperature": 0},
    ).usage
    before = first.usage.input_tokens + (first.usage.cache_read_input_tokens or 0) + first.usage.output_tokens
    assert (second.cache_read_input_tokens or 0) >= before - 1


@pytest.mark.filterwarnings("ignore")  # litellm's own, of which there are many.
def test_litellm_messages_as_mini_swe_agent_keeps_them(server: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(os.environ, "LITELLM_LOCAL_MODEL_COST_MAP", "True")
    litellm = pytest.importorskip("litellm")
    options = {"model": f"openai/{MODEL}", "api_base": f"{server.url}/v1", "api_key": "none", "temperature": 0}
    messages: list[Any] = [{"role": "user", "content": "Name a bird."}]
    first = litellm.completion(messages=messages, max_tokens=5, **options)
    message = first.choices[0].message.model_dump(warnings=False)
    assert {"provider_specific_fields", "function_call"} <= message.keys()
    messages += [message | {"provider_specific_fields": {"refusal": None}, "images": []}, THEN]
    second = litellm.completion(messages=messages, max_tokens=2, **options)
    assert second.usage.prompt_tokens_details.cached_tokens == first.usage.total_tokens - 1
