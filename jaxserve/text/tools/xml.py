"""Calls whose parameters are plain text between tags: Qwen3-Coder, GLM 4.5 and later, DeepSeek V3.2 and later.

The arguments are made into JSON while they stream: a parameter that the tool's schema declares a string is sent as
it comes, others when they are complete.
"""

from __future__ import annotations

import re
from abc import abstractmethod
from collections.abc import Iterable
from typing import ClassVar

from jaxserve.text.reader import Reading
from jaxserve.text.tools.base import ToolParser
from jaxserve.text.tools.format import CallFormat, TaggedCall, ToolFormat


class ParameterParser(ToolParser):
    """Calls that are a name and then parameters, each in tags of its own.

    OPENING: what begins a parameter
    """

    OPENING: ClassVar[str]

    @abstractmethod
    def _parameter(self, name: str, *, first: bool) -> Reading[bool]:
        """Read one parameter of tool `name` after OPENING. Returns False if it is not whole."""

    def _parameters(self, name: str) -> Reading[bool]:
        first = True
        while True:
            yield from self.reader.space()
            if not (yield from self.reader.accept(self.OPENING, drop_partial=True)):
                return self.close_parameters(first=first)
            if not (yield from self._parameter(name, first=first)):
                return False
            first = False


class Qwen3CoderParser(ParameterParser):
    """<tool_call><function=f><parameter=x>1</parameter></function></tool_call>"""

    markers: ClassVar[tuple[str, ...]] = ("<tool_call>", "</tool_call>")
    on_own_lines = True
    OPENING = "<parameter="

    def _calls(self) -> Reading[None]:
        while marker := (yield from self.content_until("<tool_call>", "<function=")):
            if marker == "<tool_call>":
                yield from self.reader.space()
                marker = yield from self.reader.accept("<function=", drop_partial=True)
            name, end = (yield from self.reader.until(">")) if marker else ("", "")
            if not end or not self.offered(name.strip()):
                self.give_up()
                continue
            self.start_call(name.strip())
            whole = yield from self._parameters(name.strip())
            self.end_call(whole=whole)
            yield from self._closing()

    def heads(self) -> Iterable[str]:
        return "<tool_call><function=NAME>", "<function=NAME>"

    def _parameter(self, name: str, *, first: bool) -> Reading[bool]:
        key, end = yield from self.reader.until(">")
        if not end:
            return False
        ends = ("</parameter>", "\n<parameter=", "\n</function>")  # the model forgets to close some
        found = yield from self.parameter(name, key.strip(), ends, first=first, take=False)
        yield from self.reader.accept("</parameter>", drop_partial=True)
        return bool(found)

    def _closing(self) -> Reading[None]:
        for tag in ("</function>", "</tool_call>"):
            yield from self.reader.space()
            yield from self.reader.accept(tag, drop_partial=True)


class GlmParser(ParameterParser):
    """<tool_call>f<arg_key>x</arg_key><arg_value>1</arg_value></tool_call>, with or without line breaks."""

    markers: ClassVar[tuple[str, ...]] = (
        *("<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
    )
    OPENING = "<arg_key>"

    def _calls(self) -> Reading[None]:
        while (yield from self.content_until("<tool_call>")):
            name, end = yield from self.reader.until("<arg_key>", "</tool_call>", take=False)
            if not end or not self.offered(name.strip()):
                self.give_up()
                continue
            self.start_call(name.strip())
            whole = yield from self._parameters(name.strip())
            self.end_call(whole=whole)
            yield from self.reader.space()
            yield from self.reader.accept("</tool_call>", drop_partial=True)

    def heads(self) -> Iterable[str]:
        return "<tool_call>NAME<arg_key>", "<tool_call>NAME</tool_call>"

    def _parameter(self, name: str, *, first: bool) -> Reading[bool]:
        key, end = yield from self.reader.until("</arg_key>")
        yield from self.reader.space()
        if not end or not (yield from self.reader.accept("<arg_value>", drop_partial=True)):
            return False
        return bool((yield from self.parameter(name, key.strip(), ("</arg_value>",), first=first)))


_ATTRIBUTE = re.compile(r'(\w+)="([^"]*)"')


class DsmlParser(ParameterParser):
    """DeepSeek V3.2: <｜DSML｜function_calls><｜DSML｜invoke name="f"><｜DSML｜parameter name="x" string="true">..."""

    TAG = "｜DSML｜"
    BEGIN = ("<｜DSML｜function_calls>", "<｜DSML｜tool_calls>")
    markers: ClassVar[tuple[str, ...]] = (TAG,)
    OPENING = f"<{TAG}parameter"

    def _calls(self) -> Reading[None]:
        ends = [tag.replace("<", "</") for tag in self.BEGIN]
        yield from self.sections(self.BEGIN, f"<{self.TAG}invoke", self._invoke, ends)

    def heads(self) -> Iterable[str]:
        call = f'<{self.TAG}invokename="NAME">'
        return call, *(begin + call for begin in self.BEGIN)

    def _attributes(self) -> Reading[dict[str, str]]:
        text, end = yield from self.reader.until(">")
        return dict(_ATTRIBUTE.findall(text)) if end else {}

    def _invoke(self) -> Reading[bool]:
        name = (yield from self._attributes()).get("name", "")
        if not self.offered(name):
            return False
        self.start_call(name)
        whole = yield from self._parameters(name)
        self.end_call(whole=whole)
        yield from self.reader.accept(f"</{self.TAG}invoke>", drop_partial=True)
        return True

    def _parameter(self, name: str, *, first: bool) -> Reading[bool]:
        attributes = yield from self._attributes()
        ends = (f"</{self.TAG}parameter>",)
        text = {"true": True, "false": False}.get(attributes.get("string", ""))
        key = attributes.get("name", "")
        return bool(key and (yield from self.parameter(name, key, ends, first=first, text=text)))


FORMATS = (
    ToolFormat(
        "qwen3_coder",
        Qwen3CoderParser,
        CallFormat(
            TaggedCall(
                "<tool_call>\n<function=NAME>\n",
                "<parameter=KEY>\n",
                "\n</parameter>\n",
                "</function>\n</tool_call>",
                ends=("\n<parameter=", "\n</function>"),
            ),
            trigger="<tool_call>",
        ),
        signs=("<function=",),
        aliases=("qwen3_xml",),
    ),
    ToolFormat(
        "glm45",
        GlmParser,
        CallFormat(
            TaggedCall("<tool_call>NAME\n", "<arg_key>KEY</arg_key>\n<arg_value>", "</arg_value>\n", "</tool_call>"),
            trigger="<tool_call>",
        ),
        signs=("<arg_key>",),
        aliases=("glm", "glm47"),
    ),
    ToolFormat(
        "deepseek_v32",
        DsmlParser,
        CallFormat(
            TaggedCall(
                '<｜DSML｜invoke name="NAME">\n',
                '<｜DSML｜parameter name="KEY" string="TEXT">',
                "</｜DSML｜parameter>\n",
                "</｜DSML｜invoke>\n",
            ),
            *("<｜DSML｜function_calls>\n", "", "</｜DSML｜function_calls>", "<｜DSML｜function_calls>"),
        ),
        signs=("｜DSML｜",),
        aliases=("deepseekv32",),
    ),
)
