"""`jaxserve config show|validate|schema`: print or check the configuration of flags, environment and file."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence

import yaml

from jaxserve.cli.options import load_config
from jaxserve.config import Config
from jaxserve.errors import ConfigError

USAGE = """usage: jaxserve config show|validate|schema [--config FILE] [flags of launch]

  show      print the configuration as YAML, without secrets
  validate  check it; exit code 2 with the reasons if it is wrong
  schema    print the JSON Schema of the configuration file, for editors"""


def run(words: Sequence[str]) -> int:
    """Run the command `config`. Raises ConfigError."""
    if not words or any(word in ("-h", "--help") for word in words):
        print(USAGE)
        return 0
    action, *flags = words
    if action == "schema":
        if flags:
            raise ConfigError(f"schema takes no {flags[0]}", fix="leave it out")
        print(json.dumps(Config.model_json_schema(), indent=2))
        return 0
    if action not in ("show", "validate"):
        raise ConfigError(f"no action {action!r}", fix="use show, validate or schema")
    if flags and not flags[0].startswith("--"):
        flags = ["--config", *flags]
    config = load_config(flags, os.environ, several=True)
    print(dump(config) if action == "show" else "the configuration is valid")
    return 0


def dump(config: Config) -> str:
    """Return the whole configuration as YAML, with secrets masked."""
    return yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False).rstrip()
