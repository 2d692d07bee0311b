"""What every API shape shares: from a request in common terms to a running turn."""

from __future__ import annotations

import asyncio
import json
import secrets
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from dlite_agent.api.keeper import Keeper
from dlite_agent.api.recorder import Asked, Recorder
from dlite_agent.api.stored import ResponseStore
from dlite_agent.api.turns import Choice, Run
from dlite_agent.config import Mode, Settings
from dlite_agent.decode.engine import DeadlineExceeded, Engine
from dlite_agent.decode.grammar import Constraint, Grammars, json_answer
from dlite_agent.decode.jobs import Generation
from dlite_agent.decode.load import Runtime
from dlite_agent.decode.sampling import SamplingParams
from dlite_agent.errors import ContextOverflow, DliteError, InvalidRequest, NotFound
from dlite_agent.session.history import History, Prompt, splice
from dlite_agent.session.identity import SessionName
from dlite_agent.session.messages import JSON, Message
from dlite_agent.session.opening import make_tiers, open_persister
from dlite_agent.session.reasoning import ReasoningParser, ResponseParser
from dlite_agent.session.registry import OnConflict, Registry, Session
from dlite_agent.session.template import ChatTemplate
from dlite_agent.session.toolcalls import tool_parser
from dlite_agent.session.toolchoice import tool_constraint


@dataclass(frozen=True)
class Caller:
    """Who asks: `owner` is a digest of the API key, empty where there are none."""

    owner: str
    request_id: str


@dataclass(frozen=True)
class Ask:
    """One request in common terms.

    Attributes:
        api: name of the shape, for logs and metrics.
        messages: the conversation; None where `prompt` is given instead.
        prompt: text or ids to continue as they are.
        tools: OpenAI-shaped function tools.
        tool_choice: auto, none, required or an object that names a function.
        answer_schema: JSON schema of the answer; an empty one for any object; None for free text.
        max_tokens: None for all that fits.
        clamp: let `max_tokens` be more than fits, and stop at the end of the context.
        session: id of the session to continue, found by other means than `name`.
        warnings: what of the request had no effect, for the response.
    """

    api: str
    messages: list[Message] | None = None
    prompt: str | list[int] | None = None
    tools: list[JSON] = field(default_factory=list)
    tool_choice: Any = "auto"
    parallel: bool = True
    answer_schema: JSON | None = None
    params: SamplingParams = field(default_factory=SamplingParams)
    max_tokens: int | None = None
    clamp: bool = False
    stop: tuple[str, ...] = ()
    n: int = 1
    top_scores: int | None = None
    thinking: bool | None = None
    ignore_eos: bool = False
    name: SessionName | None = None
    session: str | None = None
    on_conflict: OnConflict | None = None
    mode: Mode | None = None
    verify_window: int | None = None
    seconds: float | None = None
    stream: bool = False
    warnings: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Prepared:
    """The ids of a prompt and, for a conversation, how they came about."""

    ids: list[int]
    spliced: Prompt | None


class Service:
    """Sessions, template, grammars and engine of one served model."""

    def __init__(self, settings: Settings, engine: Engine, runtime: Runtime, recorder: Recorder) -> None:
        target = runtime.decoder.target
        self.settings = settings
        self.engine = engine
        self.recorder = recorder
        self.tokenizer = runtime.tokenizer
        self.context_limit = target.context_limit
        self.drafter = runtime.decoder.drafter is not None
        self.template = ChatTemplate(runtime.tokenizer, target.spec.eos_ids)
        self.names = settings.model.names or (settings.model.target.rstrip("/").rsplit("/", 1)[-1],)
        self.created = int(time.time())
        self.fingerprint = f"fp_{target.fingerprint}"
        self.vocab_size = target.spec.vocab_size
        self._grammars: Grammars | None = None
        self._grammars_lock = asyncio.Lock()
        self.registry = Registry(max_sessions=settings.server.max_sessions, on_drop=self._dropped)
        persister = open_persister(settings.sessions, settings.data_dir, runtime)
        self.responses = ResponseStore(settings.server.max_responses, settings.data_dir)
        self.tiers = make_tiers(settings.sessions, runtime, persister)
        self.keeper = Keeper(self.registry, engine, persister, settings.sessions)
        engine.attach(self.tiers)
        recorder.metrics.watch(self.tiers, persister)
        self._longest_token = max(len(token) for token in runtime.tokenizer.get_vocab())

    @property
    def model(self) -> str:
        """The name under which the model is served first."""
        return self.names[0]

    def count(self, text: str) -> int:
        """Tokens that a text would have on its own."""
        return len(self.template.encode(text)) if text else 0

    def token_text(self, token: int) -> str:
        """A token alone as text; part of a character shows as U+FFFD."""
        text: str = self.tokenizer.decode([token])
        return text

    def _dropped(self, session: Session) -> None:
        self.engine.release(session.key)
        self.keeper.forget(session)
        self.recorder.session_end(session)

    async def session(self, owner: str, reference: str) -> Session:
        """A session by id or by its client's name for it, stored ones included. Raises NotFound or StoreUnavailable."""
        reason = await self.keeper.adopt(owner, reference)
        try:
            return self.registry.get(owner, reference)
        except NotFound as error:
            if reason is None:
                raise
            raise NotFound(f"{error.message} What is stored cannot be used: {reason}", param=error.param) from None

    async def fork(self, session: Session, *, turn: int | None, name: str) -> Session:
        """A durable fork; see `Registry.fork`."""
        if name:
            await self.keeper.adopt(session.owner, name)
        fork = self.registry.fork(session, turn=turn, name=name)
        try:
            await self.keeper.fork(session, fork)
        except DliteError:
            self.registry.delete(fork)
            raise
        return fork

    async def delete(self, session: Session) -> None:
        """Remove a session everywhere, its stored responses too.

        Raises Conflict while it has a turn in flight, StoreUnavailable.
        """
        await self.registry.hold(session, "refuse")
        try:
            await self.keeper.delete(session)
            self.responses.drop_session(session.id)
        finally:
            self.registry.release(session)
        self.registry.delete(session)

    async def close(self) -> None:
        """End all turns, hand all sessions over, and close the stores."""
        await self.keeper.settle()
        await asyncio.to_thread(self.engine.close, 0.0)
        self.tiers.close()
        await self.keeper.close()
        self.responses.close()

    async def open(self, ask: Ask, caller: Caller) -> Run:
        """Start a turn.

        Raises:
            DliteError: the request cannot be served; nothing has changed.
        """
        arrived = time.monotonic()
        seconds = min(ask.seconds or float("inf"), self.settings.scheduler.request_seconds)
        if bad := [token for token in ask.params.logit_bias if token >= self.vocab_size]:
            raise InvalidRequest(f"token {bad[0]} is outside the vocabulary", param="logit_bias")
        constraint = self._constraint(ask)
        if isinstance(ask.prompt, str):
            ask = replace(ask, prompt=await asyncio.to_thread(self.tokens_of, ask.prompt))
        session = await self._session(ask, caller.owner)
        await self._hold(session, ask, seconds)
        try:
            await self.keeper.hold(session)
            prepared = await self._prepare(session, ask)
            room = self._room(len(prepared.ids), ask)
            request_id, keeper = caller.request_id, self.keeper
            run = Run(
                self.registry, self.recorder, session, prepared.ids, prepared.spliced, ask.api, request_id, keeper
            )
            run.warnings = list(ask.warnings)
            run.arrived = arrived
            deadline = arrived + seconds
            generations = [await self._generation(run, ask, i, room, constraint, deadline) for i in range(ask.n)]
            run.asked = Asked(generations[0], constraint)
            run.submit(self.engine, generations)
        except BaseException:
            self.registry.release(session)
            raise
        return run

    async def _hold(self, session: Session, ask: Ask, seconds: float) -> None:
        conflict = ask.on_conflict or self.settings.server.session_conflict
        try:
            async with asyncio.timeout(seconds):
                await self.registry.hold(session, conflict)
        except TimeoutError as error:
            raise DeadlineExceeded(f"the session was busy for {seconds:.1f} s: retry later") from error

    async def _session(self, ask: Ask, owner: str) -> Session:
        if ask.session is not None:
            return await self.session(owner, ask.session)
        reason = None if ask.name is None else await self.keeper.adopt(owner, ask.name.id)
        if ask.messages is None:
            assert isinstance(ask.prompt, list)
            session = self.registry.continues(owner, ask.name, ask.prompt)
        else:
            await self.keeper.adopt_conversation(owner, ask.messages, ask.tools)
            session = self.registry.find(owner, ask.name, ask.messages, ask.tools)
        session.unstored = session.unstored or reason
        return session

    def tokens_of(self, text: str, special: bool = True) -> list[int]:
        """Ids of plain text; `special` adds what the tokenizer puts around it. Raises InvalidRequest."""
        self._check_size(len(text))
        try:
            ids: list[int] = self.tokenizer.encode(text, add_special_tokens=special)
        except (UnicodeEncodeError, TypeError) as error:
            raise InvalidRequest("The text holds a lone surrogate (\\ud800-\\udfff).", param="prompt") from error
        return ids

    def _check_size(self, characters: int) -> None:
        """Refuse what cannot fit before it is tokenised: no token has more characters than the longest."""
        if (least := characters // self._longest_token) >= self.context_limit:
            raise overflow(self.context_limit, least, None)

    async def _prepare(self, session: Session, ask: Ask) -> Prepared:
        if ask.messages is None:
            assert isinstance(ask.prompt, list)
            return Prepared(ask.prompt, None)
        messages = ask.messages
        return await asyncio.to_thread(self.render, session.history, session.ids, messages, ask.tools, ask.thinking)

    def render(
        self,
        history: History,
        ids: Sequence[int],
        messages: Sequence[Message],
        tools: Sequence[JSON],
        thinking: bool | None,
    ) -> Prepared:
        """The ids of a conversation, those of `history` taken over. Raises ContextOverflow where it cannot fit."""
        calls = (call for message in messages for call in message.tool_calls)
        said = sum(len(message.content) for message in messages) + sum(len(call.arguments) for call in calls)
        self._check_size(said + sum(len(json.dumps(tool, ensure_ascii=False)) for tool in tools))
        spliced = splice(self.template, history, ids, messages, tools or None, thinking=thinking)
        return Prepared(spliced.ids, spliced)

    def _room(self, prompt: int, ask: Ask) -> int:
        """Tokens the answer may have. Raises ContextOverflow."""
        limit = self.context_limit
        if prompt >= limit or (ask.max_tokens is not None and not ask.clamp and prompt + ask.max_tokens > limit):
            raise overflow(limit, prompt, ask.max_tokens)
        room = limit - prompt
        return room if ask.max_tokens is None else min(room, ask.max_tokens)

    def _constraint(self, ask: Ask) -> Constraint | None:
        reasoning = self.template.reasoning(thinking=ask.thinking)
        forced = None
        if ask.tools:
            forced = tool_constraint(
                self.template.tool_style, ask.tools, ask.tool_choice, parallel=ask.parallel, reasoning=reasoning
            )
        elif ask.tool_choice not in (None, "auto", "none"):
            raise InvalidRequest("tool_choice asks for a call, but the request has no tools.", param="tool_choice")
        if ask.answer_schema is None:
            return forced
        if forced is not None:
            raise InvalidRequest(
                "response_format cannot be combined with strict tools or a forced tool_choice.", param="response_format"
            )
        if ask.tools and ask.tool_choice != "none":
            raise InvalidRequest(
                'response_format holds the answer to JSON, which leaves no room for a call: send tool_choice "none".',
                param="response_format",
            )
        gate = "open" if reasoning == "open" else "optional" if reasoning == "optional" else "none"
        return json_answer(ask.answer_schema or None, reasoning=gate)  # type: ignore[arg-type]

    async def grammars(self) -> Grammars:
        """The grammar compiler, made when first wanted: it reads the whole vocabulary."""
        async with self._grammars_lock:
            if self._grammars is None:
                self._grammars = await asyncio.to_thread(
                    Grammars, self.tokenizer, vocab_size=self.vocab_size, stop_ids=self.template.stop_ids
                )
        return self._grammars

    async def _generation(
        self, run: Run, ask: Ask, index: int, room: int, constraint: Constraint | None, deadline: float
    ) -> Generation:
        matcher = None
        if constraint is not None:
            matcher = await asyncio.to_thread((await self.grammars()).matcher, constraint)
        parser = None
        if ask.messages is not None:
            tools = ask.tools if ask.tool_choice != "none" else []
            parser = ResponseParser(
                ReasoningParser(self.template.reasoning(thinking=ask.thinking)),
                tool_parser(self.template.tool_style, tools) if tools else None,
            )
        run.choices.append(Choice(index, parser))
        seed = secrets.randbits(63) if ask.params.seed is None else (ask.params.seed + index) % 2**63
        params = replace(ask.params, seed=seed)
        session = run.session
        return Generation(
            id=uuid.uuid4().hex,
            key=session.key if index == 0 else f"{session.key}#{uuid.uuid4().hex[:8]}",
            ids=run.prompt_ids,
            params=params,
            max_new_tokens=room,
            reply=run.reply_to(index),
            owner=session.owner,
            stop=ask.stop,
            mode=ask.mode,
            verify_window=ask.verify_window,
            matcher=matcher,
            top_scores=ask.top_scores,
            ignore_eos=ask.ignore_eos,
            deadline=deadline,
            keep=index == 0,
            stored=session.stored,
            unstored=session.unstored,
        )


def overflow(limit: int, prompt: int, asked: int | None) -> ContextOverflow:
    """The error in the words by which agents know that they must compact."""
    requested = prompt + (asked or 0)
    parts = f"{prompt} in the messages" + (f", {asked} in the completion" if asked else "")
    return ContextOverflow(
        f"This model's maximum context length is {limit} tokens. However, you requested {requested} tokens ({parts}). "
        "Please reduce the length of the messages or completion.",
        param="messages",
    )
