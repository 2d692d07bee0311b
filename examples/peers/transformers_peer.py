"""transformers as a peer: `transformers_peer.py FOLDER THREADS [lookup]`. It keeps the cache of the common prefix."""

from __future__ import annotations

import queue
import sys
import threading
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import transformers
from serve import serve
from transformers import AutoModelForCausalLM, DynamicCache

threads = int(sys.argv[2])
torch.set_num_threads(threads)
model = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.bfloat16)
model.generation_config.eos_token_id = None
options: dict[str, Any] = {"prompt_lookup_num_tokens": 7} if "lookup" in sys.argv else {}
kept: list[int] = []
cache = DynamicCache(config=model.config)


class Streamer:
    """What `generate` asks of a streamer; the prompt comes first and is passed over."""

    def __init__(self) -> None:
        self.tokens: queue.Queue[int | None] = queue.Queue()
        self._prompt = True

    def put(self, value: torch.Tensor) -> None:
        if not self._prompt:
            for token in value.flatten().tolist():
                self.tokens.put(token)
        self._prompt = False

    def end(self) -> None:
        self.tokens.put(None)


def decode(ids: Sequence[int], count: int) -> Iterable[int]:
    global cache, kept
    shared = 0
    while shared < min(len(ids) - 1, len(kept)) and ids[shared] == kept[shared]:
        shared += 1
    if cache.get_seq_length() > shared:
        cache.crop(shared - cache.get_seq_length())
    streamer = Streamer()
    thread = threading.Thread(
        target=model.generate,
        kwargs={
            "inputs": torch.tensor([ids]),
            "past_key_values": cache,
            "max_new_tokens": count,
            "min_new_tokens": count,
            "do_sample": False,
            "streamer": streamer,
            **options,
        },
    )
    thread.start()
    made: list[int] = []
    while (token := streamer.tokens.get()) is not None:
        made.append(token)
        yield token
    thread.join()
    kept = [*ids, *made][: cache.get_seq_length()]


def reset() -> None:
    global cache, kept
    cache, kept = DynamicCache(config=model.config), []


serve(decode, reset, version=transformers.__version__, dtype="bfloat16", threads=threads)
