"""The declaration of a tool format: its names, its parser, and how its calls are written.

A module of this folder declares its formats in a tuple FORMATS, and `registry` collects them. `grammar.tools` turns the
description of the calls into a grammar.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from jaxserve.text.reader import Reading, TextReader
from jaxserve.text.tools.base import ToolParser


@dataclass(frozen=True, slots=True)
class JsonCall:
    """A call written as before, {"name": "f", ARGUMENTS: {...}}, after. arguments: the key ARGUMENTS"""

    arguments: str
    before: str = ""
    after: str = ""


@dataclass(frozen=True, slots=True)
class NamedCall:
    """A call written as before, {...}, after. In `before` NAME stands for the tool's name, INDEX for a number."""

    before: str
    after: str = ""


@dataclass(frozen=True, slots=True)
class TaggedCall:
    """A call written as head, then (before, value, after) per parameter, then tail. Strings have no quotes.

    In the texts NAME stands for the tool's name, KEY for the parameter's, and TEXT for whether the value is a string.

    ends: texts that end a parameter for the parser if a call's structure follows, besides `after` without its line
      breaks
    closed_by: a regex without anchors; texts in which it matches may be read as more than one value
    """

    head: str
    before: str
    after: str
    tail: str
    ends: tuple[str, ...] = ()
    closed_by: str = ""


@dataclass(frozen=True, slots=True)
class PythonCall:
    """A call written as f(a=1, b="x"), with the parameters in the order of the schema."""


@dataclass(frozen=True, slots=True)
class NotedCall:
    """A call written as before, {a:1,b:<|"|>x<|"|>}, after: keys have no quotes, and texts stand between marks.

    In `before` NAME stands for the tool's name. mark: the mark around texts
    """

    before: str
    after: str
    mark: str


Call = JsonCall | NamedCall | TaggedCall | PythonCall | NotedCall


@dataclass(frozen=True, slots=True)
class Channels:
    """How a model writes an output as messages.

    thought, thought_end: texts around reasoning. again: what begins another message, before its header
    answer: the header of an answer
    """

    thought: str
    thought_end: str
    again: str
    answer: str


@dataclass(frozen=True, slots=True)
class CallFormat:
    """How a model writes the calls of one output.

    open, separator, close: texts around the calls and between them
    trigger: the text that begins calls in free text; `open` or the call begins with it; "": calls begin the output
    single: there is one call per output
    channels: of an output that is a list of messages, of which a call, with its header, is one
    """

    call: Call
    open: str = ""
    separator: str = "\n"
    close: str = ""
    trigger: str = ""
    single: bool = False
    channels: Channels | None = None


@dataclass(frozen=True, slots=True)
class CallOpening:
    """How a tool call begins that ends the thinking without its closing tag.

    `marker`, white space, the name of a tool of the request if `named`, white space, and one of `first`; or without a
    name one of `unnamed`. The marker alone is not enough: a model that thinks about its format writes it too.
    """

    marker: str
    first: tuple[str, ...]
    named: bool = False
    unnamed: tuple[str, ...] = ()

    def read(self, reader: TextReader, tools: Collection[str]) -> Reading[str]:
        """Read the opening and return its end; "" if the next text is not one. The text read is remembered."""
        reader.mark()
        yield from reader.accept(self.marker)
        yield from reader.space()
        if self.named:
            found = yield from reader.accept(*tools, *self.unnamed)
            if not found or found in self.unnamed:
                return found
            yield from reader.space()
        return (yield from reader.accept(*self.first))


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """A tool format.

    name, aliases: values of `model.tool_parser`; aliases are names in SGLang and vLLM
    signs: texts of which one in a chat template selects the format
    general: whether templates of other formats may contain the signs too; these formats are tried first
    variants: pairs (text, calls): how calls are written if the chat template contains the text
    openings: how calls begin that end the thinking without its closing tag
    """

    name: str
    parser: type[ToolParser]
    calls: CallFormat
    signs: tuple[str, ...] = ()
    aliases: tuple[str, ...] = ()
    general: bool = False
    variants: tuple[tuple[str, CallFormat], ...] = ()
    openings: tuple[CallOpening, ...] = ()

    def calls_in(self, template: str) -> CallFormat:
        """Return how calls are written with a chat template."""
        return next((calls for text, calls in self.variants if text in template), self.calls)
