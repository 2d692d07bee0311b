"""Prompts that ask the same behind histories of several lengths, to see whether tau depends on the context.

    python examples/context_prompts.py ROOT OUT.jsonl
    dlite-agent train evaluate --prompts OUT.jsonl

ROOT holds Python files that no drafter was trained on. Each request is asked behind earlier turns of 500 to 7,000
tokens (kinds context-500 ..) and after 1, 4 and 8 tool outputs in a row (kinds tools-1 ..).
"""

from __future__ import annotations

import json
import sys
from itertools import cycle, islice
from pathlib import Path
from typing import Any

from dlite_agent.decode.load import chat_ids, load_tokenizer
from dlite_agent.model.weights import DEFAULT_TARGET, resolve

LENGTHS = (500, 1000, 2000, 4000, 7000)
TOOLS = (1, 4, 8)
REQUESTS = (
    "Explain what this code does.\n\n{code}",
    "Write a unit test for this code.\n\n{code}",
    "Add a docstring to every function and show the whole code.\n\n{code}",
    "Find a bug in this code and show the mended code.\n\n{code}",
    "Rename one variable to something clearer and show the whole code.\n\n{code}",
    "What should the next step be after reading this?\n\n{code}",
)
PIECE = 900
"""Characters of code in a request or a tool's output."""

Message = dict[str, Any]


def pieces(root: Path) -> list[str]:
    """Stretches of code, cut at line ends, in the order of the files' names."""
    found = []
    for path in sorted(root.rglob("*.py")):
        text = path.read_text()
        for start in range(0, len(text) - PIECE, 4 * PIECE):
            found.append(text[start : start + PIECE].split("\n", 1)[-1].rsplit("\n", 1)[0])
    return found


def main(root: Path, out: Path) -> None:
    tokenizer = load_tokenizer(resolve(DEFAULT_TARGET))
    code = pieces(root)
    rows = []
    for number, request in enumerate(REQUESTS):
        mine = islice(cycle(code), number * 37, None)
        asked = {"role": "user", "content": request.format(code=next(mine))}
        others = list(islice(mine, 60))
        for length in LENGTHS:
            messages: list[Message] = [asked]
            for other in others:
                earlier = [
                    {"role": "user", "content": f"Look at this file.\n\n{other}"},
                    {"role": "assistant", "content": "I have read it."},
                ]
                if len(chat_ids(tokenizer, [*earlier, *messages])) > length:
                    break
                messages = [*earlier, *messages]
            rows.append({"id": f"context-{length}-{number}", "kind": f"context-{length}", "messages": messages})
        for tools in TOOLS:
            messages = [asked]
            for other in others[:tools]:
                call = {"name": "view", "arguments": {"path": f"module_{len(messages)}.py"}}
                messages.append({"role": "assistant", "content": f"<tool_call>\n{json.dumps(call)}\n</tool_call>"})
                messages.append({"role": "tool", "content": other})
            rows.append({"id": f"tools-{tools}-{number}", "kind": f"tools-{tools}", "messages": messages})
    out.write_text("".join(json.dumps(row) + "\n" for row in rows))
    print(f"{len(rows)} prompts in {out}")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
