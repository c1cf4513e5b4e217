"""The command line: `jaxserve COMMAND`. One file per command; main.py lists them."""

from jaxserve.cli.main import main

__all__ = ["main"]
