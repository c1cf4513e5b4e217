"""Begin `jaxserve launch` and `jaxserve serve`: print the help, load the configuration, check the model's path.

The server is imported by name at the end, so that an error of the operator is reported before the large imports. The
engine process runs its imports at the same time.
"""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Sequence

from jaxserve.cli.config import dump
from jaxserve.cli.main import imported
from jaxserve.cli.options import launch_help, load_config, wanted_format
from jaxserve.config import Config
from jaxserve.engine.hosts.agreement import check_hosts
from jaxserve.log import configure_logging, tell
from jaxserve.model_files import check_local_model, local_directory
from jaxserve.transport.engine_child import ENGINE_MODULE, EngineChild
from jaxserve.version import __version__

DEMO = "the embedded demo model"

logger = logging.getLogger(__name__)


def run(words: Sequence[str]) -> int:
    """Run the command `launch`: print the help, or load the configuration and start the server."""
    if any(word in ("-h", "--help", "--help-all") for word in words):
        print(launch_help(everything="--help-all" in words))
        return 0
    if wanted_format(words, os.environ) == "json":  # errors in the configuration are logged as JSON too
        configure_logging(Config.parse({"logging": {"format": "json"}}).logging, is_command=True)
    config = load_config(words, os.environ, several=True)
    configure_logging(config.logging, is_command=True)
    for line in dump(config).splitlines():
        logger.debug("configuration: %s", line)
    check_hosts(config)
    if config.models.served:
        return imported("jaxserve.cli.several").serve(config)
    check_model_paths(config)
    if config.mesh.host_rank > 0:
        return imported("jaxserve.cli.follow").serve(config)
    tell_start(config.model.path or DEMO)
    child = start_engine(config)
    try:
        return imported("jaxserve.cli.launch").serve(config, child, functools.partial(_reread, words))
    finally:
        if child is not None:
            child.close()


def _reread(words: Sequence[str]) -> Config:
    """Return the configuration with what its file says now. Raises ConfigError."""
    return load_config(words, os.environ, notice=lambda line: None)


def tell_start(served: str) -> None:
    """Tell the operator that a server starts. served: the path of its model, or a text that names its models"""
    line = f"jaxserve {__version__} starts with {served}"
    tell(line, text=line, event="start", version=__version__, model=served)


def start_engine(config: Config) -> EngineChild | None:
    """Start the engine process, so that its imports run beside the server's. Return None if there are several engines.

    Raises ConfigError if there is no directory for its sockets.
    """
    if config.mesh.replicas > 1:
        return None
    return EngineChild(ENGINE_MODULE, config.without_secrets().model_dump_json())


def check_model_paths(config: Config) -> None:
    """Check the paths of the model and the tokenizer. Raises ConfigError."""
    if config.model.path is not None:
        check_local_model(config.model.path)
    if config.model.tokenizer is not None:
        local_directory(config.model.tokenizer)
