"""The three ways to handle a flag of another server, and the conversion of its values."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from jaxserve.errors import ConfigError

_SUFFIXES = {"k": 10**3, "m": 10**6, "g": 10**9, "K": 2**10, "M": 2**20, "G": 2**30}
_COUNT = re.compile(r"(\d+(?:\.\d+)?)([kmgKMG])")


def count(text: str) -> str:
    """Convert a number of tokens: 32k is 32,000, 32K is 32,768, auto and -1 are null."""
    if text in ("auto", "-1"):
        return "null"
    match = _COUNT.fullmatch(text)
    return text if match is None else str(int(float(match[1]) * _SUFFIXES[match[2]]))


def gibibytes(text: str) -> str:
    """Convert a number of GiB to a size. 0 is null."""
    return "null" if text in ("0", "0.0") else f"{text}GiB"


def gigabytes(text: str) -> str:
    """Convert a number of GB to a size. 0 is null."""
    return "null" if text in ("0", "0.0") else f"{text}GB"


def json_list(text: str) -> str:
    """Return the only entry of a JSON list of texts, or the text itself. Raises ConfigError for several."""
    try:
        entries = json.loads(text)
    except ValueError:
        return text
    if not isinstance(entries, list) or len(entries) != 1:
        raise ConfigError(f"{text} should be one value", fix="write a list in the configuration file")
    return str(entries[0])


def reserved_share(text: str) -> str:
    """Convert SGLang's conservativeness to scheduler.new_token_ratio, which is 0.7 times it and at most 1."""
    try:
        return str(min(1.0, 0.7 * float(text)))
    except ValueError:
        return text


@dataclass(frozen=True)
class Key:
    """The flag sets a key of the configuration.

    const: value that a switch sets
    words: values of the flag that have another name here
    others: the value used, with a notice, for anything that is not one of the key's own words
    many: whether the flag takes several words
    note: notice to show when the flag is used
    """

    key: str
    const: str | None = None
    words: Mapping[str, str] = field(default_factory=dict)
    others: str | None = None
    convert: Callable[[str], str] | None = None
    many: bool = False
    note: str = ""


@dataclass(frozen=True)
class NoEffect:
    """The flag has no effect. values: the accepted ones, any if empty; others are refused with `fix`."""

    reason: str
    values: tuple[str, ...] = ()
    fix: str = ""


@dataclass(frozen=True)
class Refused:
    """The flag is refused. fix: what to do instead."""

    fix: str


Answer = Key | NoEffect | Refused
