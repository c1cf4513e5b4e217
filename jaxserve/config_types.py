"""The types of configuration values.

Every number has a range, every text is printable, and every secret is masked if a Config is printed or dumped.
"""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, PlainSerializer, Secret, SecretStr

WEEK = 7 * 24 * 3600.0
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f]")
_KEY = re.compile(r"[\x21-\x7e]+")
_SIZE = re.compile(r"(\d{1,16}(?:\.\d{1,9})?) ?(?:([KMGT]?)(i?)B)?", re.IGNORECASE)
_NO_KEYS = ("none", "null")
_ORIGIN = re.compile(r"\*|https?://[^/\s]+")
_HOST_NAME = re.compile(r"\*|(?:\*\.)?[a-z0-9][\w-]*(?:\.[a-z0-9][\w-]*)*", re.ASCII | re.IGNORECASE)


class Section(BaseModel):
    """Base class of the sections. A section is frozen and refuses unknown keys."""

    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True, hide_input_in_errors=True)


def _not_bool(value: Any) -> Any:
    if isinstance(value, bool):
        raise ValueError("should be a number")
    return value


def _finite(value: float) -> float:
    if not math.isfinite(value):
        raise ValueError("should be a finite number")
    return value


def _text(value: str) -> str:
    if not value.strip():
        raise ValueError("is empty")
    if _CONTROL.search(value):
        raise ValueError("has a control character in it")
    return value


def _template(value: str) -> str:
    if not value.strip():
        raise ValueError("is empty")
    if "\0" in value:
        raise ValueError("has a NUL character in it")
    return value


def _one_or_list(value: Any) -> Any:
    return (value,) if isinstance(value, str) else value


def _path(value: Any) -> Any:
    if not isinstance(value, str | Path):
        return value
    try:
        return str(Path(_text(str(value))).expanduser())
    except RuntimeError:
        raise ValueError("begins with ~, and the home directory is unknown") from None


def _key(value: SecretStr) -> SecretStr:
    key = value.get_secret_value()
    if not key:
        raise ValueError("is empty")
    if key.lower() in _NO_KEYS:
        raise ValueError("is the word for no key; for an open server leave it out, or write null in YAML")
    if not key.strip("*"):
        raise ValueError("is the mask of a key, as jaxserve config show prints it")
    if not _KEY.fullmatch(key):
        raise ValueError("may hold visible ASCII characters only: no space, no newline")
    return value


def _origin(value: str) -> str:
    if not _ORIGIN.fullmatch(value):
        raise ValueError("should be * or an origin such as https://example.com")
    return value


def _host_name(value: str) -> str:
    if not _HOST_NAME.fullmatch(value):
        raise ValueError("should be * or the name of a host such as llm.example.com or *.example.com, without a port")
    return value.lower()


def _url(value: str) -> str:
    try:
        parts = urlsplit(_text(value))
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.port == 0:
            raise ValueError
    except ValueError:
        raise ValueError("should be a URL such as http://localhost:4318/v1/traces") from None
    return value


def _without_password(url: str | None) -> str | None:
    """Return the URL with its password masked."""
    if url is None or "@" not in urlsplit(url).netloc:
        return url
    parts = urlsplit(url)
    return parts._replace(netloc=f"***@{parts.netloc.rpartition('@')[2]}").geturl()


def reveal(secret: Secret[Any] | SecretStr | None) -> Any:
    """Return the value of a secret; None if it is not set."""
    return None if secret is None else secret.get_secret_value()


def _size(value: Any) -> Any:
    """Convert a size such as 8GiB or 500 MB to bytes."""
    if not isinstance(value, str):
        return _not_bool(value)
    match = _SIZE.fullmatch(value.strip())
    if match is None:
        raise ValueError("should be a number of bytes, or a size such as 8GiB or 500MB")
    return int(float(match[1]) * (1024 if match[3] else 1000) ** " KMGT".index((match[2] or " ").upper()))


_Texts = str | list[str]  # how a list of texts may be written
Auto = Literal["auto"]
_Size = Annotated[int, Field(ge=1, le=2**50)]
Bytes = Annotated[_Size, BeforeValidator(_size, json_schema_input_type=_Size | str)]
Int = Annotated[int, BeforeValidator(_not_bool)]
Float = Annotated[float, BeforeValidator(_not_bool), AfterValidator(_finite)]
Seconds = Annotated[Float, Field(ge=0.001, le=WEEK)]
Text = Annotated[str, AfterValidator(_text)]
TextOrTemplate = Annotated[str, AfterValidator(_template)]


def json_list(value: Any) -> Any:
    """Parse a list, which is JSON text in the environment and as a flag. Raises ValueError."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except ValueError:
        raise ValueError("should be a list, as JSON in the environment and as a flag") from None


def _words(value: Any) -> Any:
    """Split a text at its commas."""
    return value.split(",") if isinstance(value, str) else value


Names = Annotated[tuple[Text, ...], BeforeValidator(_one_or_list, json_schema_input_type=_Texts)]
Words = Annotated[tuple[Text, ...], BeforeValidator(_words, json_schema_input_type=_Texts)]
Origins = Annotated[
    tuple[Annotated[str, AfterValidator(_origin)], ...], BeforeValidator(_one_or_list, json_schema_input_type=_Texts)
]
HostNames = Annotated[
    tuple[Annotated[str, AfterValidator(_host_name)], ...], BeforeValidator(_one_or_list, json_schema_input_type=_Texts)
]
DirPath = Annotated[Path, BeforeValidator(_path)]
FilePath = Annotated[Path, BeforeValidator(_path)]
DirPaths = Annotated[tuple[DirPath, ...], BeforeValidator(_one_or_list, json_schema_input_type=_Texts)]
Key = Annotated[SecretStr, AfterValidator(_key)]
SecretSeed = Secret[Annotated[Int, Field(ge=0, lt=2**63)]]
Url = Annotated[str, AfterValidator(_url), PlainSerializer(_without_password, when_used="json")]
