"""A stream of ids gives the text of the whole, whatever the ids and wherever a stop string falls."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from dlite_agent.decode.text import TextStream
from tests import tokenizers

NAMES = st.sampled_from(["smollm2", "qwen3", "llama3_1"])
ALPHABET = st.sampled_from([*"ab .,'\n\t{}<>", "é", "日", "🤖", "👩‍💻", "\u0301", "ß"])
TEXTS = st.lists(ALPHABET, max_size=24).map("".join)


def push_all(stream: TextStream, ids: list[int]) -> int:
    """Push until a stop; every text shown on the way must begin the next. Returns ids taken."""
    shown = ""
    for taken, each in enumerate(ids, 1):
        done = stream.push(each)
        assert stream.text.startswith(shown)
        shown = stream.text
        if done:
            return taken
    return len(ids)


@given(NAMES, st.lists(st.integers(0, 40_000), max_size=20), st.booleans())
def test_any_ids_give_the_text_of_the_whole(name: str, ids: list[int], skip: bool) -> None:
    """Ids at random are mostly torn characters."""
    tokenizer = tokenizers.load(name)
    stream = TextStream(tokenizer, skip_special_tokens=skip)
    push_all(stream, ids)
    whole = tokenizer.decode(ids, skip_special_tokens=skip, clean_up_tokenization_spaces=False)
    assert stream.finish() == whole


@given(NAMES, st.lists(TEXTS, min_size=1, max_size=8))
def test_any_split_into_ids_gives_the_same_text(name: str, parts: list[str]) -> None:
    """The same text in other ids, as each part is encoded alone."""
    tokenizer = tokenizers.load(name)
    ids = [each for part in parts for each in tokenizer.encode(part, add_special_tokens=False)]
    stream = TextStream(tokenizer)
    push_all(stream, ids)
    assert stream.finish() == tokenizer.decode(ids, clean_up_tokenization_spaces=False)


def first_complete(text: str, stops: list[str]) -> int | None:
    """Where the stop begins that is complete first in a reading of `text` letter by letter."""
    for end in range(1, len(text) + 1):
        begins = [end - len(s) for s in stops if text[:end].endswith(s)]
        if begins:
            return min(begins)
    return None


@given(
    NAMES, TEXTS, TEXTS, st.lists(st.text("ab .日é{", min_size=1, max_size=4), min_size=1, max_size=3), st.booleans()
)
def test_a_stop_cuts_where_it_is_complete_first(
    name: str, before: str, after: str, stops: list[str], planted: bool
) -> None:
    tokenizer = tokenizers.load(name)
    text = before + stops[0] + after if planted else before + after
    ids = tokenizer.encode(text, add_special_tokens=False)
    text = tokenizer.decode(ids, clean_up_tokenization_spaces=False)
    stream = TextStream(tokenizer, stops)
    taken = push_all(stream, ids)
    cut = first_complete(text, stops)
    assert stream.finish() == (text if cut is None else text[:cut])
    assert (stream.stopped is None) == (cut is None)
    if cut is None:
        assert taken == len(ids)
