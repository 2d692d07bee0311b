from __future__ import annotations

import time

import pytest

from dlite_agent.config import SchedulerSettings
from dlite_agent.decode.jobs import Generation, Job, TurnFigures
from dlite_agent.decode.sampling import SamplingParams
from dlite_agent.decode.scheduler import Overloaded, Scheduler, victim


def job(order: int, *, owner: str = "", key: str = "", tokens: int = 10, deadline: float | None = None) -> Job:
    generation = Generation(
        id=f"g{order}",
        key=key or f"{owner}/s{order}",
        ids=[1] * tokens,
        params=SamplingParams(),
        max_new_tokens=4,
        reply=lambda _: None,
        owner=owner,
        deadline=deadline,
    )
    return Job(generation, order, TurnFigures(queued=0.0, prompt_tokens=tokens))


def test_the_queue_is_bounded_by_requests() -> None:
    scheduler = Scheduler(SchedulerSettings(max_running=1, max_queued=2))
    scheduler.offer(job(0))
    scheduler.offer(job(1))
    with pytest.raises(Overloaded, match="2 requests wait") as refused:
        scheduler.offer(job(2), seconds_per_request=4.0)
    assert refused.value.status == 429
    assert refused.value.retry_after == 12
    assert scheduler.depth() == (2, 20)


def test_the_queue_is_bounded_by_tokens_but_takes_one_large_request() -> None:
    scheduler = Scheduler(SchedulerSettings(max_queued_tokens=100))
    scheduler.offer(job(0, tokens=500))
    with pytest.raises(Overloaded):
        scheduler.offer(job(1, tokens=1))


def test_owners_take_turns_and_arrival_decides_inside_one() -> None:
    scheduler = Scheduler(SchedulerSettings(max_running=8))
    for order in range(4):
        scheduler.offer(job(order, owner="many"))
    scheduler.offer(job(4, owner="few"))
    scheduler.offer(job(5, owner="few"))
    taken = []
    while (next_job := scheduler.take()) is not None:
        scheduler.running.append(next_job)
        taken.append(next_job.order)
    assert taken == [0, 4, 1, 5, 2, 3]


def test_a_full_batch_admits_nobody_and_a_busy_state_is_waited_for() -> None:
    scheduler = Scheduler(SchedulerSettings(max_running=2))
    first, same, other = job(0, key="/a"), job(1, key="/a"), job(2, key="/b")
    for one in (first, same, other):
        scheduler.offer(one)
    assert scheduler.take() is first
    scheduler.running.append(first)
    assert scheduler.take() is other
    scheduler.running.append(other)
    assert scheduler.take() is None
    scheduler.running.remove(first)
    assert scheduler.take() is same


def test_prompts_share_the_chunk_in_turns() -> None:
    scheduler = Scheduler(SchedulerSettings())
    scheduler.running = [job(0), job(1), job(2)]
    firsts = {scheduler.order()[0].order for _ in range(3)}
    assert firsts == {0, 1, 2}
    assert scheduler.chunk(scheduler.running) == scheduler.settings.prefill_chunk


def test_withdraw_and_deadlines() -> None:
    scheduler = Scheduler(SchedulerSettings())
    now = time.monotonic()
    stays, late = job(0), job(1, deadline=now - 1)
    scheduler.offer(stays)
    scheduler.offer(late)
    assert scheduler.expired(now) == [late]
    assert scheduler.withdraw("g1") is None
    assert scheduler.withdraw("g0") is stays
    assert scheduler.depth() == (0, 0)


def test_the_victim_is_the_latest_arrival() -> None:
    jobs = [job(3), job(7), job(5)]
    assert victim(jobs) is jobs[1]
    assert victim([]) is None
