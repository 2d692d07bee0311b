"""`bench peers`: one recorded agent session through this engine and through others, turn by turn, taking turns.

A peer is a process in an environment of its own that loads the same weights and then answers JSON lines: the whole
prompt of a turn in, and out come the new ids, seconds to the first and seconds in all (examples/peers/). Each keeps
what it can of the session between turns, as its users would have it. History is the recording's, whatever was answered.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Protocol

from dlite_agent.config import Mode
from dlite_agent.decode.load import Runtime
from dlite_agent.decode.sampling import SamplingParams
from dlite_agent.decode.states import common_prefix
from dlite_agent.errors import DliteError, InvalidRequest
from dlite_agent.trace.script import Script


class PeerFailed(DliteError):
    """A peer could not be started or did not answer; the message has its last words."""

    code = "peer_failed"


@dataclass(frozen=True)
class Answer:
    """New ids of one turn; seconds from the request to the first and to the last of them."""

    ids: list[int]
    first: float
    seconds: float


class Peer(Protocol):
    """Something that decodes greedily, and keeps a session between turns."""

    name: str

    def turn(self, ids: Sequence[int], new_tokens: int) -> Answer: ...

    def reset(self) -> None:
        """Forget the session."""

    def close(self) -> None: ...


class Ours:
    """This engine's decoder, without the server around it."""

    def __init__(self, runtime: Runtime, mode: Mode) -> None:
        self.name = f"dlite-agent {mode}"
        self._decoder, self._mode = runtime.decoder, mode
        self._state = runtime.decoder.open()

    def turn(self, ids: Sequence[int], new_tokens: int) -> Answer:
        start = time.perf_counter()
        state = self._state
        shared = min(common_prefix(state.ids, ids), len(ids) - 1)
        state.truncate(shared)
        params = SamplingParams(temperature=0.0)
        turn = self._decoder.begin(
            state, ids[shared:], params, max_new_tokens=new_tokens, mode=self._mode, ignore_eos=True
        )
        first = None
        while turn.finish is None:
            self._decoder.step([turn])
            if first is None and turn.generated:
                first = time.perf_counter() - start
        self._decoder.finish(turn)
        assert first is not None
        return Answer(list(turn.generated), first, time.perf_counter() - start)

    def reset(self) -> None:
        self._state.kv.free()
        self._state = self._decoder.open()

    def close(self) -> None:
        self._state.kv.free()


class Process:
    """A peer in a process of its own.

    Raises:
        PeerFailed: it did not come up.
    """

    def __init__(self, name: str, command: Sequence[str]) -> None:
        self.name = name
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        try:
            self.about = self._read()
        except PeerFailed:
            self.close()
            raise

    def turn(self, ids: Sequence[int], new_tokens: int) -> Answer:
        return Answer(**self._ask({"ids": list(ids), "new_tokens": new_tokens}))

    def reset(self) -> None:
        self._ask({"reset": True})

    def close(self) -> None:
        _pipe(self._process.stdin).close()
        try:
            self._process.wait(timeout=20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        _pipe(self._process.stdout).close()

    def _ask(self, request: dict[str, Any]) -> dict[str, Any]:
        pipe = _pipe(self._process.stdin)
        pipe.write(json.dumps(request) + "\n")
        pipe.flush()
        return self._read()

    def _read(self) -> dict[str, Any]:
        line = _pipe(self._process.stdout).readline()
        try:
            found: dict[str, Any] = json.loads(line)
        except ValueError:
            raise PeerFailed(f"{self.name} did not answer (see its messages above): {line[-300:]!r}") from None
        return found


def _pipe(pipe: IO[str] | None) -> IO[str]:
    assert pipe is not None
    return pipe


def read_peers(path: Path) -> dict[str, list[str]]:
    """Commands by name, from the JSON file that examples/peers/setup.sh writes.

    Raises:
        InvalidRequest: it is not there or not of that shape.
    """
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise InvalidRequest(f"{path} cannot be read: {error}; run examples/peers/setup.sh", param="peers") from error
    if not isinstance(found, dict) or not all(isinstance(command, list) for command in found.values()):
        raise InvalidRequest(f"{path} must map names to command lines", param="peers")
    return found


def bench_peers(
    peers: Sequence[Peer],
    script: Script,
    *,
    new_tokens: int = 64,
    repeats: int = 3,
    on_turn: Callable[[str], None] | None = None,
) -> dict[str, Any]:
    """Play the session `repeats` times after an unmeasured warm-up of its first turn; within a turn, peers take turns.

    Each turn decodes as many tokens as the recording's answer had, `new_tokens` at most.

    Returns:
        By peer: median seconds to the first token (of the first turn, and of later ones), ms a token after it, decode
        and session seconds; the ratio of ours (the first peer) to it, as median and range over repeats; and how many of
        its ids were ours.

    Raises:
        PeerFailed: one stopped answering. NotReplayable: the recording holds no ids.
    """
    script.need_ids()
    turns = [(turn.prompt_ids or [], min(len(turn.output_ids or []), new_tokens)) for turn in script.turns]
    turns = [(ids, count) for ids, count in turns if count > 1]
    runs: dict[str, list[list[Answer]]] = {peer.name: [] for peer in peers}
    for peer in peers:
        peer.turn(*turns[0])
    for repeat in range(repeats):
        for peer in peers:
            peer.reset()
            runs[peer.name].append([])
        for number, (ids, count) in enumerate(turns):
            turned = (repeat + number) % len(peers)
            for peer in (*peers[turned:], *peers[:turned]):
                runs[peer.name][-1].append(peer.turn(ids, count))
            if on_turn is not None:
                on_turn(f"repeat {repeat + 1}, turn {number + 1} of {len(turns)}: {len(ids)} tokens, {count} new")
    ours = runs[peers[0].name]
    contexts = [len(ids) for ids, _ in turns]
    return {
        "session": script.session,
        "turns": len(turns),
        "context": [min(contexts), max(contexts)],
        "new_tokens": sum(count for _, count in turns),
        "repeats": repeats,
        "peers": {name: _figures(found, ours) for name, found in runs.items()},
    }


def _figures(runs: Sequence[Sequence[Answer]], ours: Sequence[Sequence[Answer]]) -> dict[str, Any]:
    mine, base = [_sums(run) for run in runs], [_sums(run) for run in ours]
    figures = ("first_later", "token", "session")
    ratios = {name: [a[name] / b[name] for a, b in zip(base, mine, strict=True)] for name in figures}
    answers = [(p.ids, q.ids) for run, other in zip(runs, ours, strict=True) for p, q in zip(run, other, strict=True)]
    pairs = [pair for a, b in answers for pair in zip(a, b, strict=True)]
    return {
        **{name: statistics.median(found[name] for found in mine) for name in mine[0]},
        "ours_to_it": {
            name: {"median": statistics.median(found), "min": min(found), "max": max(found)}
            for name, found in ratios.items()
        },
        "same_ids": sum(a == b for a, b in pairs) / len(pairs),
    }


def _sums(run: Sequence[Answer]) -> Mapping[str, float]:
    later = [answer.first for answer in run[1:]] or [run[0].first]
    decode = sum(answer.seconds - answer.first for answer in run)
    return {
        "first_turn": run[0].first,
        "first_later": statistics.median(later),
        "token": decode / sum(len(answer.ids) - 1 for answer in run),
        "decode": decode,
        "session": sum(answer.seconds for answer in run),
    }
