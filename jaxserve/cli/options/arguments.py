"""Types of argparse's arguments: each refuses a value that cannot be meant, with the range that can."""

from __future__ import annotations

import argparse
import math
import re
from collections.abc import Callable

_VISIBLE = re.compile(r"[\x21-\x7e]*")


def at_least(least: int, most: int | None = None) -> Callable[[str], int]:
    """Return a type for whole numbers not below `least` nor above `most`, which raises ArgumentTypeError."""

    def _whole(text: str) -> int:
        try:
            number = int(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"should be a whole number, not {text!r}") from None
        if number < least:
            raise argparse.ArgumentTypeError(f"should be at least {least}, not {number}")
        if most is not None and number > most:
            raise argparse.ArgumentTypeError(f"should be at most {most}, not {number}")
        return number

    return _whole


def positive(text: str) -> float:
    """Read a finite number above 0. Raises ArgumentTypeError."""
    number = _real(text)
    if number <= 0:
        raise argparse.ArgumentTypeError(f"should be above 0, not {text}")
    return number


def share(text: str) -> float:
    """Read a number from 0 to 1. Raises ArgumentTypeError."""
    number = _real(text)
    if not 0 <= number <= 1:
        raise argparse.ArgumentTypeError(f"should be from 0 to 1, not {text}")
    return number


def api_key(text: str) -> str:
    """Read a key that a header can have; empty: no key. Raises ArgumentTypeError."""
    if not _VISIBLE.fullmatch(text):
        raise argparse.ArgumentTypeError("may hold visible ASCII characters only: no space, no newline")
    return text


def _real(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not math.isfinite(number):
        raise argparse.ArgumentTypeError(f"should be a finite number, not {text!r}")
    return number
