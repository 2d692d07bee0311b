"""From settings and a loaded model to the stores and tiers of a server's sessions."""

from __future__ import annotations

import hashlib
import uuid
from pathlib import Path

from dlite_agent.config import SessionSettings
from dlite_agent.decode.load import Runtime
from dlite_agent.session.persist import Persister
from dlite_agent.session.record import Fingerprint, kv_layout
from dlite_agent.session.retention import Costs, Retention
from dlite_agent.session.store.base import SessionStore
from dlite_agent.session.store.disk import DiskStore
from dlite_agent.session.store.memory import MemoryStore
from dlite_agent.session.tiers import Tiers

SESSIONS_FOLDER = "sessions"


def fingerprint_of(runtime: Runtime) -> Fingerprint:
    """What stored state of this model depends on.

    Of the drafter it is the target layers it taps: a drafter keeps no state of its own, so a better one for the same
    taps goes on from what an older one's sessions have stored.
    """
    decoder, tokenizer = runtime.decoder, runtime.tokenizer
    target, spec = decoder.target, decoder.target.spec
    vocabulary = "\0".join(f"{token} {index}" for token, index in sorted(tokenizer.get_vocab().items()))
    return Fingerprint(
        target=target.fingerprint,
        drafter="taps " + " ".join(map(str, decoder.taps)),
        tokenizer=_digest(vocabulary),
        template=_digest(str(tokenizer.chat_template)),
        dtype=target.precision.name,
        kv_layout=kv_layout(spec.num_layers, spec.num_kv_heads, spec.head_dim),
    )


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:16]


def open_persister(settings: SessionSettings, data_dir: Path | None, runtime: Runtime) -> Persister | None:
    """The stores that settings ask for; None where sessions live in memory only.

    Raises:
        Conflict: another process owns the folder.
        StoreUnavailable: the folder cannot be used.
        InvalidRequest: the Redis URL is malformed.
    """
    if data_dir is None and settings.redis_url is None:
        return None
    shared = None
    if settings.redis_url is not None:
        from dlite_agent.session.store.redis import RedisStore

        shared = RedisStore(settings.redis_url, ttl_s=settings.redis_ttl_s, kv_limit=settings.redis_kv_limit)
    # Blocks pass through the local store on their way to the shared one: in memory it holds as much KV as that takes.
    local: SessionStore = (
        MemoryStore(kv_limit=settings.redis_kv_limit) if data_dir is None else DiskStore(data_dir / SESSIONS_FOLDER)
    )
    return Persister(
        local,
        fingerprint_of(runtime),
        bytes_per_position=runtime.decoder.pool.bytes_per_position,
        owner=f"replica {uuid.uuid4().hex}",
        shared=shared,
        lease_ttl_s=settings.lease_ttl_s,
    )


def make_tiers(settings: SessionSettings, runtime: Runtime, persister: Persister | None) -> Tiers:
    """The tiers of a device's sessions. Costs are starting values until the first prefills and transfers are timed."""
    pool = runtime.decoder.pool
    budget = pool.capacity * pool.bytes_per_position
    slow = pool.device.type == "cpu"
    keeps_kv = persister is not None and persister.local.kv_limit != 0
    costs = Costs(
        bytes_per_token=pool.bytes_per_position,
        prefill_s=1e-3 if slow else 4e-5,
        host_bytes_s=0.0 if not settings.host_bytes else 4e9 if slow else 25e9,
        disk_bytes_s=1e9 if keeps_kv else 0.0,
        device_gb=budget / 1e9,
    )
    return Tiers(Retention(costs, settings.idle_share * budget, settings.host_bytes), persister)
