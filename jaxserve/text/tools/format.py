"""The declaration of a tool format: its names, its parser, and how its calls are written.

A module of this folder declares its formats in a tuple FORMATS, and `registry` collects them. `grammar.tools` turns the
description of the calls into a grammar.
"""

from __future__ import annotations

from dataclasses import dataclass

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


Call = JsonCall | NamedCall | TaggedCall | PythonCall


@dataclass(frozen=True, slots=True)
class CallFormat:
    """How a model writes the calls of one output.

    open, separator, close: texts around the calls and between them
    trigger: the text that begins calls in free text; `open` or the call begins with it; "": calls begin the output
    single: there is one call per output
    """

    call: Call
    open: str = ""
    separator: str = "\n"
    close: str = ""
    trigger: str = ""
    single: bool = False


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """A tool format.

    name, aliases: values of `model.tool_parser`; aliases are names in SGLang and vLLM
    signs: texts of which one in a chat template selects the format
    general: whether templates of other formats may contain the signs too; these formats are tried first
    variants: pairs (text, calls): how calls are written if the chat template contains the text
    """

    name: str
    parser: type[ToolParser]
    calls: CallFormat
    signs: tuple[str, ...] = ()
    aliases: tuple[str, ...] = ()
    general: bool = False
    variants: tuple[tuple[str, CallFormat], ...] = ()

    def calls_in(self, template: str) -> CallFormat:
        """Return how calls are written with a chat template."""
        return next((calls for text, calls in self.variants if text in template), self.calls)
