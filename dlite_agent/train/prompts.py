"""Agent-shaped prompts: what a coding agent would ask about a source, or about no source at all.

Each builder makes chat messages from one source; the tokens of the prompt become training text too, so builders vary
the frame (system prompt, tool call, tool output) around real code, logs, data and prose.
"""

from __future__ import annotations

import difflib
import json
import random
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any

from dlite_agent.train.sources import Source

Message = dict[str, Any]
Builder = Callable[[Source, random.Random], list[Message]]


@dataclass(frozen=True)
class Prompt:
    """Messages to answer; `source` is the unit of the split."""

    source: str
    kind: str
    messages: list[Message]


def excerpt(text: str, rng: random.Random, *, smallest: int = 200, largest: int = 1600) -> str:
    """Whole lines of a text, between `smallest` and `largest` characters, short ones more often; long lines are cut."""
    lines = [line[:240].rstrip() for line in text.expandtabs(4).splitlines()]
    budget = int(smallest + (largest - smallest) * rng.random() ** 2)
    start = rng.randrange(max(len(lines) - 8, 1)) if rng.random() < 0.7 else 0
    taken: list[str] = []
    for line in lines[start:]:
        if budget < len(line) and taken:
            break
        budget -= len(line) + 1
        taken.append(line)
    return "\n".join(taken).strip("\n")


def _name(source: Source) -> str:
    return "/".join(PurePosixPath(source.key.removesuffix(".gz")).parts[-3:])


def _language(source: Source) -> str:
    suffix = PurePosixPath(source.key.removesuffix(".gz")).suffix.lstrip(".")
    return {"py": "python", "js": "javascript", "mjs": "javascript", "h": "c", "sh": "bash", "yml": "yaml"}.get(
        suffix, suffix
    )


def _fenced(source: Source, text: str) -> str:
    return f"```{_language(source)}\n{text}\n```"


def _identifier(text: str, rng: random.Random) -> str:
    names = re.findall(r"\b(?:def|class|function|struct|let|const|var)\s+([A-Za-z_]\w{2,})", text)
    names = names or re.findall(r"\b[A-Za-z_]\w{4,}\b", text) or ["main"]
    return str(rng.choice(names))


_SYSTEMS = (
    "You are a coding agent. Work in small steps and explain each change briefly.",
    "You are a careful software engineer. Answer with code first, then a short explanation.",
    "You are an assistant that edits files in a repository. Reply in Markdown.",
    "You are a senior developer reviewing code. Be concise.",
    "You are an autonomous agent that fixes failing tests. Think before you act.",
)
_TOOLS: tuple[tuple[str, dict[str, str]], ...] = (
    ("read_file", {"path": "string"}),
    ("write_file", {"path": "string", "content": "string"}),
    ("search", {"pattern": "string", "path": "string"}),
    ("run", {"command": "string"}),
    ("list_dir", {"path": "string"}),
    ("apply_patch", {"patch": "string"}),
)


def _framed(user: str, rng: random.Random) -> list[Message]:
    system = [{"role": "system", "content": rng.choice(_SYSTEMS)}] if rng.random() < 0.4 else []
    return [*system, {"role": "user", "content": user}]


def _tool_system(rng: random.Random) -> Message:
    tools = rng.sample(_TOOLS, rng.randint(2, 4))
    if rng.random() < 0.5:
        listing = json.dumps([{"name": name, "parameters": parameters} for name, parameters in tools], indent=1)
    else:
        listing = "\n".join(f"- {name}({', '.join(parameters)})" for name, parameters in tools)
    form = '{"name": <tool>, "arguments": {...}}'
    return {
        "role": "system",
        "content": f"You are a coding agent with these tools:\n{listing}\nCall one as JSON: {form}",
    }


_ASKS = {
    "explain": (
        "Read `{name}` and explain what it does.",
        "Explain this code step by step.",
        "What does `{symbol}` do in this file? Give an example of its use.",
        "Summarise this file in three sentences, then list its public names.",
        "Review this code and point out possible problems.",
    ),
    "edit": (
        "Add a docstring to every function and return the whole code.",
        "Rename `{symbol}` to `{symbol}_v2` everywhere and show the full new code.",
        "Add type hints and return the updated code.",
        "Add error handling to this code. Reply with the complete code only.",
        "Refactor this code to be shorter; keep the behaviour.",
        "Translate this code to Python.",
        "Add logging to `{symbol}` and show the changed function.",
    ),
    "tests": (
        "Write pytest tests for `{symbol}`.",
        "Write unit tests with unittest for this code, including edge cases.",
        "List the test cases this code needs, then write two of them.",
    ),
    "complete": (
        "Continue this code.",
        "Complete the rest of this file.",
        "Write the next function of this file in the same style.",
    ),
}


def _code_task(kind: str) -> Builder:
    def build(source: Source, rng: random.Random) -> list[Message]:
        text = excerpt(source.text, rng)
        ask = rng.choice(_ASKS[kind]).format(name=_name(source), symbol=_identifier(text, rng))
        parts = [ask, _fenced(source, text)] if rng.random() < 0.7 else [_fenced(source, text), ask]
        return _framed("\n\n".join(parts), rng)

    return build


def _mutated(text: str, rng: random.Random) -> tuple[str, str]:
    """A text and the text after a few small edits, as a commit would make them."""
    old = text.splitlines()
    new = list(old)
    for _ in range(rng.randint(1, 3)):
        at = rng.randrange(len(new))
        line = new[at]
        edits = [
            (r"==", "!="), (r"<", "<="), (r"\+", "-"), (r"\bTrue\b", "False"), (r"\band\b", "or"), (r"\b0\b", "1"),
            (r"\bself\.(\w+)", r"self._\1"), (r"\"", "'"), (r"return\b", "return not"),
        ]  # fmt: skip
        pattern, new_text = rng.choice(edits)
        changed = re.sub(pattern, new_text, line, count=1)
        if changed == line:
            changed = line + rng.choice(("  # TODO: check", "  # noqa", "", ";"))
        new[at] = changed
        if rng.random() < 0.2:
            new.insert(at, line[: len(line) - len(line.lstrip())] + "# changed: see the issue")
    return "\n".join(old), "\n".join(new)


def _diff(source: Source, rng: random.Random) -> list[Message]:
    if source.kind == "diff":
        patch = excerpt(source.text, rng)
    else:
        old, new = _mutated(excerpt(source.text, rng, largest=2400), rng)
        lines = difflib.unified_diff(
            old.splitlines(), new.splitlines(), f"a/{_name(source)}", f"b/{_name(source)}", n=2, lineterm=""
        )
        patch = "\n".join(lines)
    ask = rng.choice(
        (
            "Write a commit message for this diff.",
            "Review this patch. Is it correct?",
            "What does this change do? Answer in two sentences.",
            "This patch broke a test. Explain why and write the reverse diff.",
        )
    )
    return _framed(f"{ask}\n\n```diff\n{patch}\n```", rng)


def _bug(source: Source, rng: random.Random) -> list[Message]:
    _, broken = _mutated(excerpt(source.text, rng, largest=1000), rng)
    ask = rng.choice(
        ("There is a bug in this code. Find it and show the fix.", "This fails. Fix it and return the whole code.")
    )
    return _framed(f"{ask}\n\n{_fenced(source, broken)}", rng)


def _call(source: Source, rng: random.Random) -> list[Message]:
    symbol, name = _identifier(excerpt(source.text, rng), rng), _name(source)
    user = rng.choice(
        (
            f"Find where `{symbol}` is used.",
            f"Open {name} and look for `{symbol}`.",
            f"Run the tests of {name}.",
            f"In {name}, replace `{symbol}` by `new_{symbol}`.",
            f"List the files beside {name}.",
        )
    )
    return [_tool_system(rng), {"role": "user", "content": user}]


def _output_of(source: Source, rng: random.Random) -> tuple[dict[str, object], str]:
    """A tool call and what the tool printed, really computed from the source."""
    name = _name(source)
    choice = rng.random()
    if choice < 0.4:
        return {"name": "read_file", "arguments": {"path": name}}, excerpt(source.text, rng)
    if choice < 0.7:
        word = _identifier(source.text[:4000], rng)
        lines = enumerate(source.text.splitlines(), 1)
        hits = [f"{name}:{number}:{line.strip()[:160]}" for number, line in lines if word in line]
        return {"name": "search", "arguments": {"pattern": word, "path": "."}}, "\n".join(hits[: rng.randint(1, 12)])
    first = rng.randrange(1, 200)
    body = excerpt(source.text, rng, largest=1000).splitlines()
    numbered = "\n".join(f"{number:>6}\t{line}" for number, line in enumerate(body, first))
    return {
        "name": "run",
        "arguments": {"command": f"sed -n '{first},{first + len(body) - 1}p' {name} | cat -n"},
    }, numbered


def _after_tool(source: Source, rng: random.Random) -> list[Message]:
    call, output = _output_of(source, rng)
    symbol = _identifier(output, rng)
    task = rng.choice(
        (
            f"Explain how `{symbol}` works.",
            f"Fix the handling of `{symbol}` when it is missing.",
            f"Which lines mention `{symbol}`, and why?",
            "Read the file and tell me what to change first.",
            f"Write a test for `{symbol}`.",
        )
    )
    return [
        _tool_system(rng) if rng.random() < 0.7 else {"role": "system", "content": rng.choice(_SYSTEMS)},
        {"role": "user", "content": task},
        {"role": "assistant", "content": json.dumps(call)},
        {"role": "tool" if rng.random() < 0.7 else "user", "content": output},
    ]


_PROSE_ASKS = (
    "Summarise this document.",
    "What is this about? Answer in one paragraph.",
    "List the most important points as bullet points.",
    "Write three questions this text answers, with answers.",
    "Rewrite this text so that a beginner understands it.",
    "How do I use this? Give the commands.",
    "Turn this into a README section.",
)
_DATA_ASKS = (
    "Explain each field of this file.",
    "Convert this to JSON.",
    "Write Python code that reads this file and prints its keys.",
    "Which settings here would you change for production?",
    "Return the same data with the keys in alphabetical order.",
)
_LOG_ASKS = (
    "What went wrong here?",
    "Explain this output and what to do next.",
    "Summarise this log: warnings first, then errors.",
    "Which line shows the cause? Quote it and explain.",
    "The command failed with this output. Propose a fix.",
)


def _document(asks: tuple[str, ...], fenced: bool) -> Builder:
    def build(source: Source, rng: random.Random) -> list[Message]:
        text = excerpt(source.text, rng)
        body = _fenced(source, text) if fenced else text
        ask = rng.choice(asks)
        return _framed(f"{ask}\n\n{body}" if rng.random() < 0.6 else f"{body}\n\n{ask}", rng)

    return build


BUILDERS: dict[str, dict[str, tuple[float, Builder]]] = {
    "code": {
        "explain": (0.2, _code_task("explain")),
        "edit": (0.22, _code_task("edit")),
        "tests": (0.1, _code_task("tests")),
        "complete": (0.1, _code_task("complete")),
        "bug": (0.08, _bug),
        "diff": (0.08, _diff),
        "tool-call": (0.07, _call),
        "after-tool": (0.15, _after_tool),
    },
    "prose": {"prose": (0.8, _document(_PROSE_ASKS, fenced=False)), "after-tool": (0.2, _after_tool)},
    "data": {"data": (0.7, _document(_DATA_ASKS, fenced=True)), "after-tool": (0.3, _after_tool)},
    "log": {"log": (1.0, _document(_LOG_ASKS, fenced=True))},
    "diff": {"diff": (1.0, _diff)},
}
"""For each kind of source: prompt kind -> (share, builder)."""


def prompt_about(source: Source, *, seed: int) -> Prompt:
    """The prompt that `seed` makes of a source."""
    rng = random.Random(f"{seed} {source.key}")
    builders = BUILDERS[source.kind]
    kind = rng.choices(list(builders), [share for share, _ in builders.values()])[0]
    return Prompt(source.key, kind, builders[kind][1](source, rng))
