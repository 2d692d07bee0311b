"""`bench restore`: bringing a paused session back from disk or host memory, against computing its prompt again.

For each context length one session is prefilled, answers, and is committed. Then the three ways back alternate in one
run; every one is timed until the state stands on the device, and the answer that follows must be the uninterrupted one,
token for token and round for round.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dlite_agent.config import Mode
from dlite_agent.decode.generate import generate
from dlite_agent.decode.load import Runtime, chat_ids
from dlite_agent.decode.sampling import SamplingParams
from dlite_agent.decode.state import DecodeState
from dlite_agent.errors import InvalidRequest
from dlite_agent.session.history import History, Turn
from dlite_agent.session.opening import fingerprint_of
from dlite_agent.session.persist import Persister
from dlite_agent.session.restore import Loaded
from dlite_agent.session.snapshot import Facts
from dlite_agent.session.store.disk import DiskStore
from dlite_agent.session.store.host import HostTier

WAYS = ("host", "disk", "recompute")
_SESSION = "bench"


@dataclass(frozen=True)
class _Answer:
    tokens: list[int]
    advances: list[int]
    tau: float


def bench_restore(
    runtime: Runtime,
    contexts: Sequence[int],
    *,
    repeats: int = 3,
    new_tokens: int = 32,
    text: str | None = None,
    on_row: Callable[[dict[str, Any]], None] | None = None,
) -> dict[str, Any]:
    """Time the three ways back at each context length.

    Args:
        contexts: prompt tokens, about.
        repeats: of each way; figures are medians.
        text: what the prompts are cut from; this package's own source by default.

    Returns:
        `rows`, one a context: seconds by way, their ratios to recomputing, tau uninterrupted and after each way.

    Raises:
        InvalidRequest: the text or the model's context is too short.
    """
    text = _own_source() if text is None else text
    ids = runtime.tokenizer.encode(text, add_special_tokens=False)
    limit = runtime.decoder.target.context_limit - 2 * new_tokens - 64
    if not contexts or max(contexts) > min(limit, len(ids)):
        raise InvalidRequest(f"contexts must be at most {min(limit, len(ids))} tokens", param="context")
    rows = []
    for context in contexts:
        rows.append(_row(runtime, _prompt(runtime, ids, context), repeats, new_tokens))
        if on_row is not None:
            on_row(rows[-1])
    return {
        "dtype": runtime.decoder.target.precision.name,
        "bytes_per_token": runtime.decoder.pool.bytes_per_position,
        "repeats": repeats,
        "new_tokens": new_tokens,
        "rows": rows,
    }


def _own_source() -> str:
    package = Path(__file__).parents[1]
    return "\n".join(path.read_text() for path in sorted(package.rglob("*.py")))


def _prompt(runtime: Runtime, ids: list[int], context: int) -> list[int]:
    part = runtime.tokenizer.decode(ids[:context])
    return chat_ids(runtime.tokenizer, [{"role": "user", "content": f"{part}\n\nWhat does this program do?"}])


def _row(runtime: Runtime, prompt: list[int], repeats: int, new_tokens: int) -> dict[str, Any]:
    decoder = runtime.decoder
    with tempfile.TemporaryDirectory() as folder:
        store, host = DiskStore(Path(folder)), HostTier()
        keeper = Persister(
            store, fingerprint_of(runtime), bytes_per_position=decoder.pool.bytes_per_position, owner="bench"
        )
        state = decoder.open()
        first = _answer(runtime, state, prompt, new_tokens)
        ids = list(state.ids)
        keeper.hold(_SESSION)
        history = History("", (Turn(("user", "assistant"), ("", ""), len(prompt), len(ids)),))
        begin = time.perf_counter()
        keeper.commit(keeper.snapshot(_SESSION, state, Facts(history)))
        commit_s = time.perf_counter() - begin
        begin = time.perf_counter()
        host.put(_SESSION, state)
        spill_s = time.perf_counter() - begin
        whole = _answer(runtime, state, [], new_tokens)
        state.kv.free()

        def from_host() -> DecodeState:
            copy = host.get(_SESSION)
            assert copy is not None
            return copy.apply(decoder.open().kv, decoder.target.device)

        def from_disk() -> DecodeState:
            found = keeper.read(_SESSION)
            assert isinstance(found, Loaded)
            return found.apply(decoder.open().kv, decoder.target.device)

        def anew() -> DecodeState:
            # All but the anchor, as the others come back: with the boundary's features and one id ahead of it.
            made = decoder.open()
            generate(decoder, made, ids[:-1], SamplingParams(), max_new_tokens=1, mode="ar")
            made.truncate(len(ids) - 1)
            made.ids.append(ids[-1])
            return made

        ways = dict(zip(WAYS, (from_host, from_disk, anew), strict=True))
        seconds: dict[str, list[float]] = {name: [] for name in WAYS}
        after: dict[str, _Answer] = {}
        for turn in range(repeats):
            for name in WAYS[turn % 3 :] + WAYS[: turn % 3]:
                begin = time.perf_counter()
                back = ways[name]()
                seconds[name].append(time.perf_counter() - begin)
                if name not in after:
                    after[name] = _answer(runtime, back, [], new_tokens)
                back.kv.free()
        store.close()
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    return {
        "context": len(ids),
        "megabytes": (len(ids) - 1) * decoder.pool.bytes_per_position / 1e6,
        "commit_s": commit_s,
        "spill_s": spill_s,
        "seconds": medians,
        "spread": {name: [min(values), max(values)] for name, values in seconds.items()},
        "ratio": {name: medians["recompute"] / medians[name] for name in ("host", "disk")},
        "tau": {"first": first.tau, "uninterrupted": whole.tau, **{name: after[name].tau for name in WAYS}},
        "same": {name: after[name] == whole for name in WAYS},
    }


def _answer(runtime: Runtime, state: DecodeState, new: list[int], new_tokens: int) -> _Answer:
    mode: Mode = "ar" if runtime.decoder.drafter is None else "dlite"
    turn, figures = generate(
        runtime.decoder, state, new, SamplingParams(), max_new_tokens=new_tokens, mode=mode, ignore_eos=True
    )
    return _Answer(list(turn.generated), figures.advances, figures.tau)
