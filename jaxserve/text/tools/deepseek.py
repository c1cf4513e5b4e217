"""DeepSeek V3, R1 and V3.1: calls between the family's own tags."""

from __future__ import annotations

from typing import ClassVar

from jaxserve.text.reader import Reading
from jaxserve.text.tools.base import ToolParser

CALLS_BEGIN, CALLS_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
CALL_BEGIN, CALL_END, SEPARATOR = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁sep｜>"


class DeepSeekParser(ToolParser):
    """V3: BEGIN function SEP name, the arguments in a fenced block, END. V3.1: BEGIN name SEP {"x": 1} END."""

    markers: ClassVar[tuple[str, ...]] = (CALLS_BEGIN, CALLS_END, CALL_BEGIN, CALL_END, SEPARATOR)

    def _calls(self) -> Reading[None]:
        while (yield from self.content_until(CALLS_BEGIN)):
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
            yield from self.reader.accept(CALLS_END, drop_partial=True)

    def _call(self) -> Reading[bool]:
        name, end = yield from self.reader.until(SEPARATOR)
        if end and name.strip() == "function" and (yield from self.reader.peek()) != "{":
            name, end = yield from self.reader.until("\n", "{", take=False)
        if not end or not self.valid_name(name.strip()):
            return False
        self.start_call(name.strip())
        yield from self.reader.space()
        fenced = yield from self.reader.accept("```json", "```")
        whole = yield from self.json_arguments()
        self.end_call(whole=whole)
        if whole and fenced:
            yield from self.reader.space()
            yield from self.reader.accept("```")
        yield from self.reader.space()
        yield from self.reader.accept(CALL_END, drop_partial=True)
        return True
