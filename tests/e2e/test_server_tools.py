"""Tools and structured output through the real clients."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import anthropic
import openai
from pydantic import BaseModel

from tests.serving import MODEL, Live

PARAMETERS = {
    "type": "object",
    "properties": {"path": {"type": "string", "maxLength": 8}},
    "required": ["path"],
    "additionalProperties": False,
}
READ: Any = {"type": "function", "function": {"name": "read", "parameters": PARAMETERS, "strict": True}}
ASK: list[Any] = [{"role": "user", "content": "Read a.txt and b.txt."}]


class Point(BaseModel):
    x: int
    y: int


def openai_client(server: Live) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", timeout=300, max_retries=0)


def test_parallel_calls_stream_with_their_own_index(server: Live) -> None:
    with openai_client(server) as client:
        stream = client.chat.completions.create(
            model=MODEL, messages=ASK, tools=[READ], tool_choice="required", max_tokens=70, seed=5, stream=True
        )
        calls: dict[int, list[str]] = {}
        names: dict[int, str] = {}
        finish = None
        for chunk in stream:
            for call in chunk.choices[0].delta.tool_calls or []:
                assert call.function is not None
                if call.function.name:
                    assert call.id
                    names[call.index] = call.function.name
                calls.setdefault(call.index, []).append(call.function.arguments or "")
            finish = chunk.choices[0].finish_reason or finish
    assert list(calls) == list(range(len(calls)))
    complete = list(calls.values()) if finish == "tool_calls" else list(calls.values())[:-1]
    assert set(names.values()) == {"read"}
    for parts in complete:
        assert json.loads("".join(parts)).keys() == {"path"}


def test_a_streamed_call_and_its_result_continue_the_session(server: Live) -> None:
    messages: list[Any] = [*ASK]
    with openai_client(server) as client:
        with client.chat.completions.stream(
            model=MODEL,
            messages=messages,
            tools=[READ],
            tool_choice="required",
            parallel_tool_calls=False,
            max_tokens=60,
            temperature=0,
            stream_options={"include_usage": True},
        ) as stream:
            for _ in stream:
                pass
            first = stream.get_final_completion()
        message = first.choices[0].message
        assert message.tool_calls
        result = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "It says 42."}
        messages += [message.model_dump(exclude_none=True), result]
        second = client.chat.completions.create(
            model=MODEL,
            messages=messages,
            tools=[READ],
            tool_choice="none",
            max_tokens=3,
            temperature=0,
        )
    assert first.usage is not None
    assert second.usage is not None
    assert second.usage.prompt_tokens_details is not None
    assert second.usage.prompt_tokens_details.cached_tokens == first.usage.total_tokens - 1


def test_structured_output_is_parsed_by_the_sdk(server: Live) -> None:
    with openai_client(server) as client:
        answer = client.chat.completions.parse(
            model=MODEL,
            messages=[{"role": "user", "content": "A point near zero."}],
            response_format=Point,
            max_tokens=60,
            temperature=0,
        )
        assert isinstance(answer.choices[0].message.parsed, Point)
        response = client.responses.parse(
            model=MODEL, input="A point.", text_format=Point, max_output_tokens=60, temperature=0
        )
        assert isinstance(response.output_parsed, Point)


def test_responses_call_and_continue(server: Live) -> None:
    tool: Any = {"type": "function", "name": "read", "parameters": PARAMETERS, "strict": True}
    with openai_client(server) as client:
        first = client.responses.create(
            model=MODEL,
            input="Read a.txt.",
            tools=[tool],
            tool_choice={"type": "function", "name": "read"},
            max_output_tokens=60,
            temperature=0,
        )
        (call,) = [item for item in first.output if item.type == "function_call"]
        second = client.responses.create(
            model=MODEL,
            previous_response_id=first.id,
            input=[{"type": "function_call_output", "call_id": call.call_id, "output": "It says 42."}],
            tools=[tool],
            tool_choice="none",
            max_output_tokens=3,
            temperature=0,
        )
        output = {"type": "function_call_output", "call_id": call.call_id, "output": "It says 42."}
        items: Any = [{"role": "user", "content": "Read a.txt."}, *first.output, output]
        again = client.responses.create(
            model=MODEL, input=items, tools=[tool], tool_choice="none", max_output_tokens=3, temperature=0
        )
    assert json.loads(call.arguments).keys() == {"path"}
    assert first.usage is not None
    for later in (second, again):
        assert later.usage is not None
        assert later.usage.input_tokens_details.cached_tokens >= first.usage.total_tokens - 1


def test_messages_tool_use_async(server: Live) -> None:
    tool: Any = {"name": "read", "description": "Read a file.", "input_schema": PARAMETERS, "strict": True}

    async def run() -> None:
        async with anthropic.AsyncAnthropic(base_url=server.url, api_key="none", timeout=300) as client:
            messages: list[Any] = [{"role": "user", "content": "Read a.txt."}]
            async with client.messages.stream(
                model=MODEL,
                messages=messages,
                tools=[tool],
                tool_choice={"type": "any", "disable_parallel_tool_use": True},
                max_tokens=60,
                extra_body={"temperature": 0},
            ) as stream:
                first = await stream.get_final_message()
            assert first.stop_reason == "tool_use"
            (call,) = [block for block in first.content if block.type == "tool_use"]
            assert isinstance(call.input, dict)
            assert call.input.keys() == {"path"}
            result = {"type": "tool_result", "tool_use_id": call.id, "content": "It says 42."}
            messages += [{"role": "assistant", "content": first.content}, {"role": "user", "content": [result]}]
            second = await client.messages.create(
                model=MODEL,
                messages=messages,
                tools=[tool],
                tool_choice={"type": "none"},
                max_tokens=3,
                extra_body={"temperature": 0},
            )
            before = first.usage.input_tokens + (first.usage.cache_read_input_tokens or 0) + first.usage.output_tokens
            assert (second.usage.cache_read_input_tokens or 0) >= before - 1

    asyncio.run(run())
