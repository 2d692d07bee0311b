"""Cached target states on disk: append-only shards of conversations, read through memory maps.

A token costs S * H * 2 bytes of taps (bf16), 6 bytes an entry of the target's distribution, and 5 more. A shard
becomes visible by one rename, so a reader beside a writer, or after a kill, sees only whole shards.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dlite_agent.errors import InvalidRequest

TOP = 64
"""Entries of the target's distribution kept at each position."""


@dataclass(frozen=True)
class Labels:
    """What a conversation is, for splits and for reports per kind. `thinking` is the template's switch."""

    id: str
    source: str
    kind: str
    temperature: float
    thinking: bool | None = None


@dataclass(frozen=True)
class Conversation:
    """Token ids [T] with the target's states at each of them.

    `taps` [T, S, H] bf16; `top_ids` [T, TOP] int32 and `top_p` [T, TOP] fp16, largest first: the target's distribution
    of the token after each position, at temperature 1. `spans` are the positions (start, end) that the target
    generated; the rest is context.
    """

    labels: Labels
    spans: tuple[tuple[int, int], ...]
    ids: Tensor
    taps: Tensor
    top_ids: Tensor
    top_p: Tensor

    @property
    def prompt(self) -> int:
        """Where the first answer begins."""
        return self.spans[0][0]


@dataclass(frozen=True)
class Header:
    """What must agree between all shards of a cache, and with the target a drafter is trained for."""

    target: str
    tap_layers: tuple[int, ...]
    hidden_size: int
    vocab_size: int


def write_shard(folder: Path, header: Header, conversations: Sequence[Conversation]) -> None:
    """Write a shard so that it is either wholly there or not at all.

    Raises:
        InvalidRequest: there is nothing to write, or the disk refuses; nothing is left behind.
    """
    if not conversations:
        raise InvalidRequest("a shard needs at least one conversation", param="conversations")
    partial = folder.with_name(f".{folder.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    try:
        partial.mkdir(parents=True)
        arrays = {
            "ids": torch.cat([c.ids for c in conversations]).to(torch.int32),
            "taps": torch.cat([c.taps for c in conversations]).to(torch.bfloat16).view(torch.int16),
            "top_ids": torch.cat([c.top_ids for c in conversations]).to(torch.int32),
            "top_p": torch.cat([c.top_p for c in conversations]).to(torch.float16),
            "starts": torch.tensor([0] + [c.ids.shape[0] for c in conversations]).cumsum(0),
            "spans": torch.tensor([(i, *span) for i, c in enumerate(conversations) for span in c.spans]).view(-1, 3),
        }
        for name, tensor in arrays.items():
            np.save(partial / f"{name}.npy", tensor.contiguous().numpy())
        meta = {"header": asdict(header), "conversations": [asdict(c.labels) for c in conversations]}
        (partial / "meta.json").write_text(json.dumps(meta))
        partial.rename(folder)
    except OSError as error:
        shutil.rmtree(partial, ignore_errors=True)
        raise InvalidRequest(f"cannot write {folder}: {error.strerror}; free some space", param="cache") from error


class Shard:
    """One shard, memory-mapped."""

    def __init__(self, folder: Path) -> None:
        self.name = folder.name
        try:
            meta: dict[str, Any] = json.loads((folder / "meta.json").read_text())
            header = meta["header"]
            self.header = Header(**{**header, "tap_layers": tuple(header["tap_layers"])})
            self.conversations = [Labels(**labels) for labels in meta["conversations"]]
            self.ids = _open(folder, "ids")
            self.taps = _open(folder, "taps")
            self.top_ids = _open(folder, "top_ids")
            self.top_p = _open(folder, "top_p")
            self.starts = np.load(folder / "starts.npy")
            self.spans = self._spans(folder)
        except (OSError, EOFError, ValueError, KeyError, TypeError) as error:
            raise InvalidRequest(f"{folder} is not a readable shard: {error}; delete it", param="cache") from error

    def _spans(self, folder: Path) -> NDArray[np.int64]:
        """Rows (conversation, start, end), counted from the conversation's first token, in order."""
        path = folder / "spans.npy"
        if path.is_file():
            spans: NDArray[np.int64] = np.load(path)
            return spans
        # Shards of the first builders hold one answer each, from `prompts` to the end.
        prompts, lengths = np.load(folder / "prompts.npy"), np.diff(self.starts)
        return np.stack((np.arange(len(prompts)), np.minimum(prompts, lengths), lengths), axis=1)

    def __len__(self) -> int:
        return int(self.ids.shape[0])

    @property
    def generated(self) -> int:
        """Tokens that the target generated."""
        return int((self.spans[:, 2] - self.spans[:, 1]).sum())

    def digest(self) -> str:
        """SHA-256 over what the shard is of: target, taps, labels and ids."""
        named = json.dumps([asdict(self.header), [asdict(labels) for labels in self.conversations]], sort_keys=True)
        return hashlib.sha256(named.encode() + self.spans.tobytes() + self.ids.tobytes()).hexdigest()

    def conversation(self, index: int) -> Conversation:
        """A copy of one conversation."""
        rows = slice(int(self.starts[index]), int(self.starts[index + 1]))
        return Conversation(
            labels=self.conversations[index],
            spans=tuple((int(start), int(end)) for i, start, end in self.spans if i == index),
            ids=torch.from_numpy(self.ids[rows].astype(np.int64)),
            taps=torch.from_numpy(self.taps[rows].copy()).view(torch.bfloat16),
            top_ids=torch.from_numpy(self.top_ids[rows].astype(np.int64)),
            top_p=torch.from_numpy(self.top_p[rows].copy()),
        )


def _open(folder: Path, name: str) -> NDArray[Any]:
    array: NDArray[Any] = np.load(folder / f"{name}.npy", mmap_mode="r")
    return array


def open_shards(cache: Path, *, names: Sequence[str] | None = None) -> list[Shard]:
    """Shards of a cache folder by name, all by default; they must agree in target and taps.

    Raises:
        InvalidRequest: there are none, one is unreadable, or they disagree.
    """
    found = sorted(p.name for p in cache.iterdir() if p.is_dir() and p.name[0] != ".") if cache.is_dir() else []
    wanted = found if names is None else list(names)
    if not wanted:
        raise InvalidRequest(f"{cache} holds no shards: build the cache first", param="cache")
    shards = [Shard(cache / name) for name in wanted]
    for shard in shards:
        if shard.header != shards[0].header:
            raise InvalidRequest(
                f"{shard.name} and {shards[0].name} were made for different targets or taps", param="cache"
            )
    return shards


def check_disjoint(train: Sequence[Shard], held_out: Sequence[Shard]) -> None:
    """Refuse training data that shares a source with held-out data.

    Raises:
        InvalidRequest: names the first shared source.
    """
    ours = {labels.source for shard in train for labels in shard.conversations}
    theirs = {labels.source for shard in held_out for labels in shard.conversations}
    if shared := sorted(ours & theirs):
        raise InvalidRequest(
            f"{len(shared)} sources are in training and held-out data, {shared[0]!r} first: split by source",
            param="held_out",
        )
