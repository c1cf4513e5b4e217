"""An audit hook against code that comes from requests: unpickling, exec and compile below whatever handles one.

It runs in the test process and in every server, engine and helper process that tests start. What it finds is an
error where it happens, and a line in the file that JAXSERVE_TEST_AUDIT names, which fails the session.
"""

from __future__ import annotations

import functools
import os
import sys
from types import FrameType

EVENTS = frozenset({"pickle.find_class", "marshal.loads", "exec", "compile"})
VARIABLE = "JAXSERVE_TEST_AUDIT"

# (end of the file's path, function or "" for all): below these, what runs was brought about by a request
HANDLERS = (
    ("/uvicorn/protocols/http/httptools_impl.py", "run_asgi"),
    ("/anyio/_backends/_asyncio.py", "run"),  # a route that is no coroutine
    ("/concurrent/futures/thread.py", "run"),  # what a route gives to a thread
    ("/jaxserve/api/batch/request.py", "__call__"),
    ("/jaxserve/engine/server.py", "run"),
    ("/jaxserve/client/async_engine.py", "_handle"),
    ("/jaxserve/types/messages.py", ""),
    ("/jaxserve/client/link.py", "receive"),
    ("/jaxserve/engine/child.py", "receive"),
    ("/jaxserve/grammar/worker.py", "run"),
    ("/jaxserve/grammar/matcher.py", "__call__"),
    ("/jaxserve/text/chat_template.py", "render"),
    ("/jaxserve/store/store.py", ""),
)
# where Python itself compiles or executes: a module that is imported late, the source line of a traceback (Jinja's, of
# its own error, too), our own annotations at their first use; and the one text that is code by design, the
# operator's chat template, compiled once and never a request's
ALLOWED = (
    ("<frozen importlib._bootstrap>", "_find_and_load"),
    ("/traceback.py", ""),
    ("/inspect.py", "get_annotations"),
    ("/typing.py", ""),
    ("/jinja2/debug.py", "fake_traceback"),
)


@functools.cache  # an import asks for each frame above it
def _is_in(places: tuple[tuple[str, str], ...], file: str, function: str) -> bool:
    if function == "<module>":
        return False
    return any(file.endswith(ending) and name in ("", function) for ending, name in places)


def below_a_request(frame: FrameType | None) -> str | None:
    """The handler that `frame` runs below; None if there is none, or if Python's own needs come first."""
    while frame is not None:
        code = frame.f_code
        if _is_in(ALLOWED, code.co_filename, code.co_name):
            return None
        if _is_in(HANDLERS, code.co_filename, code.co_name):
            return f"{code.co_filename}:{frame.f_lineno} {code.co_name}"
        frame = frame.f_back
    return None


def hook(event: str, args: tuple[object, ...]) -> None:
    if event not in EVENTS:
        return
    handler = below_a_request(sys._getframe().f_back)
    if handler is None:
        return
    caller = sys._getframe().f_back
    where = f"{caller.f_code.co_filename}:{caller.f_lineno}" if caller is not None else "?"
    message = f"{event} {str(args)[:200]!r} at {where}, below {handler}"
    if (path := os.environ.get(VARIABLE)) is not None:
        with open(path, "a", encoding="utf-8") as file:
            file.write(message + "\n")
    raise RuntimeError(f"forbidden by the tests' audit hook: {message}")
