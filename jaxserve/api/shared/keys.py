"""Whose request it is: the API keys of the server, and what each may see.

With `server.keys` every file, batch and session belongs to the key that made it. A key finds only its own; those of
others are unknown ids to it. Without, there is one owner, the default key, and everything is its own.
"""

from __future__ import annotations

import hashlib
import hmac
from dataclasses import dataclass

from pydantic import SecretStr
from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.types import Scope

from jaxserve.config import ServerSection
from jaxserve.config_keys import DEFAULT_KEY, digest_of


@dataclass(frozen=True, slots=True)
class Caller:
    """The key of a request. owner: of what the request makes; "" is the default key."""

    owner: str = ""
    admin: bool = False

    @property
    def sees(self) -> str | None:
        """The owner whose files and batches it finds; None: those of all."""
        return None if self.admin else self.owner

    def engine_name(self, request_id: str) -> str:
        """What the engine calls a request. Two keys may choose one id, and neither aborts the other's request.

        Neither ids nor names of keys have spaces in them.
        """
        return f"{request_id} of {self.owner}" if self.owner else request_id


DEFAULT_CALLER = Caller()


class KeyRing:
    """The keys of one server: their hashes only."""

    def __init__(self, section: ServerSection) -> None:
        named = [(key.digest, Caller("" if key.name == DEFAULT_KEY else key.name)) for key in section.keys]
        single = _of_secret(section.api_key, DEFAULT_CALLER)
        admin = _of_secret(section.admin_api_key, Caller(admin=True))
        self._keys = single + named + admin  # the last counts, if the admin key is also the key of clients
        self.needed = section.needs_key
        self.isolates = bool(section.keys)
        self.has_admin = bool(admin)

    def find(self, scope: Scope) -> Caller | None:
        """The owner of the request's bearer key. Takes the same time whichever key it is, or none."""
        header = Headers(scope=scope).get("authorization", "")
        scheme, _, key = header.partition(" ")
        given = hashlib.sha256(key.strip().encode("latin-1")).digest()
        found = None
        for digest, caller in self._keys:
            if hmac.compare_digest(given, digest):
                found = caller
        return found if scheme.lower() == "bearer" else None


def _of_secret(key: SecretStr | None, caller: Caller) -> list[tuple[bytes, Caller]]:
    return [] if key is None else [(digest_of(key.get_secret_value()), caller)]


def set_caller(scope: Scope, caller: Caller) -> None:
    scope.setdefault("state", {})["caller"] = caller


def caller_of(request: Request) -> Caller:
    """Who sent the request; the default key where none is needed."""
    return request.scope.get("state", {}).get("caller", DEFAULT_CALLER)
