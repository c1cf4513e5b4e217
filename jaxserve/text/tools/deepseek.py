"""DeepSeek V3, R1 and V3.1: calls between the family's own tags."""

from __future__ import annotations

from collections.abc import Iterable
from typing import ClassVar

from jaxserve.text.reader import Reading
from jaxserve.text.tools.base import ToolParser
from jaxserve.text.tools.format import CallFormat, CallOpening, NamedCall, ToolFormat

CALLS_BEGIN, CALLS_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
CALL_BEGIN, CALL_END, SEPARATOR = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁sep｜>"


class DeepSeekParser(ToolParser):
    """V3: BEGIN function SEP name, the arguments in a fenced block, END. V3.1: BEGIN name SEP {"x": 1} END."""

    markers: ClassVar[tuple[str, ...]] = (CALLS_BEGIN, CALLS_END, CALL_BEGIN, CALL_END, SEPARATOR)
    call_ends = ("```", CALL_END)

    def _calls(self) -> Reading[None]:
        yield from self.sections((CALLS_BEGIN,), CALL_BEGIN, self._call, (CALLS_END,))

    def heads(self) -> Iterable[str]:
        calls = (f"{CALL_BEGIN}NAME{SEPARATOR}", f"{CALL_BEGIN}function{SEPARATOR}NAME")
        return *calls, *(CALLS_BEGIN + call for call in calls)

    def _call(self) -> Reading[bool]:
        name, end = yield from self.reader.until(SEPARATOR)
        if end and name.strip() == "function" and (yield from self.reader.peek()) != "{":
            name, end = yield from self.reader.until("\n", "{", take=False)
        if not end or not self.offered(name.strip()):
            return False
        self.start_call(name.strip())
        yield from self.reader.space()
        yield from self.reader.accept("```json", "```", drop_partial=True)
        whole = yield from self.json_arguments()
        self.end_call(whole=whole)
        yield from self.skip_braces()
        yield from self.reader.accept("```", drop_partial=True)
        yield from self.reader.space()
        yield from self.reader.accept(CALL_END, drop_partial=True)
        return True


_BEGIN, _END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
_CALL, _CALL_END, _SEPARATOR = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁sep｜>"
_FENCED = NamedCall(f"{_CALL}function{_SEPARATOR}NAME\n```json\n", f"\n```{_CALL_END}")

FORMATS = (
    ToolFormat(
        "deepseek_v3",
        DeepSeekParser,
        CallFormat(NamedCall(f"{_CALL}NAME{_SEPARATOR}", _CALL_END), _BEGIN, "", _END, _BEGIN),
        signs=(_BEGIN,),
        aliases=("deepseekv3", "deepseekv31", "deepseek_v31"),
        variants=(("```json", CallFormat(_FENCED, _BEGIN, "\n", _END, _BEGIN)),),
        openings=(
            CallOpening(_BEGIN, (_CALL,)),
            CallOpening(_CALL, (_SEPARATOR,), named=True, unnamed=(f"function{_SEPARATOR}",)),
        ),
    ),
)
