"""Translates the constraints of a request (schema, regex, choices, EBNF, GBNF, Lark) into grammars for llguidance."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

import llguidance

from jaxserve.errors import InvalidSchemaError
from jaxserve.types.sampling import GrammarSpec

if TYPE_CHECKING:
    from llguidance._lib import JsonCompileOptions


_DATA = frozenset({"enum", "const", "default", "examples", "example"})  # keys whose values are not schemas
BY_NAME = frozenset({"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"})


def with_parts(schema: dict[str, Any], change: Callable[[Any], Any]) -> dict[str, Any]:
    """Return the object of a JSON schema with `change` applied to each schema or list in it. Data stays as it is."""

    def changed(key: str, value: Any) -> Any:
        if key in _DATA:
            return value
        if key in BY_NAME and isinstance(value, dict):
            return {name: change(part) for name, part in value.items()}
        return change(value)

    return {key: changed(key, value) for key, value in schema.items()}


def moved(schema: Any, place: str) -> Any:
    """Return a schema whose references hold after moving it to `place` of another. One with an $id is not changed."""
    if isinstance(schema, list):
        return [moved(item, place) for item in schema]
    if not isinstance(schema, dict) or "$id" in schema:
        return schema
    result = with_parts(schema, partial(moved, place=place))
    reference = schema.get("$ref")
    if isinstance(reference, str) and reference.startswith("#"):
        result["$ref"] = place + reference[1:]
    return result


_ASCII = {"d": "[0-9]", "w": "[0-9A-Za-z_]"}


def ascii_classes(pattern: str) -> str:
    r"""Return the pattern with `\d` and `\w` written out, also inside classes.

    Inside a class, `[`, `&&`, `~~` and `--` are escaped: they are characters, not operators as in Rust.
    """
    out: list[str] = []
    opening = ""  # the opening of the class that is open
    at = 0
    while at < len(pattern):
        piece = pattern[at : at + 2] if pattern[at] == "\\" else pattern[at]
        size = len(piece)
        if size == 2 and piece[1] in _ASCII and not opening.startswith("[^"):
            piece = _ASCII[piece[1]]
        elif not opening and piece == "[":
            opening = piece = _class_start(pattern, at)
            size = len(piece)
        elif opening and pattern.startswith("[:", at) and ":]" in pattern[at:]:
            piece = pattern[at : pattern.index(":]", at) + 2]
            size = len(piece)
        elif opening and piece in ("[", "&", "~", "-"):
            piece = _in_class(piece, out, pattern[at + 1 : at + 2], opening)
        elif piece == "]":
            opening = ""
        out.append(piece)
        at += size
    return "".join(out)


def quoted(text: str) -> str:
    """Return a text as a literal of a Lark grammar."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", r"\u007f")


def _in_class(char: str, before: list[str], after: str, opening: str) -> str:
    """Return a character of a class, escaped if it or a pair of it would be an operator."""
    starts_range = char == "-" == after and before[-1] == opening
    return "\\" + char if char == "[" or before[-1] == char or starts_range else char


def _class_start(pattern: str, at: int) -> str:
    """Return the opening of a class, including a bracket that comes first and is a literal."""
    end = at + 1 + pattern.startswith("[^", at)
    return pattern[at : end + pattern.startswith("]", end)]


def ascii_schema(schema: Any) -> Any:
    """Return the JSON schema with `ascii_classes` applied to all patterns. Its nesting depth must have been checked."""
    if isinstance(schema, list):
        return [ascii_schema(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    result = with_parts(schema, ascii_schema)
    if isinstance(pattern := result.get("pattern"), str):
        result["pattern"] = ascii_classes(pattern)
    if isinstance(named := result.get("patternProperties"), dict):
        result["patternProperties"] = {ascii_classes(pattern): part for pattern, part in named.items()}
    return result


_TOKEN = re.compile(
    r"""(?P<skip>\s+|\#[^\n]*) | (?P<rule>[\w-]+)\s*::= | (?P<name>[\w-]+) | "(?P<text>(?:[^"\\\n]|\\.)*)"
    | \[(?P<class>(?:[^\]\\]|\\.)+)\] | (?P<any>\.) | (?P<mark>[()|]) | (?P<repeat>[*+?]|\{[\s\d,]*\})""",
    re.VERBOSE | re.DOTALL,
)
_CHAR = re.compile(r"\\(?:x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|(.))|(.)", re.DOTALL)
_ESCAPES = {"n": "\n", "r": "\r", "t": "\t"} | {char: char for char in "\"'\\[]/-^"}

Tokens = list[tuple[str, str]]  # (kind, text)


def gbnf_to_lark(source: str) -> str:
    """Return the Lark text of a grammar whose rules are `name ::= ...`; it begins with `root`.

    Raises InvalidSchemaError with the reason.
    """
    rules = _rules(source)
    if "root" not in rules:
        raise _error("the grammar has no rule root")
    for body in rules.values():
        for kind, text in body:
            if kind == "name" and text not in rules:
                raise _error(f"the grammar's rule {text!r} is undefined")
    terminals = _terminals(rules)
    names = {name: f"{'T' if name in terminals else 'r'}{i}" for i, name in enumerate(rules)} | {"root": "start"}
    return "\n".join(["%llguidance {}", *(f"{names[name]}: {_body(body, names)}" for name, body in rules.items())])


def _rules(source: str) -> dict[str, Tokens]:
    rules: dict[str, Tokens] = {}
    body: Tokens | None = None
    at = 0
    while at < len(source):
        match = _TOKEN.match(source, at)
        if match is None or (body is None and match.lastgroup not in ("rule", "skip")):
            line = source.count("\n", 0, at) + 1
            raise _error(f"the grammar cannot be read: line {line}, at {source[at : at + 20]!r}")
        kind, at = match.lastgroup or "", match.end()
        if kind == "rule":
            body = rules[match["rule"]] = []
        elif kind != "skip" and body is not None:
            body.append((kind, match[kind]))
    return rules


def _terminals(rules: dict[str, Tokens]) -> set[str]:
    """Return the names of the rules that are regular as far as their references show; `root` stays a rule."""
    references = {name: {text for kind, text in body if kind == "name"} for name, body in rules.items()}
    del references["root"]
    found: set[str] = set()
    while more := {name for name, others in references.items() if name not in found and others <= found}:
        found |= more
    return found


def _body(body: Tokens, names: dict[str, str]) -> str:
    """Return the right side of a rule."""
    written = []
    for kind, text in body:
        match kind:
            case "name":
                written.append(names[text])
            case "text":
                written.append(quoted("".join(char for char, _ in _chars(text))))
            case "class":
                written.append(f"/[{_class(text)}]/")
            case "any":
                written.append(r"/(.|\n)/")
            case _:
                written.append("".join(text.split()))
    return " ".join(written).strip()


def _class(text: str) -> str:
    """Return the inside of a class for a regex, with every character but letters and digits written by its number."""
    chars = list(_chars(text))
    negated, at, out = chars[0] == ("^", False), 0, ""
    chars = chars[negated:]
    while at < len(chars):
        if chars[at + 1 : at + 2] == [("-", False)] and at + 2 < len(chars):
            out += f"{_numbered(chars[at][0])}-{_numbered(chars[at + 2][0])}"
            at += 3
        else:
            out += _numbered(chars[at][0])
            at += 1
    return "^" * negated + out


def _numbered(char: str) -> str:
    return char if char.isalnum() else f"\\u{{{ord(char):x}}}"


def _chars(text: str) -> Iterator[tuple[str, bool]]:
    """Yield the characters of a literal or a class, each with whether it was escaped."""
    for match in _CHAR.finditer(text):
        if match[5] is not None:
            yield match[5], False
            continue
        number = match[1] or match[2] or match[3]
        char = _ESCAPES.get(match[4] or "") if number is None else _char(int(number, 16))
        if char is None:
            raise _error(f"the grammar cannot be read: the escape {match[0]!r} is unknown")
        yield char, True


def _char(number: int) -> str | None:
    return chr(number) if number < 0x110000 else None


def _error(message: str) -> InvalidSchemaError:
    return InvalidSchemaError(message, param="response_format")


MAX_SOURCE_BYTES = 256 * 1024
MAX_SCHEMA_DEPTH = 64
MAX_ALTERNATIVES = 4096
MAX_INTEGER = 2**53  # in enum and const: llguidance rounds larger integers, and crashes at some near -2**63
HIDDEN = "\ufdd0"  # a noncharacter of Unicode, not allowed in interchange
# a special token's name in a Lark grammar, or a comment, text or pattern, which may contain the same characters
_LARK_NAME = re.compile(r'//[^\n]*|"(?:[^"\\\n]|\\.)*"|/(?:[^/\\\n]|\\.)+/|(?P<name><(?!\[)[^<>\s]+>)')
_LEAST_INTEGER = -(2**63) + 1024  # the next float64 above the least int64
# white space between JSON tokens: enough for pretty printing, but bounded
WHITESPACE = r"[\x20\x0A\x0D\x09]{1,32}"
JSON_OPTIONS: JsonCompileOptions = {"whitespace_flexible": True, "whitespace_pattern": WHITESPACE, "lenient": False}


def translate(spec: GrammarSpec) -> str:
    """Return the grammar text for llguidance.LLMatcher. Raises InvalidSchemaError with the reason."""
    if spec.checked:
        return spec.checked
    check_source(spec.source)
    if spec.kind not in _TRANSLATIONS:
        raise InvalidSchemaError(f"{spec.kind!r} is no kind of grammar", param="response_format")
    try:
        return _TRANSLATIONS[spec.kind](spec.source)
    except RecursionError as error:
        raise InvalidSchemaError("the grammar is nested too deep", param="response_format") from error


def check_source(source: str, param: str = "response_format") -> None:
    """Raise InvalidSchemaError if the source of a grammar is too large, or cannot be written in UTF-8."""
    try:
        size = len(source.encode())
    except UnicodeEncodeError:
        raise InvalidSchemaError("a text in the grammar has half of a surrogate pair", param=param) from None
    if size > MAX_SOURCE_BYTES:
        raise InvalidSchemaError(f"the grammar is larger than {MAX_SOURCE_BYTES} bytes", param=param)


def schema_spec(schema: Mapping[str, Any] | bool, *, strict: bool = False) -> GrammarSpec:
    """Return the spec of a JSON schema. strict: close objects that list properties, as in OpenAI's strict mode."""
    return GrammarSpec(kind="json_schema", source=json.dumps(closed(schema) if strict else schema))


def choice_spec(choices: list[str]) -> GrammarSpec:
    return GrammarSpec(kind="choice", source=json.dumps(choices))


def json_schema_part(schema: Mapping[str, Any] | bool, *, exact: bool = True) -> str:
    """Return a JSON schema as a part of a Lark grammar.

    exact: raise InvalidSchemaError for keywords that llguidance does not enforce; else leave them out
    """
    return "%json " + json.dumps({**_checked_schema(schema), "x-guidance": {**JSON_OPTIONS, "lenient": not exact}})


def check_depth(schema: Any) -> None:
    """Raise InvalidSchemaError if the schema is nested too deep."""
    if any(depth > MAX_SCHEMA_DEPTH for _, depth in _walk(schema)):
        raise InvalidSchemaError(f"the schema is nested deeper than {MAX_SCHEMA_DEPTH}", param="response_format")


def closed(schema: Any, depth: int = 0) -> Any:
    """Return `schema` with additionalProperties false in each object that lists properties and does not set it.

    Raises InvalidSchemaError if it is nested too deep.
    """
    if depth > MAX_SCHEMA_DEPTH:
        raise InvalidSchemaError(f"the schema is nested deeper than {MAX_SCHEMA_DEPTH}", param="response_format")
    if isinstance(schema, list):
        return [closed(item, depth + 1) for item in schema]
    if not isinstance(schema, dict):
        return schema
    result = with_parts(schema, lambda part: closed(part, depth + 1))
    if isinstance(schema.get("properties"), dict) and "additionalProperties" not in schema:
        result["additionalProperties"] = False
    return result


def loads(source: str, what: str) -> Any:
    """Parse JSON text. what: its name in error messages.

    Raises InvalidSchemaError if it is not JSON or nested too deep.
    """
    try:
        return json.loads(source)
    except ValueError as error:
        raise InvalidSchemaError(f"{what} is not valid JSON: {error}", param="response_format") from error
    except RecursionError as error:
        raise InvalidSchemaError(f"{what} is nested too deep", param="response_format") from error


def _json_schema(source: str) -> str:
    text = json.dumps(_checked_schema(loads(source, "the schema")))
    try:
        return llguidance.LLMatcher.grammar_from_json_schema(text, overrides=JSON_OPTIONS)
    except ValueError as error:
        raise InvalidSchemaError(f"the schema cannot be read: {error}", param="response_format") from error


def _json_object(source: str) -> str:
    return _json_schema('{"type": "object"}')


def _checked_schema(schema: Any) -> dict[str, Any]:
    if schema is True:
        return {}
    if not isinstance(schema, dict):
        raise InvalidSchemaError("the schema must be an object, and no value satisfies false", param="response_format")
    draft = schema.get("$schema")
    old_draft = not (isinstance(draft, str) and re.search("2019-09|2020-12", draft))
    check_depth(schema)
    schema = _without_idle(schema)
    for part, depth in _walk(schema):
        _refuse(part, old_draft=depth > 0 and old_draft)
    return ascii_schema(schema)


def _without_idle(schema: Any) -> Any:
    """Return a schema without the keywords that forbid nothing, because llguidance cannot read some of them."""
    if isinstance(schema, list):
        return [_without_idle(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    kept = {key: _bound(key, value) for key, value in schema.items() if not (key in _IDLE and _IDLE[key](value))}
    if "then" not in kept and "else" not in kept:
        kept.pop("if", None)
    if "if" not in kept:
        kept = {key: value for key, value in kept.items() if key not in ("then", "else")}
    if kept.get("contains") is not None and kept.get("minContains") == 0 and "maxContains" not in kept:
        kept = {key: value for key, value in kept.items() if key not in ("contains", "minContains")}
    if "contains" not in kept:
        kept = {key: value for key, value in kept.items() if key not in ("minContains", "maxContains")}
    return with_parts(kept, _without_idle)


def _bound(key: str, value: Any) -> Any:
    """Return a bound that llguidance can enforce: it fails at the least int64, and reads bounds as float64."""
    at_least = key in ("minimum", "exclusiveMinimum")
    return _LEAST_INTEGER if at_least and _is_real(value) and -(2**63) - 1 <= value < _LEAST_INTEGER else value


def _takes_any(schema: Any) -> bool:
    return schema is True or schema == {}


def _takes_any_name(schema: Any) -> bool:
    """Return whether a schema allows every text, and so every name of a property."""
    if not isinstance(schema, dict):
        return schema is True
    kinds = schema.get("type", "string")
    other = {key: value for key, value in schema.items() if key not in ("type", "title", "description", "$comment")}
    is_text = kinds == "string" or (isinstance(kinds, list) and "string" in kinds)
    return is_text and all(key == "minLength" and value == 0 for key, value in other.items())


def _is_no_limit(value: Any) -> bool:
    """Return whether a count is larger than any output can reach."""
    return _is_real(value) and value >= 2**31 - 1


def _is_end_of_floats(value: Any) -> bool:
    """Return whether a bound is the largest float32 or float64, perhaps rounded, so that it only names a type."""
    return _is_real(value) and (3.4028e38 <= abs(value) <= 3.4029e38 or abs(value) >= 1.7976e308)


def _is_real(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


# The formats of JSON Schema. By its rules any other is a note that forbids nothing, as pydantic's path and password.
# llguidance refuses those of JSON Schema that it cannot enforce.
_FORMATS = frozenset(
    "date-time date time duration email idn-email hostname idn-hostname ipv4 ipv6 uri uri-reference iri iri-reference "
    "uuid uri-template json-pointer relative-json-pointer regex".split()
)

# keyword -> whether a value of it forbids nothing
_IDLE: dict[str, Callable[[Any], bool]] = {
    "propertyNames": _takes_any_name,
    "uniqueItems": lambda value: value is False,
    "format": lambda value: isinstance(value, str) and value not in _FORMATS,
    "not": lambda value: value is False,
    **dict.fromkeys(("dependentRequired", "dependentSchemas", "dependencies"), lambda value: value == {}),
    **dict.fromkeys(("unevaluatedProperties", "unevaluatedItems", "then", "else"), _takes_any),
    **dict.fromkeys(("maxLength", "maxItems", "maxProperties"), _is_no_limit),
    **dict.fromkeys(("minimum", "exclusiveMinimum"), lambda value: _is_end_of_floats(value) and value < 0),
    **dict.fromkeys(("maximum", "exclusiveMaximum"), lambda value: _is_end_of_floats(value) and value > 0),
}


def _walk(schema: Any) -> Iterator[tuple[dict[str, Any], int]]:
    """Yield each object in the schema with its depth, without recursion."""
    stack: list[tuple[Any, int]] = [(schema, 0)]
    while stack:
        node, depth = stack.pop()
        if isinstance(node, dict):
            yield node, depth
            stack += [(value, depth + 1) for value in node.values()]
        elif isinstance(node, list):
            stack += [(value, depth + 1) for value in node]


def _refuse(part: dict[str, Any], *, old_draft: bool) -> None:
    """Refuse keywords that llguidance accepts and does not enforce, or enforces differently from common validators."""
    options = part.get("x-guidance")
    if isinstance(options, dict) and options.get("lenient"):
        raise InvalidSchemaError("x-guidance.lenient is not allowed", param="response_format")
    if old_draft and isinstance(part.get("$ref"), str) and isinstance(part.get("$id"), str):
        message = "$id beside $ref: drafts differ in what the reference means, write it out"
        raise InvalidSchemaError(message, param="response_format")

    values = part["enum"] if isinstance(part.get("enum"), list) else [part.get("const")]
    if any(isinstance(value, int) and abs(value) > MAX_INTEGER for value in values):
        raise InvalidSchemaError("an integer above 2**53 in enum or const is not kept exactly", param="response_format")


def _regex(source: str) -> str:
    return llguidance.LLMatcher.grammar_from_regex(ascii_classes(source))


def _lark(source: str) -> str:
    return llguidance.LLMatcher.grammar_from_lark(_LARK_NAME.sub(_hidden, source))


def _hidden(piece: re.Match[str]) -> str:
    return hidden_name(piece[0]) if piece["name"] else piece[0]


def hidden_name(text: str) -> str:
    """Return the name of a special token in matchers, which no text of a client spells."""
    return f"{text[:-1]}{HIDDEN}{text[-1:]}"


def shown_names(message: str) -> str:
    """Return llguidance's message with the names of special tokens as the client wrote them."""
    return message.replace(HIDDEN, "").replace(r"\u{fdd0}", "")


def _ebnf(source: str) -> str:
    return _lark(gbnf_to_lark(source))


def _choice(source: str) -> str:
    choices = loads(source, "the list of choices")
    if not isinstance(choices, list) or not 0 < len(choices) <= MAX_ALTERNATIVES:
        raise InvalidSchemaError(f"there must be 1 to {MAX_ALTERNATIVES} choices", param="response_format")
    if not all(isinstance(choice, str) for choice in choices):
        raise InvalidSchemaError("a choice must be a text", param="response_format")
    texts = [quoted(choice) for choice in dict.fromkeys(choices) if choice]
    if not texts:
        return _lark('start: ""')
    # One terminal, not one rule a choice: the parser takes at most 2,000 rules that begin at one place.
    return _lark(f"start: CHOICE{'?' if '' in choices else ''}\nCHOICE: {' | '.join(texts)}")


_TRANSLATIONS: dict[str, Callable[[str], str]] = {
    "json_schema": _json_schema,
    "json_object": _json_object,
    "regex": _regex,
    "lark": _lark,
    "ebnf": _ebnf,
    "choice": _choice,
}


ANY_TEXT = r"/(.|\n)*/"


@dataclass
class LarkWriter:
    """Collects rules and returns expressions.

    special_tokens: text -> id of the tokenizer's special tokens. In a literal, which is of the model's format, they are
        written as tokens, as the model writes them. A client's own text is written in ordinary ones.
    """

    special_tokens: Mapping[str, int] = field(default_factory=dict)
    rules: list[str] = field(default_factory=list)
    _count: int = 0
    _size: int = 0  # characters of the rules

    @cached_property
    def _special(self) -> re.Pattern[str] | None:
        names = sorted(self.special_tokens, key=len, reverse=True)
        return re.compile("(" + "|".join(map(re.escape, names)) + ")") if names else None

    def literal(self, text: str) -> str:
        """Return an expression for exactly this text of the model's format; "" for the empty text."""
        parts = self._special.split(text) if self._special else [text]
        return " ".join(self._literal_part(part) for part in parts if part)

    def _literal_part(self, part: str) -> str:
        if part in self.special_tokens:
            return f"<[{self.special_tokens[part]}]>"
        return quoted(part)

    def is_special(self, text: str) -> bool:
        return text in self.special_tokens

    def rule(self, expression: str, *, lazy: bool = False, terminal: bool = False) -> str:
        """Add a rule and return its name. lazy: the shortest match counts.

        Raises InvalidSchemaError if the grammar becomes too large: a small request can describe an enormous one.
        """
        self._count += 1
        self._size += len(expression)
        if self._size > MAX_SOURCE_BYTES:
            raise InvalidSchemaError(f"the grammar is larger than {MAX_SOURCE_BYTES} bytes", param="tools")
        name = f"R{self._count}" if terminal else f"r{self._count}"
        self.rules.append(f"{name}{'[lazy]' if lazy else ''}: {expression}")
        return name

    def schema(self, schema: Mapping[str, Any] | bool, *, exact: bool = True) -> str:
        """Match a JSON value. exact: as in `json_schema_part`"""
        return self.rule(json_schema_part(schema, exact=exact))

    def text_until(self, end: str, *, without: str = "") -> str:
        """Match any text up to and including the first `end`. without: a regex that matches nowhere in the text"""
        if self.is_special(end):
            return f"{self.text()} {self.literal(end)}"
        text = ANY_TEXT
        if without:
            pattern = without.replace("/", r"\/")
            text = self.rule(f"{ANY_TEXT} & ~/(.|\\n)*({pattern})(.|\\n)*/", terminal=True)
        return self.rule(f"{text} {self.literal(end)}", lazy=True)

    def matching_until(self, regex: str, end: str, without: Sequence[str]) -> str:
        """Match a text that matches `regex` and contains none of `without`, and then `end`."""
        banned = "|".join(map(_regex_escape, without))
        allowed = self.rule(f"{between_slashes(f'({regex})')} & ~/(.|\\n)*({banned})(.|\\n)*/", terminal=True)
        return self.rule(f"{allowed} {quoted(end)}", lazy=True)

    def text(self) -> str:
        """Match any text without special tokens, also the empty text."""
        return self.rule(ANY_TEXT, terminal=True)

    def text_without(self, stops: Sequence[str]) -> str:
        """Match any text that contains none of `stops`."""
        plain = [stop for stop in stops if not self.is_special(stop)]
        if not plain:
            return self.text()
        pattern = "|".join(_regex_escape(stop) for stop in plain)
        return self.rule(f"{ANY_TEXT} & ~/(.|\\n)*({pattern})(.|\\n)*/", terminal=True)

    def finish(self, start: str) -> str:
        return "\n".join(["%llguidance {}", f"start: {start}", *self.rules])


def between_slashes(regex: str) -> str:
    """Return a client's regex as a terminal of a Lark grammar."""
    lark = {"/": r"\/", "\n": r"\n", "\\\n": r"\n"}
    return "/" + re.sub(r"\\.|/|\n", lambda piece: lark.get(piece[0], piece[0]), ascii_classes(regex), flags=re.S) + "/"


def _regex_escape(text: str) -> str:
    """Escape a text for a regex between slashes."""
    return re.sub(r"([\\.+*?()|\[\]{}^$/])", r"\\\1", text).replace("\n", "\\n")


def one_of(options: Sequence[str]) -> str:
    return "(" + " | ".join(options) + ")" if len(options) > 1 else options[0]
