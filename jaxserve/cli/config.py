"""`jaxserve config show|validate|schema`: what the flags, the environment and a file make together."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence

import yaml

from jaxserve.cli.options.settings import load_config
from jaxserve.config import Config
from jaxserve.errors import ConfigError

USAGE = """usage: jaxserve config show|validate|schema [--config FILE] [flags of launch]

  show      print the resolved configuration as YAML
  validate  say whether it is right; exit code 2 with the reasons if not
  schema    print the JSON Schema of the configuration file, for editors"""


def run(words: Sequence[str]) -> int:
    """Run the command `config`. Raises ConfigError."""
    if not words or words[0] in ("-h", "--help"):
        print(USAGE)
        return 0
    action, *flags = words
    if action == "schema":
        print(json.dumps(Config.model_json_schema(), indent=2))
        return 0
    if action not in ("show", "validate"):
        raise ConfigError(f"no action {action!r}", fix="use show, validate or schema")
    if flags and not flags[0].startswith("--"):
        flags = ["--config", *flags]
    config = load_config(flags, os.environ)
    print(dump(config) if action == "show" else "the configuration is valid")
    return 0


def dump(config: Config) -> str:
    """The whole tree as YAML; a secret is a row of stars."""
    return yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False).rstrip()
