"""Find the API key of a request, the objects that it may see, its usage and its limits.

With `server.keys`, every file, batch and session belongs to the key that created it. A key sees only its own objects,
and the ids of other objects are unknown to it. Without `server.keys` there is one owner, the default key, which owns
everything.

The scheduler enforces weights and `max_running` (see scheduler/tenants.py). A request that would exceed a limit of its
key is refused here with a 429, which names the limit and the seconds after which there will be room.
"""

from __future__ import annotations

import hashlib
import hmac
import math
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from pydantic import SecretStr
from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.types import Scope

from jaxserve.config import DEFAULT_KEY, ApiKey, ServerSection, digest_of
from jaxserve.errors import InvalidValueError, QueueFullError
from jaxserve.types.sampling import Tenant


@dataclass(frozen=True, slots=True)
class Caller:
    """The sender of a request.

    owner: name of the key that owns the objects which the request creates; "" is the default key
    is_stored: the request waits in the store, as batch requests do, so limits of the key do not refuse it
    """

    owner: str = ""
    admin: bool = False
    is_stored: bool = False

    @property
    def sees(self) -> str | None:
        """The owner whose files and batches the caller sees; None: all owners."""
        return None if self.admin else self.owner

    @property
    def name(self) -> str:
        """The name of the key, for logs."""
        return "admin" if self.admin else self.owner or DEFAULT_KEY

    def engine_name(self, request_id: str) -> str:
        """Return the request's id inside the engine. Two keys may choose one id without aborting each other.

        Ids and names of keys contain no spaces, so a space separates them.
        """
        return f"{request_id} of {self.owner}" if self.owner else request_id


DEFAULT_CALLER = Caller()


class KeyRing:
    """The keys of one server, kept as hashes only."""

    def __init__(self, section: ServerSection) -> None:
        named = [(key.digest, Caller("" if key.name == DEFAULT_KEY else key.name)) for key in section.keys]
        single = _of_secret(section.api_key, DEFAULT_CALLER)
        admin = _of_secret(section.admin_api_key, Caller(admin=True))
        self._keys = single + named + admin  # the last entry wins, if the admin key is also a client key
        self.needed = section.needs_key
        self.isolates = bool(section.keys)
        self.has_admin = bool(admin)

    def find(self, scope: Scope) -> Caller | None:
        """Return the owner of the request's key. Runs in constant time over all keys."""
        found = None
        for key in _given(scope):
            found = self._owner(key) or found
        return found

    def is_given(self, scope: Scope) -> bool:
        """Return whether the request has a key, whether this server knows it or not."""
        return any(key.strip() for key in _given(scope))

    def _owner(self, key: str) -> Caller | None:
        given = hashlib.sha256(key.strip().encode("latin-1")).digest()
        found = None
        for digest, caller in self._keys:
            if hmac.compare_digest(given, digest):
                found = caller
        return found


def _given(scope: Scope) -> list[str]:
    """Return the keys of a request: a bearer token and `x-api-key`."""
    headers = Headers(scope=scope)
    scheme, _, bearer = headers.get("authorization", "").partition(" ")
    return [*([bearer] if scheme.lower() == "bearer" else []), *headers.getlist("x-api-key")[:1]]


def _of_secret(key: SecretStr | None, caller: Caller) -> list[tuple[bytes, Caller]]:
    return [] if key is None else [(digest_of(key.get_secret_value()), caller)]


def set_caller(scope: Scope, caller: Caller) -> None:
    scope.setdefault("state", {})["caller"] = caller


def caller_of(request: Request) -> Caller:
    """Return who sent the request: the default key if no key is needed."""
    return request.scope.get("state", {}).get("caller", DEFAULT_CALLER)


COUNTS = ("requests", "prompt_tokens", "cached_tokens", "completion_tokens", "refused", "num_live")
_WEIGHT = 1 / 16  # weight of the newest request in the moving average of seconds


class KeyLimitError(QueueFullError):
    """A request exceeds a limit of its API key. retry_after: seconds"""

    def __init__(self, message: str, retry_after: float) -> None:
        super().__init__(message)
        self.retry_after = max(1.0, retry_after)


class TokenBucket:
    """Tokens that may be used within a minute. They refill evenly.

    Requests that run may use more tokens than there are. Later requests wait until the debt is refilled.

    clock: returns seconds
    """

    def __init__(self, per_minute: int, clock: Callable[[], float]) -> None:
        self.capacity = per_minute
        self._clock = clock
        self._left = float(per_minute)
        self._at = clock()

    def take(self, count: int) -> None:
        now = self._clock()
        self._left = min(self.capacity, self._left + (now - self._at) * self.capacity / 60) - count
        self._at = now

    @property
    def used(self) -> float:
        """Return how many tokens are missing from a full bucket."""
        self.take(0)
        return self.capacity - self._left

    @property
    def seconds_until_some(self) -> float:
        """Return the seconds until there is a token; 0 if there is one now."""
        self.take(0)
        return 0.0 if self._left >= 1 else (1 - self._left) * 60 / self.capacity


class KeyPeers(Protocol):
    """The same key in the other processes of a server with `server.workers`."""

    def publish(self, usage: KeyUsage) -> None: ...

    def others(self, name: str) -> int: ...

    @property
    def wait(self) -> float: ...

    @property
    def used(self) -> float: ...

    def refill(self, usage: KeyUsage) -> None: ...

    def absorb(self, row: int, usage: KeyUsage) -> None: ...


@dataclass
class KeyUsage:
    """One key: its tenant for the scheduler, its limits, and its counts in this process since the start.

    max_live: most requests that run or wait at once; None: no limit. max_queued: how many of them may wait
    peers: the key's counts in other processes, which the limits and `as_dict` include
    """

    tenant: Tenant
    max_live: int | None = None
    max_queued: int = 0
    bucket: TokenBucket | None = None
    num_live: int = 0
    requests: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    refused: int = 0
    seconds_a_request: float = 1.0
    peers: KeyPeers | None = None

    @property
    def name(self) -> str:
        return self.tenant.name or DEFAULT_KEY

    def check(self, count: int = 1) -> None:
        """Check the limits for `count` more requests.

        Raises KeyLimitError, or InvalidValueError for more than there may ever be at once.
        """
        if self.max_live is not None and count > self.max_live:
            message = f"The request has {count} sequences; the key {self.name!r} may have {self.max_live} in hand."
            raise InvalidValueError(message)
        try:
            self._check(count)
        except KeyLimitError:
            self.add({"refused": 1})
            raise

    def _check(self, count: int) -> None:
        if self.bucket is not None and (seconds := self._wait(self.bucket)):
            message = f"The key {self.name!r} has used its tokens_per_minute."
            raise KeyLimitError(message, seconds)
        if self.max_live is not None and (num_live := self.total("num_live")) + count > self.max_live:
            seconds = self.seconds_a_request * (num_live + count - self.max_live) / max(1, num_live)
            running = self.max_live - self.max_queued
            message = (
                f"The key {self.name!r} has {num_live} requests in hand: {running} may run, and max_queued lets "
                f"{self.max_queued} wait."
            )
            raise KeyLimitError(message, seconds)

    def _wait(self, bucket: TokenBucket) -> float:
        return bucket.seconds_until_some if self.peers is None else self.peers.wait

    def headers(self) -> dict[str, str]:
        """Return OpenAI's headers of the key's limits: the most, what is left, and when all of it is there again.

        Requests are those in hand at once, so they are there again once they have ended; tokens are of a minute.
        """
        found: dict[str, str] = {}
        if self.max_live is not None:
            live = self.total("num_live")
            found |= _limit_headers("requests", self.max_live, live, self.seconds_a_request if live else 0.0)
        if self.bucket is not None:
            used = self.bucket.used if self.peers is None else self.peers.used
            found |= _limit_headers("tokens", self.bucket.capacity, used, used * 60 / self.bucket.capacity)
        return found

    def limit(self, other: KeyUsage) -> None:
        """Take the weight and the limits of another entry of the same key. A bucket of the same size stays as full."""
        self.tenant, self.max_live, self.max_queued = other.tenant, other.max_live, other.max_queued
        if self.bucket is None or other.bucket is None or self.bucket.capacity != other.bucket.capacity:
            self.bucket = other.bucket

    def total(self, name: str) -> int:
        """Return a count of all processes."""
        own: int = getattr(self, name)
        return own if self.peers is None else own + self.peers.others(name)

    def add(self, counts: Mapping[str, int]) -> None:
        """Add to counts by name."""
        for name, count in counts.items():
            setattr(self, name, getattr(self, name) + count)
        if self.peers is not None:
            self.peers.publish(self)

    def begin(self, count: int, prompt_tokens: int) -> None:
        """Count `count` requests that have `prompt_tokens` in all."""
        self.add({"num_live": count, "requests": count, "prompt_tokens": prompt_tokens})
        if self.bucket is not None:
            self.bucket.take(prompt_tokens)

    def generated(self, count: int) -> None:
        """Count output tokens."""
        self.completion_tokens += count
        if self.bucket is not None:
            self.bucket.take(count)
        if self.peers is not None:
            self.peers.publish(self)

    def end(self, count: int, seconds: float, cached_tokens: int) -> None:
        """Count the end of `count` requests, which took `seconds`."""
        self.add({"num_live": -count, "cached_tokens": cached_tokens})
        self.seconds_a_request += _WEIGHT * (seconds - self.seconds_a_request)

    def as_dict(self) -> dict[str, Any]:
        return {"name": self.name, "weight": self.tenant.weight} | {name: self.total(name) for name in COUNTS}


def _limit_headers(kind: str, most: int, used: float, seconds: float) -> dict[str, str]:
    left = max(0, math.floor(most - used))
    values = {"limit": str(most), "remaining": str(left), "reset": f"{max(0.0, seconds):.3f}s"}
    return {f"x-ratelimit-{name}-{kind}": value for name, value in values.items()}


class KeyUsages:
    """The usage of every key of `server.keys`, and of the default key. Nothing is counted without `server.keys`.

    max_num_seqs: requests that the engine runs at once
    """

    def __init__(self, keys: Iterable[ApiKey], max_num_seqs: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._max_num_seqs = max_num_seqs
        self._clock = clock
        self._by_owner: dict[str, KeyUsage] = {}
        self.reload(keys)

    def reload(self, keys: Iterable[ApiKey]) -> None:
        """Take the keys of a configuration that was read again. A key that stays keeps its counts."""
        found = {usage.tenant.name: usage for usage in (_usage(key, self._max_num_seqs, self._clock) for key in keys)}
        if found:
            found.setdefault("", KeyUsage(Tenant()))
        for name in found.keys() & self._by_owner.keys():
            self._by_owner[name].limit(found[name])
        self._by_owner = {name: self._by_owner.get(name, usage) for name, usage in found.items()}

    def of(self, owner: str) -> KeyUsage | None:
        return self._by_owner.get(owner)

    def all(self) -> list[KeyUsage]:
        return list(self._by_owner.values())


def _usage(key: ApiKey, max_num_seqs: int, clock: Callable[[], float]) -> KeyUsage:
    name = "" if key.name == DEFAULT_KEY else key.name
    max_live = None
    if key.max_queued is not None:
        max_live = min(key.max_running or math.inf, max_num_seqs) + key.max_queued
    return KeyUsage(
        Tenant(name, key.weight, key.max_running),
        None if max_live is None else int(max_live),
        key.max_queued or 0,
        None if key.tokens_per_minute is None else TokenBucket(key.tokens_per_minute, clock),
    )
