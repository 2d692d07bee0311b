"""The restore benchmark on a tiny model: all ways back lead to the same answer."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from dlite_agent.bench.restore import WAYS, bench_restore
from dlite_agent.decode.load import Runtime
from dlite_agent.decode.rounds import Decoder
from dlite_agent.errors import InvalidRequest
from dlite_agent.tables import restore_bench_table


class Characters:
    """A tokenizer of the tiny vocabulary: one letter a token."""

    chat_template = "none"

    def encode(self, text: str, **options: bool) -> list[int]:
        return [ord(letter) % 97 for letter in text]

    def decode(self, ids: list[int]) -> str:
        return "".join(map(chr, ids))

    def get_vocab(self) -> dict[str, int]:
        return {chr(i): i for i in range(97)}

    def apply_chat_template(self, messages: list[dict[str, str]], **options: bool) -> str:
        return messages[0]["content"]


def test_all_ways_back_give_the_uninterrupted_answer(make_decoder: Callable[..., Decoder]) -> None:
    runtime = Runtime(make_decoder(), Characters(), Path())
    result = bench_restore(runtime, [100, 200], repeats=2, new_tokens=12)
    for row in result["rows"]:
        assert row["same"] == dict.fromkeys(WAYS, True)
        assert len({row["tau"][name] for name in ("uninterrupted", *WAYS)}) == 1
        assert all(seconds > 0 for seconds in row["seconds"].values())
    assert restore_bench_table(result).row_count == 2


def test_a_context_that_does_not_fit_is_refused(make_decoder: Callable[..., Decoder]) -> None:
    with pytest.raises(InvalidRequest, match="at most"):
        bench_restore(Runtime(make_decoder(), Characters(), Path()), [5000])
