"""The table of commands and the one place where their errors become a line and an exit code."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence

from jaxserve.errors import ConfigError
from jaxserve.version import __version__

# command -> (module, what it does). A module is imported only when its command runs: `--help` stays instant.
COMMANDS = {
    "launch": ("jaxserve.cli.launch", "serve a model over HTTP"),
    "convert": ("jaxserve.cli.convert", "write a checkpoint anew, to be loaded faster"),
    "plan": ("jaxserve.cli.plan", "how large a model is on 1, 8 or 16 devices, by its config alone"),
    "config": ("jaxserve.cli.config", "show, validate or describe the configuration"),
    "batch": ("jaxserve.cli.batch", "run a batch file, here or at a server"),
    "bench": ("jaxserve.cli.bench", "measure the engine or a server"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; the exit code: 0 done, 1 failed, 2 a mistake of the operator."""
    words = list(sys.argv[1:] if argv is None else argv)
    if not words or words[0] in ("-h", "--help"):
        print(_usage())
        return 0
    if words[0] in ("-V", "--version"):
        print(f"jaxserve {__version__}")
        return 0
    if words[0] not in COMMANDS:
        print(f"jaxserve: no command {words[0]!r}\n\n{_usage()}", file=sys.stderr)
        return 2
    try:
        return importlib.import_module(COMMANDS[words[0]][0]).run(words[1:])
    except ConfigError as error:
        print(describe(error), file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


def describe(error: ConfigError) -> str:
    """One line: the cause, and the fix where there is one."""
    return f"jaxserve: {error}" + (f" -> {error.fix}" if error.fix else "")


def _usage() -> str:
    lines = [f"  {name:9} {what}" for name, (_, what) in COMMANDS.items()]
    return "usage: jaxserve COMMAND [--help]\n\n" + "\n".join(lines)
