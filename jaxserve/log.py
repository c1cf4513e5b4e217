"""Logging: one set-up for all processes, as text for people or as JSON lines for programs."""

from __future__ import annotations

import json
import logging
import sys

from jaxserve.config import LoggingSection


class JsonFormatter(logging.Formatter):
    """Formats a record as one JSON object on one line."""

    def format(self, record: logging.LogRecord) -> str:
        """Format a record as JSON, with the traceback in `exception`."""
        line = {
            "time": self.formatTime(record, "%Y-%m-%dT%H:%M:%S%z"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
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


def configure_logging(section: LoggingSection) -> None:
    """Configure the `jaxserve` loggers of this process. Called once by its main function."""
    handler = logging.StreamHandler(sys.stderr)
    text = TextFormatter("%(asctime)s %(levelname)-7s %(name)s: %(message)s", "%H:%M:%S")
    handler.setFormatter(JsonFormatter() if section.format == "json" else text)
    root = logging.getLogger("jaxserve")
    root.handlers = [handler]
    root.propagate = False
    root.setLevel(section.level.upper())
