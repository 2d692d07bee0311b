"""Redaction: secrets are replaced before content reaches a log."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, NamedTuple

MARK = "[redacted]"

_NAMES = (
    r"(?:api[_-]?key|access[_-]?key(?:[_-]?id)?|secret[_-]?key|private[_-]?key|client[_-]?secret|secret|password|passwd|"
    r"passphrase|authorization|auth[_-]?token|access[_-]?token|refresh[_-]?token|session[_-]?token|id[_-]?token|"
    r"set[_-]cookie|cookie|credentials?|(?<![a-z])token)"
)
_SECRET_KEY = re.compile(rf"{_NAMES}$", re.IGNORECASE)


class _Rule(NamedTuple):
    """A pattern, tried only where one of the seeds occurs: finding a fixed text is far cheaper than the pattern."""

    seeds: tuple[str, ...]
    pattern: re.Pattern[str]


_SHAPES = (
    _Rule(
        ("PRIVATE KEY",),
        re.compile(
            r"-----BEGIN [A-Z ]{0,40}PRIVATE KEY-----.*?(?:-----END [A-Z ]{0,40}PRIVATE KEY-----|\Z)", re.DOTALL
        ),
    ),
    _Rule(("sk-",), re.compile(r"\bsk-[A-Za-z0-9_-]{16,}")),
    _Rule(
        ("gh", "glpat", "hf_", "xox"),
        re.compile(r"\b(?:ghp|gho|ghu|ghs|ghr|github_pat|glpat|hf|xox[abprs])[_-][A-Za-z0-9_-]{16,}"),
    ),
    _Rule(("AKIA", "ASIA"), re.compile(r"\b(?:AKIA|ASIA)[A-Z0-9]{16}\b")),
    _Rule(("AIza",), re.compile(r"\bAIza[A-Za-z0-9_-]{30,}")),
    _Rule(("eyJ",), re.compile(r"\beyJ[A-Za-z0-9_-]{8,}\.[A-Za-z0-9_-]{8,}\.[A-Za-z0-9_-]*")),
)
_NAME_SEEDS = ("key", "secret", "passw", "passphrase", "auth", "token", "cookie", "credential")
# Tried line by line, seeds in lower case. Groups 1 and 3 stay, what lies between is the secret. Unquoted values are
# taken only in the shapes of environment files, query strings and YAML, since source code assigns to names such as
# `token` all the time.
_CONTEXTS = (
    _Rule(("bearer", "basic"), re.compile(r"(\b(?:bearer|basic)[ \t]+)([A-Za-z0-9+/=_.~-]{8,})()", re.IGNORECASE)),
    _Rule(
        ("://",),
        re.compile(r"(\b[a-z][a-z0-9+.-]{0,20}://[^\s/:@]{0,256}:)([^\s/@]{1,1024})(@)", re.IGNORECASE),
    ),
    _Rule(
        _NAME_SEEDS,
        re.compile(
            rf"({_NAMES}\\?[\"']?[ \t]*[:=][ \t]*\\?[\"'])((?:(?!\\?[\"']).){{1,8192}})(\\?[\"'])", re.IGNORECASE
        ),
    ),
    _Rule(_NAME_SEEDS, re.compile(rf"({_NAMES}=)([^\s\"'&;,()\\]{{6,}})()", re.IGNORECASE)),
    _Rule(
        _NAME_SEEDS,
        re.compile(rf"({_NAMES}:[ \t]*)((?=[^\s,]{{0,256}}\d)[^\s\"'&;,(){{}}\[\]\\]{{8,}})()", re.IGNORECASE),
    ),
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
        for rule in _SHAPES:
            if any(seed in value for seed in rule.seeds):
                value = rule.pattern.sub(MARK, value)
        return "\n".join(map(_redact_line, value.split("\n")))

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


def _redact_line(line: str) -> str:
    lower = line.lower()
    for rule in _CONTEXTS:
        if any(seed in lower for seed in rule.seeds):
            line = rule.pattern.sub(lambda match: f"{match[1]}{MARK}{match[3]}", line)
    return line
