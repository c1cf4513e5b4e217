"""The command line: `jaxserve COMMAND`. One file a command; this one names them and prints their errors."""

from jaxserve.cli.main import main

__all__ = ["main"]
