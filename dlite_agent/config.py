"""Settings: one frozen tree, built once at start, with every default in one place."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, get_args

from dlite_agent.errors import InvalidRequest

DEFAULT_TARGET_NAME = "smollm2-135m"
Mode = Literal["ar", "dlite", "suffix", "mixed"]
"""Drafts: none, the drafter's, copies of the session's own text, or in each round what promises most."""


@dataclass(frozen=True)
class ModelSettings:
    """What runs, and where.

    Attributes:
        target: model folder, GGUF file, hub id or the default target's name.
        drafter: checkpoint folder, "auto" (the shipped one that fits) or "none".
        kv_budget: bytes of KV that all sessions together may hold on the device.
        context_limit: ids a session may hold; None is the model's own.
        names: names by which clients may ask for the model; empty means the target's own.
    """

    target: str = DEFAULT_TARGET_NAME
    drafter: str = "auto"
    dtype: str = "auto"
    device: str = "auto"
    threads: int | None = None
    kv_budget: int = 4 << 30
    context_limit: int | None = None
    anchor_group_size: int | None = None
    names: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        _at_least(self, "kv_budget", 1)
        if self.context_limit is not None:
            _at_least(self, "context_limit", 2)
        if self.threads is not None:
            _at_least(self, "threads", 1)


@dataclass(frozen=True)
class SchedulerSettings:
    """How requests share the device.

    Attributes:
        max_running: turns in one batch.
        max_queued, max_queued_tokens: requests, and prompt tokens in them, that may wait; one more is refused (429).
        prefill_chunk: prompt rows of one step while nobody decodes.
        prefill_chunk_beside: prompt rows of one step beside decoding turns; it bounds how long a prompt delays them.
        headroom: KV positions reserved ahead of a growing answer.
        request_seconds: default deadline of a request, queue included.
        share_prefixes: copy a common prompt prefix's KV from another key's session too.
        mode: how turns decode that do not say; None is `dlite` where there is a drafter, else `ar`.
    """

    max_running: int = 16
    max_queued: int = 64
    max_queued_tokens: int = 1 << 18
    prefill_chunk: int = 512
    prefill_chunk_beside: int = 128
    headroom: int = 256
    request_seconds: float = 1800.0
    share_prefixes: bool = False
    mode: Mode | None = None

    def __post_init__(self) -> None:
        for name in ("max_running", "max_queued", "max_queued_tokens", "prefill_chunk", "prefill_chunk_beside"):
            _at_least(self, name, 1)
        _at_least(self, "headroom", 1)
        if self.mode is not None and self.mode not in get_args(Mode):
            raise InvalidRequest(f"mode must be one of {', '.join(get_args(Mode))}, not {self.mode!r}", param="mode")
        if not self.request_seconds > 0:
            raise InvalidRequest("request_seconds must be above 0", param="request_seconds")


@dataclass(frozen=True)
class ServerSettings:
    """The HTTP side.

    Attributes:
        host, port: where to listen; port 0 takes a free one.
        api_keys: accepted keys; empty means no key is asked for, which only a loopback host may do.
        allowed_hosts: values of the Host header besides loopback names; with keys, empty allows any.
        allowed_origins: web origins that may call the API (CORS); none by default.
        max_body_bytes, max_header_bytes: larger requests are refused (413, 431).
        keepalive_seconds: pause after which a stream gets a comment.
        drain_seconds: how long requests in flight may go on after SIGTERM.
        session_conflict: what a request meets whose session has a turn in flight: "refuse" (409) or "wait".
        max_sessions: sessions kept; the longest unused goes first.
        max_responses: stored responses that `previous_response_id` may name.
        log_content: write prompts and answers to the log.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    api_keys: tuple[str, ...] = field(default=(), repr=False)
    allowed_hosts: tuple[str, ...] = ()
    allowed_origins: tuple[str, ...] = ()
    max_body_bytes: int = 32 << 20
    max_header_bytes: int = 32 << 10
    keepalive_seconds: float = 5.0
    drain_seconds: float = 30.0
    session_conflict: Literal["refuse", "wait"] = "refuse"
    max_sessions: int = 4096
    max_responses: int = 16384
    log_content: bool = False

    def __post_init__(self) -> None:
        if not 0 <= self.port <= 65535:
            raise InvalidRequest("port must be 0..65535", param="port")
        for name in ("max_body_bytes", "max_header_bytes", "max_sessions", "max_responses"):
            _at_least(self, name, 1)
        if not self.keepalive_seconds > 0 or self.drain_seconds < 0:
            raise InvalidRequest(
                "keepalive_seconds must be above 0, drain_seconds at least 0", param="keepalive_seconds"
            )
        if self.session_conflict not in ("refuse", "wait"):
            raise InvalidRequest("session_conflict must be refuse or wait", param="session_conflict")
        if any(len(key) < 8 or not key.isprintable() or not key.isascii() for key in self.api_keys):
            raise InvalidRequest("an API key must be at least 8 printable ASCII characters", param="api_keys")
        if not self.api_keys and not is_loopback(self.host):
            raise InvalidRequest(
                f"{self.host} can be reached from other machines: set an API key, or listen on 127.0.0.1", param="host"
            )


@dataclass(frozen=True)
class SessionSettings:
    """What becomes of sessions between their turns.

    Attributes:
        host_bytes: host memory that paused sessions may hold; 0 for none.
        idle_share: share of the KV budget that paused sessions may hold at most.
        disk_bytes: what session files may take; beyond it the longest idle sessions are removed. None for no limit.
        redis_url: a Redis or Valkey server shared by replicas, with user, password and database; None for none.
        redis_kv_limit: bytes of KV that one session may keep there; 0 keeps KV away from it.
        redis_ttl_s: seconds after which a session that nobody uses is gone from there.
        lease_ttl_s: seconds after which another replica may take over a session that this one does not use.
    """

    host_bytes: int = 2 << 30
    idle_share: float = 0.8
    disk_bytes: int | None = None
    redis_url: str | None = field(default=None, repr=False)
    redis_kv_limit: int = 0
    redis_ttl_s: float = 86_400.0
    lease_ttl_s: float = 30.0

    def __post_init__(self) -> None:
        for name in ("host_bytes", "redis_kv_limit"):
            _at_least(self, name, 0)
        if self.disk_bytes is not None:
            _at_least(self, "disk_bytes", 1)
        if not 0 < self.idle_share <= 1:
            raise InvalidRequest("idle_share must be above 0 and at most 1", param="idle_share")
        if not (self.lease_ttl_s >= 1 and self.redis_ttl_s >= self.lease_ttl_s):
            raise InvalidRequest("lease_ttl_s must be at least 1 and at most redis_ttl_s", param="lease_ttl_s")


@dataclass(frozen=True)
class Settings:
    """Everything a server is started with.

    Attributes:
        data_dir: folder for event logs and sessions; None keeps all in memory.
    """

    model: ModelSettings = field(default_factory=ModelSettings)
    scheduler: SchedulerSettings = field(default_factory=SchedulerSettings)
    server: ServerSettings = field(default_factory=ServerSettings)
    sessions: SessionSettings = field(default_factory=SessionSettings)
    data_dir: Path | None = None


def is_loopback(host: str) -> bool:
    """Whether a host name or address only reaches this machine."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def read_keys(path: Path) -> tuple[str, ...]:
    """API keys of a file, one a line; empty lines and lines that begin with # are skipped.

    Raises:
        InvalidRequest: the file cannot be read or holds no key.
    """
    try:
        lines = [line.strip() for line in path.read_text().splitlines()]
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidRequest(f"cannot read API keys: {error}", param="api_key_file") from error
    keys = tuple(line for line in lines if line and not line.startswith("#"))
    if not keys:
        raise InvalidRequest(f"{path.name} holds no API key", param="api_key_file")
    return keys


def _at_least(settings: object, name: str, low: int) -> None:
    if getattr(settings, name) < low:
        raise InvalidRequest(f"{name} must be at least {low}", param=name)
