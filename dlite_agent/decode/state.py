"""What a session is to the decoder: ids, KV up to a boundary, and the features that boundaries carry."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from torch import Tensor

from dlite_agent.config import Mode
from dlite_agent.decode.kv import SequenceKV
from dlite_agent.decode.planner import Odds
from dlite_agent.decode.sampling import Sampler
from dlite_agent.decode.suffix import SuffixIndex
from dlite_agent.decode.text import TextStream

FinishReason = Literal["eos", "stop", "length", "context"]


@dataclass
class DecodeState:
    """One session on the device.

    Attributes:
        ids: the truth. KV covers ids[:boundary]; what lies beyond has not been through the target: after a turn that is
            one id, the anchor.
        features: tapped hidden states [S, H] of ids[boundary - 1], or None where they are not known.
        kept: features by boundary, for the end of each prompt and of each turn.
        suffix, odds: what copies are drafted from, and how often drafts were right; both come back by themselves.
    """

    kv: SequenceKV
    ids: list[int] = field(default_factory=list)
    features: Tensor | None = None
    kept: dict[int, Tensor] = field(default_factory=dict)
    suffix: SuffixIndex = field(default_factory=SuffixIndex)
    odds: Odds | None = None

    @property
    def boundary(self) -> int:
        return self.kv.length

    @property
    def pending(self) -> list[int]:
        """Ids that are known but not in the KV yet."""
        return self.ids[self.kv.length :]

    def keep(self) -> None:
        """Remember the features of the present boundary."""
        if self.features is not None:
            self.kept[self.boundary] = self.features

    def truncate(self, length: int) -> None:
        """Go back to ids[:length].

        Where features were kept at `length` the next turn starts without a target forward; elsewhere exactly the last
        token is left to be computed again.
        """
        if not 0 <= length <= len(self.ids):
            raise ValueError(f"cannot truncate {len(self.ids)} ids to {length}")
        self.suffix.cut(self.ids, length)
        del self.ids[length:]
        self.kept = {n: features for n, features in self.kept.items() if n <= length}
        if length <= self.boundary:
            self.kv.truncate(length if length in self.kept else max(length - 1, 0))
            self.features = self.kept.get(self.boundary)

    def fork(self) -> DecodeState:
        """An independent copy: same ids, same KV rows, same features. Raises KVExhausted."""
        return DecodeState(self.kv.fork(), list(self.ids), self.features, dict(self.kept))


@dataclass(frozen=True)
class TokenScore:
    """Log-probability of an emitted token under the target's bare logits, and the most likely tokens beside it."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...]


@dataclass
class Turn:
    """One request being decoded on a session.

    Attributes:
        verify_window: rows of a verify pass, anchor included; it shortens the draft as well.
        limit: ids the session may hold.
        top_scores: how many of the most likely tokens `scores` lists for each emitted one; None for no scores at all.
        generated: ids emitted so far; `finish` says why the turn has ended, once it has.
    """

    state: DecodeState
    sampler: Sampler
    mode: Mode
    max_new_tokens: int
    verify_window: int
    limit: int
    eos_ids: frozenset[int]
    text: TextStream | None
    resumed: bool
    top_scores: int | None = None
    scores: list[TokenScore] = field(default_factory=list)
    generated: list[int] = field(default_factory=list)
    finish: FinishReason | None = None

    @property
    def decoding(self) -> bool:
        """Whether the next step is a round and not a prompt chunk: an anchor is decided and all before it is in KV.

        A turn that has lost its KV (a pre-emption) runs its own ids again as a prompt first.
        """
        return (bool(self.generated) or self.resumed) and len(self.state.ids) - self.state.boundary == 1

    def draft_length(self, proposal_length: int) -> int:
        """Drafts worth making in the next round: none beyond what may still be emitted after them."""
        if self.mode == "ar":
            return 0
        left = min(self.max_new_tokens - len(self.generated), self.limit - len(self.state.ids))
        return max(0, min(proposal_length, self.verify_window - 1, left - 1))

    def emit(self, tokens: list[int]) -> int:
        """Take decided tokens in order until the turn ends; returns how many were taken. The rest never existed."""
        taken = 0
        while taken < len(tokens) and self.finish is None:
            token = tokens[taken]
            taken += 1
            self.generated.append(token)
            self.state.ids.append(token)
            if token in self.eos_ids:
                self.finish = "eos"
            elif self.text is not None and self.text.push(token):
                self.finish = "stop"
            elif len(self.generated) >= self.max_new_tokens:
                self.finish = "length"
            elif len(self.state.ids) >= self.limit:
                self.finish = "context"
        if self.finish is not None and self.text is not None:
            # A stop string may stand before half a character, and then shows only when no more ids come.
            self.text.finish()
            if self.text.stopped is not None:
                self.finish = "stop"
        self.sampler.commit(tokens[:taken])
        return taken
