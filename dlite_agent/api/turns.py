"""One request while it runs: engine replies become deltas, the first answer is committed, the rest is undone."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from dlite_agent.decode.engine import Cancelled, Engine
from dlite_agent.decode.jobs import Failed, Finished, Generation, Piece, Prefilled, Reply, Started, TurnFigures
from dlite_agent.decode.state import FinishReason, TokenScore
from dlite_agent.errors import DliteError
from dlite_agent.session import toolcalls
from dlite_agent.session.deltas import Delta, ParsedCall, TextDelta
from dlite_agent.session.history import History, Prompt
from dlite_agent.session.messages import Message
from dlite_agent.session.reasoning import ResponseParser
from dlite_agent.session.record import SamplerState
from dlite_agent.session.registry import Registry, Session

if TYPE_CHECKING:
    from dlite_agent.api.keeper import Keeper
    from dlite_agent.api.recorder import Asked, Recorder

USER = "user"
"""Whom a session waits for that has called no tool."""


@dataclass(frozen=True)
class Waiting:
    """Nothing to show yet; `done` of `total` prompt tokens are in KV."""

    done: int
    total: int


@dataclass(frozen=True)
class Chunk:
    """New deltas of one choice, and the scores of the tokens they came from."""

    index: int
    deltas: list[Delta]
    scores: tuple[TokenScore, ...] = ()


@dataclass(frozen=True)
class Answer:
    """A complete choice.

    Attributes:
        finish: as OpenAI names it; `reason` as the decoder does; `stop` is the stop string that ended it.
        tokens: tokens generated, a stop token included.
    """

    index: int
    message: Message
    calls: list[ParsedCall]
    finish: toolcalls.FinishReason
    reason: FinishReason
    stop: str | None
    tokens: int
    ids: tuple[int, ...]
    scores: tuple[TokenScore, ...]
    figures: TurnFigures


Event = Waiting | Chunk | Answer


@dataclass
class Choice:
    """One of a request's answers while it grows. Without a parser everything is text."""

    index: int
    parser: ResponseParser | None
    text: str = ""
    scores: list[TokenScore] = field(default_factory=list)
    answer: Answer | None = None

    def feed(self, piece: Piece) -> list[Delta]:
        self.text += piece.text
        self.scores += piece.scores
        if self.parser is None:
            return [TextDelta(piece.text)] if piece.text else []
        return self.parser.feed(piece.text)

    def finish(self) -> list[Delta]:
        return [] if self.parser is None else self.parser.finish()

    def message(self) -> Message:
        return Message("assistant", self.text) if self.parser is None else self.parser.message()


class Run:
    """A turn of a session in flight, with one answer or several.

    Whoever iterates `events` must call `close` in the end, whatever happens: it undoes what is unfinished and gives the
    session back.
    """

    def __init__(
        self,
        registry: Registry,
        recorder: Recorder,
        session: Session,
        prompt_ids: list[int],
        spliced: Prompt | None,
        api: str,
        request_id: str,
        keeper: Keeper,
    ) -> None:
        self.session = session
        self.prompt_ids = prompt_ids
        self.spliced = spliced
        self.api = api
        self.request_id = request_id
        self.choices: list[Choice] = []
        self.warnings: list[str] = []
        self.asked: Asked | None = None
        self.arrived = time.monotonic()
        self.started = time.time()
        self.turn = session.turns
        self.announced = False
        self._registry = registry
        self._recorder = recorder
        self._engine: Engine | None = None
        self._generations: list[Generation] = []
        self._replies: asyncio.Queue[tuple[int, Reply]] = asyncio.Queue()
        self._loop = asyncio.get_running_loop()
        self._progress = (0, len(prompt_ids))
        self._closed = False
        self._over = False
        self._keeper = keeper
        self._saving: asyncio.Task[None] | None = None

    @property
    def divergence(self) -> dict[str, Any] | None:
        """Why and where the request left the stored conversation: index of the message, position in the ids."""
        match = None if self.spliced is None else self.spliced.match
        if match is None or match.divergence is None or self.spliced is None:
            return None
        return {"reason": str(match.divergence), "message": self.spliced.at, "position": match.keep}

    def reply_to(self, index: int) -> Callable[[Reply], None]:
        """What the engine's thread calls with the replies of one choice."""

        def put(reply: Reply) -> None:
            if not self._loop.is_closed():
                self._loop.call_soon_threadsafe(self._replies.put_nowait, (index, reply))

        return put

    def submit(self, engine: Engine, generations: list[Generation]) -> None:
        """Hand the generations to the engine. Raises Overloaded or Unavailable."""
        engine.submit(*generations)
        self._engine = engine
        self._generations = generations

    async def events(self, pause: float) -> AsyncIterator[Event]:
        """What happens, in order; `Waiting` when nothing did for `pause` seconds. Ends when all answers are there.

        Raises:
            DliteError: a choice failed.
        """
        while any(choice.answer is None for choice in self.choices):
            try:
                async with asyncio.timeout(pause):
                    index, reply = await self._replies.get()
            except TimeoutError:
                yield Waiting(*self._progress)
                continue
            if isinstance(reply, Started):
                if index == 0:
                    self._recorder.turn_start(self, reply.cached_tokens)
            elif isinstance(reply, Prefilled):
                self._progress = (reply.done, reply.total)
            elif isinstance(reply, Piece):
                self._progress = (self._progress[1], self._progress[1])
                deltas = self.choices[index].feed(reply)
                if deltas or reply.scores:
                    yield Chunk(index, deltas, reply.scores)
            elif isinstance(reply, Finished):
                choice = self.choices[index]
                if deltas := choice.finish():
                    yield Chunk(index, deltas)
                answer = self._answer(choice, reply)
                if index == 0:
                    # A commit that has begun comes to its end, whether or not somebody still waits for the answer.
                    self._saving = asyncio.get_running_loop().create_task(self._commit(answer, reply))
                    while not (await asyncio.wait({self._saving}, timeout=pause))[0]:
                        yield Waiting(*self._progress)
                    self._saving.result()
                choice.answer = answer
                yield answer
            elif isinstance(reply, Failed):
                self._fail(reply.error, reply.figures)
                raise reply.error

    def _answer(self, choice: Choice, reply: Finished) -> Answer:
        calls = [] if choice.parser is None else choice.parser.calls
        stopped = "stop" if reply.reason in ("eos", "stop") else "length"
        return Answer(
            index=choice.index,
            message=choice.message(),
            calls=calls,
            finish=toolcalls.finish_reason(stopped, calls),  # type: ignore[arg-type]
            reason=reply.reason,
            stop=reply.stop,
            tokens=len(reply.generated),
            ids=reply.generated,
            scores=tuple(choice.scores),
            figures=reply.figures,
        )

    async def _commit(self, answer: Answer, reply: Finished) -> None:
        """The turn is durable first, then known here: only then may the response end."""
        ids = [*self.prompt_ids, *answer.ids]
        history = History() if self.spliced is None else self.spliced.answered(answer.message, len(ids))
        divergence = None if self.divergence is None else str(self.divergence["reason"])
        sampler = SamplerState(self._generations[0].params, len(self.prompt_ids))
        begin = time.monotonic()
        try:
            await self._keeper.commit(self.session, ids, history, reply, divergence, sampler)
        except DliteError as error:
            self._fail(error, answer.figures)
            raise
        answer.figures.committed = time.monotonic() - begin
        self._registry.commit(self.session, ids, history, divergence)
        self._over = True
        self._recorder.turn_end(self, answer)
        self._wait_for(answer.calls[-1].name if answer.calls else USER)

    def _wait_for(self, tool: str) -> None:
        if self._engine is not None:
            self._engine.pause(self.session.key, tool)

    def _fail(self, error: DliteError, figures: TurnFigures | None) -> None:
        if not self._over:
            self._over = True
            self._recorder.turn_failed(self, error, figures)

    async def answers(self) -> list[Answer]:
        """All answers, when the last is complete."""
        async for _ in self.events(pause=3600.0):
            pass
        return [choice.answer for choice in self.choices if choice.answer is not None]

    def close(self) -> None:
        """Undo what is unfinished and give the session back; doing it twice is fine."""
        if self._closed:
            return
        self._closed = True
        if self._saving is not None and not self._saving.done():
            self._saving.add_done_callback(lambda _: self._end())
        else:
            self._end()

    def _end(self) -> None:
        assert self._engine is not None
        if self._saving is not None and not self._saving.cancelled():
            self._saving.exception()  # It was raised where the answer was waited for, or nobody waits any more.
        for choice, generation in zip(self.choices, self._generations, strict=True):
            if choice.answer is None:
                self._engine.cancel(generation.id)
        if not self._over and self.session.turns:
            self._wait_for(USER)
        self._fail(Cancelled("the client went away"), None)
        self._registry.release(self.session)
