"""The corpus: which prompts are answered, by which side of the split, and what was built from them.

A corpus folder holds `manifest.json`, `plan.jsonl` (one request a line) and the caches `train/` and `held_out/`. The
plan is fixed by its inputs and seed; the caches grow along it, shard by shard, and a stopped build goes on from there.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import random
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from dlite_agent.errors import InvalidRequest
from dlite_agent.train.prompts import Message, Prompt, prompt_about
from dlite_agent.train.questions import questions, tracebacks
from dlite_agent.train.recorded import Recording
from dlite_agent.train.sources import held_out, scan
from dlite_agent.train.store import open_shards

Ints = NDArray[np.int64]
SPLITS = ("train", "held_out")


@dataclass(frozen=True)
class Request:
    """One prompt to be answered by the target at a temperature (0 is greedy), or what it has answered already.

    `thinking` sets the template's switch (None leaves its default). A recorded session has `ids` in place of messages,
    with the `spans` (start, end) that the target generated.
    """

    id: str
    split: str
    source: str
    kind: str
    temperature: float
    messages: list[Message]
    thinking: bool | None = None
    ids: list[int] = field(default_factory=list)
    spans: list[tuple[int, int]] = field(default_factory=list)

    def cut(self, length: int) -> Request:
        """A recorded session's first `length` tokens."""
        if len(self.ids) <= length:
            return self
        spans = [(start, min(end, length)) for start, end in self.spans if start < length]
        return replace(self, ids=self.ids[:length], spans=spans)


@dataclass(frozen=True)
class Plan:
    """Inputs of `make_plan`: folders and files to read, how many sources at most, and the shares.

    `recorded` are files and folders of session logs and chats (see `recorded`); `thinking_share` of the answers are
    made with reasoning switched on, where the target's template has the switch.
    """

    roots: tuple[str, ...]
    sources: int
    recorded: tuple[str, ...] = ()
    thinking_share: float = 0.0
    seed: int = 0
    held_out_share: float = 0.03
    greedy_share: float = 0.6
    with_questions: bool = True
    traces: int = 300


def make_plan(plan: Plan, recordings: Sequence[Recording] = ()) -> list[Request]:
    """Requests in the order in which they are to be answered; recorded sessions come first.

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
    for recording in reversed(recordings):
        requests = recorded_requests(recording, SPLITS[held_out(recording.key, plan.held_out_share)]) + requests
    requests = list({request.id: request for request in requests}.values())
    if not any(request.split == "train" for request in requests):
        raise InvalidRequest("no source is left for training: lower held_out_share or add sources", param="sources")
    return requests


def _request(prompt: Prompt, plan: Plan, rng: random.Random) -> Request:
    temperature = 0.0 if rng.random() < plan.greedy_share else round(rng.uniform(0.4, 1.0), 2)
    split = SPLITS[held_out(prompt.source, plan.held_out_share)]
    if split == "held_out":
        temperature = 0.0
    return Request(_digest(prompt.messages)[:16], split, prompt.source, prompt.kind, temperature, prompt.messages)


def recorded_requests(recording: Recording, split: str) -> list[Request]:
    """What a recorded session adds to a plan; prompts without ids are answered greedily."""
    place = {"split": split, "source": recording.key, "temperature": 0.0}
    requests = [
        Request(id=_digest(ids)[:16], kind="session", messages=[], ids=ids, spans=spans, **place)  # type: ignore[arg-type]
        for ids, spans in recording.branches
    ]
    for messages in recording.prompts:
        kind = "after-tool" if messages[-1].get("role") == "tool" else "chat"
        requests.append(Request(id=_digest(messages)[:16], kind=kind, messages=messages, **place))  # type: ignore[arg-type]
    return requests


def with_thinking(requests: Sequence[Request], share: float, *, seed: int) -> list[Request]:
    """The same requests with the template's switch set, on for `share` of them."""
    rng = random.Random(f"{seed} thinking")
    return [replace(r, thinking=rng.random() < share) if r.messages else r for r in requests]


def _distinct(prompts: Iterable[Prompt]) -> list[Prompt]:
    return list({_digest(prompt.messages): prompt for prompt in prompts}.values())


def _digest(value: object) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def write_plan(folder: Path, plan: Plan, requests: Sequence[Request]) -> dict[str, Any]:
    """Write plan and manifest; returns the manifest.

    Raises:
        InvalidRequest: the folder already holds another plan, or the disk refuses; nothing half-written is left.
    """
    lines = "".join(json.dumps(_row(request)) + "\n" for request in requests)
    names = {"roots": [Path(p).name for p in plan.roots], "recorded": [Path(p).name for p in plan.recorded]}
    manifest: dict[str, Any] = {
        "plan": {**asdict(plan), **names},
        "plan_digest": hashlib.sha256(lines.encode()).hexdigest(),
        "requests": len(requests),
        "splits": dict(Counter(request.split for request in requests)),
        "kinds": dict(Counter(request.kind for request in requests)),
        "sources": len({request.source for request in requests}),
    }
    path = folder / "manifest.json"
    if path.is_file():
        if json.loads(path.read_text())["plan_digest"] != manifest["plan_digest"]:
            raise InvalidRequest(f"{folder} holds another corpus: choose an empty folder", param="corpus")
        return manifest
    _write(folder / "plan.jsonl", lines)
    _write(path, json.dumps(manifest, indent=1) + "\n")
    return manifest


def _row(request: Request) -> dict[str, Any]:
    """A request without the fields that only few have."""
    optional = {f.name for f in fields(Request)[6:]}
    return {name: value for name, value in asdict(request).items() if name not in optional or value not in (None, [])}


@contextlib.contextmanager
def atomic_file(path: Path) -> Iterator[BinaryIO]:
    """A file that takes `path`'s place when the block ends, or leaves no trace.

    Raises:
        InvalidRequest: the disk refuses.
    """
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with partial.open("wb") as file:
            yield file
        partial.replace(path)
    except OSError as error:
        raise InvalidRequest(f"cannot write {path}: {error.strerror}; free some space", param="corpus") from error
    finally:
        partial.unlink(missing_ok=True)


def _write(path: Path, text: str) -> None:
    with atomic_file(path) as file:
        file.write(text.encode())


def summarise(folder: Path) -> dict[str, Any]:
    """Count what has been built so far into the manifest; returns the manifest.

    Each side has conversations, tokens, generated tokens, counts by kind and by thinking, and the shards' digests.
    """
    path = folder / "manifest.json"
    manifest: dict[str, Any] = json.loads(path.read_text())
    manifest["built"] = {}
    for split in SPLITS:
        shards = open_shards(folder / split) if (folder / split).is_dir() else []
        labels = [label for shard in shards for label in shard.conversations]
        manifest["built"][split] = {
            "conversations": len(labels),
            "sources": len({label.source for label in labels}),
            "tokens": sum(len(shard) for shard in shards),
            "generated": sum(shard.generated for shard in shards),
            "kinds": dict(Counter(label.kind for label in labels)),
            "thinking": dict(Counter(str(label.thinking).lower() for label in labels)),
            "digests": {shard.name: shard.digest() for shard in shards},
        }
    _write(path, json.dumps(manifest, indent=1) + "\n")
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
    rows = [json.loads(line) for line in text.splitlines()]
    return [Request(**{**row, "spans": [(start, end) for start, end in row.get("spans", ())]}) for row in rows]


Encode = Callable[..., list[int]]
"""Chat messages -> ids of the prompt, ending where the answer begins; `thinking=` where a request sets it."""


def prompt_ids(request: Request, encode: Encode) -> list[int]:
    """What stands before the answer, or all of a recorded session."""
    if request.ids:
        return request.ids
    return encode(request.messages) if request.thinking is None else encode(request.messages, thinking=request.thinking)


def count_ids(requests: Iterable[Request], encode: Encode, vocab_size: int) -> Ints:
    """Occurrences [V] of each id in the prompts of the training side."""
    counts = np.zeros(vocab_size, dtype=np.int64)
    for request in requests:
        if request.split == "train":
            counts += np.bincount(prompt_ids(request, encode), minlength=vocab_size)
    return counts


def read_prompts(path: Path) -> list[Request]:
    """Held-out prompts of a JSONL file, {"id", "messages"} a line and optionally "kind"; answered greedily.

    Raises:
        InvalidRequest: the file or a line of it cannot be used; the line is named.
    """
    try:
        lines = path.read_text().split("\n")  # not splitlines: a string may hold other separators
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidRequest(f"{path} cannot be read: {error}", param="prompts") from error
    requests = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            messages = [{**message, "role": str(message["role"])} for message in row["messages"]]
            kind = str(row.get("kind") or str(row["id"]).rsplit("-", 1)[0])
            requests.append(Request(str(row["id"]), "held_out", f"prompts: {row['id']}", kind, 0.0, messages))
        except (ValueError, KeyError, TypeError) as error:
            raise InvalidRequest(f"{path} line {number} is not a prompt: {error!r}", param="prompts") from error
    if not requests:
        raise InvalidRequest(f"{path} holds no prompts", param="prompts")
    return requests
