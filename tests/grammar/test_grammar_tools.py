"""Tool grammars against the parsers: whatever a grammar allows is read back as calls that match their schemas."""

import json
import random
import time
from collections import Counter
from typing import Any

import jsonschema
import pytest

from jaxserve.errors import InvalidSchemaError
from jaxserve.grammar.matcher import GrammarMatcher, MatcherFactory
from jaxserve.grammar.tools import CallModel, GrammarTool, is_raw_input, no_call_grammar, tool_grammar
from jaxserve.text.tokenizer import Tokenizer
from jaxserve.text.tools import ToolSet
from jaxserve.text.tools.registry import TOOL_FORMATS
from jaxserve.types.sampling import GrammarSpec
from tests.grammar.conftest import byte_tokenizer
from tests.grammar.test_matcher import feed, mask, written
from tests.text import hostile_calls
from tests.text.whole_outputs import ParsedOutput, parse_whole

WEATHER = GrammarTool(
    "get_weather",
    {
        "type": "object",
        "properties": {
            "city": {"type": "string"},
            "unit": {"type": "string", "enum": ["C", "F"]},
            "days": {"type": "integer", "minimum": 1, "maximum": 14},
            "deep": {"$ref": "#/$defs/flag"},
        },
        "required": ["city", "days"],
        "$defs": {"flag": {"type": "array", "items": {"type": "boolean"}, "maxItems": 2}},
    },
    strict=True,
)
NOW = GrammarTool("now", {"type": "object", "properties": {}}, strict=True)
SHELL = GrammarTool("shell", custom=True, regex=r"ls -[al]{1,2} \"x\"")
TOOLS = ToolSet(parameters={tool.name: tool.arguments_schema for tool in (WEATHER, NOW)}, custom=("shell",))
TEMPLATES = {
    "mistral_named": ("mistral", "[ARGS]"),
    "deepseek_fenced": ("deepseek_v3", "```json"),
    "glm47": ("glm45", "</arg_key><arg_value>"),
}
PARSERS = {name: form.parser for name, form in TOOL_FORMATS.items()}
PARSERS |= {name: TOOL_FORMATS[family].parser for name, (family, _) in TEMPLATES.items()}


def grammar(
    factory: MatcherFactory, tokenizer: Tokenizer, name: str, tools: list[GrammarTool], **options: Any
) -> GrammarMatcher:
    family, template = TEMPLATES.get(name, (name, ""))
    special = {text: i for i in tokenizer.special_ids if (text := tokenizer.id_to_token(i))}
    spec = tool_grammar(CallModel(family, template, special), tools, **options)
    assert spec is not None
    return factory(spec)


def sample(matcher: GrammarMatcher, tokenizer: Tokenizer, rng: random.Random) -> str | None:
    """A random output, with a leaning to characters that end things; None if it gets too long."""
    (eos,) = tokenizer.eos_token_ids
    closing = {i for text in '"}])>\n/<abc' for i in tokenizer.encode(text)}
    tokens: list[int] = []
    while not matcher.is_terminated and len(tokens) < 1500:
        allowed = mask(matcher)
        likely = sorted(allowed & closing) if rng.random() < 0.7 else []
        token = eos if eos in allowed and rng.random() < 0.5 else rng.choice(likely or sorted(allowed))
        assert matcher.accept(token), matcher.error
        if token == eos:
            break
        tokens.append(token)
    return tokenizer.decode(tokens, skip_special_tokens=False) if matcher.is_terminated else None


def check_calls(output: ParsedOutput) -> None:
    for call in output.tool_calls:
        if call.custom:
            assert call.name == "shell" and call.arguments in {
                f'ls -{x} "x"' for x in ("a", "l", "aa", "al", "la", "ll")
            }
        else:
            jsonschema.validate(json.loads(call.arguments), TOOLS.parameters[call.name])


@pytest.mark.parametrize("name", PARSERS)
def test_required_outputs_are_calls(factory: MatcherFactory, tokenizer: Tokenizer, name: str) -> None:
    rng, found = random.Random(name), 0
    for _ in range(12):
        matcher = grammar(factory, tokenizer, name, [WEATHER, NOW, SHELL], required=True)
        text = sample(matcher, tokenizer, rng)
        if text is None:
            continue
        output = parse_whole(PARSERS[name](TOOLS), text)
        assert output.tool_calls and not (output.content or "").strip(), text
        check_calls(output)
        found += 1
    assert found >= 2


@pytest.mark.parametrize("name", PARSERS)
def test_one_call_where_parallel_calls_are_off(factory: MatcherFactory, tokenizer: Tokenizer, name: str) -> None:
    rng, found = random.Random(name), 0
    for _ in range(8):
        matcher = grammar(factory, tokenizer, name, [NOW, WEATHER], required=True, parallel=False)
        text = sample(matcher, tokenizer, rng)
        if text is not None:
            assert len(parse_whole(PARSERS[name](TOOLS), text).tool_calls) == 1, text
            found += 1
    assert found >= 2


AUTO = {
    "hermes": 'Hi. <tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>',
    "mistral": 'Hi. [TOOL_CALLS][{"name": "now", "arguments": {}}]',
    "mistral_named": "Hi. [TOOL_CALLS]now[ARGS]{}",
    "glm45": "Hi. <tool_call>now\n</tool_call>",
    "glm47": "Hi. <tool_call>now</tool_call>",
    "gemma4": "Hi. <|tool_call>call:now{}<tool_call|>",
    "hy_v3": "Hi. <tool_calls:opensource>\n<tool_call:opensource>now<tool_sep:opensource>\n</tool_call:opensource>\n"
    "</tool_calls:opensource>",
    "minimax_m2": 'Hi. <minimax:tool_call>\n<invoke name="now">\n</invoke>\n</minimax:tool_call>',
    "seed_oss": "Hi. <seed:tool_call>\n<function=now>\n</function>\n</seed:tool_call>",
    "lfm2": "Hi. <|tool_call_start|>[now()]<|tool_call_end|>",
    "olmo3": "Hi. <function_calls>\nnow()\n</function_calls>",
    "apertus": 'Hi. <|tools_prefix|>[{"now": {}}]<|tools_suffix|>',
    "qwen3_coder": "Hi. <tool_call>\n<function=now>\n</function>\n</tool_call>",
    "llama3_json": '{"name": "now", "parameters": {}}',
    "pythonic": "[now()]",
    "deepseek_v3": "Hi. <｜tool▁calls▁begin｜><｜tool▁call▁begin｜>now<｜tool▁sep｜>{}<｜tool▁call▁end｜>"
    "<｜tool▁calls▁end｜>",
    "kimi_k2": "Hi. <|tool_calls_section_begin|><|tool_call_begin|>functions.now:0<|tool_call_argument_begin|>{}"
    "<|tool_call_end|><|tool_calls_section_end|>",
    "harmony": "<|channel|>analysis<|message|>Hm<|end|><|start|>assistant<|channel|>commentary to=functions.now "
    "<|constrain|>json<|message|>{}",
    "muse_glimmer": " to=self<|message|>Hm<|eom|><|start|>assistant to=now<|message|><atem:function_calls>\n"
    '<atem:invoke name="now">\n</atem:invoke>\n</atem:function_calls>',
}
DEEP = '{"name": "get_weather", "parameters": {"city": "a", "days": 1, "deep": '
FINAL = {"harmony": "<|channel|>final<|message|>", "muse_glimmer": " to=user<|message|>"}


@pytest.mark.parametrize("name", AUTO)
def test_auto_allows_text_and_calls_of_known_tools(factory: MatcherFactory, tokenizer: Tokenizer, name: str) -> None:
    def fresh(**options: Any) -> GrammarMatcher:
        return grammar(factory, tokenizer, name, [NOW, WEATHER], required=False, **options)

    answer, call = fresh(), fresh()
    assert feed(answer, tokenizer, FINAL.get(name, "") + "Hello <b> [x] {y}") and answer.is_accepting
    assert feed(call, tokenizer, AUTO[name]), call.error
    assert call.is_accepting
    assert not feed(fresh(), tokenizer, AUTO[name].replace("now", "nope"))
    second = AUTO[name].removeprefix("Hi. ")
    if name not in (*FINAL, "llama3_json", "pythonic"):
        assert not feed(fresh(parallel=False), tokenizer, AUTO[name] + second)


@pytest.mark.parametrize("name", AUTO)
def test_a_json_answer_or_calls(factory: MatcherFactory, tokenizer: Tokenizer, name: str) -> None:
    """Also where both begin with the same characters."""
    properties = {"name": {"const": "Bo"}}
    schema = {"type": "object", "properties": properties, "required": ["name"], "additionalProperties": False}

    def fresh() -> GrammarMatcher:
        return grammar(factory, tokenizer, name, [GrammarTool("now")], required=False, answer=schema)

    final = FINAL.get(name, "")
    answer, call = fresh(), fresh()
    assert feed(answer, tokenizer, final + '{"name": "Bo"}') and answer.is_accepting
    text = AUTO[name].removeprefix("Hi. ")
    assert feed(call, tokenizer, text), call.error
    assert call.is_accepting
    if name == "llama3_json":  # the call is written as the answer is: references in its schema keep their targets
        right, wrong = (grammar(factory, tokenizer, name, [WEATHER], required=False, answer=schema) for _ in range(2))
        assert feed(right, tokenizer, DEEP + "[true]}}") and right.is_accepting, right.error
        assert not feed(wrong, tokenizer, DEEP + "[1")
    for wrong in (final + '{"name": "Al"}', "Hello", text.replace("now", "nope")):
        assert not feed(fresh(), tokenizer, wrong)


@pytest.mark.parametrize("name", ["hermes", "mistral_named", "kimi_k2"])
def test_a_function_that_lists_no_parameters_has_none(factory: MatcherFactory, tokenizer: Tokenizer, name: str) -> None:
    bare, call = grammar(factory, tokenizer, name, [GrammarTool("now")], required=True), AUTO[name].removeprefix("Hi. ")
    assert feed(bare, tokenizer, call) and bare.is_accepting, bare.error
    opened = call[: call.rindex("{}") + 1] + '"a"'
    for tool, takes in ((GrammarTool("now"), False), (GrammarTool("now", {}), True)):
        assert feed(grammar(factory, tokenizer, name, [tool], required=True), tokenizer, opened) == takes


def test_auto_without_strict_tools_is_free() -> None:
    loose = GrammarTool("f", {"type": "object"})
    assert tool_grammar(CallModel("hermes"), [loose], required=False) is None
    assert tool_grammar(CallModel("hermes"), [loose, NOW], required=False) is not None, "one of them is strict"
    assert tool_grammar(CallModel("hermes"), [loose], required=False, parallel=False) is not None
    with pytest.raises(InvalidSchemaError):
        tool_grammar(CallModel("hermes"), [], required=True)
    with pytest.raises(InvalidSchemaError) as caught:
        tool_grammar(CallModel("nope"), [loose], required=True)
    assert caught.value.param == "tool_choice"


def test_a_lark_tool_is_enforced_where_it_is_named(factory: MatcherFactory, tokenizer: Tokenizer) -> None:
    tool = GrammarTool("calc", custom=True, lark='start: "1" ("+" "1")*')
    spec = tool_grammar(CallModel("hermes"), [tool], required=True)
    assert spec is not None and is_raw_input([tool], required=True)
    assert feed(factory(spec), tokenizer, "1+1+1") and not feed(factory(spec), tokenizer, "2")
    assert not is_raw_input([tool, NOW], required=True)


SPOKEN = r"""
start: "say \"" WORD "\"" ("\n" line)*  // quotes and line breaks are escaped in a call
line: /[a-c"\t]{1,3}/ | "x".."z" | line_end
line_end: "stop"i | "<" NUMBER{2} ">"
WORD: /[a-z]+/ & /.{1,4}/
NUMBER: /[0-9]/
"""
SPEAK, CALC = GrammarTool("speak", custom=True, lark=SPOKEN), GrammarTool("calc", custom=True, lark='start: "1"+')


FAMILIES = ["hermes", "json", "llama3_json", "mistral_named", "deepseek_v3", "kimi_k2", "pythonic"]
FAMILIES += ["qwen3_coder", "glm45", "deepseek_v32", "gemma4", "minimax_m2", "hy_v3", "seed_oss", "lfm2", "olmo3"]
FAMILIES += ["muse_glimmer"]


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("required", [True, False])
def test_a_lark_tool_among_others(factory: MatcherFactory, tokenizer: Tokenizer, name: str, required: bool) -> None:
    rng, found = random.Random(name), Counter[str]()
    known = ToolSet({"now": {}}, ["speak", "calc"])
    specs = {tool.name: GrammarSpec(kind="lark", source=tool.lark or "") for tool in (SPEAK, CALC)}
    for _ in range(40 if required else 5):
        matcher = grammar(factory, tokenizer, name, [SPEAK, CALC, NOW], required=required)
        output = parse_whole(PARSERS[name](known), sample(matcher, tokenizer, rng) or "")
        for call in output.tool_calls:
            found[call.name] += 1
            assert call.name not in specs or feed(factory(specs[call.name]), tokenizer, call.arguments), call
    assert not required or (found["speak"] and found["calc"])


def test_a_lark_tool_may_be_called_or_not(factory: MatcherFactory, tokenizer: Tokenizer) -> None:
    def fits(text: str) -> bool:
        return feed(grammar(factory, tokenizer, "hermes", [SPEAK], required=False), tokenizer, text)

    call = '<tool_call>\n{"name": "speak", "arguments": {"input": "%s"}}\n</tool_call>'
    assert fits("Hello.") and fits(call % r"say \"ab\"\nSTOP") and fits(call % r"say \"ab\"\n<12>")
    assert not fits(call % r"say \"abcde") and not fits(call % r"say \"ab\" x")


REFUSED = ["start: %json {}", "start: ~/a/", "start: other", "begin: /a/", "start: @x", "start: <|im_end|>"]
REFUSED += ["%declare A\nstart: /a/", "start[lazy]: /a/", "%llguidance {}\nstart: /a/"]


@pytest.mark.parametrize("source", [*REFUSED, 'start: "a</parameter>"'])
@pytest.mark.parametrize("name", ["hermes", "qwen3_coder"])
def test_lark_that_cannot_be_carried_over_is_refused(name: str, source: str) -> None:
    if name == "hermes" and source not in REFUSED:
        return
    with pytest.raises(InvalidSchemaError, match="lark") as caught:
        tool_grammar(CallModel(name), [GrammarTool("f", custom=True, lark=source), NOW], required=True)
    assert caught.value.param == "tools"


NAMES = " ".join("LIMITED" + "_" * i for i in range(400))


@pytest.mark.parametrize("source", [
    "start: /a/\nb" + " " * 200_000,
    f"start: /a/ // {NAMES}" + "".join(f"\nr{i}: /{i}/" for i in range(8000)),
    'start: "' + "a" * 300_000 + '"',
])  # fmt: skip
def test_a_lark_tool_does_not_take_long(source: str) -> None:
    began = time.thread_time()
    with pytest.raises(InvalidSchemaError):
        tool_grammar(CallModel("hermes"), [GrammarTool("f", custom=True, lark=source), NOW], required=True)
    assert time.thread_time() - began < 2


RICH = r"""
%import common.INT
%import common (WS, CNAME)
%import common.SIGNED_INT -> NUM
start: select (";" select)~0..2 | "-"~3
select: "SELECT" column ("," column)* limit?   // spaces may stand between any two of them
column: NAME | NUM | "\"" CNAME "\""
limit: "LIMIT" INT
NAME: /[a-z]+/ & ~("from" | "where") & /.{2,4}/
%ignore WS
"""


@pytest.mark.parametrize("name", ["hermes", "qwen3_coder", "pythonic"])
def test_imports_repetitions_complements_and_ignored_text(
    factory: MatcherFactory, tokenizer: Tokenizer, name: str
) -> None:
    tool = GrammarTool("sql", custom=True, lark=RICH)
    known, alone = ToolSet({"now": {}}, ["sql"]), GrammarSpec(kind="lark", source=RICH)
    rng, found = random.Random(name), 0
    for _ in range(16):
        matcher = grammar(factory, tokenizer, name, [tool, NOW], required=True, parallel=False)
        for call in parse_whole(PARSERS[name](known), sample(matcher, tokenizer, rng) or "").tool_calls:
            matched = factory(alone)
            assert call.name == "now" or (feed(matched, tokenizer, call.arguments) and matched.is_accepting), call
            found += call.name == "sql"
    assert found >= 3


def test_what_stands_in_a_call_with_a_rich_grammar(factory: MatcherFactory, tokenizer: Tokenizer) -> None:
    frames = {
        "hermes": '<tool_call>\n{"name": "sql", "arguments": {"input": "%s"}}\n</tool_call>',
        "qwen3_coder": "<tool_call>\n<function=sql>\n<parameter=input>\n%s\n</parameter>\n</function>\n</tool_call>",
    }
    tool = GrammarTool("sql", custom=True, lark=RICH)
    quote = {"hermes": r"\"", "qwen3_coder": '"'}
    for name, frame in frames.items():

        def fits(text: str, name: str = name, frame: str = frame) -> bool:
            return feed(grammar(factory, tokenizer, name, [tool, NOW], required=True), tokenizer, frame % text)

        q = quote[name]
        assert fits("SELECT ab , 12 LIMIT 5;SELECT cd") and fits("---") and fits(f"SELECT {q}a_B{q}")
        assert not fits("--") and not fits("SELECT from") and not fits("SELECT a;SELECT b;SELECT c;SELECT d")


def test_a_text_between_tags_never_holds_the_closing_tag(factory: MatcherFactory, tokenizer: Tokenizer) -> None:
    slashed = GrammarTool("h", custom=True, regex=r"a\/b\\/")
    free = GrammarTool("f", custom=True, lark=r"start: /(.|\n)+/ (/[<]/ /.+/)?")
    loose = GrammarTool("g", custom=True, regex=r"(.|\n)+/b (.|\n)+")
    heads = {free: "a/b > c", loose: "a\n/b < c", slashed: "a/b\\/"}
    for tool, text in heads.items():
        head = f"<tool_call>\n<function=%s>\n<parameter=input>\n{text}"
        for tail, good in (("\n</parameter>\n</function>\n</tool_call>", True), ("</parameter> more", False)):
            matcher = grammar(factory, tokenizer, "qwen3_coder", [tool, NOW], required=True, parallel=False)
            assert feed(matcher, tokenizer, head % tool.name + tail) is good


PAIR = GrammarTool("pair", {"type": "object", "properties": {"a": {"type": "string"}, "b": {"type": "string"}},
                            "required": ["a"]}, strict=True)  # fmt: skip
ONE_TEXT = {
    "qwen3_coder": "<tool_call>\n<function=pair>\n<parameter=a>\n%s\n</parameter>\n</function>\n</tool_call>",
    "glm45": "<tool_call>pair\n<arg_key>a</arg_key>\n<arg_value>%s</arg_value>\n</tool_call>",
    "deepseek_v32": '<｜DSML｜function_calls>\n<｜DSML｜invoke name="pair">\n'
    '<｜DSML｜parameter name="a" string="true">%s</｜DSML｜parameter>\n</｜DSML｜invoke>\n</｜DSML｜function_calls>',
}
DSML_B = '<｜DSML｜parameter name="b" string="true">'


@pytest.mark.parametrize("name, text, allowed", [
    ("qwen3_coder", "x</parameter>y", True), ("qwen3_coder", "x\n</function>\ny", True),
    ("qwen3_coder", "</parameter>", True), ("qwen3_coder", "<parameter=b>y", True),
    ("qwen3_coder", "x\n<parameter=b>\ny", False), ("qwen3_coder", "x\n</function>\n</tool_call>", False),
    ("qwen3_coder", "x</parameter><parameter=b>\ny", False), ("qwen3_coder", "x</parameter></tool_call>y", False),
    ("qwen3_coder", "x</parameter> \n </function></tool_call>y", False),
    ("glm45", "x</arg_value>y", True), ("glm45", "<arg_key>b</arg_key><arg_value>", True),
    ("glm45", "x</arg_value><arg_key>b</arg_key><arg_value>y", False), ("glm45", "x</arg_value></tool_call>y", False),
    ("deepseek_v32", "x</｜DSML｜parameter>y", True), ("deepseek_v32", f"x</｜DSML｜parameter>{DSML_B}y", False),
    ("deepseek_v32", "x</｜DSML｜parameter></｜DSML｜invoke></｜DSML｜function_calls>y", False),
])  # fmt: skip
def test_required_calls_hold_no_text_that_has_two_readings(
    factory: MatcherFactory, tokenizer: Tokenizer, name: str, text: str, allowed: bool
) -> None:
    call = ONE_TEXT[name] % text
    assert feed(grammar(factory, tokenizer, name, [PAIR], required=True), tokenizer, call) is allowed
    if allowed:
        tools = ToolSet({"pair": PAIR.arguments_schema})
        (found,) = parse_whole(PARSERS[name](tools), call).tool_calls
        assert json.loads(found.arguments) == {"a": text}


NOTED = {
    "type": "object",
    "properties": {
        "to": {"type": "array", "items": {"type": "string", "enum": ["a,b", "c}"]}, "minItems": 1, "maxItems": 2},
        "at": {"$ref": "#/$defs/place"},
        "note": {"anyOf": [{"type": "string"}, {"type": "null"}]},
        "kind": {"enum": ["x", 1, None]},
        "when": {"type": ["integer", "string"]},
        "grid": {"type": "array", "items": {"type": "array", "items": {"type": "integer"}}, "maxItems": 1},
        "both": {"type": "object", "properties": {"a": {"$ref": "#/$defs/tag"}, "b": {"$ref": "#/$defs/tag"}}},
    },
    "required": ["to", "at"],
    "$defs": {
        "place": {
            "type": "object",
            "properties": {"lat": {"type": "number"}, "tags": {"type": "array", "items": {"$ref": "#/$defs/tag"}}},
            "required": ["lat"],
        },
        "tag": {"type": "string"},
    },
}


# a value as the model writes it, and whether the schema allows it
Q = '<|"|>'
NOTED_VALUES = [
    ("to", f"[{Q}a,b{Q}]", True), ("to", f"[{Q}a,b{Q},{Q}c}}{Q}]", True), ("to", "[]", False),
    ("to", f"[{Q}x{Q}]", False),
    ("to", f"[{Q}a,b{Q},{Q}a,b{Q},{Q}a,b{Q}]", False), ("at", "{lat:1.5}", True), ("at", "{}", False),
    ("at", f"{{lat:-2,tags:[{Q}x {{y}}{Q},{Q}{Q}]}}", True), ("at", "{lat:1,tags:[2]}", False),
    ("note", f"{Q}a \"b\" <|\"| c{Q}", True), ("note", "null", True), ("note", "1", False), ("kind", f"{Q}x{Q}", True),
    ("kind", "1", True), ("kind", "null", True), ("kind", "2", False), ("when", "3", True), ("when", f"{Q}3{Q}", True),
    ("grid", "[[1,2]]", True), ("grid", "[[1],[2]]", False), ("grid", "[]", True),
    ("both", f"{{a:{Q}x{Q},b:{Q}y{Q}}}", True), ("both", f"{{a:{Q}x{Q},b:1}}", False),
]  # fmt: skip


@pytest.mark.parametrize("key, text, allowed", NOTED_VALUES)
def test_values_in_gemmas_notation_match_their_schemas(
    factory: MatcherFactory, tokenizer: Tokenizer, key: str, text: str, allowed: bool
) -> None:
    schema = NOTED | {"properties": {key: NOTED["properties"][key]}, "required": [key]}
    for strict in (True, False):
        matcher = grammar(factory, tokenizer, "gemma4", [GrammarTool("send", schema, strict=strict)], required=True)
        call = f"<|tool_call>call:send{{{key}:{text}}}<tool_call|>"
        assert feed(matcher, tokenizer, call) is allowed
        if allowed:
            (found,) = parse_whole(PARSERS["gemma4"](ToolSet({"send": schema})), call).tool_calls
            jsonschema.validate(json.loads(found.arguments), schema)


def test_a_value_without_a_schema_is_any_in_gemmas_notation(factory: MatcherFactory, tokenizer: Tokenizer) -> None:
    schema = {"properties": {"a": {}, "b": {"type": "object"}, "c": {"type": "array"}}, "required": ["a", "b", "c"]}
    text = f"{{a:[{{k:{Q}x{Q}}},null],b:{{k:[1,{Q}{Q}]}},c:[{Q}x{Q},[true]]}}"
    call = f"<|tool_call>call:send{text}<tool_call|>"
    assert feed(grammar(factory, tokenizer, "gemma4", [GrammarTool("send", schema)], required=True), tokenizer, call)
    (found,) = parse_whole(PARSERS["gemma4"](ToolSet({"send": schema})), call).tool_calls
    assert json.loads(found.arguments) == {"a": [{"k": "x"}, None], "b": {"k": [1, ""]}, "c": ["x", [True]]}


@pytest.mark.parametrize("part", [
    {"type": "array", "items": {"type": "string"}, "uniqueItems": True}, {"enum": [{"a": 1}]},
    {"type": "object", "properties": {"a": {"type": "string"}}, "minProperties": 1},
    {"type": "array", "items": {"$ref": "#/properties/p"}}, {"$ref": "#/properties/p"},
    {"type": "string", "enum": []}, {"enum": [f"a{Q}b"]},
])  # fmt: skip
def test_what_gemmas_notation_cannot_enforce_is_refused_or_any_value(part: dict[str, Any]) -> None:
    schema = {"type": "object", "properties": {"p": part}}
    with pytest.raises(InvalidSchemaError) as caught:
        tool_grammar(CallModel("gemma4"), [GrammarTool("f", schema, strict=True)], required=True)
    assert caught.value.param == "tools"
    assert tool_grammar(CallModel("gemma4"), [GrammarTool("f", schema)], required=True) is not None


def test_text_parameters_that_cannot_be_bound_are_refused() -> None:
    tool = GrammarTool("f", {"properties": {"a": {"type": "string", "pattern": "x"}}}, strict=True)
    with pytest.raises(InvalidSchemaError, match="pattern"):
        tool_grammar(CallModel("glm45"), [tool], required=True)
    assert tool_grammar(CallModel("hermes"), [tool], required=True) is not None


def test_special_tokens_are_written_as_tokens() -> None:
    own = byte_tokenizer()
    special = {text: i for i in own.special_ids if (text := own.id_to_token(i))}
    spec = tool_grammar(CallModel("hermes", special_tokens=special), [NOW], required=True)
    assert spec is not None and f"<[{special['<tool_call>']}]>" in spec.source and '"<tool_call>' not in spec.source


@pytest.mark.parametrize("name", ["qwen3_coder", "glm45", "deepseek_v32", "hermes"])
def test_values_that_spell_a_special_token_are_written_in_ordinary_ones(
    name: str, factory: MatcherFactory, tokenizer: Tokenizer
) -> None:
    """A token that ends a turn would cut the call."""
    text = "<eos> [TOOL_CALLS]"
    tool = GrammarTool("f", {"properties": {"[TOOL_CALLS]": {"enum": [text]}}, "required": ["[TOOL_CALLS]"]}, True)
    call = hostile_calls.FAMILIES[name].write([hostile_calls.Call("f", {"[TOOL_CALLS]": text})], [""], random.Random(3))
    matcher = grammar(factory, tokenizer, name, [tool], required=True)
    head, _, rest = call.partition("[TOOL_CALLS]")
    assert feed(matcher, tokenizer, head) and written(
        matcher, tokenizer, f"[TOOL_CALLS]{rest[: rest.index(text)]}{text}", 320
    )


@pytest.mark.parametrize("name, key", [
    ("qwen3_coder", "a<b"), ("glm45", "a\nb"), ("deepseek_v32", 'a"b'), ("glm45", " a"), ("pythonic", "a-b"),
    ("qwen3_coder", ""),
])  # fmt: skip
def test_a_parameter_whose_name_cannot_be_written_is_left_out_or_refused(
    name: str, key: str, factory: MatcherFactory, tokenizer: Tokenizer
) -> None:
    """The parser would not read it back."""
    schema = {"type": "object", "properties": {key: {"type": "integer"}, "n": {"const": 1}}, "required": [key, "n"]}
    with pytest.raises(InvalidSchemaError, match="named"):
        tool_grammar(CallModel(name), [GrammarTool("f", schema, strict=True)], required=True)
    for tool in (GrammarTool("f", schema), GrammarTool("f", schema | {"required": ["n"]}, strict=True)):
        text = sample(
            grammar(factory, tokenizer, name, [tool], required=True, parallel=False), tokenizer, random.Random(1)
        )
        (found,) = parse_whole(PARSERS[name](ToolSet({"f": schema})), text or "").tool_calls
        assert json.loads(found.arguments) == {"n": 1}


@pytest.mark.parametrize("name", sorted(PARSERS))
def test_where_no_call_is_allowed_text_is_free_and_calls_are_not(
    name: str, factory: MatcherFactory, tokenizer: Tokenizer
) -> None:
    family, template = TEMPLATES.get(name, (name, ""))
    special = {text: i for i in tokenizer.special_ids if (text := tokenizer.id_to_token(i))}
    spec = no_call_grammar(CallModel(family, template, special))
    assert spec is not None
    final = FINAL.get(name, "")
    for text in ("It is sunny.\n", '{"answer": [1, 2]}', "[1, 2]", "f(x) < 2"):
        assert feed(factory(spec), tokenizer, final + text), text
    rng = random.Random(5)
    calls = [sample(grammar(factory, tokenizer, name, [WEATHER, NOW], required=True), tokenizer, rng) for _ in range(9)]
    written = [call for call in calls if call is not None]
    assert written
    for call in written:
        assert not feed(factory(spec), tokenizer, call), call
    assert no_call_grammar(CallModel(None)) is None
