"""Who runs next: bounded admission, a fair order, chunked prefill beside decoding, and whom to pre-empt."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterable, Sequence

from dlite_agent.config import SchedulerSettings
from dlite_agent.decode.jobs import Job
from dlite_agent.errors import DliteError


class Overloaded(DliteError):
    """The queue is full. `retry_after` is in seconds."""

    status = 429
    code = "overloaded"

    def __init__(self, message: str, *, retry_after: int) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class Scheduler:
    """The queue and the order of work. `offer`, `depth` and `withdraw` may be called from any thread."""

    def __init__(self, settings: SchedulerSettings) -> None:
        self.settings = settings
        self.running: list[Job] = []
        self._queue: list[Job] = []
        self._lock = threading.Lock()
        self._served = 0

    def depth(self) -> tuple[int, int]:
        """Requests that wait, and the prompt tokens in them."""
        with self._lock:
            return len(self._queue), sum(job.figures.prompt_tokens for job in self._queue)

    def offer(self, job: Job, *, seconds_per_request: float = 1.0) -> None:
        """Queue a job.

        Args:
            seconds_per_request: recent pace, for the advice when to come back.

        Raises:
            Overloaded: the queue holds as many requests or tokens as it may. One request that alone exceeds the token
                limit is taken by an empty queue.
        """
        limits = self.settings
        with self._lock:
            waiting = len(self._queue)
            tokens = sum(queued.figures.prompt_tokens for queued in self._queue) + job.figures.prompt_tokens
            if waiting >= limits.max_queued or (waiting and tokens > limits.max_queued_tokens):
                retry = max(1, min(60, round(seconds_per_request * (waiting + 1) / limits.max_running)))
                raise Overloaded(
                    f"{waiting} requests wait already (limits: {limits.max_queued} requests, "
                    f"{limits.max_queued_tokens} tokens): retry in {retry} s",
                    retry_after=retry,
                )
            self._queue.append(job)

    def requeue(self, job: Job) -> None:
        """Put back a job that had been taken; no limit applies, and it keeps its place by arrival."""
        with self._lock:
            self._queue.append(job)

    def withdraw(self, job_id: str) -> Job | None:
        """Take a job out of the queue by its generation's id."""
        with self._lock:
            for job in self._queue:
                if job.generation.id == job_id:
                    self._queue.remove(job)
                    return job
        return None

    def expired(self, now: float) -> list[Job]:
        """Take out of the queue all jobs whose deadline is past."""
        with self._lock:
            late = [job for job in self._queue if past_deadline(job, now)]
            self._queue = [job for job in self._queue if job not in late]
        return late

    def drain(self) -> list[Job]:
        """Empty the queue."""
        with self._lock:
            jobs, self._queue = self._queue, []
        return jobs

    def take(self) -> Job | None:
        """The next job to admit, or None when the batch is full or nothing waits.

        The owner with the fewest running jobs comes first, and with them the job that arrived first: one client with
        many requests cannot shut out another, and nobody waits for ever. A job whose state is in use waits for it.
        """
        if len(self.running) >= self.settings.max_running:
            return None
        share = Counter(job.generation.owner for job in self.running)
        busy = {job.generation.key for job in self.running}
        with self._lock:
            ready = [job for job in self._queue if job.generation.key not in busy]
            if not ready:
                return None
            job = min(ready, key=lambda queued: (share[queued.generation.owner], queued.order))
            self._queue.remove(job)
        return job

    def order(self) -> list[Job]:
        """Running jobs as the next step takes them: those that decode, then those with prompt rows left, in turns."""
        decoding = [job for job in self.running if job.turn is not None and job.turn.decoding]
        filling = [job for job in self.running if job not in decoding]
        if len(filling) > 1:
            self._served += 1
            first = self._served % len(filling)
            filling = filling[first:] + filling[:first]
        return decoding + filling

    def chunk(self, jobs: Sequence[Job]) -> int:
        """Prompt rows that the next step may run."""
        decoding = any(job.turn is not None and job.turn.decoding for job in jobs)
        return self.settings.prefill_chunk_beside if decoding else self.settings.prefill_chunk


def victim(jobs: Iterable[Job]) -> Job | None:
    """Whom to pre-empt when KV runs out: the job that arrived last."""
    return max(jobs, key=lambda job: job.order, default=None)


def past_deadline(job: Job, now: float) -> bool:
    """Whether the job should have been done by `now` (monotonic)."""
    deadline = job.generation.deadline
    return deadline is not None and now >= deadline
