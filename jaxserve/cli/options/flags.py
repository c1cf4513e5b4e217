"""Parse the words of a command line into values of configuration keys.

A flag is `--section.key value`, `--section.key=value`, or alone for true. A few have short names (`SHORT`), and the
names of other servers are in foreign_flags.py. One word without a dash is the model.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Literal, get_args, get_origin

from jaxserve.cli.options.flag_answers import Answer, Key, NoEffect, Refused
from jaxserve.cli.options.foreign_flags import ROWS
from jaxserve.config import RENAMED, SECRETS, known_keys, old_name_notice, suggestion
from jaxserve.errors import ConfigError

CONFIG = "config"  # the value of --config, which is no key of the configuration
# short names that no other server has, and those of jax.distributed
SHORT: Mapping[str, str] = {
    "--tensor": "mesh.tensor",
    "--replicas": "mesh.replicas",
    "--prefill-replicas": "mesh.prefill_replicas",
    "--num-processes": "mesh.hosts",
    "--process-id": "mesh.host_rank",
    "--coordinator-address": "mesh.leader_address",
}
_SEVERAL = ("model.served_name", "server.allowed_hosts", "server.cors_origins")
_SWITCH_WORDS = ("true", "false")
_NEGATED = re.compile(r"--(no|disable)-")


@dataclass
class Flags:
    """The values of a command line. notices: messages for the operator about flags without effect."""

    values: dict[str, Any] = field(default_factory=dict)
    notices: list[str] = field(default_factory=list)

    def put(self, key: str, values: Sequence[str]) -> None:
        """Set a key. Values of a list key are appended; any other key keeps the last value."""
        if key in _SEVERAL:
            self.values[key] = [*self.values.get(key, ()), *values]
        else:
            self.values[key] = plain(values[-1], key)

    def put_model(self, word: str) -> None:
        """Set the model. Raises ConfigError if two different models are given."""
        if self.values.setdefault("model.path", word) != word:
            raise ConfigError(f"two models are given, {self.values['model.path']} and {word}", fix="leave one out")


def parse_flags(argv: Iterable[str]) -> Flags:
    """Parse a command line. Raises ConfigError for a flag that is unknown, refused, or has no value."""
    flags, words = Flags(), deque(argv)
    while words:
        word = words.popleft()
        if not word.startswith("-"):
            flags.put_model(word)
            continue
        flag, equals, text = word.partition("=")
        answer, switch = find_flag(flag)
        given = [text] if equals else _values(words, switch=switch, many=isinstance(answer, Key) and answer.many)
        _take(flags, flag, answer, given, switch=switch)
    return flags


def find_flag(flag: str) -> tuple[Answer, bool]:
    """Return the handling of a flag, and whether it is a switch. Raises ConfigError for an unknown flag."""
    if flag == "--config":
        return Key(CONFIG), False
    key = flag.removeprefix("--").replace("-", "_")
    if flag.startswith("--") and key in known_keys():
        return Key(key), known_keys()[key].annotation is bool
    if flag.startswith("--") and key in RENAMED:
        return Key(RENAMED[key], note=old_name_notice(key)), known_keys()[RENAMED[key]].annotation is bool
    name = flag.replace("_", "-")
    exact, beginnings = _table()
    for known in (name, name.partition(".")[0]):  # --compilation-config.level is --compilation-config
        if known in exact:
            return exact[known]
    for beginning, answer in beginnings:
        if name.startswith(beginning):
            return answer, False
    if name.startswith("--no-") and f"--{name[5:]}" in exact:
        return _opposite(exact[f"--{name[5:]}"][0]), True
    raise ConfigError(f"unknown flag {flag}{_right_flag(name)}", fix="see jaxserve launch --help-all")


@cache
def _table() -> tuple[dict[str, tuple[Answer, bool]], list[tuple[str, Answer]]]:
    """Return {name: (handling, whether it is a switch)}, and the handling of the names that end in *."""
    exact: dict[str, tuple[Answer, bool]] = {name: (Key(key), False) for name, key in SHORT.items()}
    beginnings: list[tuple[str, Answer]] = []
    for names, answer in ROWS:
        for name in names.split():
            if name.endswith("*"):
                beginnings.append((name[:-1], answer))
            else:
                exact[name.removesuffix("!")] = (answer, name.endswith("!"))
    return exact, beginnings


def key_flags() -> dict[str, str]:
    """Return {flag: key} of all flags whose name is not their key."""
    return {name: answer.key for name, (answer, _) in _table()[0].items() if isinstance(answer, Key)}


def _opposite(answer: Answer) -> Answer:
    """Return the handling of `--no-X` from that of `--X`."""
    if isinstance(answer, Key) and answer.const in _SWITCH_WORDS:
        return Key(answer.key, const="false" if answer.const == "true" else "true")
    return NoEffect("it is off") if isinstance(answer, Refused) else NoEffect("this is the default")


def _values(words: deque[str], *, switch: bool, many: bool) -> list[str]:
    """Remove the values of a flag from `words` and return them."""
    found: list[str] = []
    while words and (many or not found) and not _is_flag(words[0]):
        if switch and words[0].lower() not in _SWITCH_WORDS:
            break
        found.append(words.popleft())
    return found


def _is_flag(word: str) -> bool:
    return word.startswith("-") and not re.fullmatch(r"-(\d.*|\.\d.*|inf|nan)", word)


def _take(flags: Flags, flag: str, answer: Answer, given: list[str], *, switch: bool) -> None:
    if isinstance(answer, Refused):
        raise ConfigError(f"{flag} is no flag of jaxserve", fix=answer.fix)
    if isinstance(answer, NoEffect):
        if answer.values and given and given[0].lower() not in answer.values:
            raise ConfigError(f"{flag} {given[0]} is not served", fix=answer.fix)
        if given != ["false"]:
            flags.notices.append(f"{flag} has no effect: {answer.reason}")
        return
    if switch:
        given = [_switched(answer.const or "true", *given)]
    if not given:
        raise ConfigError(f"{flag} needs a value")
    if len(given) > 1 and answer.key not in _SEVERAL:
        raise ConfigError(f"{flag} takes one value, and {len(given)} are given")
    flags.put(answer.key, [_value(flags, flag, answer, text) for text in given])
    if answer.note:
        flags.notices.append(f"{flag}: {answer.note}")


def _switched(const: str, word: str = "true") -> str:
    """Return the value that a switch sets. `--X false` sets the opposite of a boolean, and any other word itself."""
    if word.lower() == "true":
        return const
    return "true" if word.lower() == const == "false" else word


def _value(flags: Flags, flag: str, answer: Key, text: str) -> str:
    if text.lower() in answer.words:
        text = answer.words[text.lower()]
    elif answer.convert is not None:
        text = answer.convert(text)
    if answer.others is not None and text not in _words_of(answer.key):
        flags.notices.append(f"{flag} {text} is not known here: {answer.others} is taken")
        text = answer.others
    return text


def _words_of(key: str) -> tuple[str, ...]:
    annotation = known_keys()[key].annotation
    return get_args(annotation) if get_origin(annotation) is Literal else ()


def _right_flag(name: str) -> str:
    """Return a suggestion for an unknown flag, but never the opposite of what it means."""
    own = [f"--{key.replace('_', '-')}" for key in known_keys()]
    choices = [*_table()[0], *own, "--config"]
    negated = bool(_NEGATED.match(name))
    return suggestion(name, [each for each in choices if bool(_NEGATED.match(each)) == negated], cutoff=0.75)


def plain(text: str, key: str) -> str | None:
    """Return the text of a flag or variable; None for null and none if the key may be unset.

    A secret is never unset: this would open the server.
    """
    if text.lower() not in ("null", "none") or key == CONFIG or key.partition(".")[2] in SECRETS:
        return text
    return None if type(None) in get_args(known_keys()[key].annotation) else text
