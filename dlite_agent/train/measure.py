"""A drafter measured by really decoding prompts: acceptance by what was written where; AR and prompt lookup beside."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from dlite_agent.config import Mode
from dlite_agent.decode.figures import RunFigures, merged
from dlite_agent.decode.generate import generate
from dlite_agent.decode.rounds import Decoder
from dlite_agent.decode.sampling import SamplingParams
from dlite_agent.errors import InvalidRequest
from dlite_agent.train.collect import loop_cut
from dlite_agent.train.data import Encode, Request
from dlite_agent.train.evaluate import Acceptance
from dlite_agent.train.lookup import lookup_rounds

CONTEXTS = (512, 1024, 2048, 4096)
Groups = dict[tuple[str, str], Acceptance]


@dataclass
class Measurement:
    """Acceptance of the drafter and of prompt lookup by group, and the figures of both ways to decode.

    A group is (by, name): by "all" ("everything" and "without loops": rounds before an answer began to repeat itself),
    by "prompt" (the request's kind), by "text" (what the round continued) and by "context" (tokens before the round).
    """

    drafter: Groups = field(default_factory=lambda: defaultdict(Acceptance))
    lookup: Groups = field(default_factory=lambda: defaultdict(Acceptance))
    dlite: list[RunFigures] = field(default_factory=list)
    ar: list[RunFigures] = field(default_factory=list)

    def speed(self) -> dict[str, Any]:
        """The speed-up in decoding, prefill apart, with what it consists of; seconds are medians of a step or round."""
        dlite, ar = merged(self.dlite), merged(self.ar)
        speedup = ar.seconds_per_token / dlite.seconds_per_token if self.ar and dlite.advances else None
        return {
            "tau": dlite.tau,
            "speedup": speedup,
            "t_ar": ar.median("wall") if self.ar else None,
            "t_d": dlite.median("draft"),
            "t_v": dlite.median("verify"),
            "t_s": dlite.median("rest"),
            "context": dlite.summary()["context"],
            "batch": 1,
        }

    def rows(self) -> list[dict[str, Any]]:
        """One row a group: tau, rounds, advances and acceptance by position, and the tau of prompt lookup."""
        return [
            {
                "by": by,
                "group": name,
                "tau": round(found.tau, 4),
                "rounds": found.rounds,
                "advances": found.advances,
                "rates": found.rates(),
                "lookup_tau": round(self.lookup[by, name].tau, 4),
                "lookup_advances": self.lookup[by, name].advances,
            }
            for (by, name), found in sorted(self.drafter.items())
        ]


def measure(
    decoder: Decoder,
    requests: Sequence[Request],
    encode: Encode,
    text: Callable[[list[int]], str],
    *,
    max_new: int = 128,
    ar: bool = True,
) -> Measurement:
    """Decode requests greedily, one at a time; with `ar` also without a drafter, in turn the first and the second.

    Args:
        text: ids of an answer as text, to tell code, prose and tool calls apart.

    Raises:
        InvalidRequest: the decoder has no drafter, or there are no requests.
    """
    if decoder.drafter is None or not requests:
        raise InvalidRequest("evaluation needs a drafter and at least one prompt", param="drafter")
    width = decoder.proposal_length
    found = Measurement()
    for number, request in enumerate(requests):
        prompt = encode(request.messages)
        modes: tuple[Mode, ...] = ("dlite", "ar") if number % 2 else ("ar", "dlite")
        runs = {mode: _decode(decoder, prompt, max_new, mode) for mode in modes if ar or mode == "dlite"}
        answer, figures = runs["dlite"]
        found.dlite.append(figures)
        if ar:
            found.ar.append(runs["ar"][1])
        groups = _Groups(request, len(prompt), answer, text)
        emitted = 1  # the prefill emits the first anchor
        for advance in figures.advances:
            for group in groups.at(emitted):
                found.drafter[group].add(advance - 1, min(width, len(answer) - emitted), width)
            emitted += advance
        for at, hits, possible in lookup_rounds(prompt, answer, width):
            for group in groups.at(at):
                found.lookup[group].add(hits, possible, width)
    return found


def _decode(decoder: Decoder, prompt: list[int], max_new: int, mode: Mode) -> tuple[list[int], RunFigures]:
    state = decoder.open()
    try:
        params = SamplingParams(temperature=0.0)
        turn, figures = generate(decoder, state, prompt, params, max_new_tokens=max_new, mode=mode)
        return turn.generated, figures
    finally:
        state.kv.free()


class _Groups:
    """The groups of a round by where in an answer it begins."""

    def __init__(self, request: Request, prompt: int, answer: list[int], text: Callable[[list[int]], str]) -> None:
        self._request, self._prompt, self._answer, self._text = request, prompt, answer, text
        self._loop = next((n for n in range(1, len(answer)) if loop_cut(answer[:n]) is not None), len(answer))

    def at(self, emitted: int) -> list[tuple[str, str]]:
        context = self._prompt + emitted
        over = next((f"under {limit}" for limit in CONTEXTS if context < limit), f"{CONTEXTS[-1]} and more")
        groups = [
            ("all", "everything"),
            ("prompt", self._request.kind),
            ("text", kind_of_text(self._request, self._text(self._answer[:emitted]))),
            ("context", over),
        ]
        return groups if emitted >= self._loop else [*groups, ("all", "without loops")]


def kind_of_text(request: Request, written: str) -> str:
    """What the next tokens of an answer belong to, by what stands before them."""
    if request.messages[-1]["role"] == "tool":
        return "after tool output"
    if written.lstrip().startswith(("{", "<tool_call>")):
        return "tool call"
    return "code" if written.count("```") % 2 else "prose"
