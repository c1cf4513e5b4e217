"""Run a command of the table, print its error as one line, and turn it into an exit code."""

from __future__ import annotations

import contextlib
import difflib
import errno
import gc
import importlib
import logging
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import FrameType
from typing import Any

from jaxserve.errors import ConfigError, UnexpectedEndError
from jaxserve.log import fields, is_json, tell, tell_at_once
from jaxserve.version import __version__

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)  # errors of a write that are not a bug

# command -> (module, description). A module is imported when its command runs, so `--help` is instant.
_SERVER = "jaxserve.cli.start"
COMMANDS = {
    "launch": (_SERVER, "serve a model over HTTP"),
    "serve": (_SERVER, "the same as launch"),
    "chat": ("jaxserve.cli.chat", "talk to a model in the terminal, at a running server or one of its own"),
    "compile": (
        "jaxserve.cli.compile",
        "write a bundle of compiled programs, with which a start compiles nothing",
    ),
    "convert": ("jaxserve.cli.convert", "write a checkpoint in the form that loads fastest"),
    "plan": ("jaxserve.cli.plan", "print how much memory a model needs, from its config.json alone"),
    "doctor": ("jaxserve.cli.doctor", "check this machine, the configuration and a model, and say what to do"),
    "config": ("jaxserve.cli.config", "show or check the configuration, or print its JSON Schema"),
    "store": ("jaxserve.cli.store", "check, back up, restore or upgrade the directory of files and batches"),
    "batch": ("jaxserve.cli.batch", "run a batch file without a server, or send it to one"),
    "bench": ("jaxserve.cli.bench", "measure the engine or a server"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return the exit code: 0 done, 1 failed, 2 a mistake in the command or the configuration."""
    words = list(sys.argv[1:] if argv is None else argv)
    sys.path[:] = without_empty_entries(sys.path)
    _open_closed()
    try:
        try:
            return _run(words)
        finally:
            sys.stdout.flush()  # so that an error is reported here, not while Python ends
    except ConfigError as error:
        tell_error(error)
        return 2
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # the reader of the output ended, as `| head` does
        _drop_output()
        return 141
    except UnexpectedEndError as error:
        tell_error(error)
    except OSError as error:
        if error.errno not in _FULL:
            return _bug(error)
        _drop_output()
        where = "" if error.filename is None else f": {error.filename}"
        tell_error(UnexpectedEndError(f"cannot write{where}: {error.strerror}", fix="make room on the disk"))
    except Exception as error:
        return _bug(error)
    return 1


def without_empty_entries(path: list[str], environ: Mapping[str, str] = os.environ) -> list[str]:
    """Return the import path without the working directory if an empty entry of PYTHONPATH put it there."""
    entries = environ.get("PYTHONPATH", "").split(os.pathsep)
    if len(entries) == 1 or "" not in entries:
        return path
    here = os.path.abspath(os.curdir)
    named = here in (os.path.abspath(entry) for entry in entries if entry)
    return path if named else [entry for entry in path if entry not in ("", here)]


def _run(words: Sequence[str]) -> int:
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
    module = COMMANDS[words[0]][0]
    with on_sigterm(_end_at_once) if module == _SERVER else contextlib.nullcontext():
        return imported(module).run(words[1:])


def _end_at_once(number: int, frame: FrameType | None) -> None:
    """End before the server handles signals itself. The engine process ends too, because its stdin is closed."""
    tell_at_once("SIGTERM: stopping", event="stop", signal="SIGTERM")
    os._exit(0)


def _bug(error: Exception) -> int:
    if is_json():
        logging.getLogger("jaxserve").critical(
            "a bug: report it with this line", exc_info=error, extra=fields(event="end")
        )
        return 1
    traceback.print_exception(error)
    print(f"jaxserve: {type(error).__name__}: {error} -> a bug: report it with the lines above", file=sys.stderr)
    return 1


def _open_closed() -> None:
    """Open the standard streams that the shell closed (`2>&-`), so that no other file gets their descriptors."""
    for descriptor, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            os.open(os.devnull, os.O_RDWR)  # gets the lowest descriptor that is free
            setattr(sys, name, open(descriptor, "w" if descriptor else "r", encoding="utf-8", closefd=False))


def _drop_output() -> None:
    """Send stdout to the null device, because Python writes there once more when it ends."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def imported(name: str) -> Any:
    """Import the module of a command.

    During the import Ctrl-C ends the process without KeyboardInterrupt, because an extension module may print a
    traceback for it. The garbage collector leaves the modules alone: it would walk them again and again, which
    takes 0.5 s of a warm start (docs/experiments/start.md), and find nothing.
    """
    is_main = threading.current_thread() is threading.main_thread()
    quiet = is_main and signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if quiet:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    gc.disable()
    try:
        return importlib.import_module(name)
    finally:
        gc.freeze()
        gc.enable()
        if quiet:
            signal.signal(signal.SIGINT, signal.default_int_handler)


@contextlib.contextmanager
def on_sigterm(act: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    """Call `act` at a SIGTERM. Linux gives it to the first process of a container only if there is a handler."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, act)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def tell_error(error: ConfigError | UnexpectedEndError, *, of: str = "jaxserve") -> None:
    """Tell the operator what ends this process. of: the command, or the model that the process serves"""
    text = describe(error).replace("jaxserve", of, 1)
    named = {"event": "end", "error": type(error).__name__, "fix": error.fix}
    tell(str(error), level=logging.CRITICAL, text=text, **named, **({} if of == "jaxserve" else {"model": of}))


def describe(error: ConfigError | UnexpectedEndError) -> str:
    """Return one line: the cause, and the fix if there is one."""
    return f"jaxserve: {error}" + (f" -> {error.fix}" if error.fix else "")


def _usage() -> str:
    lines = [f"  {name:9} {what}" for name, (_, what) in COMMANDS.items()]
    return "usage: jaxserve COMMAND [--help]\n\n" + "\n".join(lines)
