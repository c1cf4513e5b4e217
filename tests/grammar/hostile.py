"""Grammars made to hurt: the families of advisories against servers like this one, in many sizes."""

import json
import random
from typing import Any

from jaxserve.types.sampling import GrammarSpec


def deep(head: str, inner: str, tail: str, times: int) -> str:
    return head * times + inner + tail * times


def schemas() -> list[Any]:
    return [
        {"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(4000)}},
        {"enum": [f"v{i}" for i in range(15_000)]},
        {"enum": [f"v{i}" for i in range(50_000)]},
        {"type": "array", "items": {"type": "integer"}, "maxItems": 10**9},
        {"type": "array", "items": {}, "minItems": 10**6},
        {"type": "string", "minLength": 10**8},
        {"type": "string", "pattern": "^(a+)+b$"},
        {"type": "string", "pattern": "^(([a-z])+.)+[A-Z]([a-z])+$"},
        {"allOf": [{"type": "string", "pattern": f"^.{{0,{i}00}}a.{{0,{i}00}}$"} for i in range(1, 9)]},
        {
            "allOf": [
                {"anyOf": [{"properties": {f"k{i}{j}": {"type": "integer"}}} for j in range(10)]} for i in range(8)
            ]
        },
        {"type": "integer", "minimum": -(10**300), "maximum": 10**300},
        {"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"},
        {"$defs": {"a": {"anyOf": [{"$ref": "#/$defs/a"}, {"$ref": "#/$defs/a"}]}}, "$ref": "#/$defs/a"},
        {"type": "number", "multipleOf": 1e-300},
    ]


def hostile() -> list[GrammarSpec]:
    """One or two of each family."""
    texts = [("json_schema", json.dumps(item)) for item in schemas()]
    texts += [("json_schema", deep('{"items":', "{}", "}", depth)) for depth in (60, 500, 20_000)]
    texts += [("json_schema", deep('{"properties":{"a":', "{}", "}}", depth)) for depth in (31, 500)]
    texts += [("json_schema", '{"pattern": "\\ud800"}'), ("json_schema", '{"a": "\\u12"}')]
    patterns = ["(a+)+b", "(" * 30_000, deep("(", "a", ")", 5000), "(a{0,1000}){0,1000}", "((a{0,100}){0,100}){0,100}",
                "x{1,100000}", ".*.*.*.*.*.*a.{300}", "(.{1,500}){1,500}x", "[" * 1000, "(a|aa|aaa)*" * 200, "\\",
                "(?i)" * 500]  # fmt: skip
    texts += [("regex", pattern) for pattern in patterns]
    rules = "\n".join(f"r{i}: r{i + 1} r{i + 1} | r{i + 1}" for i in range(300))
    texts += [
        ("lark", "start: start"),
        ("lark", "start: start start | "),
        ("lark", 'start: a\na: a a | "x" | '),
        ("lark", f'start: r0\n{rules}\nr300: "x"'),
        ("lark", "start: " + "(" * 20_000),
        ("lark", 'start: "x"{1000000}'),
        ("lark", "start: /(.{1,999}){1,999}/"),
        ("ebnf", "root ::= root root | "),
        ("ebnf", "root ::= " + "(" * 5000),
        ("ebnf", 'root ::= ("a"{1,1000}){1,1000}'),
        ("choice", json.dumps(["a" * 5000] * 50)),
    ]
    return [GrammarSpec(kind=kind, source=source) for kind, source in texts]


def many_hostile(count: int, seed: int = 0) -> list[GrammarSpec]:
    """`count` different ones: each family above, then others of random families and sizes."""
    rng = random.Random(seed)
    found = {(spec.kind, spec.source): spec for spec in hostile()}
    while len(found) < count:
        kind, source = rng.choice(FAMILIES)(rng)
        found[kind, source] = GrammarSpec(kind=kind, source=source)
    return list(found.values())[:count]


def _size(rng: random.Random) -> int:
    return int(10 ** rng.uniform(1, 4.5))


def _nested_schema(rng: random.Random) -> tuple[Any, str]:
    head, tail = rng.choice([('{"items":', "}"), ('{"anyOf":[{"type":"null"},', "]}"), ('{"properties":{"a":', "}}"),
                             ('{"additionalProperties":', "}"), ('{"allOf":[', "]}")])  # fmt: skip
    return "json_schema", deep(head, '{"type":"string"}', tail, _size(rng))


def _wide_schema(rng: random.Random) -> tuple[Any, str]:
    size = _size(rng)
    wide = [
        {"enum": [f"{'x' * rng.randrange(9)}{i}" for i in range(size)]},
        {"properties": {f"k{i}": {"enum": [i, str(i)]} for i in range(size)}, "required": [f"k{size - 1}"]},
        {"anyOf": [{"type": "string", "pattern": f"a{{{i}}}b*"} for i in range(min(size, 3000))]},
        {"type": "array", "prefixItems": [{"type": "number", "maximum": i} for i in range(min(size, 3000))]},
    ]
    return "json_schema", json.dumps(rng.choice(wide))


def _recursive_schema(rng: random.Random) -> tuple[Any, str]:
    size = min(_size(rng), 2000)
    names = [f"n{i}" for i in range(size)]
    defs = {name: {"anyOf": [{"$ref": f"#/$defs/{rng.choice(names)}"} for _ in range(3)]} for name in names}
    if rng.random() < 0.5:
        defs[names[-1]]["anyOf"].append({"type": "integer"})  # type: ignore[dict-item]
    return "json_schema", json.dumps({"$defs": defs, "$ref": "#/$defs/n0"})


def _pattern_schema(rng: random.Random) -> tuple[Any, str]:
    return "json_schema", json.dumps({"type": "string", "pattern": _regex(rng)[1], "minLength": rng.randrange(5000)})


def _regex(rng: random.Random) -> tuple[Any, str]:
    text = rng.choice("ab.")
    for _ in range(rng.randrange(1, 7)):
        top = rng.choice([3, 30, 300, 3000])
        quantifier = rng.choice(["*", "+", f"{{0,{top}}}", f"{{{top}}}", "?"])
        text = f"({text}{rng.choice(['', 'a', '|a', '|aa', '.*'])}){quantifier}"
    return "regex", text * rng.choice([1, 1, 2, 20]) + rng.choice(["", "b", "[^a]{50}"])


def _lark(rng: random.Random) -> tuple[Any, str]:
    size = min(_size(rng), 1500)
    lines = [
        f"r{i}: " + " | ".join(f"r{rng.randrange(size)} r{rng.randrange(size)}" for _ in range(3)) for i in range(size)
    ]
    end = rng.choice(['"x"', "/(a+)+b/", '"x"{0,99999}', "/.{0,9999}z/"])
    return "lark", "start: r0\n" + "\n".join(lines) + f"\n  | {end}\n"


FAMILIES = (_nested_schema, _wide_schema, _recursive_schema, _pattern_schema, _regex, _regex, _lark)
