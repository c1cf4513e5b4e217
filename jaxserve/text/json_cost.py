"""Estimates the cost of decoding a JSON text from its bytes: objects, lists, names, values, and very long numbers.

Decoding takes 0.4 us and 100 bytes per object or name, and 0.1 us and 40 bytes per number. The GIL is held until the
end. Counting takes 1 ns per byte, in calls of a few milliseconds.
"""

from __future__ import annotations

from dataclasses import dataclass

SMALL_BYTES = 16 * 1024  # bytes below which a text is not counted: 16,000 lists take 7 ms

MAX_DIGITS = 400  # of one number; the largest float has 309; parsing many numbers with thousands of digits takes long

# All digits become 0, so that a search in C finds long numbers: twenty times as quick as a pattern.
_SHAPES = bytes(48 if chr(byte) in "0123456789." else 101 if chr(byte) in "eE" else byte for byte in range(256))
_LONG_NUMBER = b"0" * MAX_DIGITS
_LARGE_EXPONENTS = (b"0e000", b"0e+000")


@dataclass(frozen=True, slots=True)
class JsonLimits:
    """Limits of a JSON text.

    structures: objects, lists and field names. values: entries of objects and lists, except the first of each
    """

    structures: int
    values: int
    objects: int | None = None


def over_limit(raw: bytes, limits: JsonLimits) -> str | None:
    """Return the limit that the text exceeds; None if it exceeds none.

    Text that is not JSON may pass: decoding stops at its first mistake.
    """
    if len(raw) <= SMALL_BYTES:
        return None
    if _over(raw, limits) is None and not _has_long_number(raw):
        return None  # the contents of strings were counted too
    outside = _outside_strings(raw, 2 * (limits.structures + limits.values))
    if outside is None:
        return f"{limits.structures + limits.values} texts and names"
    over = _over(outside, limits)
    return f"{MAX_DIGITS} digits in a number" if over is None and _has_long_number(outside) else over


def most_structures(raw: bytes) -> int:
    """Return an upper bound of the objects, lists and field names. Brackets and colons inside strings count too."""
    return raw.count(b"{") + raw.count(b"[") + raw.count(b":")


def _over(text: bytes, limits: JsonLimits) -> str | None:
    if limits.objects is not None and text.count(b"{") > limits.objects:
        return f"{limits.objects} objects"
    if most_structures(text) > limits.structures:
        return f"{limits.structures} objects, lists and names"
    return f"{limits.values} values" if text.count(b",") > limits.values else None


def may_be_beyond_a_float(raw: bytes) -> bool:
    """Return whether the text may contain NaN, Infinity, or a number with an exponent of three or more digits."""
    return b"NaN" in raw or b"Infinity" in raw or may_have_large_exponent(raw)


def may_have_large_exponent(raw: bytes) -> bool:
    """Return whether the text may contain a number with a three-digit exponent."""
    shapes = raw.translate(_SHAPES)
    return any(each in shapes for each in _LARGE_EXPONENTS)


def _has_long_number(text: bytes) -> bool:
    return _LONG_NUMBER in text.translate(_SHAPES)


def _outside_strings(raw: bytes, max_quotes: int) -> bytes | None:
    """Return the text without its strings; None if there are too many strings to remove."""
    text = raw.replace(b"\\\\", b"").replace(b'\\"', b"")
    if text.count(b'"') > max_quotes:
        return None
    return b"".join(text.split(b'"')[::2])
