"""What JSON text costs is told from its bytes as a decoder would find it, whatever its strings hold."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxserve.text.json_cost import SMALL_BYTES, JsonLimits, may_have_large_exponent, over_limit

PADDING = b" " * SMALL_BYTES
TEXTS = st.text(alphabet='a"\\{}[]:,\n é\u2028' + "1" * 3, max_size=12)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | TEXTS,
    lambda inner: st.lists(inner, max_size=6) | st.dictionaries(TEXTS, inner, max_size=6),
    max_leaves=30,
)


def costs(value: Any) -> tuple[int, int]:
    """(structures, values) of decoded JSON."""
    if not isinstance(value, list | dict):
        return 0, 0
    inner = [costs(each) for each in (value.values() if isinstance(value, dict) else value)]
    names = len(value) if isinstance(value, dict) else 0
    return 1 + names + sum(s for s, _ in inner), max(0, len(value) - 1) + sum(v for _, v in inner)


@given(VALUES, st.booleans())
def test_what_a_decoder_would_make_is_counted(value: Any, ascii: bool) -> None:
    raw = json.dumps(value, ensure_ascii=ascii).encode(errors="surrogatepass") + PADDING
    structures, values = costs(value)
    assert over_limit(raw, JsonLimits(structures, values)) is None or len(json.dumps(value)) > 4 * (structures + values)
    if structures:
        assert over_limit(raw, JsonLimits(structures - 1, 10**6)) is not None
    if values:
        assert over_limit(raw, JsonLimits(10**6, values - 1)) is not None


@pytest.mark.parametrize("text", ['[{,:]}"\\' * 50_000, "\\" * 9999, '\\"', "9" * 100_000, "é日本" * 10_000])
def test_what_strings_hold_is_not(text: str) -> None:
    raw = json.dumps({"a": text, "b": [text]}).encode() + PADDING
    assert over_limit(raw, JsonLimits(4, 1)) is None
    assert over_limit(raw, JsonLimits(3, 1)) == "3 objects, lists and names"
    assert over_limit(raw, JsonLimits(4, 0)) == "0 values"


def test_objects_have_a_limit_of_their_own() -> None:
    raw = json.dumps({"a": [{}, {}, "{{{"]}).encode() + PADDING
    assert over_limit(raw, JsonLimits(9, 9, 3)) is None
    assert over_limit(raw, JsonLimits(9, 9, 2)) == "2 objects"


def test_numbers_that_take_long_to_read() -> None:
    limits = JsonLimits(10, 10)
    assert over_limit(b"[" + b"9" * 4000 + b"]" + PADDING, limits) == "400 digits in a number"
    assert over_limit(b"[" + b"9" * 300 + b"]" + PADDING, limits) is None


@pytest.mark.parametrize("number", ["1e999", "1E+999", "2.e999", "0.5e100"])
def test_large_exponents_are_seen(number: str) -> None:
    assert may_have_large_exponent(b'{"a": %s}' % number.encode())
    assert not may_have_large_exponent(
        b'{"a": "word %s", "b": [1e99, 1000]}' % number.lower().replace("e", "x").encode()
    )


def test_small_text_is_not_counted() -> None:
    assert over_limit(b"[" * SMALL_BYTES, JsonLimits(1, 1)) is None


def test_millions_of_strings_are_not_taken_out_one_by_one() -> None:
    assert over_limit(b'["",' * 10**6, JsonLimits(10, 10)) == "20 texts and names"
