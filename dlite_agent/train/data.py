"""The corpus: which prompts are answered, by which side of the split, and what was built from them.

A corpus folder holds `manifest.json`, `plan.jsonl` (one request a line) and the caches `train/` and `held_out/`. The
plan is fixed by its inputs and seed; the caches grow along it, shard by shard, and a stopped build goes on from there.
"""

from __future__ import annotations

import hashlib
import json
import random
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dlite_agent.errors import InvalidRequest
from dlite_agent.train.prompts import Message, Prompt, prompt_about
from dlite_agent.train.questions import questions, tracebacks
from dlite_agent.train.sources import held_out, scan

Ints = NDArray[np.int64]
SPLITS = ("train", "held_out")


@dataclass(frozen=True)
class Request:
    """One prompt to be answered by the target at a temperature (0 is greedy)."""

    id: str
    split: str
    source: str
    kind: str
    temperature: float
    messages: list[Message]


@dataclass(frozen=True)
class Plan:
    """Inputs of `make_plan`: folders and files to read, how many sources at most, and the shares."""

    roots: tuple[str, ...]
    sources: int
    seed: int = 0
    held_out_share: float = 0.03
    greedy_share: float = 0.6
    with_questions: bool = True
    traces: int = 300


def make_plan(plan: Plan) -> list[Request]:
    """Requests in the order in which they are to be answered.

    Raises:
        InvalidRequest: a root cannot be used, or the split came out with an empty training side.
    """
    sources = scan([Path(root) for root in plan.roots], limit=plan.sources, seed=plan.seed)
    prompts = [prompt_about(source, seed=plan.seed) for source in sources]
    if plan.with_questions:
        prompts += questions(seed=plan.seed)
        traces = tracebacks(plan.traces, seed=plan.seed)
        prompts += [prompt_about(trace, seed=plan.seed + i) for i, trace in enumerate(traces)]
    rng = random.Random(f"{plan.seed} plan")
    rng.shuffle(prompts)
    requests = [_request(prompt, plan, rng) for prompt in _distinct(prompts)]
    if not any(request.split == "train" for request in requests):
        raise InvalidRequest("no source is left for training: lower held_out_share or add sources", param="sources")
    return requests


def _request(prompt: Prompt, plan: Plan, rng: random.Random) -> Request:
    temperature = 0.0 if rng.random() < plan.greedy_share else round(rng.uniform(0.4, 1.0), 2)
    split = SPLITS[held_out(prompt.source, plan.held_out_share)]
    if split == "held_out":
        temperature = 0.0
    return Request(_digest(prompt.messages)[:16], split, prompt.source, prompt.kind, temperature, prompt.messages)


def _distinct(prompts: Iterable[Prompt]) -> list[Prompt]:
    return list({_digest(prompt.messages): prompt for prompt in prompts}.values())


def _digest(value: object) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def write_plan(folder: Path, plan: Plan, requests: Sequence[Request]) -> dict[str, Any]:
    """Write plan and manifest; returns the manifest.

    Raises:
        InvalidRequest: the folder already holds another plan.
    """
    lines = "".join(json.dumps(asdict(request)) + "\n" for request in requests)
    manifest: dict[str, Any] = {
        "plan": {**asdict(plan), "roots": [Path(root).name for root in plan.roots]},
        "plan_digest": hashlib.sha256(lines.encode()).hexdigest(),
        "requests": len(requests),
        "splits": dict(Counter(request.split for request in requests)),
        "kinds": dict(Counter(request.kind for request in requests)),
        "sources": len({request.source for request in requests}),
    }
    path = folder / "manifest.json"
    if path.is_file() and json.loads(path.read_text())["plan_digest"] != manifest["plan_digest"]:
        raise InvalidRequest(f"{folder} holds another corpus: choose an empty folder", param="corpus")
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "plan.jsonl").write_text(lines)
    path.write_text(json.dumps(manifest, indent=1) + "\n")
    return manifest


def read_plan(folder: Path) -> list[Request]:
    """The requests of a corpus folder.

    Raises:
        InvalidRequest: there is none, or it is not what the manifest says.
    """
    try:
        text = (folder / "plan.jsonl").read_text()
        digest = json.loads((folder / "manifest.json").read_text())["plan_digest"]
    except (OSError, ValueError, KeyError) as error:
        raise InvalidRequest(f"{folder} is not a corpus: {error}", param="corpus") from error
    if hashlib.sha256(text.encode()).hexdigest() != digest:
        raise InvalidRequest(f"the plan of {folder} does not match its manifest: build it anew", param="corpus")
    return [Request(**json.loads(line)) for line in text.splitlines()]


def count_ids(requests: Iterable[Request], encode: Callable[[list[Message]], list[int]], vocab_size: int) -> Ints:
    """Occurrences [V] of each id in the prompts of the training side."""
    counts = np.zeros(vocab_size, dtype=np.int64)
    for request in requests:
        if request.split == "train":
            counts += np.bincount(encode(request.messages), minlength=vocab_size)
    return counts


def read_prompts(path: Path) -> list[Request]:
    """Held-out prompts of a JSONL file, {"id", "messages"} a line and optionally "kind"; answered greedily.

    Raises:
        InvalidRequest: the file or a line of it cannot be used; the line is named.
    """
    try:
        lines = path.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidRequest(f"{path} cannot be read: {error}", param="prompts") from error
    requests = []
    for number, line in enumerate(lines, 1):
        try:
            row = json.loads(line)
            messages = [{"role": str(m["role"]), "content": str(m["content"])} for m in row["messages"]]
            kind = str(row.get("kind") or str(row["id"]).rsplit("-", 1)[0])
            requests.append(Request(str(row["id"]), "held_out", f"prompts: {row['id']}", kind, 0.0, messages))
        except (ValueError, KeyError, TypeError) as error:
            raise InvalidRequest(f"{path} line {number} is not a prompt: {error!r}", param="prompts") from error
    if not requests:
        raise InvalidRequest(f"{path} holds no prompts", param="prompts")
    return requests
