"""The help of `jaxserve launch`, made from the configuration tree."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator

from pydantic.fields import FieldInfo

from jaxserve.cli.options.flags import key_flags
from jaxserve.cli.options.settings import variable_of
from jaxserve.config import Config, known_keys

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
    """Return what a section of the configuration is about, without a full stop."""
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
