"""The engine on tiny targets: replies, prefix reuse, cancelling, pre-emption, and memory back at its baseline."""

from __future__ import annotations

import itertools
import queue
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from dlite_agent.config import SchedulerSettings
from dlite_agent.decode.engine import Cancelled, DeadlineExceeded, Engine, Unavailable
from dlite_agent.decode.jobs import Failed, Finished, Generation, Piece, Reply, Started
from dlite_agent.decode.load import Runtime
from dlite_agent.decode.rounds import Decoder
from dlite_agent.decode.sampling import SamplingParams
from dlite_agent.decode.states import common_prefix
from dlite_agent.errors import ContextOverflow, KVExhausted, ModelError
from tests.helpers import CONTEXT, GREEDY, prompt, run_turn

SECONDS = 60.0
NAMES = itertools.count()


class Letters:
    """A tokenizer of the tiny vocabulary: one letter a token."""

    def decode(self, ids: list[int], **options: bool) -> str:
        return "".join(chr(0x100 + token) for token in ids)


class Client:
    """Submits to an engine and collects replies."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine

    def generation(self, ids: list[int], key: str, **options: Any) -> tuple[Generation, queue.SimpleQueue[Reply]]:
        replies: queue.SimpleQueue[Reply] = queue.SimpleQueue()
        values: dict[str, Any] = {"params": GREEDY, "max_new_tokens": 12} | options
        return Generation(id=f"g{next(NAMES)}", key=key, ids=ids, reply=replies.put, **values), replies

    def start(self, ids: list[int], key: str = "/s", **options: Any) -> tuple[str, queue.SimpleQueue[Reply]]:
        generation, replies = self.generation(ids, key, **options)
        self.engine.submit(generation)
        return generation.id, replies

    def run(self, ids: list[int], key: str = "/s", **options: Any) -> Finished:
        last = drain(self.start(ids, key, **options)[1])[-1]
        assert isinstance(last, Finished), last
        return last

    def fail(self, ids: list[int], key: str = "/s", **options: Any) -> Failed:
        last = drain(self.start(ids, key, **options)[1])[-1]
        assert isinstance(last, Failed), last
        return last

    def settled(self) -> None:
        """Wait until all messages so far have been handled."""
        self.run([1], "/settle", max_new_tokens=1, keep=False)

    @property
    def reserved(self) -> int:
        self.settled()
        return self.engine.stats.kv_reserved


def drain(replies: queue.SimpleQueue[Reply]) -> list[Reply]:
    """All replies up to the last."""
    out: list[Reply] = []
    while not out or not isinstance(out[-1], Finished | Failed):
        out.append(replies.get(timeout=SECONDS))
    return out


@pytest.fixture
def serve(make_decoder: Callable[..., Decoder]) -> Iterator[Callable[..., Client]]:
    running: list[Engine] = []

    def start(*, positions: int = 20_000, drafter: bool = True, **settings: Any) -> Client:
        decoder = make_decoder(drafter=drafter, positions=positions)
        engine = Engine(SchedulerSettings(**settings), lambda: Runtime(decoder, Letters(), Path()))
        engine.start()
        running.append(engine)
        return Client(engine)

    yield start
    for engine in running:
        engine.close()


@pytest.fixture
def alone(make_decoder: Callable[..., Decoder]) -> Callable[..., list[int]]:
    """What a decoder generates greedily without any engine."""

    def generate(ids: list[int], count: int = 12) -> list[int]:
        decoder = make_decoder()
        turn, _ = run_turn(decoder, decoder.open(), ids, max_new_tokens=count, mode="ar")
        return turn.generated

    return generate


def test_pieces_join_to_what_a_decoder_generates_alone(
    serve: Callable[..., Client], alone: Callable[..., list[int]]
) -> None:
    client = serve()
    ids = prompt(40)
    replies = drain(client.start(ids)[1])
    pieces = [reply for reply in replies if isinstance(reply, Piece)]
    assert isinstance(replies[0], Started)
    last = replies[-1]
    assert isinstance(last, Finished)
    assert [token for piece in pieces for token in piece.ids] == list(last.generated) == alone(ids)
    assert "".join(piece.text for piece in pieces) == Letters().decode(list(last.generated))
    figures = last.figures
    assert figures.queued <= figures.admitted <= figures.restored
    assert figures.first_token is not None
    assert figures.first_token <= figures.finished
    assert 1 + sum(row.advance for row in figures.rounds) == 12


def test_a_next_turn_prefills_only_its_new_ids(serve: Callable[..., Client], alone: Callable[..., list[int]]) -> None:
    client = serve()
    first = client.run(prompt(40))
    longer = [*prompt(40), *first.generated, *prompt(9, seed=1)]
    second = client.run(longer)
    assert second.figures.cached_tokens == 40 + 12 - 1
    assert second.figures.tier == "device"
    assert sum(chunk.tokens for chunk in second.figures.prefills) == 10
    assert list(second.generated) == alone(longer)


def test_an_edited_prompt_keeps_the_common_part(serve: Callable[..., Client], alone: Callable[..., list[int]]) -> None:
    client = serve()
    client.run(prompt(60))
    edited = [*prompt(30), *prompt(20, seed=2)]
    edited[30] = (prompt(60)[30] + 1) % 90
    answer = client.run(edited)
    assert answer.figures.cached_tokens == 29
    assert list(answer.generated) == alone(edited)


def test_the_same_prompt_again_runs_no_prompt_rows(serve: Callable[..., Client]) -> None:
    client = serve()
    first = client.run(prompt(40))
    again = client.run(prompt(40))
    assert again.figures.cached_tokens == 40
    assert sum(chunk.tokens for chunk in again.figures.prefills) == 0
    assert again.generated == first.generated


def test_a_shared_prefix_is_copied_inside_one_owner_only(
    serve: Callable[..., Client], alone: Callable[..., list[int]]
) -> None:
    client = serve()
    client.run(prompt(100), "a/one", owner="a")
    longer = [*prompt(100), 5, 6, 7]
    assert client.run(longer, "b/other", owner="b").figures.tier == "none"
    copied = client.run(longer, "a/two", owner="a")
    assert copied.figures.tier == "shared"
    assert copied.figures.cached_tokens == 100
    assert list(copied.generated) == alone(longer)


def test_many_sessions_together_equal_each_alone(serve: Callable[..., Client], alone: Callable[..., list[int]]) -> None:
    client = serve(prefill_chunk=32, prefill_chunk_beside=16, max_running=6)
    prompts = [prompt(20 + 17 * i, seed=i) for i in range(10)]
    started = [client.start(ids, f"/s{i}")[1] for i, ids in enumerate(prompts)]
    for ids, replies in zip(prompts, started, strict=True):
        last = drain(replies)[-1]
        assert isinstance(last, Finished)
        assert list(last.generated) == alone(ids)


def test_several_answers_share_one_prefill(serve: Callable[..., Client]) -> None:
    client = serve()
    sampled = [SamplingParams(temperature=1.0, seed=seed) for seed in (5, 6)]
    made = [client.generation(prompt(50), key, params=p) for key, p in zip(("/s", "/s#1"), sampled, strict=True)]
    client.engine.submit(made[0][0], made[1][0])
    first, second = (drain(replies)[-1] for _, replies in made)
    assert isinstance(first, Finished)
    assert isinstance(second, Finished)
    assert second.figures.cached_tokens == 50
    assert sum(chunk.tokens for chunk in second.figures.prefills) == 0
    assert client.run(prompt(50), "/alone", params=sampled[1]).generated == second.generated


@pytest.mark.parametrize("after", [0, 1, 3])
def test_cancelling_undoes_the_turn(serve: Callable[..., Client], alone: Callable[..., list[int]], after: int) -> None:
    client = serve(prefill_chunk=16)
    first = client.run(prompt(40))
    before = client.reserved
    longer = [*prompt(40), *first.generated, *prompt(60, seed=1)]
    generation, replies = client.start(longer, max_new_tokens=300)
    seen = 0
    while seen < after:
        seen += isinstance(replies.get(timeout=SECONDS), Piece)
    client.engine.cancel(generation)
    last = drain(replies)[-1]
    assert isinstance(last, Failed)
    assert isinstance(last.error, Cancelled)
    assert client.reserved == before
    assert list(client.run(longer).generated) == alone(longer)


def test_cancelling_in_the_queue(serve: Callable[..., Client]) -> None:
    client = serve(max_running=1)
    running, replies = client.start(prompt(10), "/long", max_new_tokens=400)
    waiting, waited = client.start(prompt(10), "/queued")
    client.engine.cancel(waiting)
    assert isinstance(drain(waited)[-1], Failed)
    client.engine.cancel(running)
    assert isinstance(drain(replies)[-1], Failed)
    assert client.reserved == 0


def test_a_deadline_ends_a_turn_wherever_it_is(serve: Callable[..., Client]) -> None:
    client = serve(max_running=1)
    assert isinstance(client.fail(prompt(10), deadline=0.0).error, DeadlineExceeded)
    assert client.reserved == 0


def test_running_out_of_kv_preempts_the_latest_and_nothing_is_lost(
    serve: Callable[..., Client], alone: Callable[..., list[int]]
) -> None:
    # Both prompts fit with little to spare; the answers together do not.
    client = serve(positions=300, headroom=8)
    pairs = [client.start(prompt(60, seed=i), f"/s{i}", max_new_tokens=120) for i in range(2)]
    for i, (_, replies) in enumerate(pairs):
        everything = drain(replies)
        last = everything[-1]
        assert isinstance(last, Finished), last
        assert list(last.generated) == alone(prompt(60, seed=i), 120)
        streamed = [token for reply in everything if isinstance(reply, Piece) for token in reply.ids]
        assert streamed == list(last.generated)
    client.settled()
    assert client.engine.stats.preemptions > 0


def test_idle_sessions_give_way_and_come_back(serve: Callable[..., Client], alone: Callable[..., list[int]]) -> None:
    client = serve(positions=360)
    first = client.run(prompt(150), "/old")
    client.run(prompt(200, seed=3), "/new")
    assert client.engine.stats.evictions > 0
    longer = [*prompt(150), *first.generated, 4, 5]
    back = client.run(longer, "/old")
    assert back.figures.cached_tokens == 0
    assert back.figures.reason == "evicted"
    assert list(back.generated) == alone(longer)


def test_a_prompt_that_never_fits_fails_and_changes_nothing(serve: Callable[..., Client]) -> None:
    client = serve(positions=100)
    assert isinstance(client.fail(prompt(200)).error, KVExhausted)
    assert client.reserved == 0
    assert isinstance(client.fail(prompt(CONTEXT)).error, ContextOverflow)


def test_release_gives_everything_back(serve: Callable[..., Client]) -> None:
    client = serve()
    client.run(prompt(40))
    assert client.engine.held("/s") == 51
    client.engine.release("/s")
    assert client.reserved == 0
    assert client.engine.held("/s") == 0


def test_close_lets_turns_finish_or_fails_them(serve: Callable[..., Client]) -> None:
    client = serve()
    _, replies = client.start(prompt(10), max_new_tokens=30)
    client.engine.close(drain_seconds=SECONDS)
    assert isinstance(drain(replies)[-1], Finished)
    with pytest.raises(Unavailable):
        client.start(prompt(10))
    hasty = serve()
    _, replies = hasty.start(prompt(10), max_new_tokens=400)
    replies.get(timeout=SECONDS)
    hasty.engine.close()
    last = drain(replies)[-1]
    assert isinstance(last, Failed)
    assert isinstance(last.error, Unavailable)


def test_what_goes_wrong_while_loading_is_raised_where_it_was_started() -> None:
    def load() -> Runtime:
        raise ModelError("no such model")

    engine = Engine(SchedulerSettings(), load)
    with pytest.raises(ModelError, match="no such model"):
        engine.start()


def test_common_prefix() -> None:
    assert common_prefix([], [1]) == 0
    assert common_prefix([1, 2, 3], [1, 2, 3]) == 3
    for at in range(64):
        assert common_prefix([0] * at + [1] * 9, [0] * at + [2] * 30) == at


def test_random_traffic_leaves_memory_at_its_baseline(serve: Callable[..., Client]) -> None:
    client = serve(positions=1500, prefill_chunk=24, max_running=4, max_queued=200)
    baseline = client.reserved
    rounds = 60

    def worker(number: int) -> None:
        for i in range(rounds // 3):
            size = 5 + (number * 31 + i * 17) % 120
            generation, replies = client.start(prompt(size, seed=i), f"/w{number}", max_new_tokens=1 + i % 40)
            if i % 3 == number % 3:
                replies.get(timeout=SECONDS)
                client.engine.cancel(generation)
            drain(replies)

    threads = [threading.Thread(target=worker, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(SECONDS)
    for number in range(3):
        client.engine.release(f"/w{number}")
    assert client.reserved == baseline == 0
