"""`jaxserve launch` and `jaxserve serve` before the server starts: the help, the configuration, the model's path.

Imports the server by name at the end, so that an error of the operator is reported before the large imports.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence

from jaxserve.cli.config import dump
from jaxserve.cli.main import imported
from jaxserve.cli.options.help import launch_help
from jaxserve.cli.options.settings import load_config
from jaxserve.config import Config
from jaxserve.engine.hosts.agreement import check_hosts
from jaxserve.log import configure_logging
from jaxserve.model_directory import check_local_model, local_directory

logger = logging.getLogger(__name__)


def run(words: Sequence[str]) -> int:
    """Run the command `launch`: print the help, or load the configuration and start the server."""
    if any(word in ("-h", "--help", "--help-all") for word in words):
        print(launch_help(everything="--help-all" in words))
        return 0
    config = load_config(words, os.environ, several=True)
    configure_logging(config.logging)
    for line in dump(config).splitlines():
        logger.debug("configuration: %s", line)
    check_hosts(config)
    if config.models.served:
        return imported("jaxserve.cli.several").serve(config)
    check_files(config)
    if config.mesh.host_rank > 0:
        return imported("jaxserve.cli.follow").serve(config)
    return imported("jaxserve.cli.launch").serve(config)


def check_files(config: Config) -> None:
    """Check the paths of the model and the tokenizer. Raises ConfigError."""
    if config.model.path is not None:
        check_local_model(config.model.path)
    if config.model.tokenizer is not None:
        local_directory(config.model.tokenizer)
