"""Embeds a client's Lark grammar in a larger one: the input of a custom tool, inside a JSON string or between two tags.

It becomes an inner grammar (`%lark`). Everything that the result allows is, unescaped, allowed by the client's grammar.
A grammar that cannot be embedded that way is refused. Inside JSON, literals are escaped as JSON requires, and a pattern
keeps only the matches that need no escaping. Between tags, a pattern keeps only matches in which the closing tag cannot
begin, because llguidance takes the longest match of a pattern and never backtracks.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from jaxserve.errors import InvalidSchemaError
from jaxserve.grammar.translate import LarkWriter, check_source

_STRING = r'"(?:[^"\\\n]|\\.)*"'
_TOKEN = re.compile(
    rf"""(?P<comment>//[^\n]*) | (?P<range>{_STRING}\s*\.\.\s*{_STRING}) | (?P<string>{_STRING}i?)
    | (?P<pattern>/(?:[^/\\\n]|\\.)+/[a-z]*) | (?P<name>[A-Za-z_][A-Za-z0-9_]*)
    | (?P<times>~\s*[0-9]+(?:\s*\.\.\s*[0-9]+)?)
    | (?P<foreign>[%@~<>\\&]|\[(?=[a-z_]+\s*[=\],])) | (?P<rest>\s+|.)""",
    re.VERBOSE,
)
_STATEMENT = re.compile(r"^[ \t]*(?=%|[?!]*[A-Za-z_][A-Za-z0-9_]*\s*(?:\.\d+\s*)?:)", re.MULTILINE)
_DEFINITION = re.compile(r"\s*[?!]*([A-Za-z_][A-Za-z0-9_]*)\s*(?:\.-?\d+\s*)?:(.*)", re.DOTALL)
_IMPORT = re.compile(r"\s*%import\s+[\w.]+?(?:\.(\w+)(?:\s*->\s*(\w+))?|\s*\(([\w\s,]+)\))\s*")
_NEEDS_NO_ESCAPE = r'/[^"\\\x00-\x1f\x7f]*/'


def embed_in_json(writer: LarkWriter, source: str) -> str:
    """Return an expression for the texts of `source`, escaped for a JSON string.

    Raises InvalidSchemaError (param tools).
    """
    return writer.rule(_Embedding(source, _NEEDS_NO_ESCAPE, _escaped).text())


def embed_before(writer: LarkWriter, source: str, end: str, ends: Sequence[str]) -> str:
    """Return an expression for the texts of `source` that contain none of `ends` and are closed by the text `end`.

    Each of `ends` begins with "<" or a line break. Raises InvalidSchemaError (param tools).
    """
    limit = r"/[^<\n]*/" if end.startswith("\n") else "/[^<]*/"

    def literal(text: str) -> str:
        """Return the text. Raises InvalidSchemaError if it contains a closing tag."""
        for tag in map(str.strip, ends):
            if tag in text:
                raise _refusal(f"{tag!r}, which ends a call")
        return text

    return writer.rule(_Embedding(source, limit, literal).text())


def _escaped(literal: str) -> str:
    flag = "i" if literal.endswith("i") else ""
    try:
        value = json.loads(literal.removesuffix("i"))
    except ValueError:
        raise _refusal(f"the literal {literal}") from None
    escaped = json.dumps(value, ensure_ascii=False)[1:-1]
    if flag and escaped != value:
        raise _refusal(f"the literal {literal}")
    return json.dumps(escaped, ensure_ascii=False) + flag


@dataclass
class _Embedding:
    """Rewrites a tool's Lark grammar so that it can stand in another one.

    source: the grammar. limit: the expression that the text of every terminal must match too. literal: converts a
    text in quotes.
    """

    source: str
    limit: str
    literal: Callable[[str], str]
    _names: set[str] = field(default_factory=set)
    _imported: set[str] = field(default_factory=set)
    _terminals: dict[str, str] = field(default_factory=dict)  # expression -> name of the terminal that restricts it

    @cached_property
    def _prefix(self) -> str:
        """The beginning of the names of limited terminals, with which no name of the source begins."""
        taken = re.findall("LIMITED_*", self.source)
        return max(taken, key=len, default="LIMITED") + "_" * bool(taken)

    def text(self) -> str:
        """Return the embedded grammar. Raises InvalidSchemaError (param tools) if it cannot be embedded."""
        check_source(self.source, "tools")
        statements = list(self._statements())
        for statement in statements:
            self._learn(statement)
        if "start" not in self._names:
            raise InvalidSchemaError("the tool's lark grammar has no rule start", param="tools")
        lines = [self._statement(statement) for statement in statements]
        limited = [f"{name}: {expression} & {self.limit}" for expression, name in self._terminals.items()]
        return "%lark {\n" + "\n".join([*lines, *limited]) + "\n}"

    def _statements(self) -> Iterator[str]:
        plain = "".join("" if match.lastgroup == "comment" else match[0] for match in _TOKEN.finditer(self.source))
        starts = [match.start() for match in _STATEMENT.finditer(plain)]
        for begin, end in zip([0, *starts], [*starts, len(plain)], strict=True):
            if plain[begin:end].strip():
                yield plain[begin:end].strip()

    def _learn(self, statement: str) -> None:
        if definition := _DEFINITION.fullmatch(statement):
            self._names.add(definition[1])
        elif found := _IMPORT.fullmatch(statement):
            self._imported |= set(re.findall(r"\w+", found[3] or found[2] or found[1]))

    def _statement(self, statement: str) -> str:
        if _IMPORT.fullmatch(statement):
            return statement
        if statement.startswith("%ignore"):
            return "%ignore " + self._expression(statement.removeprefix("%ignore"))
        definition = _DEFINITION.fullmatch(statement)
        if definition is not None and definition[1].isupper() and _is_algebra(definition[2]):
            self._expression(definition[2], check_only=True)
            return f"{statement[: definition.start(2)]} ({definition[2]}) & {self.limit}"
        if definition is None:
            return self._expression(statement)
        return statement[: definition.start(2)] + self._expression(definition[2])

    def _expression(self, text: str, check_only: bool = False) -> str:
        """Return an expression rewritten.

        check_only: the expression belongs to a terminal that is restricted as a whole; & and ~ may occur in it
        """
        return "".join(self._part(match, check_only) for match in _TOKEN.finditer(text))

    def _part(self, match: re.Match[str], check_only: bool) -> str:
        text = match[0]
        match match.lastgroup:
            case "string":
                return self.literal(text)
            case "pattern" | "range":
                return self._limited(text)
            case "name" if text in self._imported:
                return self._limited(text)
            case "name" if text not in self._names:
                raise _refusal(f"the name {text!r}, which it does not define")
            case "foreign" if not (check_only and text in "&~"):
                raise _refusal(f"{text!r}")
        return text

    def _limited(self, expression: str) -> str:
        if expression not in self._terminals:
            self._terminals[expression] = f"{self._prefix}{len(self._terminals)}"
        return self._terminals[expression]


def _is_algebra(body: str) -> bool:
    """Return whether it is a conjunction or a complement, whose parts cannot be restricted one by one."""
    return any(match.lastgroup == "foreign" and match[0] in "&~" for match in _TOKEN.finditer(body))


def _refusal(what: str) -> InvalidSchemaError:
    message = f"a custom tool with a lark grammar that uses {what} is offered only alone, named by tool_choice"
    return InvalidSchemaError(message, param="tools")
