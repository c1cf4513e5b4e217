"""Kimi K2: a section of calls, each with its id, from which the name is read."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import ClassVar

from jaxserve.text.reader import Reading
from jaxserve.text.tools.base import ToolParser
from jaxserve.text.tools.format import CallFormat, NamedCall, ToolFormat

SECTION_BEGIN = ("<|tool_calls_section_begin|>", "<|tool_call_section_begin|>")
SECTION_END = ("<|tool_calls_section_end|>", "<|tool_call_section_end|>")
CALL_BEGIN, ARGUMENTS, CALL_END = "<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"
_CALL_ID = re.compile(r"(?:functions\.)?(?P<name>.+?)(?::\d+)?")


class KimiParser(ToolParser):
    """BEGIN functions.f:0 ARGUMENTS {"x": 1} END; the id is the model's own, as its template wants it back."""

    markers: ClassVar[tuple[str, ...]] = (*SECTION_BEGIN, *SECTION_END, CALL_BEGIN, ARGUMENTS, CALL_END)

    def _calls(self) -> Reading[None]:
        yield from self.sections(SECTION_BEGIN, CALL_BEGIN, self._call, SECTION_END)

    def heads(self) -> Iterable[str]:
        call = f"{CALL_BEGIN}functions.NAME:{self.num_calls}{ARGUMENTS}"
        return call, *(begin + call for begin in SECTION_BEGIN)

    def _call(self) -> Reading[bool]:
        call_id, end = yield from self.reader.until(ARGUMENTS)
        match = _CALL_ID.fullmatch(call_id.strip())
        if not end or match is None or not self.offered(match["name"]):
            return False
        self.start_call(match["name"], call_id.strip())
        whole = yield from self.json_arguments()
        self.end_call(whole=whole)
        yield from self.reader.space()
        yield from self.reader.accept(CALL_END, drop_partial=True)
        return True


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
    ),
)
