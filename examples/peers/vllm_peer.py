"""vLLM for CPUs as a peer: `vllm_peer.py FOLDER THREADS [lookup]`. It keeps blocks of common prefixes."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Sequence
from typing import Any

from serve import serve

threads = sys.argv[2]
os.environ.update(VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_CPU_KVCACHE_SPACE="2", OMP_NUM_THREADS=threads)

import vllm  # noqa: E402  the environment decides how it starts

lookup: dict[str, Any] = {"method": "ngram", "num_speculative_tokens": 7, "prompt_lookup_max": 4}


def main() -> None:
    options = {"speculative_config": lookup} if "lookup" in sys.argv else {}
    model = vllm.LLM(sys.argv[1], dtype="bfloat16", enable_prefix_caching=True, max_model_len=8192, **options)
    engine = model.llm_engine
    requests = 0

    def decode(ids: Sequence[int], count: int) -> Iterable[int]:
        nonlocal requests
        requests += 1
        sampling = vllm.SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True)
        engine.add_request(str(requests), {"prompt_token_ids": list(ids)}, sampling)
        known = 0
        while engine.has_unfinished_requests():
            for output in engine.step():
                new = output.outputs[0].token_ids
                yield from new[known:]
                known = len(new)

    serve(decode, lambda: model.reset_prefix_cache(), version=vllm.__version__, dtype="bfloat16", threads=threads)


if __name__ == "__main__":
    main()
