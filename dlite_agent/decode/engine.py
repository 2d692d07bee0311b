"""The one thread that owns the device.

Others talk to it through messages, each request through its own reply function; an exception travels as a reply. The
thread keeps one `DecodeState` a session (`states.py`) as a cache of what the session's ids were worth: a request brings
its whole prompt, the engine finds how much of it the state holds, and runs the rest.
"""

from __future__ import annotations

import itertools
import logging
import math
import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TypeVar

from torch import Tensor

from dlite_agent.config import SchedulerSettings
from dlite_agent.decode.elsewhere import Elsewhere
from dlite_agent.decode.jobs import (
    Failed,
    Finished,
    Generation,
    Job,
    Piece,
    Prefilled,
    PrefillFact,
    RoundFact,
    Started,
    TurnFigures,
)
from dlite_agent.decode.load import Runtime
from dlite_agent.decode.rounds import Decoder, RowFigures, StepFigures
from dlite_agent.decode.scheduler import Scheduler, past_deadline, victim
from dlite_agent.decode.state import Turn
from dlite_agent.decode.states import States
from dlite_agent.decode.text import TextStream
from dlite_agent.decode.vault import Vault
from dlite_agent.errors import DliteError, KVExhausted

log = logging.getLogger(__name__)
_POLL_S = 0.05
_T = TypeVar("_T")


class Unavailable(DliteError):
    """The server is starting or stopping."""

    status = 503
    code = "unavailable"


class DeadlineExceeded(DliteError):
    """The request's deadline passed before its answer was complete."""

    status = 504
    code = "deadline_exceeded"


class Cancelled(DliteError):
    """The client went away or asked to stop."""

    status = 499
    code = "cancelled"


@dataclass(frozen=True)
class EngineStats:
    """A snapshot: jobs, KV positions, and totals since start."""

    running: int = 0
    kv_capacity: int = 0
    kv_reserved: int = 0
    states: int = 0
    steps: int = 0
    preemptions: int = 0
    evictions: int = 0


@dataclass(frozen=True)
class _Cancel:
    id: str


@dataclass(frozen=True)
class _Release:
    key: str


class Engine:
    """Runs generations in one batch on one thread.

    Args:
        load: makes the runtime; called on the engine's thread.
        observer: called on the engine's thread with the figures of every step.
    """

    def __init__(
        self,
        settings: SchedulerSettings,
        load: Callable[[], Runtime],
        *,
        observer: Callable[[StepFigures], None] | None = None,
    ) -> None:
        self.settings = settings
        self.stats = EngineStats()
        self._load = load
        self._observer = observer
        self._scheduler = Scheduler(settings)
        self._inbox: queue.SimpleQueue[_Cancel | _Release | Callable[[], None] | None] = queue.SimpleQueue()
        self._leaving: set[str] = set()
        self._followers: dict[str, list[Job]] = {}
        self._followers_lock = threading.Lock()
        self._arrivals = itertools.count()
        self._pace = 1.0
        self._stop_at: float | None = None
        self._thread = threading.Thread(target=self._main, name="dlite-engine", daemon=True)
        self._loaded: Future[Runtime] = Future()
        self._states: States
        self._elsewhere: Elsewhere
        self._steps = self._preemptions = 0

    # From any thread.

    def start(self) -> Runtime:
        """Start the thread and wait until the runtime is loaded; what went wrong there is raised here."""
        self._thread.start()
        return self._loaded.result()

    def attach(self, vault: Vault) -> None:
        """Keep states that leave the device in a vault, and look there for those that are not on it. To be called
        once, after `start`."""
        self._inbox.put(lambda: self._elsewhere.attach(vault))

    def submit(self, generation: Generation, *others: Generation) -> None:
        """Queue a generation; replies follow until one is `Finished` or `Failed`.

        Args:
            others: further answers to the same prompt; they start from this one's prefill.

        Raises:
            Overloaded: the queue is full.
            Unavailable: the engine is stopping.
        """
        if self._stop_at is not None or not self._thread.is_alive():
            raise Unavailable("the server is shutting down: retry elsewhere or later")
        job, *followers = (self._job(item) for item in (generation, *others))
        with self._followers_lock:
            self._followers[generation.id] = followers
        try:
            self._scheduler.offer(job, seconds_per_request=self._pace)
        except DliteError:
            with self._followers_lock:
                del self._followers[generation.id]
            raise
        self._inbox.put(None)

    def _job(self, generation: Generation) -> Job:
        now = time.monotonic()
        figures = TurnFigures(queued=now, prompt_tokens=len(generation.ids))
        return Job(generation, next(self._arrivals), figures, waiting_since=now)

    def cancel(self, generation_id: str) -> None:
        """Undo a generation, wherever it is, before the next step; an unknown or finished one is fine."""
        self._inbox.put(_Cancel(generation_id))

    def release(self, key: str) -> None:
        """Drop a state and its memory, once no turn runs on it."""
        self._inbox.put(_Release(key))

    def export(self, key: str, start: int) -> Future[Tensor | None]:
        """Copy of a state's KV rows from a position on, made between two steps; None where they are not there."""

        def copy() -> Tensor | None:
            state = self._states.get(key)
            return None if state is None or state.boundary <= start else state.kv.export(start)

        return self._call(copy)

    def pause(self, key: str, tool: str) -> None:
        """The session waits for a tool or for its user (named "user") from now on."""

        def wait() -> None:
            if key not in self._in_use():
                self._elsewhere.paused(key, tool)

        self._inbox.put(wait)

    def _call(self, work: Callable[[], _T]) -> Future[_T]:
        done: Future[_T] = Future()

        def run() -> None:
            try:
                done.set_result(work())
            except Exception as error:
                done.set_exception(error)

        self._inbox.put(run)
        if not self._thread.is_alive() and not done.done():
            done.set_exception(Unavailable("the server is shutting down: retry elsewhere or later"))
        return done

    def held(self, key: str) -> int:
        """Tokens of a state that are in KV now."""
        return self._states.held(key)

    def waiting(self) -> tuple[int, int]:
        """Requests that wait, and the prompt tokens in them."""
        return self._scheduler.depth()

    def close(self, drain_seconds: float = 0.0) -> None:
        """Take nothing new, let what runs go on for a while, fail the rest, and end the thread."""
        if not self._thread.is_alive():
            return
        self._stop_at = time.monotonic() + drain_seconds
        self._inbox.put(None)
        self._thread.join()

    # On the engine's thread.

    def _main(self) -> None:
        try:
            runtime = self._load()
        except BaseException as error:
            self._loaded.set_exception(error)
            return
        self._decoder: Decoder = runtime.decoder
        self._tokenizer = runtime.tokenizer
        self._states = States(runtime.decoder, share_all=self.settings.share_prefixes)
        self._elsewhere = Elsewhere(self._states, self._inbox.put, self._scheduler.requeue, self._evict)
        self._publish()
        self._loaded.set_result(runtime)
        while self._stop_at is None or self._busy():
            self._receive()
            now = time.monotonic()
            if self._stop_at is not None and now >= self._stop_at:
                self._fail_all(Unavailable("the server is shutting down: retry elsewhere or later"))
            self._expire(now)
            self._admit()
            if self._scheduler.running:
                self._step()
            self._publish()
        self._receive()
        self._elsewhere.close()
        self._states.clear()

    def _busy(self) -> bool:
        return bool(self._scheduler.running) or self._scheduler.depth()[0] > 0 or bool(self._elsewhere.jobs)

    def _publish(self) -> None:
        pool = self._decoder.pool
        self.stats = EngineStats(
            running=len(self._scheduler.running),
            kv_capacity=pool.capacity,
            kv_reserved=pool.reserved,
            states=len(self._states),
            steps=self._steps,
            preemptions=self._preemptions,
            evictions=self._states.evictions,
        )

    def _receive(self) -> None:
        """Handle all messages; wait for one when there is nothing to run."""
        wait = self._patience()
        while True:
            try:
                message = self._inbox.get(block=wait != 0, timeout=wait)
            except queue.Empty:
                break
            wait = 0
            if isinstance(message, _Cancel):
                self._cancel(message.id)
            elif isinstance(message, _Release):
                self._release(message.key)
            elif message is not None:
                message()
        self._elsewhere.tick()

    def _patience(self) -> float | None:
        """Seconds to wait for a message; None for ever."""
        if self._scheduler.running or self._scheduler.depth()[0]:
            return 0
        if self._stop_at is not None:
            return _POLL_S if self._elsewhere.jobs else 0
        due = self._elsewhere.next_due()
        return None if due == math.inf else max(min(due - time.monotonic(), threading.TIMEOUT_MAX), 0)

    def _cancel(self, generation_id: str) -> None:
        error = Cancelled("the request was cancelled")
        job = self._scheduler.withdraw(generation_id) or next(
            (job for job in self._scheduler.running if job.generation.id == generation_id), None
        )
        job = job or self._elsewhere.jobs.pop(generation_id, None) or self._take_follower(generation_id)
        if job is None:
            return
        self._undo(job, error)

    def _take_follower(self, generation_id: str) -> Job | None:
        with self._followers_lock:
            for jobs in self._followers.values():
                for job in jobs:
                    if job.generation.id == generation_id:
                        jobs.remove(job)
                        return job
        return None

    def _release(self, key: str) -> None:
        if key in self._in_use():
            self._leaving.add(key)
            return
        self._leaving.discard(key)
        self._states.drop(key)
        self._elsewhere.dropped(key)

    def _in_use(self) -> set[str]:
        return {job.generation.key for job in (*self._scheduler.running, *self._elsewhere.jobs.values())}

    def _expire(self, now: float) -> None:
        late = [job for job in self._scheduler.running if past_deadline(job, now)] + self._scheduler.expired(now)
        reading = self._elsewhere.jobs
        late += [reading.pop(name) for name, job in list(reading.items()) if past_deadline(job, now)]
        for job in late:
            seconds = now - job.figures.queued
            self._undo(job, DeadlineExceeded(f"not done after {seconds:.1f} s: ask for less, or retry later"))

    def _admit(self) -> None:
        while (job := self._scheduler.take()) is not None:
            try:
                self._begin(job)
            except KVExhausted as error:
                if self._scheduler.running:
                    self._scheduler.requeue(job)
                    return
                self._undo(job, error)
            except DliteError as error:
                self._undo(job, error)
            except Exception as error:
                log.exception("admission failed", extra={"generation": job.generation.id})
                self._undo(job, DliteError(f"the engine failed to start the request: {type(error).__name__}"))

    def _begin(self, job: Job) -> None:
        """Give a job its KV. Raises KVExhausted, then the job is as it was."""
        generation = job.generation
        now = time.monotonic()
        if job.turn is None:
            if self._elsewhere.wants_reading(job):
                return
            self._open(job)
        else:
            self._reserve(job.turn, generation.key)
            self._states.put(generation.key, job.turn.state)
            job.figures.waits.append((job.waiting_since, now))
        self._states.used(generation.key)
        self._scheduler.running.append(job)

    def _open(self, job: Job) -> None:
        generation, figures, decoder = job.generation, job.figures, self._decoder
        figures.admitted = figures.admitted or time.monotonic()
        self._elsewhere.place(job)
        tier, reason = self._states.restore(generation)
        tier, figures.reason = job.placed or (tier, reason or generation.unstored)
        state = self._states[generation.key]
        job.committed = len(state.ids)
        figures.mode = generation.mode or self.settings.mode or ("ar" if decoder.drafter is None else "dlite")
        while True:
            try:
                job.turn = decoder.begin(
                    state,
                    generation.ids[job.committed :],
                    generation.params,
                    max_new_tokens=generation.max_new_tokens,
                    mode=figures.mode,
                    verify_window=generation.verify_window,
                    text=TextStream(self._tokenizer, generation.stop),
                    ignore_eos=generation.ignore_eos,
                    matcher=generation.matcher,
                    top_scores=generation.top_scores,
                    headroom=self.settings.headroom,
                )
                break
            except KVExhausted:
                if not self._evict(generation.key):
                    raise
        figures.cached_tokens = min(state.boundary, len(generation.ids))
        figures.tier = tier if figures.cached_tokens else "none"
        figures.restored = time.monotonic()
        generation.reply(Started(figures.cached_tokens, figures.tier))

    def _reserve(self, turn: Turn, key: str) -> None:
        """Room for a turn's next steps; idle states give way. Raises KVExhausted."""
        state, window = turn.state, turn.verify_window
        if state.kv.reserved >= len(state.ids) + window:
            return
        wanted = min(len(state.ids) + self.settings.headroom, turn.limit) + window
        while True:
            try:
                state.kv.reserve(wanted)
                return
            except KVExhausted:
                if not self._evict(key):
                    raise

    def _evict(self, besides: str) -> bool:
        """Free the KV of one idle state; False when there is none."""
        return self._elsewhere.reclaim() or self._states.evict(self._in_use() | {besides})

    def _step(self) -> None:
        jobs = self._make_room(self._scheduler.order())
        if not jobs:
            return
        by_turn = {id(job.turn): job for job in jobs}
        start = time.monotonic()
        try:
            figures = self._decoder.step(
                [job.turn for job in jobs if job.turn is not None], prefill_chunk=self._scheduler.chunk(jobs)
            )
        except Exception as error:
            log.exception("a step failed")
            for job in jobs:
                self._drop(job, DliteError(f"the engine failed during a step: {type(error).__name__}"))
            return
        self._steps += 1
        if self._observer is not None:
            self._observer(figures)
        self._elsewhere.observe(figures)
        for row in figures.rows:
            self._account(by_turn[id(row.turn)], row, figures, start)

    def _make_room(self, jobs: list[Job]) -> list[Job]:
        """Reserve KV for a step of each job, pre-empting late arrivals where it runs out."""
        for job in sorted(jobs, key=lambda job: job.order):
            while job in self._scheduler.running and job.turn is not None:
                try:
                    self._reserve(job.turn, job.generation.key)
                    break
                except KVExhausted as error:
                    last = victim(self._scheduler.running)
                    if last is None or len(self._scheduler.running) == 1:
                        self._undo(job, error)
                    else:
                        self._preempt(last)
        return [job for job in jobs if job in self._scheduler.running]

    def _preempt(self, job: Job) -> None:
        """Back to the queue. The state falls back to its last committed boundary; generated ids are kept and will be
        run again as a prompt, so that what was streamed stays true."""
        assert job.turn is not None
        state = job.turn.state
        keep = min(job.committed, state.boundary)
        state.kv.truncate(keep)
        state.features = state.kept.get(keep)
        state.kept = {n: features for n, features in state.kept.items() if n <= keep}
        state.kv.shrink()
        self._scheduler.running.remove(job)
        job.waiting_since = time.monotonic()
        self._scheduler.requeue(job)
        self._preemptions += 1

    def _account(self, job: Job, row: RowFigures, step: StepFigures, start: float) -> None:
        turn, figures, generation = row.turn, job.figures, job.generation
        seconds = step.seconds
        if row.verified:
            parts = (seconds.draft, seconds.verify, seconds.rest)
            sizes = (row.advance, row.drafted, row.verified, row.context, step.batch)
            figures.rounds.append(RoundFact(start, seconds.wall, *parts, *sizes, row.plan.label, row.plan.expected))
        else:
            figures.prefills.append(PrefillFact(start, seconds.wall, row.prefilled, row.context, step.batch))
            if not row.advance:
                generation.reply(Prefilled(turn.state.boundary, len(turn.state.ids)))
        if not row.advance:
            return
        if figures.first_token is None:
            figures.first_token = time.monotonic()
            self._start_followers(job)
        if turn.finish is not None:
            self._finish(job)
        else:
            self._hand_out(job)

    def _hand_out(self, job: Job) -> None:
        turn = job.turn
        assert turn is not None
        assert turn.text is not None
        ids = tuple(turn.generated[job.sent :])
        text = turn.text.text[job.sent_text :]
        if ids or text:
            scores = tuple(turn.scores[job.sent :])
            job.sent, job.sent_text = len(turn.generated), len(turn.text.text)
            job.generation.reply(Piece(ids, text, scores))

    def _finish(self, job: Job) -> None:
        turn, generation = job.turn, job.generation
        assert turn is not None
        assert turn.text is not None
        assert turn.finish is not None
        turn.text.finish()
        self._hand_out(job)
        self._decoder.finish(turn)
        boundary = turn.state.boundary
        self._scheduler.running.remove(job)
        if not generation.keep or generation.key in self._leaving:
            self._release(generation.key)
        figures = job.figures
        figures.finished = time.monotonic()
        self._pace += 0.2 * (figures.finished - figures.admitted - self._pace)
        self._publish()
        state = turn.state
        odds = None if state.odds is None else state.odds.counts()
        stop, features = turn.text.stopped, dict(state.kept)
        generation.reply(Finished(turn.finish, tuple(turn.generated), stop, figures, boundary, features, odds))

    def _start_followers(self, job: Job) -> None:
        """Give each follower a copy of the prefilled prompt and queue it."""
        with self._followers_lock:
            followers = self._followers.pop(job.generation.id, [])
        assert job.turn is not None
        for follower in followers:
            try:
                state = job.turn.state.fork()
            except KVExhausted:
                follower.figures.reason = "no memory to copy the prompt"
            else:
                state.truncate(follower.figures.prompt_tokens)
                self._states.put(follower.generation.key, state)
            self._scheduler.requeue(follower)

    def _undo(self, job: Job, error: DliteError) -> None:
        """End a job without a trace in its session: the state goes back to what was committed."""
        if job in self._scheduler.running:
            self._scheduler.running.remove(job)
        if job.turn is not None:
            self._decoder.abort(job.turn, job.committed)
        key = job.generation.key
        state = self._states.get(key)
        if state is not None and (not state.ids or not job.generation.keep or key in self._leaving):
            self._release(key)
        self._fail(job, error)

    def _drop(self, job: Job, error: DliteError) -> None:
        """End a job whose state can no longer be trusted."""
        self._scheduler.running.remove(job)
        self._release(job.generation.key)
        self._fail(job, error)

    def _fail(self, job: Job, error: DliteError) -> None:
        job.figures.finished = time.monotonic()
        self._publish()
        job.generation.reply(Failed(error, job.figures))
        with self._followers_lock:
            followers = self._followers.pop(job.generation.id, [])
        for follower in followers:
            self._scheduler.requeue(follower)

    def _fail_all(self, error: DliteError) -> None:
        reading = list(self._elsewhere.jobs.values())
        self._elsewhere.jobs.clear()
        for job in [*self._scheduler.running, *reading, *self._scheduler.drain()]:
            self._undo(job, error)
        for job in self._scheduler.drain():
            self._undo(job, error)
