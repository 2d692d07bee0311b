"""Token masks that hold a generation to a JSON schema or to a request's tools, for drafted windows too.

A `Constraint` says what the whole response may look like: free reasoning first, then JSON, or calls, or text with calls
in it. The grammar compiler (xgrammar) turns it into an automaton over the tokenizer's vocabulary, so a window of drafts
that leaves the reasoning, enters a call or passes the end of the response needs no case of its own: the masks of its
positions simply differ. Special tokens never pass a mask, except the stop tokens where the response may end.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import torch
import xgrammar as xg

from dlite_agent.decode.schema import unenforced
from dlite_agent.errors import DliteError, InvalidRequest, ModelError
from dlite_agent.model.native import mask_logits

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Reasoning = Literal["none", "optional", "open"]
Format = dict[str, Any]

# Unbounded white space between JSON tokens is a trap: a small model can fill its whole budget with it.
_SPACES_IN_ANSWER = 16
_SPACES_IN_CALL = 1


@dataclass(frozen=True)
class CallFormat:
    """How one tool's call is written.

    Attributes:
        begin, end: the text around the arguments.
        schema: JSON schema of the arguments.
        xml: arguments are Qwen-coder's `<parameter=name>` elements, not a JSON object.
    """

    begin: str
    schema: Mapping[str, Any]
    end: str
    xml: bool = False


@dataclass(frozen=True)
class Constraint:
    """What a response may be: a format of the grammar compiler as canonical JSON, which is also its cache key."""

    format: str


def json_answer(schema: Mapping[str, Any] | None, *, reasoning: Reasoning = "none") -> Constraint:
    """An answer that is one JSON value valid for `schema`; None means any JSON object.

    Raises:
        InvalidRequest: the schema has a keyword that a grammar cannot enforce.
    """
    chosen = {"type": "object", "additionalProperties": True} if schema is None else dict(schema)
    return _constraint(_json(chosen, _SPACES_IN_ANSWER), reasoning)


def calls_only(
    calls: Sequence[CallFormat], *, separator: str = "\n", several: bool = True, reasoning: Reasoning = "none"
) -> Constraint:
    """At least one call and nothing else: `tool_choice` required, or named when `calls` has only that tool.

    Raises:
        InvalidRequest: `calls` is empty, or a schema has a keyword that a grammar cannot enforce.
    """
    if not calls:
        raise InvalidRequest("tool_choice asks for a call, but the request has no tools.", param="tools")
    body: Format = {
        "type": "tags_with_separator",
        "tags": [_tag(call) for call in calls],
        "separator": separator,
        "at_least_one": True,
        "stop_after_first": not several,
    }
    return _constraint(body, reasoning)


def text_with_calls(
    calls: Sequence[CallFormat], *, trigger: str, several: bool = True, reasoning: Reasoning = "none"
) -> Constraint:
    """Free text in which each `trigger` begins one of the calls: strict tools under `tool_choice` auto.

    Raises:
        InvalidRequest: a schema has a keyword that a grammar cannot enforce.
    """
    body: Format = {
        "type": "triggered_tags",
        "triggers": [trigger],
        "tags": [_tag(call) for call in calls],
        "at_least_one": False,
        "stop_after_first": not several,
    }
    return _constraint(body, reasoning)


def _honoured(schema: Mapping[str, Any]) -> dict[str, Any]:
    keyword = unenforced(schema)
    if keyword:
        raise InvalidRequest(f"{keyword} cannot be enforced while generating; leave it out.", param=keyword)
    return dict(schema)


def _tag(call: CallFormat) -> Format:
    return {
        "type": "tag",
        "begin": call.begin,
        "content": _json(call.schema, _SPACES_IN_CALL, call.xml),
        "end": call.end,
    }


def _json(schema: Mapping[str, Any], spaces: int, xml: bool = False) -> Format:
    style = "qwen_xml" if xml else "json"
    return {"type": "json_schema", "json_schema": _honoured(schema), "max_whitespace_cnt": spaces, "style": style}


def _constraint(body: Format, reasoning: Reasoning) -> Constraint:
    if reasoning != "none":
        block: Format = {
            "type": "tag",
            "begin": "<think>" if reasoning == "optional" else "",
            "content": {"type": "any_text"},
            "end": "</think>",
        }
        gap: Format = {"type": "regex", "pattern": r"\n{0,2}"}
        thought: Format = {"type": "sequence", "elements": [block, gap]}
        if reasoning == "optional":
            thought = {"type": "optional", "content": thought}
        body = {"type": "sequence", "elements": [thought, body]}
    return Constraint(json.dumps(body, ensure_ascii=False))


class Grammars:
    """Compiles constraints for one tokenizer; safe to use from several threads.

    Args:
        tokenizer: a fast tokenizer.
        vocab_size: width of the target's logits; ids above the tokenizer's own never pass a mask.
        stop_ids: the ids that may end a constrained response.
        cache_bytes: memory for compiled grammars.

    Raises:
        ModelError: there is no stop token, so no response could end.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        *,
        vocab_size: int,
        stop_ids: Collection[int],
        cache_bytes: int = 256 << 20,
    ) -> None:
        self.vocab_size = vocab_size
        self._lock = threading.Lock()
        stops = sorted(stop_ids)
        if not stops:
            raise ModelError("The model has no stop token: a constrained response could not end.", param="eos_token_id")
        info = xg.TokenizerInfo.from_huggingface(tokenizer, vocab_size=vocab_size, stop_token_ids=stops)
        vocab: list[bytes] = list(info.decoded_vocab)
        for index, token in tokenizer.added_tokens_decoder.items():
            if token.special and index < vocab_size:
                vocab[index] = b""
        info = xg.TokenizerInfo(
            vocab, xg.VocabType.RAW, vocab_size=vocab_size, stop_token_ids=stops, add_prefix_space=info.add_prefix_space
        )
        self._compiler = xg.GrammarCompiler(info, max_threads=2, cache_limit_bytes=cache_bytes)

    def matcher(self, constraint: Constraint) -> Matcher:
        """A matcher at the start of a response. Compiling a new constraint takes from milliseconds to seconds.

        Raises:
            InvalidRequest: the schema cannot be compiled.
        """
        try:
            with self._lock:
                compiled = self._compiler.compile_structural_tag(
                    {"type": "structural_tag", "format": json.loads(constraint.format)}
                )
        except (RuntimeError, ValueError) as error:
            reason = str(error).split(": ", 1)[-1].strip()
            raise InvalidRequest(f"The JSON schema cannot be used as a grammar: {reason}", param="schema") from error
        return Matcher(xg.GrammarMatcher(compiled), self.vocab_size)


@dataclass
class Matcher:
    """One response's place in its grammar.

    `push` and `pop` move along drafts as a drafter samples them, with `mask` on the drafter's own logits before each;
    `window` and `mask` look along a whole window and come back. Only `commit` moves for good. Positions behind a draft
    that the grammar refuses, or behind the end of the response, have no mask: no verification reaches them.

    Attributes:
        spent: begin (monotonic seconds) and length of each `mask`, for the trace.
    """

    _matcher: xg.GrammarMatcher
    vocab_size: int
    spent: list[tuple[float, float]] = field(default_factory=list)
    _row: torch.Tensor = field(init=False)

    def __post_init__(self) -> None:
        self._row = xg.allocate_token_bitmask(1, self.vocab_size)

    @property
    def finished(self) -> bool:
        """A stop token was taken."""
        return self._matcher.is_terminated()

    def push(self, token: int) -> bool:
        """Move over one token if the grammar allows it there."""
        return not self.finished and self._matcher.accept_token(token)

    def pop(self, count: int) -> None:
        """Move back over the last `count` tokens, a stop token included."""
        if count:
            self._matcher.rollback(count)

    def commit(self, tokens: Iterable[int]) -> None:
        """Move over tokens that now belong to the response.

        Raises:
            DliteError: a token was not allowed; it was sampled without the mask of its position.
        """
        for token in tokens:
            if not self.push(token):
                raise DliteError(f"Token {token} was committed against the response's grammar.")

    def window(self, drafts: Sequence[int]) -> tuple[torch.Tensor, int]:
        """Bit masks for each draft's position and the one behind them, and how many leading drafts the grammar allows.

        Returns:
            int32 [len(drafts) + 1, ceil(vocab_size / 32)] on the CPU, bit v % 32 of word v // 32 set when id v is
            allowed.
        """
        masks = xg.allocate_token_bitmask(len(drafts) + 1, self.vocab_size)
        taken = 0
        try:
            for position in range(len(drafts) + 1):
                if self.finished:
                    break
                self._matcher.fill_next_token_bitmask(masks, position)
                if position == len(drafts) or not self.push(drafts[position]):
                    break
                taken += 1
        finally:
            self.pop(taken)
        return masks, taken

    def mask(self, logits: torch.Tensor, drafts: Sequence[int] = ()) -> int:
        """Set logits of refused tokens to -inf, in place.

        Args:
            logits: [W, vocab_size]; row i is the distribution of the token behind the first i drafts, W - 1 <=
                len(drafts).
            drafts: the window's drafts.

        Returns:
            How many leading drafts the grammar allows.

        Raises:
            ValueError: the logits have another shape, or rows that are not contiguous (the kernel would miss them).
        """
        if logits.shape[1] != self.vocab_size or logits.shape[0] > len(drafts) + 1 or logits.stride(1) != 1:
            raise ValueError(f"logits {tuple(logits.shape)} do not fit {len(drafts)} drafts of {self.vocab_size} ids")
        begin = time.monotonic()
        masks, taken = self.window(drafts[: logits.shape[0] - 1])
        if not mask_logits(logits, masks):
            xg.apply_token_bitmask_inplace(logits, masks.to(logits.device), vocab_size=self.vocab_size)
        self.spent.append((begin, time.monotonic() - begin))
        return taken
