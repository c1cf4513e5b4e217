"""Starts Python processes of this package such that nothing is imported from the working directory.

`python -m` puts the working directory first on the import path. A model directory may contain `zmq.py`, and the
operator may run the server there. PYTHONPATH is used without its empty entries, which also mean the working
directory.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Mapping

_PATH = "PYTHONPATH"


def python_command(module: str, *words: str) -> list[str]:
    """Return the command that runs a module of this package, without the working directory on its path."""
    return [sys.executable, "-P", "-m", module, *words]


def child_environment(environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return a copy of `environ` for a child, with PYTHONPATH without its empty entries."""
    child = dict(environ)
    if _PATH in child:
        child[_PATH] = os.pathsep.join(filter(None, child[_PATH].split(os.pathsep)))
    return child


def end_with_parent() -> None:
    """Start a thread that waits until stdin closes, which means that the parent ended, and then exits at once."""
    threading.Thread(target=_wait_and_exit, name="parent-watch", daemon=True).start()


def _wait_and_exit() -> None:
    while sys.stdin.buffer.read(4096):
        pass
    os._exit(1)


def without_empty_entries(path: list[str], environ: Mapping[str, str] = os.environ) -> list[str]:
    """Return the import path without the working directory if an empty entry of PYTHONPATH put it there."""
    entries = environ.get(_PATH, "").split(os.pathsep)
    if len(entries) == 1 or "" not in entries:
        return path
    here = os.path.abspath(os.curdir)
    named = here in (os.path.abspath(entry) for entry in entries if entry)
    return path if named else [entry for entry in path if entry not in ("", here)]
