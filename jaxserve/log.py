"""Logging: one set-up for all processes, as text for people or as JSON lines for programs.

With JSON, each line of stderr is one object, from the first to the last, and nothing is written to stdout. What does
not come through `logging` is wrapped too: lines of XLA, stacks after a crash, and warnings of libraries.

What one request used, for its line in the log. docs/logs.md lists the fields.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass, field
from datetime import UTC, datetime
from types import TracebackType
from typing import TYPE_CHECKING, Any, Protocol, TextIO

if TYPE_CHECKING:  # `jaxserve --help` needs no configuration
    from jaxserve.config import LoggingSection

MAX_RAW_LINE = 1 << 20  # bytes; a longer one is cut into several
DRAIN_SECONDS = 1.0  # for the last lines of other processes

logger = logging.getLogger("jaxserve")


def fields(**named: Any) -> dict[str, Any]:
    """Return the `extra` of a log call that gives the JSON line more fields. The text format does not show them."""
    return {"fields": named}


class JsonFormatter(logging.Formatter):
    """Formats a record as one JSON object on one line."""

    def format(self, record: logging.LogRecord) -> str:
        """Format a record as JSON, with the traceback in `exception`."""
        line = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "pid": record.process,
            "message": record.getMessage(),
            **record.__dict__.get("fields", {}),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=True)


class TextFormatter(logging.Formatter):
    """Formats a record as one line of text. Control characters are escaped so that no request can forge a line."""

    def format(self, record: logging.LogRecord) -> str:
        first, *rest = super().format(record).split("\n") if record.exc_info else [super().format(record)]
        escaped = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in first)
        return "\n".join([escaped, *rest])


def configure_logging(section: LoggingSection, *, is_command: bool = False) -> None:
    """Configure the loggers of this process. A second call replaces what the first one set.

    With JSON, those of libraries and Python's warnings too. is_command: this is the process that the operator started,
    whose stderr the others have
    """
    handler: logging.StreamHandler[TextIO]
    if section.format == "json":
        handler = _json_handler() or logging.StreamHandler(StderrRelay().stream if is_command else sys.stderr)
        handler.setFormatter(JsonFormatter())
        logging.getLogger().handlers = [handler]
        logging.captureWarnings(True)
        sys.excepthook, threading.excepthook = _log_uncaught, _log_uncaught_in_thread
    else:
        handler = logging.StreamHandler(sys.stderr)
        handler.setFormatter(TextFormatter("%(asctime)s %(levelname)-7s %(name)s: %(message)s", "%H:%M:%S"))
    logger.handlers = [handler]
    logger.propagate = False
    logger.setLevel(section.level.upper())


def _json_handler() -> logging.StreamHandler[TextIO] | None:
    """Return the handler of this process that writes JSON; None if its log is text."""
    for handler in logger.handlers:
        if isinstance(handler, logging.StreamHandler) and isinstance(handler.formatter, JsonFormatter):
            return handler
    return None


def is_json() -> bool:
    """Return whether the log of this process is JSON, so that nothing else may be written to stderr."""
    return _json_handler() is not None


def tell(message: str, *, level: int = logging.INFO, text: str | None = None, **named: Any) -> None:
    """Tell the operator something: as one line of text at any `logging.level`, or as a JSON line with named fields.

    text: the line of text; None: the message after the name of the command
    """
    if is_json():
        logger.log(level, message, extra=fields(**named))
    else:
        print(f"jaxserve: {message}" if text is None else text, file=sys.stderr, flush=True)


def tell_at_once(message: str, **named: Any) -> None:
    """`tell` for the handler of a signal: takes no lock, and writes past every buffer."""
    handler, line, descriptor = _json_handler(), f"jaxserve: {message}", 2
    if handler is not None:
        record = logging.makeLogRecord({"name": logger.name, "msg": message, "levelname": "INFO", **fields(**named)})
        line, descriptor = handler.format(record), handler.stream.fileno()
    with contextlib.suppress(OSError):
        os.write(descriptor, line.encode() + b"\n")


def _log_uncaught(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    logger.critical("uncaught %s", kind.__name__, exc_info=(kind, error, trace))


def _log_uncaught_in_thread(args: threading.ExceptHookArgs) -> None:
    if args.exc_value is not None and not issubclass(args.exc_type, SystemExit):
        name = "a thread" if args.thread is None else args.thread.name
        exc_info = (args.exc_type, args.exc_value, args.exc_traceback)
        logger.error("uncaught %s in %s", args.exc_type.__name__, name, exc_info=exc_info)


class StderrRelay:
    """Takes what this process and its children write to descriptor 2, and writes it to stderr as JSON lines.

    A line that is an object already passes as it is. The relay lives as long as the process, so it also gets what a
    child writes while it dies.

    stream: stderr itself, for the log of this process
    """

    def __init__(self) -> None:
        sys.stderr.flush()
        self.stream = os.fdopen(os.dup(2), "w", encoding="utf-8", errors="backslashreplace")
        self._reader, writer = os.pipe()
        os.dup2(writer, 2)
        os.close(writer)
        self._end = os.urandom(16).hex().encode()  # the line after which nothing is read
        self._thread = threading.Thread(target=self._run, name="stderr", daemon=True)
        self._thread.start()
        atexit.register(self.close)

    def close(self) -> None:
        """Write what has been read until now, and let descriptor 2 be stderr again."""
        with contextlib.suppress(OSError, ValueError):
            sys.stderr.flush()
        os.write(2, b"\n" + self._end + b"\n")
        self._thread.join(DRAIN_SECONDS)
        os.dup2(self.stream.fileno(), 2)

    def _run(self) -> None:
        rest = b""
        while piece := os.read(self._reader, 1 << 16):
            *lines, rest = (rest + piece).split(b"\n")
            if len(rest) > MAX_RAW_LINE:
                lines, rest = [*lines, rest], b""
            for line in lines:
                if line == self._end:
                    return
                if line.strip():
                    self._write(line)

    def _write(self, line: bytes) -> None:
        if not _is_object(line):
            text = line.decode(errors="backslashreplace").rstrip()
            record = {"name": "stderr", "levelname": "WARNING", "msg": text, "process": None}
            line = JsonFormatter().format(logging.makeLogRecord(record)).encode()
        with contextlib.suppress(OSError, ValueError):  # the reader of stderr has left
            os.write(self.stream.fileno(), line + b"\n")


def _is_object(line: bytes) -> bool:
    try:
        return line.startswith(b"{") and isinstance(json.loads(line), dict)
    except (ValueError, RecursionError):
        return False


class TokensUsed(Protocol):
    """The tokens that a generation has used so far."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int


@dataclass(slots=True)
class RequestRecord:
    """The tokens that a request used, for its line in the log, and how far it is.

    started: time.perf_counter() when it arrived. on_ended: called with (prompts that have ended, all its prompts)
    """

    started: float = field(default_factory=time.perf_counter)
    first_token: float | None = None  # seconds since it arrived
    used: list[TokensUsed] = field(default_factory=list)
    prompts: int = 0
    ended: int = 0  # prompts
    on_ended: Callable[[int, int], None] | None = None

    def note_begin(self, used: TokensUsed, prompts: int) -> None:
        """Note a generation: its counts, which it changes as it runs, and its number of prompts."""
        self.used.append(used)
        self.prompts += prompts

    def note_ended(self) -> None:
        """Note that a prompt has ended."""
        self.ended += 1
        if self.on_ended is not None:
            self.on_ended(self.ended, self.prompts)

    def note_first_token(self, now: float) -> None:
        """Note a first token at time.perf_counter() `now`. The first one of all choices counts."""
        if self.first_token is None:
            self.first_token = now - self.started

    def as_fields(self) -> dict[str, Any]:
        """Return the fields of a request that reached the engine, in tokens and seconds; none for any other."""
        if not self.used:
            return {}
        return {
            "prompt_tokens": sum(each.prompt_tokens for each in self.used),
            "output_tokens": sum(each.completion_tokens for each in self.used),
            "cached_tokens": sum(each.cached_tokens for each in self.used),
            "time_to_first_token": None if self.first_token is None else round(self.first_token, 4),
        }


_RECORD: ContextVar[RequestRecord | None] = ContextVar("request_record", default=None)


@contextlib.contextmanager
def recorded_request() -> Iterator[RequestRecord]:
    """Record the tokens and times of the request that is answered in this context."""
    record = RequestRecord()
    token = _RECORD.set(record)
    try:
        yield record
    finally:
        _RECORD.reset(token)


def current_record() -> RequestRecord | None:
    """Return the record of the request that is answered in this context; None if it gets no line."""
    return _RECORD.get()
