"""The table of commands and the one place where their errors become a line and an exit code."""

from __future__ import annotations

import difflib
import importlib
import signal
import sys
import threading
import traceback
from collections.abc import Sequence
from typing import Any

from jaxserve.errors import ConfigError, UnexpectedEndError
from jaxserve.transport.child_process import without_empty_entries
from jaxserve.version import __version__

# command -> (module, what it does). A module is imported only when its command runs: `--help` stays instant.
COMMANDS = {
    "launch": ("jaxserve.cli.start", "serve a model over HTTP"),
    "serve": ("jaxserve.cli.start", "the same as launch"),
    "convert": ("jaxserve.cli.convert", "write a checkpoint anew, to be loaded faster"),
    "plan": ("jaxserve.cli.plan", "how large a model is on 1, 8 or 16 devices, by its config alone"),
    "config": ("jaxserve.cli.config", "show, validate or describe the configuration"),
    "batch": ("jaxserve.cli.batch", "run a batch file, here or at a server"),
    "bench": ("jaxserve.cli.bench", "measure the engine or a server"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; the exit code: 0 done, 1 failed, 2 a mistake of the operator."""
    words = list(sys.argv[1:] if argv is None else argv)
    sys.path[:] = without_empty_entries(sys.path)
    if not words or words[0] in ("-h", "--help"):
        print(_usage())
        return 0
    if words[0] in ("-V", "--version"):
        print(f"jaxserve {__version__}")
        return 0
    if words[0] not in COMMANDS:
        near = difflib.get_close_matches(words[0], COMMANDS, n=1)
        print(_usage(), file=sys.stderr)
        print(f"jaxserve: no command {words[0]!r}{f', did you mean {near[0]}?' if near else ''}", file=sys.stderr)
        return 2
    try:
        return imported(COMMANDS[words[0]][0]).run(words[1:])
    except ConfigError as error:
        print(describe(error), file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    except UnexpectedEndError as error:
        print(describe(error), file=sys.stderr)
    except Exception as error:
        traceback.print_exc()
        print(f"jaxserve: {type(error).__name__}: {error} -> a bug: report it with the lines above", file=sys.stderr)
    return 1


def imported(name: str) -> Any:
    """The module of a command. Ctrl-C ends the process while it is imported: an extension module that is interrupted
    may print a traceback of its own."""
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        return importlib.import_module(name)
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        return importlib.import_module(name)
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def describe(error: ConfigError | UnexpectedEndError) -> str:
    """One line: the cause, and the fix where there is one."""
    return f"jaxserve: {error}" + (f" -> {error.fix}" if error.fix else "")


def _usage() -> str:
    lines = [f"  {name:9} {what}" for name, (_, what) in COMMANDS.items()]
    return "usage: jaxserve COMMAND [--help]\n\n" + "\n".join(lines)
