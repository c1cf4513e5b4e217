"""Kimi K2: a section of calls, each with its id, from which the name is read."""

from __future__ import annotations

import re
from typing import ClassVar

from jaxserve.text.reader import Reading
from jaxserve.text.tools.base import ToolParser

SECTION_BEGIN = ("<|tool_calls_section_begin|>", "<|tool_call_section_begin|>")
SECTION_END = ("<|tool_calls_section_end|>", "<|tool_call_section_end|>")
CALL_BEGIN, ARGUMENTS, CALL_END = "<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"
_CALL_ID = re.compile(r"(?:functions\.)?(?P<name>.+?)(?::\d+)?")


class KimiParser(ToolParser):
    """BEGIN functions.f:0 ARGUMENTS {"x": 1} END; the id is the model's own, as its template wants it back."""

    markers: ClassVar[tuple[str, ...]] = (*SECTION_BEGIN, *SECTION_END, CALL_BEGIN, ARGUMENTS, CALL_END)

    def _calls(self) -> Reading[None]:
        while (yield from self.content_until(*SECTION_BEGIN)):
            any_call = False
            while True:
                yield from self.reader.space()
                if not (yield from self.reader.accept(CALL_BEGIN)):
                    break
                if not (yield from self._call()):
                    break
                any_call = True
            if not any_call:
                self.give_up()
            yield from self.reader.accept(*SECTION_END, drop_partial=True)

    def _call(self) -> Reading[bool]:
        call_id, end = yield from self.reader.until(ARGUMENTS)
        match = _CALL_ID.fullmatch(call_id.strip())
        if not end or match is None or not self.valid_name(match["name"]):
            return False
        self.start_call(match["name"], call_id.strip())
        whole = yield from self.json_arguments()
        self.end_call(whole=whole)
        yield from self.reader.space()
        yield from self.reader.accept(CALL_END, drop_partial=True)
        return True
