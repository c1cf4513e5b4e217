"""The command line: `jaxserve COMMAND`. Each command has a file; main.py lists them."""

from jaxserve.cli.main import main

__all__ = ["main"]
