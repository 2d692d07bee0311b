"""The example that asks the same behind histories of several lengths."""

from __future__ import annotations

from pathlib import Path

from dlite_agent.decode.load import chat_ids, load_tokenizer
from dlite_agent.train.data import read_prompts
from examples.context_prompts import LENGTHS, REQUESTS, TOOLS, main

ROOT = Path(__file__).resolve().parents[2]


def test_histories_are_as_long_as_they_say(tmp_path: Path, default_folder: Path) -> None:
    main(ROOT / "dlite_agent" / "model", tmp_path / "prompts.jsonl")
    prompts = read_prompts(tmp_path / "prompts.jsonl")
    assert len(prompts) == len(REQUESTS) * (len(LENGTHS) + len(TOOLS))
    tokenizer = load_tokenizer(default_folder)
    for prompt in prompts:
        name, _, number = prompt.kind.partition("-")
        if name == "context":
            length = len(chat_ids(tokenizer, prompt.messages))
            assert 0 <= int(number) - length < 450 or length < 600
            assert prompt.messages[-1]["content"].count("\n\n") >= 1
        else:
            assert sum(message["role"] == "tool" for message in prompt.messages) == int(number)
            assert prompt.messages[-1]["role"] == "tool"
