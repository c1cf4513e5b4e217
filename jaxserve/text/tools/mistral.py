"""Mistral: [TOOL_CALLS] and a JSON list, or, in later models, a name and its arguments after each tag."""

from __future__ import annotations

import secrets
import string
from collections.abc import Iterable
from typing import ClassVar

from jaxserve.text.reader import Reading
from jaxserve.text.tools.base import ToolParser
from jaxserve.text.tools.format import CallFormat, CallOpening, JsonCall, NamedCall, ToolFormat

TAG, ARGS, CALL_ID = "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"


class MistralParser(ToolParser):
    """[TOOL_CALLS][{"name": "f", "arguments": {"x": 1}}]   or   [TOOL_CALLS]f[CALL_ID]abc[ARGS]{"x": 1}"""

    markers: ClassVar[tuple[str, ...]] = (TAG, ARGS, CALL_ID)

    def make_id(self) -> str:
        """Return nine letters and digits, because Mistral's templates accept no other length."""
        return "".join(secrets.choice(string.ascii_letters + string.digits) for _ in range(9))

    def _calls(self) -> Reading[None]:
        while (yield from self.content_until(TAG)):
            yield from self.reader.space()
            if (yield from self.reader.accept("[")):
                started = yield from self.json_call_list()
            elif (yield from self.reader.peek()) == "{":
                started = yield from self.json_calls()
            else:
                started = yield from self._named()
            if not started:
                self.give_up()

    def heads(self) -> Iterable[str]:
        return *self.json_heads(TAG), f"{TAG}NAME{ARGS}", f"{TAG}NAME{CALL_ID}"

    def _named(self) -> Reading[bool]:
        """Read name{...}, name[ARGS]{...} or name[CALL_ID]id[ARGS]{...}."""
        name, marker = yield from self.reader.until("{", ARGS, CALL_ID, take=False)
        call_id = None
        if marker == CALL_ID:
            yield from self.reader.accept(CALL_ID)
            call_id, marker = yield from self.reader.until("{", ARGS, take=False)
        if not marker or not self.offered(name.strip()):
            return False
        self.start_call(name.strip(), call_id and call_id.strip())
        yield from self.reader.accept(ARGS)
        whole = yield from self.json_arguments()
        self.end_call(whole=whole)
        yield from self.skip_braces()
        return True


FORMATS = (
    ToolFormat(
        "mistral",
        MistralParser,
        CallFormat(JsonCall("arguments"), "[TOOL_CALLS][", ", ", "]", "[TOOL_CALLS]"),
        signs=("[TOOL_CALLS]",),
        variants=(("[ARGS]", CallFormat(NamedCall("[TOOL_CALLS]NAME[ARGS]"), separator="", trigger="[TOOL_CALLS]")),),
        openings=(CallOpening(TAG, ("{", ARGS, CALL_ID), named=True, unnamed=('{"', "{ ", "{\n", "[{")),),
    ),
)
