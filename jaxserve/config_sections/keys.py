"""Named API keys: `server.keys` of the configuration."""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from collections.abc import Sequence
from typing import Annotated

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, SecretStr, model_validator

from jaxserve.config_sections.value_types import Key, json_list, reveal

DEFAULT_KEY = "default"  # the name of server.api_key
MAX_KEYS = 256  # each request is compared with all of them
_DIGEST = re.compile(r"[0-9a-fA-F]{64}")


def digest_of(key: str) -> bytes:
    """Return the SHA-256 of a key, 32 bytes."""
    return hashlib.sha256(key.encode()).digest()


def _digest(value: SecretStr) -> SecretStr:
    if not _DIGEST.fullmatch(value.get_secret_value()):
        raise ValueError("should be 64 hexadecimal digits")
    return value


class ApiKey(BaseModel):
    """An API key and its name. Objects created with the key belong to the name."""

    model_config = ConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True)

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$", description="Name of the key's owner.")
    value: Key | None = Field(None, description="The key.")
    sha256: Annotated[SecretStr, AfterValidator(_digest)] | None = Field(
        None, description="The SHA-256 hash of the key, in hexadecimal, instead of the key."
    )

    weight: float = Field(
        1.0, gt=0, le=1000, allow_inf_nan=False, description="Share of the engine, relative to the other keys."
    )
    max_running: int | None = Field(
        None, ge=1, le=2**20, description="Requests of the key that run at once; further ones wait. Default: no limit."
    )
    max_queued: int | None = Field(
        None, ge=0, le=2**20, description="Requests of the key that may wait; more are refused. Default: no limit."
    )
    tokens_per_minute: int | None = Field(
        None, ge=1, le=2**40, description="Tokens, prompt and output, that refill evenly. Default: no limit."
    )

    @model_validator(mode="after")
    def _one_of_both(self) -> ApiKey:
        if (self.value is None) == (self.sha256 is None):
            raise ValueError("give value or sha256, one of them")
        return self

    @property
    def digest(self) -> bytes:
        """SHA-256 of the key, 32 bytes."""
        return digest_of(reveal(self.value)) if self.sha256 is None else bytes.fromhex(reveal(self.sha256))


ApiKeys = Annotated[tuple[ApiKey, ...], BeforeValidator(json_list), Field(max_length=MAX_KEYS)]


def check_distinct(keys: Sequence[ApiKey], single: SecretStr | None, admin: SecretStr | None) -> None:
    """Raise ValueError for a duplicate name, and for a key with two names, because its owner would be ambiguous.

    single, admin: server.api_key and server.admin_api_key
    """
    names = Counter([key.name for key in keys] + [DEFAULT_KEY] * (single is not None))
    if repeated := [name for name, count in names.items() if count > 1]:
        raise ValueError(f"the name {repeated[0]!r} is given twice ({DEFAULT_KEY!r} is that of server.api_key)")
    others = {digest_of(reveal(key)) for key in (single, admin) if key is not None}
    digests = Counter([key.digest for key in keys] + list(others))
    if repeated := [key.name for key in keys if digests[key.digest] > 1]:
        raise ValueError(f"the key {repeated[0]!r} is the same as another one")
