"""Kimi K2: a section of calls, each with its id, from which the name is read."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from typing import ClassVar

from jaxserve.text.reader import Reading, decode_json_string, json_rest
from jaxserve.text.tools.base import ToolParser, as_object
from jaxserve.text.tools.format import CallFormat, CallOpening, NamedCall, ToolFormat

SECTION_BEGIN = ("<|tool_calls_section_begin|>", "<|tool_call_section_begin|>")
SECTION_END = ("<|tool_calls_section_end|>", "<|tool_call_section_end|>")
CALL_BEGIN, ARGUMENTS, CALL_END = "<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"
_CALL_ID = re.compile(r"(?:functions\.)?(?P<name>.+?)(?::\d+)?")
# ids as clients and other servers change or make them: signs are replaced or lost
_PREFIX = r"(?:(?:functions?|tools?|calls?|fc|toolu|tooluse|multi_tool_use|default_api|assistant)[._:/ -]?)*"
_CHANGED_ID = re.compile(
    rf"{_PREFIX}(?P<name>.+?)(?:[._:-]?calls?)?(?:[._:#-]\d+)*?[._:#-]?(?P<number>\d*)",
    re.IGNORECASE,
)
_RANDOM_END = re.compile(r"[._:-](?=[^._:-]*\d)[0-9A-Za-z]{6,}\Z")
# an id without a name: words and a counter, or what a server drew at random
_WITHOUT_NAME = re.compile(
    r"(?:functions?|calls?|chatcmpl|tools?|id|none|null|undefined|[._:#-])*(?:\d+(?:[._:-]\d+)*|[0-9a-f-]{8,})?"
    r"|(?:toolu|tooluse|chatcmpl-tool|fc)_?[0-9a-z_-]+"
    r"|(?:call_)?(?=[a-z]*\d+[a-z]+\d)[0-9a-z]{6,}",
    re.IGNORECASE,
)
_BEHIND_NAME = re.compile(r"[:\[(#]")  # signs before the counter
_QUOTES = " \t\r\n`'\"<>|"
_MAX_ID = 128  # characters of an id without a name
_MAX_DIGITS = 9  # digits of the number of a call
_SIGNS = re.compile(r"[^0-9a-z]")


class KimiParser(ToolParser):
    """BEGIN functions.f:0 ARGUMENTS {"x": 1} END; the id is the model's own, as its template wants it back."""

    markers: ClassVar[tuple[str, ...]] = (*SECTION_BEGIN, *SECTION_END, CALL_BEGIN, ARGUMENTS, CALL_END)
    call_ends = (CALL_END, *SECTION_END)

    def _calls(self) -> Reading[None]:
        yield from self.sections(SECTION_BEGIN, CALL_BEGIN, self._call, SECTION_END)

    def heads(self) -> Iterable[str]:
        call = f"{CALL_BEGIN}functions.NAME:{self.num_calls}{ARGUMENTS}"
        return call, *(begin + call for begin in SECTION_BEGIN)

    def _call(self) -> Reading[bool]:
        written, end = yield from self.reader.until(ARGUMENTS)
        if not end:
            return False
        call_id = written.strip(_QUOTES)
        name = self._named(call_id)
        if name is None and len(call_id) <= _MAX_ID and _WITHOUT_NAME.fullmatch(call_id):
            return (yield from self._unnamed())
        if name is None:
            match = _CALL_ID.fullmatch(call_id)
            return match is not None and self.offered(match["name"])
        self.start_call(name, self._own_id(call_id, name))
        whole = yield from self.json_arguments()
        self.end_call(whole=whole)
        yield from self._close()
        return True

    def _named(self, call_id: str) -> str | None:
        """Return the tool that an id names; None if the request does not offer it."""
        match = _CALL_ID.fullmatch(call_id)
        if match is not None and match["name"] in self.tools:
            return match["name"]
        for text in (call_id, _BEHIND_NAME.split(call_id)[0], _RANDOM_END.sub("", call_id)):
            changed = _CHANGED_ID.fullmatch(text)
            wanted = [text, *((changed["name"], changed["name"] + changed["number"]) if changed else ())]
            bare = {_bare(each) for each in wanted} - {""}
            if found := [name for name in self.tools.names if _bare(name) in bare]:
                return max(found, key=len)
        return self._with_counter(_bare(re.sub(_PREFIX, "", call_id, count=1, flags=re.IGNORECASE)))

    def _with_counter(self, text: str) -> str | None:
        """Return the tool whose name, perhaps with digits at its end, and a counter are written without a sign."""
        fitting = (name for name in self.tools.names if _bare(name) and text.startswith(_bare(name)))
        return max((name for name in fitting if text[len(_bare(name)) :].isdecimal()), key=len, default=None)

    def _own_id(self, call_id: str, name: str) -> str:
        """Return the id in the form that the model's template wants back."""
        match = _CALL_ID.fullmatch(call_id)
        if match is not None and match["name"] == name:
            return call_id
        number = re.search(r"\d*$", call_id.removesuffix(name))
        return f"functions.{name}:{int(number[0]) if number and 0 < len(number[0]) < _MAX_DIGITS else self.num_calls}"

    def _unnamed(self) -> Reading[bool]:
        """Read a call whose id has no name. The names of its arguments show the tool."""
        yield from self.reader.space()
        pieces: list[str] = []
        whole = yield from self.reader.copy_json(pieces.append)
        text = "".join(pieces)
        if not whole and (yield from self._call_ends()):
            text += json_rest(text) or ""
        elif text[:1] == '"':
            text = as_object(decode_json_string(text) or "")
        try:
            arguments = json.loads(text)
        except (ValueError, RecursionError):
            return False
        name = self.tools.named_by(arguments) if isinstance(arguments, dict) else None
        if name is None:
            return False
        self.start_call(name, f"functions.{name}:{self.num_calls}")
        self.arguments(text)
        self.end_call()
        yield from self._close()
        return True

    def _close(self) -> Reading[None]:
        yield from self.skip_braces()
        yield from self.reader.accept(CALL_END, drop_partial=True)


def _bare(text: str) -> str:
    """Return the letters and digits of a name."""
    return _SIGNS.sub("", text.lower())


FORMATS = (
    ToolFormat(
        "kimi_k2",
        KimiParser,
        CallFormat(
            NamedCall(f"{CALL_BEGIN}functions.NAME:INDEX{ARGUMENTS}", CALL_END),
            *(SECTION_BEGIN[0], "", SECTION_END[0], SECTION_BEGIN[0]),
        ),
        signs=(SECTION_BEGIN[0],),
        aliases=("kimi",),
        openings=tuple(CallOpening(section, (CALL_BEGIN,)) for section in SECTION_BEGIN),
    ),
)
