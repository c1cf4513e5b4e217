"""A client's Lark grammar as part of a larger one: the text of a JSON string, for a custom tool among others.

Everything that the result allows is, unescaped, allowed by the client's grammar. Literals are escaped as JSON escapes
them; a pattern keeps those of its texts that need no escape. What cannot be carried over that way is refused.
"""

from __future__ import annotations

import json
import re

from jaxserve.errors import InvalidSchemaError
from jaxserve.grammar.lark import LarkWriter

_STRING = r'"(?:[^"\\\n]|\\.)*"'
_TOKEN = re.compile(
    rf"""(?P<comment>//[^\n]*) | (?P<range>{_STRING}\s*\.\.\s*{_STRING}) | (?P<string>{_STRING}i?)
    | (?P<pattern>/(?:[^/\\\n]|\\.)+/[a-z]*) | (?P<name>[A-Za-z_][A-Za-z0-9_]*)
    | (?P<foreign>[%@~<>\\]|\[(?=[a-z_]+\s*[=\],])) | (?P<rest>\s+|.)""",
    re.VERBOSE,
)
_NEEDS_NO_ESCAPE = r'/[^"\\\x00-\x1f\x7f]*/'


def embed_in_json(writer: LarkWriter, source: str) -> str:
    """An expression for the texts of `source`, escaped for a JSON string. Raises InvalidSchemaError (param tools)."""
    prefix = f"u{len(writer.rules)}_"
    names = set(re.findall(r"^\s*[?!]*([A-Za-z_][A-Za-z0-9_]*)\s*(?:\.\d+)?\s*:", source, re.MULTILINE))
    if "start" not in names:
        raise InvalidSchemaError("the tool's lark grammar has no rule start", param="tools")
    parts = [_part(writer, prefix, names, match) for match in _TOKEN.finditer(source)]
    writer.rules.append("".join(parts))
    return _own_name(prefix, "start")


def _part(writer: LarkWriter, prefix: str, names: set[str], match: re.Match[str]) -> str:
    text = match[0]
    match match.lastgroup:
        case "comment":
            return ""
        case "string":
            return _string(text)
        case "pattern" | "range":
            return writer.rule(f"{text} & {_NEEDS_NO_ESCAPE}", terminal=True)
        case "name":
            if text not in names:
                raise _refusal(f"the name {text!r}, which it does not define")
            return _own_name(prefix, text)
        case "foreign":
            raise _refusal(f"{text!r}")
    return text


def _own_name(prefix: str, name: str) -> str:
    """A terminal stays one: its name is in capitals."""
    return (prefix.upper() if name.isupper() else prefix) + name


def _string(text: str) -> str:
    flag = "i" if text.endswith("i") else ""
    try:
        value = json.loads(text.removesuffix("i"))
    except ValueError:
        raise _refusal(f"the literal {text}") from None
    escaped = json.dumps(value, ensure_ascii=False)[1:-1]
    if flag and escaped != value:
        raise _refusal(f"the literal {text}")
    return json.dumps(escaped, ensure_ascii=False) + flag


def _refusal(what: str) -> InvalidSchemaError:
    message = f"a custom tool with a lark grammar that uses {what} is offered only alone, named by tool_choice"
    return InvalidSchemaError(message, param="tools")
