"""Redaction: secrets are replaced before content reaches a log."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

MARK = "[redacted]"

_NAMES = (
    r"(?:api[_-]?key|access[_-]?key(?:[_-]?id)?|secret[_-]?key|private[_-]?key|client[_-]?secret|secret|password|passwd|"
    r"passphrase|authorization|auth[_-]?token|access[_-]?token|refresh[_-]?token|session[_-]?token|id[_-]?token|"
    r"set[_-]cookie|cookie|credentials?|(?<![a-z])token)"
)
_SECRET_KEY = re.compile(rf"{_NAMES}$", re.IGNORECASE)

_PATTERNS = tuple(
    re.compile(pattern, flags)
    for pattern, flags in (
        (r"-----BEGIN [A-Z ]*PRIVATE KEY-----.*?(?:-----END [A-Z ]*PRIVATE KEY-----|\Z)", re.DOTALL),
        (r"\bsk-[A-Za-z0-9_-]{16,}", 0),
        (r"\b(?:ghp|gho|ghu|ghs|ghr|github_pat|glpat|hf|xox[abprs])[_-][A-Za-z0-9_-]{16,}", 0),
        (r"\b(?:AKIA|ASIA)[A-Z0-9]{16}\b", 0),
        (r"\bAIza[A-Za-z0-9_-]{30,}", 0),
        (r"\beyJ[A-Za-z0-9_-]{8,}\.[A-Za-z0-9_-]{8,}\.[A-Za-z0-9_-]*", 0),
    )
)
# Groups 1 and 3 stay, what lies between is the secret. Unquoted values are taken only in the shapes of environment
# files, query strings and YAML, since source code assigns to names such as `token` all the time.
_KEPT_AROUND = tuple(
    re.compile(pattern, re.IGNORECASE)
    for pattern in (
        r"(\b(?:bearer|basic)\s+)([A-Za-z0-9+/=_.~-]{8,})()",
        r"(\b[a-z][a-z0-9+.-]*://[^\s/:@]*:)([^\s/@]+)(@)",
        rf"({_NAMES}\\?[\"']?\s*[:=]\s*\\?[\"'])((?:(?!\\?[\"']).)+)(\\?[\"'])",
        rf"({_NAMES}=)([^\s\"'&;,()\\]{{6,}})()",
        rf"({_NAMES}:[ \t]*)((?=[^\s,]*\d)[^\s\"'&;,(){{}}\[\]\\]{{8,}})()",
    )
)


@dataclass(frozen=True)
class Redactor:
    """Replaces secrets in text and in nested JSON values.

    Known shapes of keys and tokens, values whose key names a secret, and the given `literals` (for instance values of
    environment variables) are replaced by a mark. Redacting twice changes nothing more.
    """

    literals: tuple[str, ...] = ()

    def text(self, value: str) -> str:
        """`value` with every recognised secret replaced."""
        for literal in sorted(self.literals, key=len, reverse=True):
            if literal:
                value = value.replace(literal, MARK)
        for pattern in _PATTERNS:
            value = pattern.sub(MARK, value)
        for pattern in _KEPT_AROUND:
            value = pattern.sub(lambda match: f"{match[1]}{MARK}{match[3]}", value)
        return value

    def value(self, value: Any) -> Any:
        """A JSON value, redacted throughout; keys of objects are kept unless they hold a secret themselves."""
        if isinstance(value, str):
            return self.text(value)
        if isinstance(value, (list, tuple)):
            return [self.value(item) for item in value]
        if isinstance(value, dict):
            return {
                self.text(str(key)): MARK if _SECRET_KEY.search(str(key)) and _may_hide(item) else self.value(item)
                for key, item in value.items()
            }
        return value


def _may_hide(value: Any) -> bool:
    return value is not None and not isinstance(value, (bool, dict, list, tuple)) and value != ""
