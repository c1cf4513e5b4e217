"""From a YAML file, the environment and the command line to one Config. Order: flags, environment, YAML, default.

One spelling everywhere: `scheduler.max_num_seqs` in YAML is `--scheduler.max-num-seqs` as a flag and
`JAXSERVE_SCHEDULER__MAX_NUM_SEQS` in the environment. The flags that users of SGLang and vLLM know are aliases.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from jaxserve.config import Config
from jaxserve.errors import ConfigError

ENV_PREFIX = "JAXSERVE_"

# flag -> key. The short flags of jaxserve first, then the names of SGLang and vLLM.
ALIASES: Mapping[str, str] = {
    "--model": "model.path",
    "--dtype": "model.dtype",
    "--max-model-len": "model.max_model_len",
    "--tokenizer": "model.tokenizer",
    "--host": "server.host",
    "--port": "server.port",
    "--api-key": "server.api_key",
    "--tensor": "mesh.tensor",
    "--device": "mesh.device",
    "--model-path": "model.path",
    "--tokenizer-path": "model.tokenizer",
    "--served-model-name": "model.served_name",
    "--chat-template": "model.chat_template",
    "--reasoning-parser": "model.reasoning_parser",
    "--tool-call-parser": "model.tool_parser",
    "--revision": "model.revision",
    "--load-format": "model.load_format",
    "--context-length": "model.max_model_len",
    "--mem-fraction-static": "cache.memory_fraction",
    "--gpu-memory-utilization": "cache.memory_fraction",
    "--kv-cache-dtype": "cache.dtype",
    "--page-size": "cache.page_size",
    "--block-size": "cache.page_size",
    "--tp-size": "mesh.tensor",
    "--tp": "mesh.tensor",
    "--tensor-parallel-size": "mesh.tensor",
    "--ep-size": "mesh.expert",
    "--dp-size": "mesh.replicas",
    "--data-parallel-size": "mesh.replicas",
    "--max-running-requests": "scheduler.max_num_seqs",
    "--max-num-seqs": "scheduler.max_num_seqs",
    "--chunked-prefill-size": "scheduler.max_num_batched_tokens",
    "--max-num-batched-tokens": "scheduler.max_num_batched_tokens",
    "--max-queued-requests": "scheduler.max_queued_requests",
    "--schedule-policy": "scheduler.policy",
    "--scheduling-policy": "scheduler.policy",
    "--attention-backend": "runtime.attention",
    "--random-seed": "runtime.random_seed",
    "--seed": "runtime.random_seed",
    "--admin-api-key": "server.admin_api_key",
    "--ssl-keyfile": "server.ssl_keyfile",
    "--ssl-certfile": "server.ssl_certfile",
    "--file-storage-path": "store.path",
    "--log-level": "logging.level",
    "--log-requests": "logging.requests",
}

# flags of the peers that have another form here: what to write instead
ANSWERS: Mapping[str, str] = {
    "--trust-remote-code": "leave it out: jaxserve never runs code from a checkpoint",
    "--enable-metrics": "leave it out: /metrics is always served",
    "--enable-cache-report": "leave it out: cached tokens are always reported",
    "--disable-radix-cache": "write --cache.prefix-cache false",
    "--no-enable-prefix-caching": "write --cache.prefix-cache false",
    "--enable-deterministic-inference": "write --runtime.deterministic true",
    "--max-total-tokens": "write --cache.num-pages N (tokens / page size)",
    "--is-embedding": "leave it out: an encoder is recognised by its config.json",
    "--enable-mixed-chunk": "leave it out: prefill chunks always run beside decodes",
    "--disable-overlap-schedule": "leave it out: the loop always overlaps",
    "--quantization": "leave it out: quantised checkpoints are recognised by their config.json",
}


def load_config(argv: Iterable[str], environ: Mapping[str, str]) -> Config:
    """The Config that the flags in `argv`, the environment and the file named by --config make.

    Raises ConfigError naming every wrong key and value, with the nearest right key.
    """
    flags = _parse_flags(list(argv))
    path = flags.pop("config", None)
    tree: dict[str, Any] = _read_yaml(Path(path)) if path is not None else {}
    for key, value in (_parse_environment(environ) | flags).items():
        section, _, name = key.partition(".")
        part = tree.setdefault(section, {})
        if not isinstance(part, dict):
            raise ConfigError(f"{section} in {path} is no mapping")
        part[name] = value
    return validate(tree, source=path)


def validate(tree: Mapping[str, Any], *, source: str | None = None) -> Config:
    """A Config from nested plain data. Raises ConfigError."""
    try:
        return Config.model_validate({k: ({} if v is None else v) for k, v in tree.items()})
    except ValidationError as error:
        lines = [_explain(detail) for detail in error.errors()]
        raise ConfigError("; ".join(lines) + (f" (in {source})" if source else "")) from None


def known_keys() -> dict[str, FieldInfo]:
    """Every key of the tree, `section.name`, with its field."""
    keys: dict[str, FieldInfo] = {}
    for section, field in Config.model_fields.items():
        assert isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel)
        keys |= {f"{section}.{name}": inner for name, inner in field.annotation.model_fields.items()}
    return keys


def _explain(detail: Any) -> str:
    key = ".".join(str(part) for part in detail["loc"][:2])
    if detail["type"] == "extra_forbidden":
        return f"unknown key {key}{_suggestion(key, list(known_keys()) + list(Config.model_fields))}"
    return f"{key}: {detail['msg']}, not {detail['input']!r}"


def _suggestion(word: str, choices: Iterable[str]) -> str:
    near = difflib.get_close_matches(word, list(choices), n=1, cutoff=0.5)
    return f", did you mean {near[0]}?" if near else ""


def _read_yaml(path: Path) -> dict[str, Any]:
    try:
        tree = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read the configuration {path}: {error.strerror}") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is no YAML: {' '.join(str(error).split())}") from None
    if tree is None:
        return {}
    if not isinstance(tree, dict):
        raise ConfigError(f"{path} must hold a mapping of sections")
    return {str(key): value for key, value in tree.items()}


def _parse_environment(environ: Mapping[str, str]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for variable, text in environ.items():
        if not variable.startswith(ENV_PREFIX) or "__" not in variable:
            continue
        key = variable[len(ENV_PREFIX) :].lower().replace("__", ".", 1)
        if key not in known_keys():
            names = {f"{ENV_PREFIX}{k.upper().replace('.', '__')}" for k in known_keys()}
            raise ConfigError(f"unknown variable {variable}{_suggestion(variable, names)}")
        values[key] = _plain(text)
    return values


def _parse_flags(argv: list[str]) -> dict[str, Any]:
    """`--flag value`, `--flag=value`, or `--flag` alone for true. A list key may be given more than once."""
    values: dict[str, Any] = {}
    words = iter(range(len(argv)))
    for i in words:
        flag, equals, text = argv[i].partition("=")
        key = _key_of(flag)
        if not equals:
            has_value = i + 1 < len(argv) and not argv[i + 1].startswith("--")
            text = argv[i + 1] if has_value else _bare(flag, key)
            if has_value:
                next(words)
        if isinstance(values.get(key), list):
            values[key].append(text)
        elif key in values and key == "model.served_name":
            values[key] = [values[key], text]
        else:
            values[key] = _plain(text)
    return values


def _bare(flag: str, key: str) -> str:
    if key == "config" or known_keys()[key].annotation is not bool:
        raise ConfigError(f"{flag} needs a value")
    return "true"


def _key_of(flag: str) -> str:
    if flag == "--config":
        return "config"
    if flag in ALIASES:
        return ALIASES[flag]
    if flag in ANSWERS:
        raise ConfigError(f"{flag} is no flag of jaxserve", fix=ANSWERS[flag])
    key = flag.removeprefix("--").replace("-", "_")
    if flag.startswith("--") and key in known_keys():
        return key
    names = [f"--{k.replace('_', '-')}" for k in known_keys()]
    raise ConfigError(f"unknown flag {flag}{_suggestion(flag, [*ALIASES, *names, '--config'])}")


def _plain(text: str) -> str | None:
    return None if text.lower() in ("null", "none") else text
