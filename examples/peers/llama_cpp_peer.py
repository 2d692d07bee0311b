"""llama.cpp as a peer: `llama_cpp_peer.py MODEL.gguf THREADS [lookup]`. It keeps the KV of the common prefix."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence

import llama_cpp
from llama_cpp.llama_speculative import LlamaPromptLookupDecoding
from serve import serve

threads = int(sys.argv[2])
lookup = LlamaPromptLookupDecoding(num_pred_tokens=7) if "lookup" in sys.argv else None
model = llama_cpp.Llama(
    sys.argv[1],
    n_ctx=8192,
    n_batch=512,
    n_threads=threads,
    n_threads_batch=threads,
    draft_model=lookup,
    logits_all=lookup is not None,
    verbose=False,
)


def decode(ids: Sequence[int], count: int) -> Iterable[int]:
    for made, token in enumerate(model.generate(ids, temp=0.0, top_k=1), start=1):
        yield token
        if made == count:
            return


serve(decode, model.reset, version=llama_cpp.__version__, threads=threads)
