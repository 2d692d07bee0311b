"""Sessions in Redis or Valkey, for several replicas: records, ids, features, leases, and KV only as far as allowed.

All keys of a session carry its digest in braces, so a cluster keeps them in one slot and a script may use them all.
Every write is a script that checks the lease's fencing epoch first. Keys live `ttl_s` from the last use; whatever the
server has lost or evicted is a miss.

A lease that ran out, or that a server without persistence forgot, still permits writing while nobody has taken over:
the newest epoch the server knows is then the writer's own, or none at all.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar, cast

import redis
from redis.backoff import NoBackoff
from redis.exceptions import RedisError
from redis.retry import Retry

from dlite_agent.errors import InvalidRequest, NotFound
from dlite_agent.session.record import Refused, SessionRecord, decode
from dlite_agent.session.store.base import (
    MAX_BLOCK_BYTES,
    Entry,
    Lease,
    LeaseHeld,
    StaleLease,
    StoreUnavailable,
)

_LABELS = 8
"""Labels written with a commit: earlier ones were written by earlier commits."""
_FETCH = 8
"""Blocks asked for at once: at most 64 MB on the way."""

# KEYS lease, last lease given out, record. Newest epoch that has been given out or written.
_NEWEST = """
local given = redis.call('GET', KEYS[2])
local newest = tonumber(redis.call('HGET', KEYS[3], 'epoch') or '0')
if given then newest = math.max(newest, tonumber(string.match(given, '^%d+'))) end
local lease = redis.call('GET', KEYS[1])
"""
# ARGV owner, lease ms, ttl ms, epoch to be above. Returns the epoch, or minus the ms that another's lease has left.
_ACQUIRE = (
    _NEWEST
    + """
if lease then
  local epoch, owner = string.match(lease, '^(%d+) (.*)$')
  if owner ~= ARGV[1] then return -math.max(redis.call('PTTL', KEYS[1]), 1) end
  redis.call('PEXPIRE', KEYS[1], ARGV[2])
  return tonumber(epoch)
end
local epoch = math.max(newest, tonumber(ARGV[4])) + 1
local mine = epoch .. ' ' .. ARGV[1]
redis.call('SET', KEYS[2], mine, 'PX', ARGV[3])
redis.call('SET', KEYS[1], mine, 'PX', ARGV[2])
return epoch
"""
)
# ARGV owner, epoch, lease ms, ttl ms. Returns 0 where the caller may not write; else prolongs its lease and goes on.
_GUARD = (
    _NEWEST
    + """
local mine = ARGV[2] .. ' ' .. ARGV[1]
local epoch = tonumber(ARGV[2])
if newest > epoch or (lease and lease ~= mine) then return 0 end
if not lease and given and given ~= mine then return 0 end
if not lease and not given and newest ~= 0 and newest ~= epoch then return 0 end
redis.call('SET', KEYS[2], mine, 'PX', ARGV[4])
redis.call('SET', KEYS[1], mine, 'PX', ARGV[3])
"""
)
_RENEW = _GUARD + "return 1"
# KEYS and ARGV of the guard, then the block's.
_PUT = _GUARD + "redis.call('SET', KEYS[4], ARGV[5], 'PX', ARGV[4])\nreturn 1"
# KEYS and ARGV of the guard, then KEYS all blocks of the record, ARGV body, tokens, turn, bytes.
_COMMIT = (
    _GUARD
    + """
for i = 4, #KEYS do redis.call('PEXPIRE', KEYS[i], ARGV[4]) end
redis.call('HSET', KEYS[3], 'body', ARGV[5], 'epoch', ARGV[2])
redis.call('PEXPIRE', KEYS[3], ARGV[4])
return 1
"""
)
_RELEASE = """
if redis.call('GET', KEYS[1]) == ARGV[2] .. ' ' .. ARGV[1] then redis.call('DEL', KEYS[1]) end
return 1
"""
_T = TypeVar("_T")


class RedisStore:
    """A SessionStore on a server shared by replicas.

    Args:
        url: `redis://` or `rediss://` (TLS) with user, password and database as needed.
        ttl_s: seconds a session lives after its last use.
        kv_limit: bytes of KV blocks taken for one session; 0 keeps KV away from the server.
        timeout_s: for connecting and for every command.

    Nothing is sent before the first use, and every call tries anew, so a server that comes back is used at once.

    Raises:
        InvalidRequest: the URL is malformed.
    """

    tier = "redis"

    def __init__(
        self, url: str, *, ttl_s: float = 86_400, kv_limit: int = 0, timeout_s: float = 2.0, namespace: str = "dlite"
    ) -> None:
        self.kv_limit: int | None = kv_limit
        self._namespace = namespace
        self._ttl = max(int(ttl_s * 1000), 1)
        try:
            self._client = redis.Redis.from_url(
                url,
                socket_timeout=timeout_s,
                socket_connect_timeout=timeout_s,
                retry=Retry(NoBackoff(), 1),
                health_check_interval=30,
            )
        except ValueError as error:
            raise InvalidRequest(f"The Redis URL cannot be used: {error}", param="redis_url") from error

    def _key(self, session: str, *what: str) -> str:
        tag = hashlib.sha256(session.encode()).hexdigest()[:32]
        return ":".join((self._namespace, f"{{{tag}}}", *what))

    def _base(self, session: str) -> list[str]:
        return [self._key(session, "lease"), self._key(session, "given"), self._key(session, "record")]

    def _call(self, work: Callable[[], _T]) -> _T:
        try:
            return work()
        except RedisError as error:
            raise StoreUnavailable(
                f"The Redis server does not serve ({error}): sessions held here go on, others must wait for it.",
                param="redis_url",
            ) from error

    def _run(self, script: str, keys: Sequence[str], args: Sequence[str | int | bytes]) -> int:
        return int(self._call(lambda: cast(Any, self._client.eval(script, len(keys), *keys, *args))))

    def acquire(self, session: str, owner: str, ttl_s: float, *, after: int = 0) -> Lease:
        got = self._run(_ACQUIRE, self._base(session), [owner, _ms(ttl_s), self._ttl, after])
        if got < 0:
            raise LeaseHeld(
                f"The session is held by another replica for {-got / 1000:.1f} s more: retry then, or send the "
                "request there.",
                param="session",
            )
        return Lease(session, owner, got, ttl_s)

    def renew(self, lease: Lease) -> None:
        self._fenced(_RENEW, lease)

    def _fenced(self, script: str, lease: Lease, keys: Sequence[str] = (), args: Sequence[bytes] = ()) -> None:
        guard: list[str | int | bytes] = [lease.owner, lease.epoch, _ms(lease.ttl_s), self._ttl]
        if not self._run(script, [*self._base(lease.session), *keys], [*guard, *args]):
            raise StaleLease(f"Epoch {lease.epoch} of the session has been superseded.", param="epoch")

    def release(self, lease: Lease) -> None:
        self._run(_RELEASE, self._base(lease.session)[:1], [lease.owner, lease.epoch])

    def load(self, session: str) -> bytes | None:
        key = self._key(session, "record")
        return self._call(lambda: cast("bytes | None", self._client.hget(key, "body")))

    def _label(self, label: str) -> str:
        return f"{self._namespace}:label:{label}"

    def find(self, labels: Sequence[str]) -> dict[str, str]:
        pipeline = self._client.pipeline(transaction=False)
        for label in labels:
            pipeline.get(self._label(label))
        found = self._call(pipeline.execute) if labels else []
        return {label: data.decode() for label, data in zip(labels, found, strict=True) if data is not None}

    def held(self, session: str, keys: Sequence[str]) -> set[str]:
        pipeline = self._client.pipeline(transaction=False)
        for key in keys:
            pipeline.exists(self._key(session, key))
        found = self._call(pipeline.execute)
        return {key for key, there in zip(keys, found, strict=True) if there}

    def commit(self, lease: Lease, record: SessionRecord, blocks: Mapping[str, bytes]) -> None:
        for key, data in blocks.items():
            if len(data) >= MAX_BLOCK_BYTES:
                raise InvalidRequest(
                    f"A block of {len(data)} bytes is too large for Redis; cut blocks below {MAX_BLOCK_BYTES}.",
                    param="block_rows",
                )
            self._fenced(_PUT, lease, [self._key(lease.session, key)], [data])
        self._fenced(_COMMIT, lease, [self._key(lease.session, key) for key in record.keys], [record.encode()])
        # Labels lie in other slots of a cluster, so they follow on their own; a missing one is a session not found.
        pipeline = self._client.pipeline(transaction=False)
        for label in record.labels[-_LABELS:]:
            pipeline.set(self._label(label), lease.session, px=self._ttl)
        self._call(pipeline.execute)

    def fetch(self, session: str, keys: Sequence[str]) -> Iterator[bytes | None]:
        for first in range(0, len(keys), _FETCH):
            names = [self._key(session, key) for key in keys[first : first + _FETCH]]
            yield from self._call(lambda names=names: cast("list[bytes | None]", self._client.mget(names)))  # type: ignore[misc]

    def discard(self, session: str, keys: Sequence[str]) -> None:
        if keys:
            self._call(lambda: self._client.unlink(*(self._key(session, key) for key in keys)))

    def touch(self, session: str) -> None:
        data = self.load(session)
        if data is not None:
            pipeline = self._client.pipeline(transaction=False)
            pipeline.pexpire(self._key(session, "given"), self._ttl)
            for key in ("record", *self._named(data)):
                pipeline.pexpire(self._key(session, key), self._ttl)
            self._call(pipeline.execute)

    def _named(self, data: bytes) -> list[str]:
        """Keys of a record's blocks; those of a damaged one are left to their time to live."""
        try:
            return decode(data).keys
        except Refused:
            return []

    def delete(self, session: str) -> None:
        data = self.load(session)
        if data is None:
            raise NotFound("There is no such session.", param="session")
        self.discard(session, ["record", *self._named(data)])

    def entries(self) -> list[Entry]:
        found = []
        for key in self._call(lambda: list(self._client.scan_iter(f"{self._namespace}:{{*}}:record", count=1000))):
            data = self._call(lambda key=key: cast("bytes | None", self._client.hget(key, "body")))  # type: ignore[misc]
            left = self._call(lambda key=key: self._client.pttl(key))  # type: ignore[misc]
            try:
                record = None if data is None else decode(data)
            except Refused:
                continue
            if record is not None:
                idle = max(self._ttl - left, 0) / 1000
                entry = Entry(record.session, record.length, record.turn, record.epoch, record.size, idle)
                found.append(replace(entry, owner=record.owner, name=record.name))
        return sorted(found, key=lambda entry: entry.idle_s)

    def close(self) -> None:
        self._client.close()


def _ms(seconds: float) -> int:
    return max(int(seconds * 1000), 1)
