"""What a check of `jaxserve doctor` found: one line, its state and what to do."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

from jaxserve.errors import ConfigError

OK, WARN, BAD = "ok", "warn", "bad"


@dataclass(frozen=True)
class Finding:
    """One line of the output.

    state: ok; warn: it can serve, but worse; bad: it cannot serve. fix: what to do; empty if nothing.
    """

    check: str
    state: Literal["ok", "warn", "bad"]
    text: str
    fix: str = ""

    @classmethod
    def of(cls, check: str, error: Exception, state: Literal["warn", "bad"] = "bad") -> Finding:
        """Return the finding of an error. The fix is the error's own."""
        if isinstance(error, ConfigError):
            return cls(check, state, str(error), error.fix or "")
        text = " ".join(f"{type(error).__name__}: {error}".split())
        return cls(check, state, text, "report it with this line if the cause is not plain")

    def line(self) -> str:
        """Return the finding as one line."""
        fix = f" -> {self.fix}" if self.fix else ""
        return f"{self.state:4} {self.check:9} {' '.join(self.text.split())}{fix}"


Findings = Callable[[], Iterable[Finding]]


def examined(name: str, check: Findings) -> Iterator[Finding]:
    """Yield what a check finds. An error that it raises is a finding too, so that the other checks still run."""
    try:
        yield from check()
    except Exception as error:
        yield Finding.of(name, error)
