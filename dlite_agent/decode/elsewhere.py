"""The engine's side of the vault: states that are not on the device, looked for when a turn begins.

Reading and checking a stored state takes long, so it happens on a reader's thread while the engine goes on; only the
copy into KV is the engine's. A vault that fails must not take the engine with it: then there is nothing to be had
elsewhere, and the prompt is computed.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from dlite_agent.decode.jobs import Job
from dlite_agent.decode.rounds import StepFigures
from dlite_agent.decode.states import States
from dlite_agent.decode.vault import Fetched, Read, Vault
from dlite_agent.errors import DliteError, KVExhausted

log = logging.getLogger(__name__)
_READERS = 2
"""Threads that read stored states. More would only fight for the same disk and cores."""


class Elsewhere:
    """All on the engine's thread. Without a vault there is nothing elsewhere.

    Args:
        post: hands work to the engine's thread.
        requeue: takes a job back whose state has been read.
        evict: frees KV of some state but the one named; False when there is none.

    Attributes:
        jobs: those that wait for a reader, by generation.
    """

    def __init__(
        self,
        states: States,
        post: Callable[[Callable[[], None]], None],
        requeue: Callable[[Job], None],
        evict: Callable[[str], bool],
    ) -> None:
        self.jobs: dict[str, Job] = {}
        self._vault: Vault | None = None
        self._states = states
        self._post = post
        self._requeue = requeue
        self._evict = evict
        self._readers = ThreadPoolExecutor(_READERS, thread_name_prefix="dlite-read")

    def attach(self, vault: Vault) -> None:
        vault.attach(self._states, self._post)
        self._vault = vault

    def close(self) -> None:
        self._readers.shutdown(wait=False, cancel_futures=True)

    def wants_reading(self, job: Job) -> bool:
        """Look for the job's state off the device, once; True if it must wait for a reader and is kept here."""
        vault, generation = self._vault, job.generation
        if vault is None or job.asked:
            return False
        job.asked = True
        vault.began(generation.key, job.figures.queued)
        have = self._states.known(generation)
        job.fetched = vault.here(generation, have)
        read = vault.read(generation, have) if job.fetched is None else None
        if read is None:
            return False
        job.figures.admitted = time.monotonic()
        self.jobs[generation.id] = job
        self._readers.submit(self._read, job, read)
        return True

    def _read(self, job: Job, read: Read) -> None:
        """On a reader's thread."""
        try:
            fetched = read()
        except DliteError as error:
            fetched = Fetched(None, "none", error.message)
        except Exception as error:
            log.exception("reading a stored state failed", extra={"generation": job.generation.id})
            fetched = Fetched(None, "none", f"reading failed: {type(error).__name__}")

        def arrived() -> None:
            if self.jobs.pop(job.generation.id, None) is not None:
                job.fetched = fetched
                self._requeue(job)

        self._post(arrived)

    def place(self, job: Job) -> None:
        """Put on the device what was fetched for a job; `job.placed` says what became of it."""
        fetched, generation = job.fetched, job.generation
        if fetched is None:
            return
        job.fetched = None
        if fetched.state is None:
            job.placed = None if self._states.known(generation) else ("none", fetched.reason)
            return
        begin = time.monotonic()
        while True:
            try:
                self._states.place(generation.key, fetched.state, generation.ids)
                break
            except KVExhausted:
                if not self._evict(generation.key):
                    reason = f"no memory to restore {fetched.state.tokens} positions from {fetched.tier}"
                    job.placed = "none", reason
                    return
        job.placed = fetched.tier, fetched.reason
        if self._vault is not None:
            self._vault.placed(generation.key, fetched, time.monotonic() - begin)

    def paused(self, key: str, tool: str) -> None:
        """See `Vault.paused`."""
        self._ask(lambda vault: vault.paused(key, tool))

    def dropped(self, key: str) -> None:
        self._ask(lambda vault: vault.dropped(key))

    def observe(self, step: StepFigures) -> None:
        self._ask(lambda vault: vault.observe(step))

    def reclaim(self) -> bool:
        """Free KV of a paused session; False when none has any."""
        freed = False

        def ask(vault: Vault) -> None:
            nonlocal freed
            freed = vault.reclaim()

        self._ask(ask)
        return freed

    def next_due(self) -> float:
        """When `tick` has something to do (monotonic); infinite if never."""
        return math.inf if self._vault is None else self._vault.next_due()

    def tick(self) -> None:
        if self.next_due() <= time.monotonic():
            self._ask(lambda vault: vault.tick())

    def _ask(self, work: Callable[[Vault], None]) -> None:
        if self._vault is None:
            return
        try:
            work(self._vault)
        except Exception:
            log.exception("the vault failed and is used no more")
            self._vault = None
