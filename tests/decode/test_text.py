"""Text of a stream in the tokenizers that served models use."""

from __future__ import annotations

from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models

from dlite_agent.decode.text import TextStream
from tests import tokenizers

TEXT = "Héllo, wörld! 日本語のテキスト 🤖👩‍💻 x .  y ?\n\n\tif a != b :  # don't 've\n"


def streamed(tokenizer: Any, ids: list[int], stop: tuple[str, ...] = ()) -> TextStream:
    stream = TextStream(tokenizer, stop)
    shown = ""
    for token in ids:
        done = stream.push(token)
        assert stream.text.startswith(shown), "what was shown is never taken back"
        shown = stream.text
        if done:
            break
    assert stream.finish().startswith(shown)
    return stream


@pytest.mark.parametrize("name", ["smollm2", "qwen3", "llama3_1"])
def test_pieces_add_up_to_the_whole(name: str) -> None:
    tokenizer = tokenizers.load(name)
    ids = tokenizer.encode(TEXT, add_special_tokens=False)
    assert streamed(tokenizer, ids).text == TEXT


@pytest.mark.parametrize("name", ["smollm2", "qwen3"])
def test_a_character_is_shown_when_it_is_whole(name: str) -> None:
    tokenizer = tokenizers.load(name)
    ids = tokenizer.encode("a𓀀", add_special_tokens=False)
    assert len(ids) > 2, "the character must be split for this test"
    stream = TextStream(tokenizer)
    seen = [(stream.push(token), stream.text)[1] for token in ids]
    assert seen == ["a"] * (len(ids) - 1) + ["a𓀀"]
    cut = streamed(tokenizer, ids[:-1])
    assert cut.text == tokenizer.decode(ids[:-1])


def test_special_tokens_are_left_out_or_shown() -> None:
    tokenizer = tokenizers.load("qwen3")
    ids = tokenizer.encode("a<|im_end|>\nb", add_special_tokens=False)
    assert streamed(tokenizer, ids).text == "a\nb"
    shown = TextStream(tokenizer, skip_special_tokens=False)
    for token in ids:
        shown.push(token)
    assert shown.finish() == "a<|im_end|>\nb"


def test_text_is_held_back_while_it_may_become_a_stop() -> None:
    tokenizer = tokenizers.load("smollm2")
    stream = TextStream(tokenizer, ["</tool>"])
    for token in tokenizer.encode("x </to", add_special_tokens=False):
        assert not stream.push(token)
    assert stream.text == "x "
    assert stream.finish() == "x </to"


def test_the_first_stop_to_be_complete_wins() -> None:
    tokenizer = tokenizers.load("smollm2")
    ids = tokenizer.encode("one two three four", add_special_tokens=False)
    stream = streamed(tokenizer, ids, ("three", "wo th", "two three four", "never"))
    assert (stream.text, stream.stopped) == ("one t", "wo th")


def test_a_stop_before_an_unfinished_character_is_found_at_the_end() -> None:
    tokenizer = tokenizers.load("smollm2")
    ids = tokenizer.encode("go 🤖", add_special_tokens=False)[:-1]
    stream = streamed(tokenizer, ids, ("go ",))
    assert (stream.text, stream.stopped) == ("", "go ")


def test_words_that_start_with_a_space_keep_it() -> None:
    """Sentence-piece decoders drop the first space of whatever they are given, so pieces cannot be decoded alone."""
    vocab = {"▁Hello": 0, "▁world": 1, "!": 2, "<0xE6>": 3, "<0x97>": 4, "<0xA5>": 5, "<unk>": 6}
    inner = Tokenizer(models.BPE(vocab=vocab, merges=[], byte_fallback=True, unk_token="<unk>"))
    inner.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(content=" ", left=1, right=0),
        ]
    )

    class Wrapped:
        def decode(self, ids: list[int], *, skip_special_tokens: bool = False, **_options: bool) -> str:
            text: str = inner.decode(ids, skip_special_tokens=skip_special_tokens)
            return text

    ids = [0, 1, 2, 3, 4, 5, 1, 1, 1, 1, 1, 1, 1, 1, 2]
    assert streamed(Wrapped(), ids).text == inner.decode(ids)
