"""API keys: which key sent a request, and which objects it may see.

With `server.keys`, every file, batch and session belongs to the key that created it. A key sees only its own; the ids
of others are unknown to it. Without `server.keys` there is one owner, the default key, which owns everything.
"""

from __future__ import annotations

import hashlib
import hmac
from dataclasses import dataclass

from pydantic import SecretStr
from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.types import Scope

from jaxserve.config import DEFAULT_KEY, ServerSection, digest_of


@dataclass(frozen=True, slots=True)
class Caller:
    """The key of a request. owner: of the objects it creates; "" is the default key.

    is_stored: the request waits in the store, as those of batches do, so limits of the key do not refuse it
    """

    owner: str = ""
    admin: bool = False
    is_stored: bool = False

    @property
    def sees(self) -> str | None:
        """The owner whose files and batches the caller sees; None: those of all owners."""
        return None if self.admin else self.owner

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
        """Return whether the request has a key, of this server or not."""
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
