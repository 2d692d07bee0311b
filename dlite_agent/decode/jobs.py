"""What goes into the engine and what comes out: requests, replies and figures, all plain data."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, NamedTuple

from dlite_agent.config import Mode
from dlite_agent.decode.planner import OddsCounts
from dlite_agent.decode.sampling import SamplingParams
from dlite_agent.decode.state import FinishReason, TokenScore, Turn
from dlite_agent.errors import DliteError

if TYPE_CHECKING:
    from torch import Tensor

    from dlite_agent.decode.grammar import Matcher
    from dlite_agent.decode.vault import Fetched

Tier = Literal["device", "shared", "host", "memory", "disk", "redis", "none"]
"""Where restored KV came from: the session's own state, another session's equal prefix, the host's memory, a store, or
nowhere."""


class PrefillFact(NamedTuple):
    """One prompt chunk: `start` on the monotonic clock, seconds, rows, KV length before, turns in the step."""

    start: float
    wall: float
    tokens: int
    context: int
    batch: int


class RoundFact(NamedTuple):
    """One round of one turn, in the fields and units of the trace's `Round`."""

    start: float
    wall: float
    t_d: float
    t_v: float
    t_s: float
    advance: int
    drafted: int
    verified: int
    context: int
    batch: int
    source: str = ""
    expected: float = 0.0


@dataclass
class TurnFigures:
    """Where a turn's time went. Times are seconds of the process's monotonic clock.

    Attributes:
        queued: when it arrived; waits: further (from, to) times in the queue, after pre-emptions.
        admitted: when it was first given KV; restored: when its KV was in place.
        committed: seconds that making the turn durable took, behind `finished`.
        cached_tokens: prompt tokens whose KV was there; `tier` says from where, `reason` why not more.
    """

    queued: float
    prompt_tokens: int
    mode: Mode = "ar"
    admitted: float = 0.0
    restored: float = 0.0
    first_token: float | None = None
    finished: float = 0.0
    committed: float = 0.0
    cached_tokens: int = 0
    tier: Tier = "none"
    reason: str | None = None
    waits: list[tuple[float, float]] = field(default_factory=list)
    prefills: list[PrefillFact] = field(default_factory=list)
    rounds: list[RoundFact] = field(default_factory=list)

    @property
    def preemptions(self) -> int:
        return len(self.waits)


@dataclass(frozen=True)
class Started:
    """The turn has its KV; prompt rows beyond `cached_tokens` are to be run."""

    cached_tokens: int
    tier: Tier


@dataclass(frozen=True)
class Prefilled:
    """Prompt rows in KV so far, of all."""

    done: int
    total: int


@dataclass(frozen=True)
class Piece:
    """New tokens and the text that is now certain; text lags behind where a character or stop string may go on."""

    ids: tuple[int, ...]
    text: str
    scores: tuple[TokenScore, ...] = ()


@dataclass(frozen=True)
class Finished:
    """The turn is over and kept: the session's state covers prompt and `generated`.

    Attributes:
        boundary: positions in KV; features: tapped states by boundary, of all boundaries that are known.
        odds: how often drafts were right in this session; None if none was ever weighed.
    """

    reason: FinishReason
    generated: tuple[int, ...]
    stop: str | None
    figures: TurnFigures
    boundary: int
    features: Mapping[int, Tensor]
    odds: OddsCounts | None


@dataclass(frozen=True)
class Failed:
    """The turn is over and undone."""

    error: DliteError
    figures: TurnFigures


Reply = Started | Prefilled | Piece | Finished | Failed


@dataclass(frozen=True)
class Generation:
    """One request for the engine.

    Attributes:
        id: unique; cancels by it.
        key: the state it continues, and leaves behind if `keep`: "owner/name".
        ids: the whole prompt; what the state holds of it is found by the engine.
        reply: takes every reply, on the engine's thread; it must not block.
        owner: whose request it is: admission is fair between owners, and prefixes are shared inside one.
        stored: name of the stored session that holds the beginning of the prompt; empty if there is none.
        unstored: why what was stored is not used, if so.
        deadline: monotonic time by which it must be done.
    """

    id: str
    key: str
    ids: Sequence[int]
    params: SamplingParams
    max_new_tokens: int
    reply: Callable[[Reply], None]
    owner: str = ""
    stop: tuple[str, ...] = ()
    mode: Mode | None = None
    verify_window: int | None = None
    matcher: Matcher | None = None
    top_scores: int | None = None
    ignore_eos: bool = False
    deadline: float | None = None
    keep: bool = True
    stored: str = ""
    unstored: str | None = None


@dataclass(eq=False)
class Job:
    """A generation on its way through the engine.

    Attributes:
        order: arrival number; a pre-empted job keeps it.
        turn: once admitted; a pre-empted job keeps it.
        committed: ids of the state that stay if the turn is undone.
        sent: generated tokens, and characters of text, that were handed out.
        waiting_since: since when it is in the queue.
        asked, fetched: whether its state was asked for off the device, and what came.
        placed: tier and reason of what was put on the device from elsewhere.
    """

    generation: Generation
    order: int
    figures: TurnFigures
    turn: Turn | None = None
    committed: int = 0
    sent: int = 0
    sent_text: int = 0
    waiting_since: float = 0.0
    asked: bool = False
    fetched: Fetched | None = None
    placed: tuple[Tier, str | None] | None = None
