"""A session that pauses at a tool call and resumes after the tool's output, with no drafter prefill.

The default target is far too small to decide on a tool call by itself, so the call's beginning is put into its mouth,
as a grammar would; the path, everything after it and all timing are the model's own.
"""

from __future__ import annotations

from pathlib import Path

from rich.console import Console

from dlite_agent.decode.generate import generate
from dlite_agent.decode.load import Runtime, chat_ids, load_runtime
from dlite_agent.decode.sampling import SamplingParams
from dlite_agent.decode.text import TextStream
from dlite_agent.tables import figures_table

SYSTEM = (
    "You are a coding agent. To read a file, answer with "
    '<tool_call>{"name": "read_file", "arguments": {"path": "..."}}</tool_call>'
)
TASK = "Read examples/inventory.py and write a docstring for each function."
CALL = '<tool_call>{"name": "read_file", "arguments": {"path": "'
FOLDER = Path(__file__).parent


def encode(runtime: Runtime, text: str) -> list[int]:
    ids: list[int] = runtime.tokenizer.encode(text, add_special_tokens=False)
    return ids


def main() -> None:
    console = Console(highlight=False, markup=False)
    runtime = load_runtime()
    decoder = runtime.decoder
    mode = "dlite" if decoder.drafter is not None else "ar"
    session = decoder.open()

    messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": TASK}]
    console.print(f"user: {TASK}\n")
    text = TextStream(runtime.tokenizer, stop=["</tool_call>"])
    prompt = chat_ids(runtime.tokenizer, messages) + encode(runtime, CALL)
    turn, first = generate(decoder, session, prompt, SamplingParams(), max_new_tokens=24, mode=mode, text=text)
    console.print(f"assistant: {CALL}{text.finish()}</tool_call>")
    console.print(
        f"\n-- paused: {session.boundary} ids in KV, one anchor ahead of them, features of "
        f"{len(decoder.taps)} layers kept ({turn.finish}) --\n"
    )

    output = (FOLDER / "inventory.py").read_text()
    tail = f"<|im_end|>\n<|im_start|>user\n<tool_response>\n{output}</tool_response><|im_end|>\n<|im_start|>assistant\n"
    new_ids = encode(runtime, tail)
    console.print(f"tool: examples/inventory.py, {len(new_ids)} new tokens\n")

    drafts_before = decoder.drafter_forwards
    text = TextStream(runtime.tokenizer)
    turn, second = generate(decoder, session, new_ids, SamplingParams(), max_new_tokens=96, mode=mode, text=text)
    console.print(f"assistant: {text.finish()}\n")
    rounds = len(second.rounds)
    console.print(
        f"resumed: {second.prefilled} rows through the target ({len(new_ids)} new and the anchor), none through the "
        f"drafter; then {rounds} rounds, {decoder.drafter_forwards - drafts_before} drafter passes\n"
    )
    for title, figures in (("turn 1, until the tool call", first), ("turn 2, after the tool output", second)):
        console.print(title)
        for table in figures_table(figures):
            console.print(table)


if __name__ == "__main__":
    main()
