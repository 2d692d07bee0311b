"""The OpenAI Agents SDK, unchanged, with this server as its model: `python examples/agents_sdk.py URL MODEL`.

The SDK runs the loop and the tool; the server keeps the session, so each of its turns only prefills what is new.
"""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Annotated, Any

from agents import Agent, MaxTurnsExceeded, ModelSettings, OpenAIChatCompletionsModel, RunConfig, Runner, function_tool
from openai import AsyncOpenAI
from pydantic import Field

STOCK = {"bolts": 40, "nuts": 12}
asked: list[str] = []


@function_tool
def stock(item: Annotated[str, Field(max_length=16)]) -> int:
    """How many of an item are in stock."""
    asked.append(item)
    return STOCK.get(item, 0)


async def main(url: str, model: str) -> dict[str, Any]:
    """Let the agent make one call and see its result; what it asked, and the tokens each request found in the cache."""
    async with AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        agent = Agent(
            name="clerk",
            instructions="You answer questions about the stock.",
            model=OpenAIChatCompletionsModel(model, client),
            tools=[stock],
            # A tiny model calls only when it must; a real one decides by itself: leave tool_choice out.
            model_settings=ModelSettings(
                tool_choice="required", parallel_tool_calls=False, max_tokens=60, temperature=0
            ),
        )
        try:
            result = await Runner.run(
                agent, "How many bolts are there?", max_turns=2, run_config=RunConfig(tracing_disabled=True)
            )
            responses, answer = result.raw_responses, str(result.final_output)
        except MaxTurnsExceeded as stopped:
            if stopped.run_data is None:
                raise
            responses, answer = stopped.run_data.raw_responses, None
    usages = [(item.usage.input_tokens, item.usage.input_tokens_details.cached_tokens) for item in responses]
    return {"asked": asked, "answer": answer, "usages": usages}


if __name__ == "__main__":
    print(json.dumps(asyncio.run(main(*sys.argv[1:3]))))
