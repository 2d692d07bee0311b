"""Client messages against a session's ids: what matches, where it differs, and the ids of the next prompt.

The server owns the ids. A session's history is a row of turns, each the messages a request added and the answer that
was generated, with the positions of both in the ids. A request re-sends the conversation; `compare` finds how much of
it is the stored one, message by message, and `splice` puts the next prompt together: stored ids up to the last equal
boundary, generated ids of any later answer that comes back unchanged, and freshly rendered ids for the rest. Generated
ids are never tokenised again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from dlite_agent.session.messages import JSON, Message, digest, tools_digest
from dlite_agent.session.template import ChatTemplate, Render


class Divergence(StrEnum):
    """Why a request does not simply continue the stored conversation.

    RETRY: it stops before the last answer, which is to be generated anew.
    TRUNCATED: it stops at an earlier point of the stored conversation.
    SYSTEM_CHANGED: a leading system message differs, is new or is gone.
    TOOLS_CHANGED: the tool definitions differ.
    COMPACTED: messages are gone: a later one comes back at an earlier place, or few replaced many; but one user
        message in another's place, not the first, is an edit (the user went back and said something else).
    EDITED: a message differs in place; what followed it may be gone.
    """

    RETRY = "retry"
    TRUNCATED = "truncated"
    SYSTEM_CHANGED = "system_changed"
    TOOLS_CHANGED = "tools_changed"
    COMPACTED = "compacted"
    EDITED = "edited"


@dataclass(frozen=True)
class Turn:
    """One request and its answer.

    Attributes:
        roles, digests: of the messages the request added, then of the answer.
        prompt_end: position behind those messages, in front of the generation prompt.
        end: position behind the answer's ids, its stop token included if one was generated.
    """

    roles: tuple[str, ...]
    digests: tuple[str, ...]
    prompt_end: int
    end: int


@dataclass(frozen=True)
class History:
    """A session's turns, oldest first, and the digest of the tools that its first ids describe."""

    tools: str = ""
    turns: tuple[Turn, ...] = ()

    def digests(self) -> list[str]:
        """Of all messages, in order."""
        return [d for turn in self.turns for d in turn.digests]

    def to_json(self) -> dict[str, Any]:
        """As JSON values, for a session's record."""
        rows = [[list(t.roles), list(t.digests), t.prompt_end, t.end] for t in self.turns]
        return {"tools": self.tools, "turns": rows}

    @classmethod
    def from_json(cls, value: JSON) -> History:
        """What `to_json` gave."""
        turns = tuple(Turn(tuple(roles), tuple(digests), at, end) for roles, digests, at, end in value["turns"])
        return cls(value["tools"], turns)


@dataclass(frozen=True)
class Match:
    """How a request's messages relate to a history.

    Attributes:
        equal: number of leading messages that are the same; none when the tools differ, which stand before them all.
        turns: number of leading turns that stand whole; the request continues behind them.
        at_prompt: the next turn's messages stand too, and the request ends there: only its answer is generated anew.
        keep: position in the stored ids up to which they stand.
        divergence: why not everything stored stands, or None.
    """

    equal: int
    turns: int
    at_prompt: bool
    keep: int
    divergence: Divergence | None


def compare(history: History, messages: Sequence[Message], tools: Sequence[JSON] | None = None) -> Match:
    """Match a request's messages to a history, one by one, and name the first difference."""
    if not history.turns:
        return Match(0, 0, False, 0, None)
    if tools_digest(tools) != history.tools:
        return Match(0, 0, False, 0, Divergence.TOOLS_CHANGED)
    stored = history.digests()
    given = [digest(message) for message in messages]
    equal = _common(stored, given)
    turns, seen, keep = 0, 0, 0
    for turn in history.turns:
        if seen + len(turn.digests) > equal:
            break
        turns, seen, keep = turns + 1, seen + len(turn.digests), turn.end
    if equal == len(stored):
        return Match(equal, turns, False, keep, None)
    rest = history.turns[turns]
    at_prompt = len(given) == equal == seen + len(rest.digests) - 1
    if at_prompt:
        keep = rest.prompt_end
    roles = [role for turn in history.turns for role in turn.roles]
    return Match(equal, turns, at_prompt, keep, _reason(equal, stored, given, roles, messages))


def _reason(
    equal: int, stored: Sequence[str], given: Sequence[str], roles: Sequence[str], messages: Sequence[Message]
) -> Divergence:
    gone, new = len(stored) - equal, len(given) - equal
    if not new:
        return Divergence.RETRY if gone == 1 else Divergence.TRUNCATED
    leading = all(role == "system" for role in roles[:equal])
    if leading and "system" in (roles[equal], messages[equal].role):
        return Divergence.SYSTEM_CHANGED
    if new > 1 and given[equal + 1] == stored[min(equal + 1, len(stored) - 1)]:
        return Divergence.EDITED
    last = {item: i for i, item in enumerate(stored)}
    if any(last.get(given[i], -1) > i for i in range(equal, len(given))):
        return Divergence.COMPACTED
    resent = new == 1 and messages[equal].role == roles[equal] == "user" and not leading
    return Divergence.EDITED if resent or new >= gone - 1 else Divergence.COMPACTED


@dataclass(frozen=True)
class Prompt:
    """The next turn's ids, before its answer.

    Attributes:
        ids: the whole prompt, generation prompt included.
        keep: leading ids taken over from the stored ones at the last equal boundary.
        shared: leading ids that equal the stored ones, by chance or not, `shared` >= `keep`; target KV is good up to
            here.
        match: the comparison this came from.
        at: index of the first differing message, or None.
        prompt_end: as in the `Turn` to come.
    """

    ids: list[int]
    keep: int
    shared: int
    match: Match
    at: int | None
    prompt_end: int
    _history: History
    _messages: tuple[Message, ...]

    @property
    def added(self) -> tuple[Message, ...]:
        """The messages that the turn to come answers: those behind what was taken over."""
        return self._messages

    def answered(self, answer: Message, end: int) -> History:
        """The history once the answer is there: `answer` as sent to the client, `end` the length of the ids with it."""
        turn = _turn((*self._messages, answer), self.prompt_end, end)
        return History(self._history.tools, (*self._history.turns, turn))


def _turn(messages: Sequence[Message], prompt_end: int, end: int) -> Turn:
    return Turn(tuple(m.role for m in messages), tuple(digest(m) for m in messages), prompt_end, end)


def splice(
    template: ChatTemplate,
    history: History,
    ids: Sequence[int],
    messages: Sequence[Message],
    tools: Sequence[JSON] | None = None,
    *,
    thinking: bool | None = None,
) -> Prompt:
    """The prompt for a request: stored ids where its messages are the stored ones, rendered ids for the rest.

    An empty history renders everything. Behind a difference, answers that were generated in this session and come back
    unchanged keep their ids; those ids stand where their messages stand now, so a changed system prompt re-tokenises
    nothing generated.

    Args:
        ids: the session's ids, as long as the last turn's `end` or longer (an answer that was not kept).

    Raises:
        InvalidRequest: the template refuses the conversation.
    """
    match = compare(history, messages, tools)
    known: dict[str, list[Turn]] = {}
    for turn in reversed(history.turns[match.turns :]):
        known.setdefault(turn.digests[-1], []).append(turn)
    done = list(history.turns[: match.turns])
    out = list(ids[: match.keep])
    pending = list(messages[sum(len(turn.digests) for turn in done) :])
    prompt_end = match.keep
    if match.at_prompt:
        prompt = template.prompt(thinking=thinking)
    else:
        while (cut := _next_known(pending, known)) is not None:
            part, turn = pending[:cut], known[digest(pending[cut])].pop()
            _extend(out, _render(template, out, part, tools, thinking))
            start = len(out)
            out += ids[turn.prompt_end : turn.end]
            done.append(_turn(pending[: cut + 1], start, len(out)))
            pending = pending[cut + 1 :]
        render = _render(template, out, pending, tools, thinking)
        _extend(out, render)
        prompt_end, prompt = len(out), render.prompt
    out += prompt
    shared = _common(out, ids)
    return Prompt(
        ids=out,
        keep=min(match.keep, shared),
        shared=shared,
        match=match,
        at=None if match.divergence is None else match.equal,
        prompt_end=prompt_end,
        _history=History(tools_digest(tools), tuple(done)),
        _messages=tuple(pending),
    )


def _common(a: Sequence[object], b: Sequence[object]) -> int:
    """Length of the common prefix."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def _next_known(pending: Sequence[Message], known: dict[str, list[Turn]]) -> int | None:
    """Index of the first message that is a stored answer not used yet; an answer needs a message before it."""
    for i, message in enumerate(pending):
        if i and message.role == "assistant" and known.get(digest(message)):
            return i
    return None


def _render(
    template: ChatTemplate,
    out: Sequence[int],
    part: Sequence[Message],
    tools: Sequence[JSON] | None,
    thinking: bool | None,
) -> Render:
    if not out:
        return template.opening(part, tools, thinking=thinking)
    return template.after_answer(out[-1], part, tools, thinking=thinking)


def _extend(out: list[int], render: Render) -> None:
    if render.trim:
        del out[-render.trim :]
    out += render.ids
