"""Which session a request belongs to: by a name the client sends, else by the conversation it re-sends."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from dlite_agent.errors import InvalidRequest
from dlite_agent.session.history import History
from dlite_agent.session.messages import JSON, Message, digest, tools_digest

_LONGEST = 256


@dataclass(frozen=True)
class Convention:
    """One way that clients name a session.

    Attributes:
        place, name: a header, or a field of the body.
        agent: a header that tells agents of one session apart; each of them is a conversation of its own.
        parent: a header that names the parent: an agent of the same session where `agent` is set, else a session.
        used_by: who sends it.
    """

    place: Literal["body", "header"]
    name: str
    used_by: str
    agent: str = ""
    parent: str = ""


# In order of precedence. A field of the body is meant for the server; headers name the client's own session, from the
# most specific name to the most general; a program id groups several conversations in some setups, so it comes last.
CONVENTIONS = (
    Convention("body", "session_id", "DLite Agent, vLLM"),
    Convention("body", "prompt_cache_key", "Codex, OpenAI SDK"),
    Convention(
        "header", "x-claude-code-session-id", "Claude Code", "x-claude-code-agent-id", "x-claude-code-parent-agent-id"
    ),
    Convention("header", "x-dynamo-session-id", "Dynamo", parent="x-dynamo-parent-session-id"),
    Convention("header", "session-id", "Codex", "thread-id"),
    Convention("header", "x-session-id", "OpenCode, vLLM, Ray Serve, OpenRouter", parent="x-parent-session-id"),
    Convention("header", "x-session-affinity", "OpenCode", parent="x-parent-session-id"),
    Convention("body", "program_id", "ThunderAgent"),
)
_FINAL = "x-dynamo-session-final"


@dataclass(frozen=True)
class SessionName:
    """A session as the client names it.

    Attributes:
        id: the name; of an agent inside a session, both names joined by a slash.
        source: the convention it came by, as "header x-session-id".
        parent: the parent's name in the same form, or empty.
        final: the client says that this is the session's last request.
    """

    id: str
    source: str
    parent: str = ""
    final: bool = False


def session_name(headers: Mapping[str, str], body: JSON) -> SessionName | None:
    """The session's name by the first of `CONVENTIONS` that the request follows, or None.

    Args:
        headers: names in any case; `_` counts as `-`, since proxies change one into the other.

    Raises:
        InvalidRequest: the name is no string, too long or holds control characters.
    """
    sent = {name.lower().replace("_", "-"): value for name, value in headers.items()}
    for row in CONVENTIONS:
        found = body.get(row.name) if row.place == "body" else sent.get(row.name)
        name = _checked(found, row.name)
        if not name:
            continue
        agent = _checked(sent.get(row.agent), row.agent)
        parent = _checked(sent.get(row.parent), row.parent)
        if row.agent:
            parent = f"{name}/{parent}" if parent else name if agent and agent != name else ""
        return SessionName(
            id=f"{name}/{agent}" if agent and agent != name else name,
            source=f"{row.place} {row.name}",
            parent=parent,
            final=sent.get(_FINAL, "").strip().lower() == "true",
        )
    return None


def _checked(value: Any, field: str) -> str:
    if value is None:
        return ""
    if not isinstance(value, str):
        raise InvalidRequest(f"{field} must be a string.", param=field)
    name: str = value.strip()
    if len(name) > _LONGEST or not name.isprintable():
        raise InvalidRequest(f"{field} must be at most {_LONGEST} printable characters.", param=field)
    return name


@dataclass(frozen=True)
class Found:
    """A stored conversation that a request continues.

    Attributes:
        session_id: the session.
        messages: number of leading messages that are its own.
        at_tip: nothing in the session lies behind them. Otherwise fork it: its own client may be further on.
    """

    session_id: str
    messages: int
    at_tip: bool


def name_label(owner: str, name: str) -> str:
    """What a stored session is found by when its client names it; another owner's has another label."""
    return hashlib.sha256(f"name\0{owner}\0{name}".encode()).hexdigest()


def turn_labels(owner: str, history: History) -> list[str]:
    """What a stored session is found by when nobody names it: one label for each turn's end, oldest first."""
    key, keys = _seed(owner, history.tools), []
    for turn in history.turns:
        for item in turn.digests:
            key = _chain(key, item)
        keys.append(key)
    return keys


def message_labels(owner: str, messages: Sequence[Message], tools: Sequence[JSON] | None = None) -> list[str]:
    """Labels that sessions have which end a turn behind the request's first, second, ... message."""
    key = _seed(owner, tools_digest(tools))
    return [key := _chain(key, digest(message)) for message in messages]


class SessionIndex:
    """Sessions by what was said in them, for requests that name none. To be used from one thread.

    Each turn's end has a key: a hash chained over the owner, the tools and all messages so far. The longest chain of a
    request that is known finds its session in one look-up a message, whatever the number of sessions.
    """

    def __init__(self) -> None:
        self._by_key: dict[str, dict[str, None]] = {}
        self._keys: dict[str, list[str]] = {}

    def put(self, owner: str, session_id: str, history: History) -> None:
        """Add a session, or bring it up to date; it becomes the most recent one."""
        self.drop(session_id)
        keys = turn_labels(owner, history)
        for key in keys:
            self._by_key.setdefault(key, {})[session_id] = None
        self._keys[session_id] = keys

    def drop(self, session_id: str) -> None:
        """Forget a session; an unknown one is fine."""
        for key in self._keys.pop(session_id, ()):
            holders = self._by_key.get(key, {})
            holders.pop(session_id, None)
            if not holders:
                self._by_key.pop(key, None)

    def find(self, owner: str, messages: Sequence[Message], tools: Sequence[JSON] | None = None) -> Found | None:
        """The owner's session with the longest common run of whole turns; of several, one that ends there, then the
        latest.

        At least one answer must be in common: an equal opening alone is no reason to think that it is the same
        conversation.
        """
        chain = message_labels(owner, messages, tools)
        for count in range(len(chain), 0, -1):
            holders = list(self._by_key.get(chain[count - 1], ()))
            if holders:
                tips = [name for name in holders if self._keys[name][-1] == chain[count - 1]]
                return Found((tips or holders)[-1], count, bool(tips))
        return None


def _seed(owner: str, tools: str) -> str:
    return hashlib.sha256(f"{owner}\0{tools}".encode()).hexdigest()


def _chain(key: str, item: str) -> str:
    return hashlib.sha256(f"{key}{item}".encode()).hexdigest()
