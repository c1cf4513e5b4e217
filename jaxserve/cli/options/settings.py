"""Load one Config from flags, the environment and a YAML file. Earlier sources win.

The key `scheduler.max_num_seqs` is `--scheduler.max-num-seqs` as a flag and `JAXSERVE_SCHEDULER__MAX_NUM_SEQS` in the
environment. flags.py parses the flags.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import yaml
from yaml.composer import ComposerError

from jaxserve.cli.options.cluster import fill_hosts
from jaxserve.cli.options.flags import CONFIG, parse_flags, plain
from jaxserve.config import RENAMED, Config, known_keys, old_name_notice, suggestion, with_current_names
from jaxserve.errors import ConfigError

ENV_PREFIX = "JAXSERVE_"

_TEST_PREFIX = "JAXSERVE_TEST_"
# variables that Kubernetes sets in every pod for a Service whose name begins with "jaxserve"
_SERVICE_LINK = re.compile(r"JAXSERVE_(\w+_)?(SERVICE_(HOST|PORT(_\w+)?)|PORT_\d+_(TCP|UDP|SCTP)(_\w+)?)")
_SERVICE_ADDRESS = re.compile(r"(tcp|udp|sctp)://.*")
_MERGE = "tag:yaml.org,2002:merge"  # of the key <<


def _to_stderr(notice: str) -> None:
    print(f"jaxserve: {notice}", file=sys.stderr)


def load_config(
    argv: Iterable[str],
    environ: Mapping[str, str],
    *,
    notice: Callable[[str], None] = _to_stderr,
    several: bool = False,
) -> Config:
    """Return the Config of the flags in `argv`, the environment and the file that --config names.

    notice: called with a message for each flag without effect. several: whether it may be of several models

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
    """Return the Config of nested plain data. source: file to name in errors. Raises ConfigError."""
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
    """PyYAML's safe loader, which would take the last of two equal keys: a second `server` would drop the API key."""

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        """Raises ComposerError for a key that is there twice. `<<` merges others beneath the mapping's own."""
        node = super().compose_mapping_node(anchor)
        seen: set[tuple[str, str]] = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and key.tag != _MERGE:
                if (key.tag, key.value) in seen:
                    raise ComposerError(None, None, "found a key twice", key.start_mark)
                seen.add((key.tag, key.value))
        return node


def _yaml_problem(error: Exception) -> str:
    """Return the problem and its line, without the text, which may contain an API key."""
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
