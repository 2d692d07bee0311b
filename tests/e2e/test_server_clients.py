"""The real clients, against the real server: every shape, and cached tokens for each client's own history."""

from __future__ import annotations

import asyncio
import json
import subprocess
from typing import Any

import anthropic
import openai
import pytest

from tests.serving import MODEL, Live, events

GREEDY = {"temperature": 0}
OPENING = "You are a terse assistant in a terminal. Answer in a few words."


def test_chat_turns_prefill_only_what_is_new(client: openai.OpenAI) -> None:
    messages: list[Any] = [{"role": "system", "content": OPENING}, {"role": "user", "content": "Name a colour."}]
    first = client.chat.completions.create(model=MODEL, messages=messages, max_tokens=5, temperature=0)
    messages.append(first.choices[0].message.model_dump(exclude_none=True))
    messages.append({"role": "user", "content": "Another."})
    second = client.chat.completions.create(model=MODEL, messages=messages, max_tokens=4, temperature=0)
    assert first.usage is not None
    assert second.usage is not None
    assert second.usage.prompt_tokens_details is not None
    assert second.usage.prompt_tokens_details.cached_tokens == first.usage.total_tokens - 1


def test_chat_stream_equals_the_whole_and_ends_with_usage(client: openai.OpenAI) -> None:
    messages: list[Any] = [{"role": "user", "content": "Say hello to Bob."}]
    whole = client.chat.completions.create(model=MODEL, messages=messages, max_tokens=6, temperature=0)
    chunks = list(
        client.chat.completions.create(
            model=MODEL,
            messages=messages,
            max_tokens=6,
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices][-1] == "length"
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 6
    assert all(chunk.usage is None for chunk in chunks[:-1])


def test_async_chat(server: Live) -> None:
    async def ask() -> list[str | None]:
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="x", timeout=300) as client:
            made = [
                client.chat.completions.create(
                    model=MODEL, messages=[{"role": "user", "content": word}], max_tokens=3, temperature=0
                )
                for word in ("one", "two", "three")
            ]
            return [answer.choices[0].message.content for answer in await asyncio.gather(*made)]

    alone = [server.chat([{"role": "user", "content": word}], max_tokens=3) for word in ("one", "two", "three")]
    assert asyncio.run(ask()) == [answer["choices"][0]["message"]["content"] for answer in alone]


def test_responses_continue_by_id(client: openai.OpenAI) -> None:
    first = client.responses.create(
        model=MODEL, instructions=OPENING, input="Name a fruit.", max_output_tokens=5, temperature=0
    )
    second = client.responses.create(
        model=MODEL,
        instructions=OPENING,
        input="Another.",
        previous_response_id=first.id,
        max_output_tokens=4,
        temperature=0,
    )
    assert first.usage is not None
    assert second.usage is not None
    assert second.usage.input_tokens_details.cached_tokens == first.usage.total_tokens - 1
    assert first.output_text
    assert client.responses.retrieve(first.id).output_text == first.output_text
    # A second branch from the same response gets a session of its own.
    other = client.responses.create(
        model=MODEL, input="A third.", previous_response_id=first.id, max_output_tokens=2, temperature=0
    )
    assert other.usage is not None
    assert other.usage.model_extra is not None
    assert second.usage.model_extra is not None
    assert other.usage.model_extra["dlite"]["session_id"] != second.usage.model_extra["dlite"]["session_id"]


def test_responses_continue_by_re_sent_items(client: openai.OpenAI) -> None:
    items: list[Any] = [{"role": "user", "content": "Name a river."}]
    first = client.responses.create(
        model=MODEL, instructions=OPENING, input=items, max_output_tokens=5, temperature=0, store=False
    )
    items += [*first.output, {"role": "user", "content": "Another."}]
    second = client.responses.create(
        model=MODEL, instructions=OPENING, input=items, max_output_tokens=4, temperature=0, store=False
    )
    assert first.usage is not None
    assert second.usage is not None
    assert second.usage.input_tokens_details.cached_tokens == first.usage.total_tokens - 1


def test_responses_stream(client: openai.OpenAI) -> None:
    stream = client.responses.create(model=MODEL, input="Say hi.", max_output_tokens=3, temperature=0, stream=True)
    seen = list(stream)
    assert [event.sequence_number for event in seen] == list(range(len(seen)))
    assert seen[0].type == "response.created"
    last = seen[-1]
    assert last.type == "response.incomplete"
    assert last.response.output_text == "".join(
        event.delta for event in seen if event.type == "response.output_text.delta"
    )
    done = [event.item for event in seen if event.type == "response.output_item.done"]
    assert done == last.response.output
    assert last.response.usage is not None
    assert last.response.usage.output_tokens == 3


def test_messages_turns_report_cache_reads(claude: anthropic.Anthropic) -> None:
    messages: list[Any] = [{"role": "user", "content": "Name a tree."}]
    first = claude.messages.create(model=MODEL, system=OPENING, messages=messages, max_tokens=5, extra_body=GREEDY)
    messages += [{"role": "assistant", "content": first.content}, {"role": "user", "content": "Another."}]
    second = claude.messages.create(model=MODEL, system=OPENING, messages=messages, max_tokens=4, extra_body=GREEDY)
    assert first.stop_reason == "max_tokens"
    assert second.usage.cache_read_input_tokens == first.usage.input_tokens + first.usage.output_tokens - 1


def test_messages_stream_and_count(claude: anthropic.Anthropic) -> None:
    messages: list[Any] = [{"role": "user", "content": "Say hi."}]
    with claude.messages.stream(model=MODEL, messages=messages, max_tokens=5, extra_body=GREEDY) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert final.content[0].type == "text"
    assert final.content[0].text == text
    assert final.usage.output_tokens == 5
    counted = claude.messages.count_tokens(model=MODEL, messages=messages)
    assert counted.input_tokens == final.usage.input_tokens + (final.usage.cache_read_input_tokens or 0)


def test_completions_continue_ids_and_text(client: openai.OpenAI) -> None:
    whole = client.completions.create(model=MODEL, prompt="One, two, three,", max_tokens=4, temperature=0)
    streamed = client.completions.create(
        model=MODEL, prompt="One, two, three,", max_tokens=4, temperature=0, stream=True
    )
    assert "".join(chunk.choices[0].text for chunk in streamed) == whole.choices[0].text
    assert whole.usage is not None
    assert whole.usage.completion_tokens == 4


def test_completions_prefill_only_what_is_new(client: openai.OpenAI) -> None:
    """Text comes back as text, so this holds where tokenising it again gives the same ids, as it does here."""
    prompt = "The quick brown fox jumps over the lazy dog. The quick brown fox"
    first = client.completions.create(model=MODEL, prompt=prompt, max_tokens=5, temperature=0)
    longer = f"{prompt}{first.choices[0].text} and"
    second = client.completions.create(model=MODEL, prompt=longer, max_tokens=2, temperature=0)
    assert first.usage is not None
    assert second.usage is not None
    assert second.usage.prompt_tokens_details is not None
    assert second.usage.prompt_tokens_details.cached_tokens == first.usage.total_tokens - 1


def test_curl_streams_and_continues(server: Live) -> None:
    """A shell script with the history in a file: what it re-sends is the message it put together from the deltas."""

    def ask(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
        body = {"model": MODEL, "messages": messages, "max_tokens": 5, "temperature": 0, "stream": True}
        command = ["curl", "--silent", "--no-buffer", "--data", "@-", "--header", "Content-Type: application/json"]
        url = f"{server.url}/v1/chat/completions"
        run = subprocess.run([*command, url], input=json.dumps(body), capture_output=True, text=True, check=True)
        assert run.stdout.endswith("data: [DONE]\n\n")
        return events(run.stdout)

    messages = [{"role": "user", "content": "Name a planet, in one word."}]
    first = ask(messages)
    text = "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in first)
    second = ask([*messages, {"role": "assistant", "content": text}, {"role": "user", "content": "Another."}])
    cached = second[-1]["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert cached == first[-1]["usage"]["total_tokens"] - 1


def test_models_tell_the_context_length(client: openai.OpenAI, claude: anthropic.Anthropic) -> None:
    (model,) = client.models.list().data
    assert model.id == MODEL
    assert model.model_extra is not None
    assert model.model_extra["context_length"] == 8192
    assert client.models.retrieve(MODEL).id == MODEL
    assert claude.models.list().data[0].id == MODEL


def test_errors_reach_the_clients_as_their_own(client: openai.OpenAI, claude: anthropic.Anthropic) -> None:
    long: list[Any] = [{"role": "user", "content": "word " * 9000}]
    with pytest.raises(openai.BadRequestError, match="maximum context length is 8192 tokens") as refused:
        client.chat.completions.create(model=MODEL, messages=long)
    assert refused.value.code == "context_length_exceeded"
    assert refused.value.param == "messages"
    with pytest.raises(anthropic.BadRequestError, match="prompt is too long"):
        claude.messages.create(model=MODEL, messages=long, max_tokens=5)
    with pytest.raises(openai.NotFoundError, match="not served here"):
        client.chat.completions.create(model="gpt-9", messages=[{"role": "user", "content": "x"}])
