"""Load one Config from the command line, the environment and a YAML file. Earlier sources win.

A flag is `--section.key value`, `--section.key=value`, or alone for true. A few flags have short names (`SHORT`), and
the names of other servers are in foreign_flags.py. One word without a dash is the model. The key
`scheduler.max_num_seqs` is `--scheduler.max-num-seqs` as a flag and `JAXSERVE_SCHEDULER__MAX_NUM_SEQS` in the
environment.

The parts are, in this order: the flags, the types of arguments that all commands share, the host of a cluster
(`mesh.cluster`), the file and the environment, and the help of `jaxserve launch`, which the configuration tree gives.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import math
import re
import textwrap
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from dataclasses import field as dataclass_field
from functools import cache
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import yaml
from pydantic.fields import FieldInfo
from yaml.composer import ComposerError

from jaxserve.cli.foreign_flags import ROWS, Answer, Key, NoEffect, Refused
from jaxserve.config import RENAMED, SECRETS, Config, known_keys, old_name_notice, suggestion, with_current_names
from jaxserve.errors import ConfigError
from jaxserve.log import tell

CONFIG = "config"  # the value of --config, which is not a key of the configuration
# short names that no other server has, and the names of jax.distributed
SHORT: Mapping[str, str] = {
    "--tensor": "mesh.tensor",
    "--replicas": "mesh.replicas",
    "--prefill-replicas": "mesh.prefill_replicas",
    "--num-processes": "mesh.hosts",
    "--process-id": "mesh.host_rank",
    "--coordinator-address": "mesh.leader_address",
}
_SEVERAL = ("model.served_name", "server.allowed_hosts", "server.cors_origins", "media.allowed_hosts")
_SWITCH_WORDS = ("true", "false")
_NEGATED = re.compile(r"--(no|disable)-")


@dataclass
class Flags:
    """The values of a command line.

    notices: messages for the operator about flags without effect
    needing: flags that are refused without a key, which may come after them
    """

    values: dict[str, Any] = dataclass_field(default_factory=dict)
    notices: list[str] = dataclass_field(default_factory=list)
    needing: dict[str, Refused] = dataclass_field(default_factory=dict)

    def put(self, key: str, values: Sequence[str]) -> None:
        """Set a key. Values of a list key are appended. Any other key keeps the last value."""
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
    flags = Flags()
    words = deque(argv)
    while words:
        word = words.popleft()
        if not word.startswith("-"):
            flags.put_model(word)
            continue
        flag, equals, text = word.partition("=")
        answer, switch = find_flag(flag)
        given = [text] if equals else _values(words, switch=switch, many=isinstance(answer, Key) and answer.many)
        _take(flags, flag, answer, given, switch=switch)
    for flag, answer in flags.needing.items():
        if answer.beside not in flags.values:
            raise ConfigError(f"{flag} is no flag of jaxserve", fix=answer.fix)
        flags.notices.append(f"{flag} has no effect: {answer.beside} is set")
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


def own_word(name: str, value: str) -> str:
    """Return the value of a key by the name that it has here. `name` has no section: dtype, half -> float16.

    A value of the key's own stays: of quantization, none is not the other engines' word for auto.
    """
    answer, _ = _table()[0].get(f"--{name.replace('_', '-')}", (None, False))
    if not isinstance(answer, Key) or answer.key.partition(".")[2] != name or value in _words_of(answer.key):
        return value
    return answer.words.get(value.lower(), value)


def key_flags() -> dict[str, str]:
    """Return {flag: key} of all flags whose name is not their key."""
    return {name: answer.key for name, (answer, _) in _table()[0].items() if isinstance(answer, Key)}


def _opposite(answer: Answer) -> Answer:
    """Return the handling of `--no-X`, given the handling of `--X`."""
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
        _take_refused(flags, flag, answer, off=switch and given == ["false"])
        return
    if isinstance(answer, NoEffect):
        if answer.values and given and given[0].lower() not in answer.values:
            raise ConfigError(f"{flag} {given[0]} is not served", fix=answer.fix)
        if given != ["false"]:
            flags.notices.append(f"{flag} has no effect: {answer.reason}")
        return
    if switch:
        if given == ["false"] and answer.const not in (None, *_SWITCH_WORDS):
            return  # it sets no boolean, so that its absence is meant
        given = [_switched(answer.const or "true", *given)]
    if not given:
        raise ConfigError(f"{flag} needs a value")
    if len(given) > 1 and answer.key not in _SEVERAL:
        raise ConfigError(f"{flag} takes one value, and {len(given)} are given")
    if answer.fields:
        for key, value in answer.read_fields(given[0]).items():
            flags.put(key, [value])
    else:
        flags.put(answer.key, [_value(flags, flag, answer, text) for text in given])
    if answer.note:
        flags.notices.append(f"{flag}: {answer.note}")


def _take_refused(flags: Flags, flag: str, answer: Refused, *, off: bool) -> None:
    """Raise ConfigError, unless the flag asks for nothing or may stand beside a key."""
    if off:
        return
    if not answer.beside:
        raise ConfigError(f"{flag} is no flag of jaxserve", fix=answer.fix)
    flags.needing[flag] = answer


def _switched(const: str, word: str = "true") -> str:
    """Return the value that a switch sets. `--X false` sets the opposite of a boolean, any other word itself."""
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
    """Return a suggestion for an unknown flag, but never a flag of the opposite meaning."""
    own = [f"--{key.replace('_', '-')}" for key in known_keys()]
    choices = [*_table()[0], *own, "--config"]
    negated = bool(_NEGATED.match(name))
    return suggestion(name, [each for each in choices if bool(_NEGATED.match(each)) == negated], cutoff=0.75)


def plain(text: str, key: str) -> str | None:
    """Return the text of a flag or variable; None for null and none if the key may be unset.

    A secret is never unset, because this would open the server.
    """
    if text.lower() not in ("null", "none") or key == CONFIG or key.partition(".")[2] in SECRETS:
        return text
    return None if type(None) in get_args(known_keys()[key].annotation) else text


_VISIBLE = re.compile(r"[\x21-\x7e]*")


def at_least(least: int, most: int | None = None) -> Callable[[str], int]:
    """Return a type for integers from `least` to `most`. It raises ArgumentTypeError."""

    def _whole(text: str) -> int:
        try:
            number = int(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"should be a whole number, not {text!r}") from None
        if number < least:
            raise argparse.ArgumentTypeError(f"should be at least {least}, not {number}")
        if most is not None and number > most:
            raise argparse.ArgumentTypeError(f"should be at most {most}, not {number}")
        return number

    return _whole


def positive(text: str) -> float:
    """Read a finite number above 0. Raises ArgumentTypeError."""
    number = _real(text)
    if number <= 0:
        raise argparse.ArgumentTypeError(f"should be above 0, not {text}")
    return number


def share(text: str) -> float:
    """Read a number from 0 to 1. Raises ArgumentTypeError."""
    number = _real(text)
    if not 0 <= number <= 1:
        raise argparse.ArgumentTypeError(f"should be from 0 to 1, not {text}")
    return number


def api_key(text: str) -> str:
    """Read an API key that a header can have; empty: no key. Raises ArgumentTypeError."""
    if not _VISIBLE.fullmatch(text):
        raise argparse.ArgumentTypeError("may hold visible ASCII characters only: no space, no newline")
    return text


def _real(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not math.isfinite(number):
        raise argparse.ArgumentTypeError(f"should be a finite number, not {text!r}")
    return number


Environment = Mapping[str, str]
KEYS = ("hosts", "host_rank", "leader_address")  # of the section mesh


def fill_hosts(tree: dict[str, Any], environ: Environment) -> None:
    """Put the keys of the hosts into the section `mesh` if mesh.cluster is set. Given keys stay.

    tree: nested plain data, changed in place. Raises ConfigError if the variables are missing or wrong.
    """
    mesh = tree.get("mesh")
    if isinstance(mesh, dict) and (name := str(mesh.get("cluster") or "none")) != "none" and name in _named():
        tree["mesh"] = dict(zip(KEYS, found(name, environ), strict=True)) | mesh


def _named() -> list[str]:
    return ["auto", *_CLUSTERS]


def found(cluster: str, environ: Environment) -> tuple[int, int, str]:
    """Return the number of hosts, this host's rank, and the address of the leader. cluster: a name or "auto".

    Raises ConfigError.
    """
    if cluster == "auto":
        there = [name for name, (mark, _) in _CLUSTERS.items() if environ.get(mark)]
        if len(there) != 1:
            marks = ", ".join(mark for mark, _ in _CLUSTERS.values())
            state = f"the variables of {' and '.join(there)} are" if there else f"none of {marks} is"
            raise ConfigError(f"mesh.cluster auto: {state} set", fix=f"name the cluster: {', '.join(_CLUSTERS)}")
        cluster = there[0]
    return _CLUSTERS[cluster][1](environ)


def _lws(environ: Environment) -> tuple[int, int, str]:
    hosts = _number(environ, "LWS_GROUP_SIZE")
    rank = _number(environ, "LWS_WORKER_INDEX")
    return hosts, rank, _text(environ, "LWS_LEADER_ADDRESS")


def _slurm(environ: Environment) -> tuple[int, int, str]:
    """Read the job step of this process, which `srun` started with one task on each node."""
    hosts = _number(environ, "SLURM_STEP_NUM_NODES")
    tasks = _number(environ, "SLURM_STEP_NUM_TASKS")
    if tasks != hosts:
        raise ConfigError(
            f"mesh.cluster slurm: the step has {tasks} tasks on {hosts} nodes", fix="srun --ntasks-per-node=1"
        )
    return hosts, _number(environ, "SLURM_NODEID"), first_node(_text(environ, "SLURM_STEP_NODELIST"))


def _tpu(environ: Environment) -> tuple[int, int, str]:
    """Read the slice of TPUs that GKE describes."""
    names = [name for name in _text(environ, "TPU_WORKER_HOSTNAMES").split(",") if name]
    return len(names), _number(environ, "TPU_WORKER_ID"), names[0]


# name of a cluster -> (a variable that only this cluster sets, the function that reads its variables)
_CLUSTERS: Mapping[str, tuple[str, Callable[[Environment], tuple[int, int, str]]]] = {
    "lws": ("LWS_LEADER_ADDRESS", _lws),
    "slurm": ("SLURM_STEP_NODELIST", _slurm),
    "gke": ("TPU_WORKER_HOSTNAMES", _tpu),
}


def first_node(nodes: str) -> str:
    """Return the first name of SLURM's list of nodes, such as node[001-004,9],login1. Raises ConfigError."""
    match = re.fullmatch(r"([^\[,]+)(?:\[(\w+)[^\]]*\]([^,\[]*))?(?:,.*)?", nodes)
    if match is None:
        raise ConfigError(f"mesh.cluster slurm: {nodes!r} is no list of nodes", fix="set mesh.leader_address")
    return "".join(part or "" for part in match.groups())


def _text(environ: Environment, name: str) -> str:
    if not (text := environ.get(name, "")):
        raise ConfigError(f"mesh.cluster: the variable {name} is not set", fix="set mesh.hosts and its ranks by flags")
    return text


def _number(environ: Environment, name: str) -> int:
    text = _text(environ, name)
    if not text.isdecimal():
        raise ConfigError(f"mesh.cluster: {name} is {text!r}, and should be a number")
    return int(text)


ENV_PREFIX = "JAXSERVE_"

_TEST_PREFIX = "JAXSERVE_TEST_"
# variables that Kubernetes sets in every pod for a Service whose name begins with "jaxserve"
_SERVICE_LINK = re.compile(r"JAXSERVE_(\w+_)?(SERVICE_(HOST|PORT(_\w+)?)|PORT_\d+_(TCP|UDP|SCTP)(_\w+)?)")
_SERVICE_ADDRESS = re.compile(r"(tcp|udp|sctp)://.*")
_MERGE = "tag:yaml.org,2002:merge"  # of the key <<


def _to_stderr(notice: str) -> None:
    tell(notice, level=logging.WARNING)


def wanted_format(argv: Sequence[str], environ: Mapping[str, str]) -> str:
    """Return `logging.format` as far as it can be told from a configuration that may be wrong elsewhere; "" if it is
    not set.
    """
    key, found = "logging.format", environ.get(f"{ENV_PREFIX}LOGGING__FORMAT", "")
    for word, following in zip(argv, [*argv, ""][1:], strict=True):
        flag, equals, text = word.partition("=")
        value = text if equals else following
        if flag == f"--{key}":
            found = value
        elif flag == f"--{CONFIG}" and not found:
            with contextlib.suppress(ConfigError):
                section = read_yaml(Path(value)).get("logging")
                found = str(section.get("format", "")) if isinstance(section, dict) else ""
    return found


def load_config(
    argv: Iterable[str],
    environ: Mapping[str, str],
    *,
    notice: Callable[[str], None] = _to_stderr,
    several: bool = False,
) -> Config:
    """Return the Config of the flags in `argv`, the environment and the file that --config names.

    notice: called with a message for each flag without effect
    several: whether the configuration may have several models
    Raises ConfigError with every wrong key and value, and a suggestion for an unknown key.
    """
    parsed = parse_flags(argv)
    for line in parsed.notices:
        notice(line)
    flags = parsed.values
    path = flags.pop(CONFIG, None)
    tree, old_names = with_current_names(read_yaml(Path(path)) if path is not None else {})
    variables = _parse_environment(environ, old_names.append)
    for line in old_names:
        notice(line)
    for key, value in (variables | flags).items():
        section, _, name = key.partition(".")
        if tree.get(section) is None:
            tree[section] = {}  # as in the file: a section of which every line is a comment
        if not isinstance(tree[section], dict):
            raise ConfigError(f"{section} in {path} is not a mapping")
        tree[section][name] = value
    fill_hosts(tree, environ)
    config = validate(tree, source=path)
    if config.models.served and not several:
        raise ConfigError("models.served: this command is for one model", fix="name the model or its own --config")
    return config


def validate(tree: Mapping[str, Any], *, source: str | None = None) -> Config:
    """Return the Config of nested plain data. source: file that errors name. Raises ConfigError."""
    try:
        return Config.parse({k: ({} if v is None else v) for k, v in tree.items()})
    except ConfigError as error:
        raise ConfigError(str(error) + (f" (in {source})" if source else "")) from None


def read_yaml(path: Path) -> dict[str, Any]:
    """Return the sections of a configuration file. Raises ConfigError."""
    try:
        tree = _Loader(path.read_text(encoding="utf-8")).get_single_data()
    except OSError as error:
        raise ConfigError(f"cannot read the configuration {path}: {error.strerror}", fix="check --config") from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is not YAML: {_yaml_problem(error)}") from None
    if tree is None:
        return {}
    if not isinstance(tree, dict):
        raise ConfigError(f"{path} must hold a mapping of sections")
    return {str(key): value for key, value in tree.items()}


class _Loader(yaml.SafeLoader):
    """PyYAML's safe loader, which also refuses two equal keys. A second `server` would drop the API key."""

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        """Compose a mapping, whose own keys win over keys that `<<` merges. Raises ComposerError for a double key."""
        node = super().compose_mapping_node(anchor)
        seen: set[tuple[str, str]] = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and key.tag != _MERGE:
                if (key.tag, key.value) in seen:
                    raise ComposerError(None, None, "found a key twice", key.start_mark)
                seen.add((key.tag, key.value))
        return node


def _yaml_problem(error: Exception) -> str:
    """Return the problem and its line, without the line's text, which may contain an API key."""
    if isinstance(error, UnicodeDecodeError):
        return "it is not UTF-8 text"
    if not isinstance(error, yaml.MarkedYAMLError) or error.problem_mark is None:
        return "it has a character that YAML forbids, a number or a date that is none, or is nested too deeply"
    return f"{error.problem} in line {error.problem_mark.line + 1}, column {error.problem_mark.column + 1}"


def _parse_environment(environ: Mapping[str, str], notice: Callable[[str], None]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    unknown = list[str]()
    for variable, text in environ.items():
        if not variable.startswith(ENV_PREFIX) or variable.startswith(_TEST_PREFIX):
            continue
        key = variable[len(ENV_PREFIX) :].lower().replace("__", ".", 1)
        if key in RENAMED:
            notice(old_name_notice(key))
            key = RENAMED[key]
        if key not in known_keys():
            if _is_service_link(variable, text):
                continue
            unknown.append(f"unknown variable {variable}{_right_variable(variable)}")
            continue
        values[key] = plain(text, key)
    if unknown:
        raise ConfigError("; ".join(unknown))
    return values


def _is_service_link(variable: str, text: str) -> bool:
    named = variable.endswith("_PORT") and _SERVICE_ADDRESS.fullmatch(text)
    return bool(named or _SERVICE_LINK.fullmatch(variable))


def _right_variable(variable: str) -> str:
    """Return a suggestion: a variable with the same end (JAXSERVE_API_KEY), or the most similar one."""
    names = [variable_of(key) for key in known_keys()]
    end = f"__{variable[len(ENV_PREFIX) :]}"
    meant = next((name for name in names if name.endswith(end)), None)
    return f", did you mean {meant}?" if meant else suggestion(variable, names)


def variable_of(key: str) -> str:
    """Return the environment variable of a key."""
    return f"{ENV_PREFIX}{key.upper().replace('.', '__')}"


WIDTH = 80  # columns of a terminal
GIB = 2**30
_HEAD = """usage: jaxserve launch [MODEL] [--config FILE] [flags]

Serves MODEL, a hub id, a directory or a GGUF file, over HTTP; without MODEL
the embedded demo model. `jaxserve serve` is the same."""
_FOOT = """  --config FILE        a YAML file of the same keys
  --help-all           every key with its default and its aliases

Flags of vLLM and SGLang: docs/flags.md."""
# key -> flag of the short help
COMMON = {
    "model.dtype": "--dtype",
    "model.max_model_len": "--max-model-len",
    "model.served_name": "--served-model-name",
    "model.tool_parser": "--tool-call-parser",
    "model.reasoning_parser": "--reasoning-parser",
    "mesh.device": "--device",
    "mesh.tensor": "--tensor",
    "mesh.replicas": "--replicas",
    "mesh.expert": "--mesh.expert",
    "cache.memory_fraction": "--cache.memory-fraction",
    "cache.prefix_cache": "--cache.prefix-cache",
    "scheduler.max_num_seqs": "--max-num-seqs",
    "runtime.attention": "--runtime.attention",
    "server.host": "--host",
    "server.port": "--port",
    "server.api_key": "--api-key",
    "store.path": "--store.path",
    "logging.level": "--log-level",
}


def launch_help(*, everything: bool) -> str:
    """Return the short help, or every key with its default, its variable and its aliases."""
    return "\n".join([_HEAD, *(_all_keys() if everything else _common_keys()), *([] if everything else ["", _FOOT])])


def _common_keys() -> Iterator[str]:
    shown = ""
    for key, flag in COMMON.items():
        section = key.partition(".")[0]
        if section != shown:
            shown = section
            yield f"\n{section}: {section_title(section)}"
        field = known_keys()[key]
        yield from _entry(flag, f"{field.description} (default {default(field)})")


def _all_keys() -> Iterator[str]:
    yield "\nOrder: flags, environment, file, default."
    others: dict[str, list[str]] = {}
    for flag, key in key_flags().items():
        others.setdefault(key, []).append(flag)
    shown = ""
    for key, field in known_keys().items():
        section = key.partition(".")[0]
        if section != shown:
            shown = section
            yield f"\n{section}: {section_title(section)}"
        yield f"  --{key.replace('_', '-')} (default {default(field)})"
        spellings = ", ".join([variable_of(key), *others.get(key, [])])
        yield textwrap.fill(
            f"{field.description} [{spellings}]",
            WIDTH,
            initial_indent=" " * 6,
            subsequent_indent=" " * 6,
            break_long_words=False,
            break_on_hyphens=False,
        )


def default(field: FieldInfo) -> str:
    """Return the default of a key in the notation of the configuration file."""
    if field.default is None:
        return "null"
    if isinstance(field.default, bool):
        return str(field.default).lower()
    return "[]" if field.default == () else str(field.default)


def section_title(section: str) -> str:
    """Return the title of a section of the configuration, without a full stop."""
    annotation = Config.model_fields[section].annotation
    assert annotation is not None
    return (annotation.__doc__ or "").rstrip(".")


def _entry(flag: str, text: str) -> list[str]:
    indent = " " * 23
    lines = textwrap.wrap(text, WIDTH, initial_indent=indent, subsequent_indent=indent, break_on_hyphens=False)
    if len(flag) <= 20:
        lines[0] = f"  {flag:21}{lines[0][23:]}"
        return lines
    return [f"  {flag}", *lines]
