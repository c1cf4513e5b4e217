"""Tool-call parsers: every family's format, cut anywhere, broken anywhere, in linear time."""

import json
import random
import time
from typing import Any

import pytest

from jaxserve.text.events import ToolCallDelta, merged
from jaxserve.text.output_parser import ParserChoice
from jaxserve.text.reader import MAX_HEAD_CHARS
from jaxserve.text.tools import ToolParser, ToolSet
from jaxserve.text.tools.base import MAX_JOIN_DEPTH, schema_types
from jaxserve.text.tools.channels import CHANNELS
from jaxserve.text.tools.json_tags import HermesParser
from jaxserve.text.tools.registry import TOOL_FORMATS
from tests.text.whole_outputs import ParsedOutput, ToolCall, parse_whole

TOOLS = ToolSet(
    parameters={
        "get_weather": {
            "type": "object",
            "properties": {
                "city": {"type": "string"},
                "days": {"type": "integer"},
                "tags": {"type": "array"},
                "zip": {"type": ["string", "null"]},
            },
        },
        "now": {"type": "object", "properties": {}},
        "f": {},
        "x": {},
    },
    custom=("shell",),
)
FAMILIES = {name: form.parser for name, form in TOOL_FORMATS.items()}
ARGS = {"city": 'Zü"rich\n', "days": 3, "tags": [1, {"a": "]}"}]}
JSON_ARGS = json.dumps(ARGS, ensure_ascii=False)
WEATHER, NOW = ("get_weather", ARGS), ("now", {})


def deepseek(*calls: str) -> str:
    body = "\n".join(f"<｜tool▁call▁begin｜>{call}<｜tool▁call▁end｜>" for call in calls)
    return f"<｜tool▁calls▁begin｜>{body}<｜tool▁calls▁end｜>"


def muse(name: str, body: str) -> str:
    return f" to={name}<|message|><atem:function_calls>\n{body}</atem:function_calls>"


MUSE_NOW = '<atem:invoke name="now">\n</atem:invoke>\n'
MUSE_WEATHER = (
    '<atem:invoke name="get_weather">\n<atem:parameter name="city">Zü"rich\n</atem:parameter>\n'
    '<atem:parameter name="days">3</atem:parameter>\n'
    '<atem:parameter name="tags">[1, {"a": "]}"}]</atem:parameter>\n</atem:invoke>\n'
)
NEXT = "<|eom|><|start|>assistant"
DSML_PARAMETERS = (
    '<｜DSML｜parameter name="city" string="true">Zü"rich\n</｜DSML｜parameter>\n'
    '<｜DSML｜parameter name="days" string="false">3</｜DSML｜parameter>\n'
    '<｜DSML｜parameter name="tags" string="false">[1, {"a": "]}"}]</｜DSML｜parameter>\n'
)
PYTHON_ARGS = """city='Zü"rich\\n', days=3, tags=[1, {'a': "]}"}]"""

DSML = (
    f'<｜DSML｜function_calls>\n<｜DSML｜invoke name="get_weather">\n{DSML_PARAMETERS}</｜DSML｜invoke>\n'
    '<｜DSML｜invoke name="now">\n</｜DSML｜invoke>\n</｜DSML｜function_calls>'
)
QWEN_CODER = (
    'ok <tool_call>\n<function=get_weather>\n<parameter=city>\nZü"rich\n\n</parameter>\n<parameter=days>\n3\n'
    '</parameter>\n<parameter=tags>\n[1, {"a": "]}"}]\n</parameter>\n</function>\n</tool_call>\n'
    "<tool_call>\n<function=now>\n</function>\n</tool_call>"
)
GLM = (
    'x\n<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>Zü"rich\n</arg_value>\n<arg_key>days</arg_key>\n'
    '<arg_value>3</arg_value>\n<arg_key>tags</arg_key>\n<arg_value>[1, {"a": "]}"}]</arg_value>\n</tool_call>\n'
    "<tool_call>now\n</tool_call>"
)

SEED = (
    '<seed:tool_call>\n<function=get_weather>\n<parameter=city>Zü"rich\n</parameter>\n<parameter=days>3</parameter>\n'
    '<parameter=tags>[1, {"a": "]}"}]</parameter>\n</function>\n</seed:tool_call>\n'
    "<seed:tool_call>\n<function=now>\n</function>\n</seed:tool_call>"
)
HY = (
    "ok<tool_calls:opensource>\n<tool_call:opensource>get_weather<tool_sep:opensource>\n<arg_key:opensource>city"
    '</arg_key:opensource>\n<arg_value:opensource>Zü"rich\n</arg_value:opensource>\n<arg_key:opensource>days'
    "</arg_key:opensource>\n<arg_value:opensource>3</arg_value:opensource>\n<arg_key:opensource>tags"
    '</arg_key:opensource>\n<arg_value:opensource>[1, {"a": "]}"}]</arg_value:opensource>\n</tool_call:opensource>\n'
    "<tool_call:opensource>now<tool_sep:opensource>\n</tool_call:opensource>\n</tool_calls:opensource>"
)
MINIMAX = (
    'a\n<minimax:tool_call>\n<invoke name="get_weather">\n<parameter name="city">Zü"rich\n</parameter>\n'
    '<parameter name="days">3</parameter>\n<parameter name="tags">[1, {"a": "]}"}]</parameter>\n</invoke>\n'
    '<invoke name="now">\n</invoke>\n</minimax:tool_call>'
)
Q = '<|"|>'
GEMMA = (
    f'a<|tool_call>call:get_weather{{city:{Q}Zü"rich\n{Q},days:3,tags:[1,{{a:{Q}]}}{Q}}}]}}<tool_call|>'
    "<|tool_call>call:now{}<tool_call|>"
)

# family, output, content, calls
CASES = [
    ("seed_oss", SEED, None, [WEATHER, NOW]),
    ("mimo", SEED.replace("seed:", ""), None, [WEATHER, NOW]),
    ("hy_v3", HY, "ok", [WEATHER, NOW]),
    ("hy_v3", HY.replace("<tool_sep:opensource>", ""), "ok", [WEATHER, NOW]),
    ("hy_v3_preview", HY.replace(":opensource", ""), "ok", [WEATHER, NOW]),
    ("minimax_m2", MINIMAX, "a", [WEATHER, NOW]),
    ("gemma4", GEMMA, "a", [WEATHER, NOW]),
    ("gemma4", f"<|tool_call>call:get_weather{{ {Q}city{Q}: Rome, days : 3, zip:None}}<tool_call|>", None,
     [("get_weather", {"city": "Rome", "days ": 3, "zip": None})]),
    ("gemma4", f"<|tool_call>call:get_weather{{city:{Q}a {Q}b{Q} c{Q}}}", None,
     [("get_weather", {"city": f"a {Q}b{Q} c"})]),
    ("apertus", f'a<|tools_prefix|>[{{"get_weather": {JSON_ARGS}}}, {{"now": {{}}}}]<|tools_suffix|>', "a",
     [WEATHER, NOW]),
    ("lfm2", f"a<|tool_call_start|>[get_weather({PYTHON_ARGS}), now()]<|tool_call_end|>", "a", [WEATHER, NOW]),
    ("olmo3", f"a<function_calls>\nget_weather({PYTHON_ARGS})\nnow()\n</function_calls>", "a", [WEATHER, NOW]),
    ("olmo3", "<function_calls>\nget_weather(days=3, zip=null)\n</function_calls>b", "b",
     [("get_weather", {"days": 3, "zip": None})]),
    ("nemotron_json", f'<TOOLCALL>[{{"name": "get_weather", "arguments": {JSON_ARGS}}}]</TOOLCALL>', None, [WEATHER]),
    ("hermes", f'<tool_call>\n{{"name": "get_weather", "arguments": {JSON_ARGS}}}\n</tool_call>', None, [WEATHER]),
    ("hermes", f'Let me see.\n<tool_call>{{"arguments": {JSON_ARGS}, "name": "get_weather"}}</tool_call>\n'
               '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>', "Let me see.", [WEATHER, NOW]),
    ("hermes", '<tool_call>{"name": "now"}</tool_call> done', "done", [NOW]),
    ("hermes", '<tool_call>{"type": "function", "function": {"name": "now", "arguments": null}}</tool_call>',
     None, [NOW]),
    ("hermes", json.dumps({"name": "x"}).join(["<tool_call>", ""]), None, [("x", {})]),
    ("hermes", '<tool_call>' + json.dumps({"name": "get_weather", "arguments": JSON_ARGS}), None, [WEATHER]),
    ("qwen3_coder", QWEN_CODER, "ok", [WEATHER, NOW]),
    ("qwen3_coder", "<function=get_weather><parameter=city>a\n<parameter=zip>null\n</function></tool_call>", None,
     [("get_weather", {"city": "a", "zip": None})]),
    ("llama3_json", f'{{"name": "get_weather", "parameters": {JSON_ARGS}}}', None, [WEATHER]),
    ("llama3_json", f'<|python_tag|>{{"name": "get_weather", "parameters": {JSON_ARGS}}}; {{"name": "now"}}', None,
     [WEATHER, NOW]),
    ("llama3_json", '[{"name": "now", "parameters": {}}]', None, [NOW]),
    ("mistral", f'[TOOL_CALLS] [{{"name": "get_weather", "arguments": {JSON_ARGS}}}, {{"name": "now"}}]', None,
     [WEATHER, NOW]),
    ("mistral", f"a[TOOL_CALLS]get_weather{JSON_ARGS}[TOOL_CALLS]now[ARGS]{{}}", "a", [WEATHER, NOW]),
    ("mistral", "[TOOL_CALLS]now[CALL_ID]abcdefghi[ARGS]{}", None, [NOW]),
    ("deepseek_v3", "hi" + deepseek(f"function<｜tool▁sep｜>get_weather\n```json\n{JSON_ARGS}\n```",
                                    "function<｜tool▁sep｜>now\n```json\n{}\n```"), "hi", [WEATHER, NOW]),
    ("deepseek_v3", deepseek(f"get_weather<｜tool▁sep｜>{JSON_ARGS}", "now<｜tool▁sep｜>{}"), None, [WEATHER, NOW]),
    ("deepseek_v32", DSML, None, [WEATHER, NOW]),
    ("glm45", GLM, "x", [WEATHER, NOW]),
    ("glm45", "<tool_call>f<arg_key>a</arg_key><arg_value>b c</arg_value></tool_call>", None, [("f", {"a": "b c"})]),
    ("kimi_k2", "<|tool_calls_section_begin|><|tool_call_begin|>functions.get_weather:0<|tool_call_argument_begin|>"
                f"{JSON_ARGS}<|tool_call_end|><|tool_call_begin|>functions.now:1<|tool_call_argument_begin|>{{}}"
                "<|tool_call_end|><|tool_calls_section_end|>", None, [WEATHER, NOW]),
    ("pythonic", f"[get_weather({PYTHON_ARGS}), now()]", None, [WEATHER, NOW]),
    ("pythonic", f"<|python_start|>[get_weather({PYTHON_ARGS})]<|python_end|>", None, [WEATHER]),
    ("pythonic", "[get_weather(city='''Zü\"rich\n''', days=3, tags=[1, {'a': \"\"\"]}\"\"\"}])]", None, [WEATHER]),
    ("pythonic", "[now(), nope(x=1)]", ", nope(x=1)]", [NOW]),
    ("pythonic", "[get_weather(days=-3, zip=None, tags=(1.5, True, {1: 'a' 'b'}))]", None,
     [("get_weather", {"days": -3, "zip": None, "tags": [1.5, True, {"1": "ab"}]})]),
    ("granite", f'<|tool_call|>[{{"name": "get_weather", "arguments": {JSON_ARGS}}}]', None, [WEATHER]),
    ("internlm", 'a<|action_start|><|plugin|>{"name": "now", "parameters": {}}<|action_end|>', "a", [NOW]),
    ("phi4_mini_json", f'functools[{{"name": "get_weather", "arguments": {JSON_ARGS}}}, {{"name": "now"}}]', None,
     [WEATHER, NOW]),
    ("jamba", f'<tool_calls>[\n{{"name": "get_weather", "arguments": {JSON_ARGS}}}\n]</tool_calls>', None, [WEATHER]),
    ("json", f'[{{"name": "get_weather", "parameters": {JSON_ARGS}}}]', None, [WEATHER]),
    ("harmony", "<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>" + JSON_ARGS + "<|call|>",
     None, [WEATHER]),
    ("harmony", "<|channel|>commentary<|message|>I look.<|end|><|start|>assistant to=functions.now<|channel|>"
                "commentary json<|message|>{}<|call|>", "I look.", [NOW]),
    ("harmony", "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>commentary to=now json<|message|>"
                "{}<|call|>", None, [NOW]),
    ("harmony", " to=functions.now<|channel|>commentary <|constrain|>json<|message|>{}<|call|>", None, [NOW]),
    ("harmony", "<|channel|>commentary to=functions.now<|call|>", None, [NOW]),
    ("muse_glimmer", muse("get_weather", MUSE_WEATHER) + "<|eot|>", None, [WEATHER]),
    ("muse_glimmer", f" to=self<|message|>{MUSE_NOW}<|eom|><|start|>assistant{muse('now', MUSE_NOW)}{NEXT}"
                     f"{muse('weather.get_weather', MUSE_WEATHER)}", None, [NOW, WEATHER]),
    ("muse_glimmer", f" to=user<|message|>I look.{NEXT}{muse('now.now', MUSE_NOW.replace('now', 'now.now'))}<|eot|>",
     "I look.", [NOW]),
    ("muse_glimmer", f" to=now<|message|>{MUSE_NOW}{NEXT} to=user<|message|>Done.<|eot|>", "Done.", [NOW]),
    ("muse_glimmer", muse("now", MUSE_NOW + MUSE_WEATHER), None, [NOW, WEATHER]),
]  # fmt: skip

# what must come back as content, word for word
PLAIN = [
    ("hermes", "<tool_call>no json</tool_call>"),
    ("hermes", '<tool_call>{"nam": 1}</tool_call>'),
    ("hermes", '<tool_call>{"name": "a b", "arguments": {}}</tool_call>'),
    ("hermes", "a <tool_cal> b <tool_call"),
    ("qwen3_coder", "<tool_call>\n<fun=x></tool_call>"),
    ("qwen3_coder", "<function=" + "x" * 5000),
    ("llama3_json", '{"name": "unknown", "parameters": {}}'),
    ("llama3_json", '{"answer": {"name": "now"}}'),
    ("llama3_json", 'Say {"name": "now"}'),
    ("llama3_json", "<|python_tag|>print(1)"),
    ("mistral", "[TOOL_CALLS]no call at all"),
    ("mistral", "[TOOL_CALLS][1, 2]"),
    ("deepseek_v3", "<｜tool▁calls▁begin｜>x"),
    ("deepseek_v32", "<｜DSML｜function_calls>x"),
    ("glm45", "<tool_call>never closed"),
    ("kimi_k2", "<|tool_calls_section_begin|>x"),
    ("pythonic", "[1, 2, 3]"),
    ("pythonic", "[unknown(x=1)]"),
    ("pythonic", "[now(__import__('os').system('id'))]"),
    ("pythonic", "[now(x=open('/etc/passwd').read())]"),
    ("pythonic", "[now(1)]"),
    ("granite", "<|tool_call|>x"),
    ("gemma4", "<|tool_call>x"),
    ("gemma4", "<|tool_call>call:now<tool_call|>"),
    ("minimax_m2", "<minimax:tool_call>x"),
    ("hy_v3", "<tool_calls:opensource>x"),
    ("apertus", '<|tools_prefix|>[{"name": "now"}]'),
    ("lfm2", "<|tool_call_start|>now()"),
    ("olmo3", "<function_calls>\nunknown()"),
    ("harmony", "no channels"),
    ("harmony", "to=now is a recipient"),
    ("muse_glimmer", "no messages"),
    ("muse_glimmer", "to=now is a recipient"),
    ("muse_glimmer", muse("now", "")[len(" to=now<|message|>") :] + MUSE_NOW),
]


NO_PYTHONIC_CALLS = [text for family, text in PLAIN if family == "pythonic"]


def make(family: str) -> ToolParser:
    return FAMILIES[family](TOOLS)


def run(family: str, deltas: list[str]) -> ParsedOutput:
    parser, output = make(family), ParsedOutput()
    for delta in deltas:
        output.add(parser.feed(delta))
    output.add(parser.finish())
    assert output.all_ended
    return output


def shape(output: ParsedOutput) -> tuple:
    return output.content, output.reasoning, [(call.name, call.arguments, call.custom) for call in output.tool_calls]


@pytest.mark.parametrize("family, text, content, calls", CASES)
def test_formats(family: str, text: str, content: str | None, calls: list[tuple[str, dict]]) -> None:
    output = parse_whole(make(family), text)
    assert [(call.name, json.loads(call.arguments)) for call in output.tool_calls] == calls
    assert not any("\\u" in call.arguments for call in output.tool_calls), "its characters are not as they were written"
    assert output.content == content
    assert len({call.id for call in output.tool_calls}) == len(calls)


@pytest.mark.parametrize("family, text, content, calls", [case for case in CASES if ">\n<" in case[1]])
def test_empty_lines_between_tags_do_not_matter(
    family: str, text: str, content: str | None, calls: list[tuple[str, dict]]
) -> None:
    test_formats(family, text.replace(">\n<", ">\n \t\n<"), content, calls)


@pytest.mark.parametrize("family, text", PLAIN)
def test_what_is_no_call_is_content(family: str, text: str) -> None:
    for deltas in ([text], list(text)):
        output = run(family, deltas)
        assert (output.content, output.tool_calls) == (text, [])


# calls of a tool that is not offered, the last of them beside a call that is
UNOFFERED = [
    ("hermes", '<tool_call>\n{"name": "nope", "arguments": {"a": 1}}\n</tool_call>'),
    ("hermes", '<tool_call>{"arguments": {"a": 1}, "name": "nope"}</tool_call>'),
    ("hermes", '<tool_call>{"type": "function", "function": {"name": "nope", "arguments": {}}}</tool_call>'),
    ("qwen3_coder", "<tool_call>\n<function=nope>\n<parameter=a>\n1\n</parameter>\n</function>\n</tool_call>"),
    ("qwen3_coder", "Write <function=foo> to call it."),
    ("llama3_json", '<|python_tag|>{"name": "nope", "parameters": {}}'),
    ("mistral", '[TOOL_CALLS][{"name": "nope", "arguments": {}}]'),
    ("mistral", "[TOOL_CALLS]nope[ARGS]{}"),
    ("deepseek_v3", deepseek("nope<｜tool▁sep｜>{}")),
    ("deepseek_v3", deepseek("function<｜tool▁sep｜>nope\n```json\n{}\n```")),
    ("deepseek_v32", DSML[: DSML.index("get_weather")] + 'nope">\n</｜DSML｜invoke>\n</｜DSML｜function_calls>'),
    ("glm45", "<tool_call>nope<arg_key>a</arg_key><arg_value>1</arg_value></tool_call>"),
    ("kimi_k2", "<|tool_calls_section_begin|><|tool_call_begin|>functions.nope:0<|tool_call_argument_begin|>{}"
                "<|tool_call_end|><|tool_calls_section_end|>"),
    ("pythonic", "<|python_start|>[nope(x=1)]<|python_end|>"),
    ("granite", '<|tool_call|>[{"name": "nope", "arguments": {}}]'),
    ("internlm", '<|action_start|><|plugin|>{"name": "nope", "parameters": {}}<|action_end|>'),
    ("phi4_mini_json", 'functools[{"name": "nope", "arguments": {}}]'),
    ("jamba", '<tool_calls>[{"name": "nope", "arguments": {}}]</tool_calls>'),
    ("seed_oss", "<seed:tool_call>\n<function=nope>\n</function>\n</seed:tool_call>"),
    ("hy_v3", "<tool_calls:opensource>\n<tool_call:opensource>nope<tool_sep:opensource>\n</tool_call:opensource>"),
    ("minimax_m2", '<minimax:tool_call>\n<invoke name="nope">\n</invoke>\n</minimax:tool_call>'),
    ("gemma4", "<|tool_call>call:nope{a:1}<tool_call|>"),
    ("apertus", '<|tools_prefix|>[{"nope": {}}]<|tools_suffix|>'),
    ("lfm2", "<|tool_call_start|>[nope(x=1)]<|tool_call_end|>"),
    ("olmo3", "<function_calls>\nnope(x=1)\n</function_calls>"),
    ("nemotron_json", '<TOOLCALL>[{"name": "nope", "arguments": {}}]</TOOLCALL>'),
    ("harmony", "<|channel|>commentary to=functions.nope <|constrain|>json<|message|>{}"),
    ("muse_glimmer", muse("nope", MUSE_NOW.replace("now", "nope")).removeprefix(" ")),
]  # fmt: skip


@pytest.mark.parametrize("family, text", UNOFFERED)
def test_a_call_of_a_tool_that_is_not_offered_is_text_and_counted(family: str, text: str) -> None:
    for deltas in ([text], list(text)):
        counted: list[int] = []
        tools = ToolSet(TOOLS.parameters, TOOLS.custom, lambda counted=counted: counted.append(1))
        parser, output = FAMILIES[family](tools), ParsedOutput()
        for delta in deltas:
            output.add(parser.feed(delta))
        output.add(parser.finish())
        assert (output.content, output.tool_calls) == (text, []) and counted == [1]


@pytest.mark.parametrize("family, text", [
    ("hermes", '<tool_call>{"name": "nope"}</tool_call><tool_call>{"name": "now"}</tool_call>'),
    ("deepseek_v3", deepseek("nope<｜tool▁sep｜>{}", "now<｜tool▁sep｜>{}")),
    ("kimi_k2", "<|tool_calls_section_begin|><|tool_call_begin|>functions.nope:0<|tool_call_argument_begin|>{}"
                "<|tool_call_end|><|tool_call_begin|>functions.now:1<|tool_call_argument_begin|>{}"
                "<|tool_call_end|><|tool_calls_section_end|>"),
    ("deepseek_v32", DSML.replace("get_weather", "nope")),
    ("qwen3_coder", QWEN_CODER.replace("get_weather", "nope")),
    ("glm45", GLM.replace("get_weather", "nope")),
])  # fmt: skip
def test_calls_after_one_that_is_not_offered_are_calls(family: str, text: str) -> None:
    output = run(family, list(text))
    assert [call.name for call in output.tool_calls] == ["now"] and "nope" in (output.content or "")


@pytest.mark.parametrize("family, call, text", [
    ("hermes", '<tool_call>{"name": "now"}</tool_call>', '<tool_call>{"name": "nope"'),
    ("hy_v3", HY[2 : HY.index("get")] + "now</tool_call:opensource>", "<tool_call:opensource>nope<arg"),
    ("minimax_m2", '<minimax:tool_call><invoke name="now"></invoke>', '<invoke name="nope">'),
    ("muse_glimmer", f" to=now<|message|>{MUSE_NOW}", '<atem:invoke name="nope"'),
])  # fmt: skip
def test_the_head_of_a_call_that_is_not_offered_is_text_beside_a_call(family: str, call: str, text: str) -> None:
    assert shape(run(family, list(call + text))) == (text, None, [("now", "{}", False)])


def test_what_is_too_long_is_no_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("jaxserve.text.tools.pythonic.MAX_CALL_CHARS", 100)
    for family, text, char, size in (
        ("hermes", '<tool_call>{"%s": 1, "name": "now"}</tool_call>', "k", MAX_HEAD_CHARS),
        ("pythonic", "[now(%s)]", " ", 99),
    ):
        for more in (0, 1):
            assert len(run(family, [text % (char * (size + more))]).tool_calls) == 1 - more


# a head that is too long to be a call's, and within it a call
LONG_HEAD = ("qwen3_coder", f"<function={'x' * 5000}<tool_call><function=now></function></tool_call>")
ALL_TEXTS = [(family, text) for family, text, *_ in CASES] + [*PLAIN, LONG_HEAD]


@pytest.mark.parametrize("family, text", ALL_TEXTS)
def test_cuts_do_not_matter(family: str, text: str) -> None:
    whole = shape(run(family, [text]))
    assert shape(run(family, list(text))) == whole
    for seed in range(5):
        rng = random.Random(seed)
        points = sorted(rng.choices(range(len(text) + 1), k=5))
        assert shape(run(family, [text[a:b] for a, b in zip([0, *points], [*points, len(text)], strict=True)])) == whole


@pytest.mark.parametrize("family, text", [case for case in ALL_TEXTS if len(case[1]) < 500])
def test_an_output_may_end_anywhere(family: str, text: str, caplog: pytest.LogCaptureFixture) -> None:
    """Nothing raises, no call appears from nothing, and the arguments sent are a beginning of the whole ones. Beside
    calls the content has nothing that the whole output's has not, and without them it has all (but headers).
    """
    whole_output = run(family, [text])
    calls = whole_output.tool_calls
    for end in range(len(text)):
        output = run(family, list(text[:end]))
        cut = output.tool_calls
        if cut:
            assert (whole_output.content or "").startswith((output.content or "").rstrip()), text[:end]
        elif family not in CHANNELS:
            assert (output.content or "") == text[:end]
        if family == "pythonic" and text in NO_PYTHONIC_CALLS:
            continue  # they begin as calls do
        assert len(cut) <= len(calls)
        for part, whole in zip(cut, calls, strict=False):
            assert part.name == whole.name
            assert whole.arguments.startswith(part.arguments.removesuffix('"'))  # Python joins strings
    assert not caplog.records  # of a parser that failed


@pytest.mark.parametrize("family", ["hermes", "llama3_json", "mistral", "deepseek_v3", "kimi_k2", "glm45", "harmony",
                                    "muse_glimmer"])  # fmt: skip
def test_arguments_stream_in_fragments(family: str) -> None:
    text = next(text for name, text, _, calls in CASES if name == family and calls[0] == WEATHER)
    parser = make(family)
    events = [event for char in text for event in parser.feed(char)]
    assert sum(isinstance(event, ToolCallDelta) for event in events) > 10


def test_a_harmony_header_that_breaks_off_is_not_shown() -> None:
    """The next message is as it is, and text behind the header's words is not lost."""
    final = "<|start|>assistant<|channel|>final<|message|>hi<|return|>"
    for header, content, reasoning in (
        ("<|channel|>analysis<|end|>", "hi", None),
        ("<|channel|>analysis<|channel|>", "hi", None),
        ("<|start|>assistant", "hi", None),
        ("<|start|>assistant<|channel|>commentary to=browser.search code<|end|>", "codehi", None),
        ("<|channel|>commentary to=functions.nothing <|constrain|>json<|call|>", "hi", None),
        ("<|channel|>analysis I think.<|end|>", "hi", "I think."),
        ("<|channel|>final It is 4.<|end|>", "It is 4.hi", None),
        ("<|channel|>" + "x" * 600 + "<|end|>", "x" * 600 + "hi", None),
        ("<|channel|><|end|><|start|><|end|><|constrain|>json<|end|>", "hi", None),
        ("<|message|>", "hi", None),
    ):
        text = header + (
            final.removeprefix("<|start|>assistant<|channel|>") if header.endswith("<|channel|>") else final
        )
        for deltas in ([text], list(text)):
            assert shape(run("harmony", deltas)) == (content, reasoning, []), header
    for end in ("<|channel|>fin", "<|channel|>comment", "<|start|>assis", "<|channel|>analysis to"):
        for whole in (True, False):
            parser, output = ParserChoice(tool="harmony").make(tools=TOOLS), ParsedOutput()
            output.add(parser.feed(final + end))
            output.add(parser.finish(whole=whole))
            assert shape(output) == ("hi", None, []), end


@pytest.mark.parametrize("end", ["<|message|>", "", " <|constrain|>json"])
def test_a_harmony_call_without_arguments_has_an_empty_object(end: str) -> None:
    """The token <|call|> ends the output and is not in its text. An output that was cut there has no whole call."""
    text = "<|channel|>commentary to=functions.now" + end
    for whole, arguments in ((True, ["{}"]), (False, [""] if end == "<|message|>" else [])):
        parser, output = ParserChoice(tool="harmony").make(tools=TOOLS), ParsedOutput()
        output.add(parser.feed(text))
        output.add(parser.finish(whole=whole))
        assert [call.arguments for call in output.tool_calls] == arguments


@pytest.mark.parametrize("text", ["Then <tool_call>", '<tool_call>\n{"na', "a"])
def test_the_beginning_of_a_call_is_text_if_the_model_ended_it(text: str) -> None:
    parser, output = ParserChoice(tool="hermes").make(tools=TOOLS), ParsedOutput()
    output.add(parser.feed(text))
    output.add(parser.finish(whole=True))
    assert output.content == text


def test_neighbouring_events_are_joined() -> None:
    parser = make("hermes")
    events = parser.feed('a b <tool_call>{"name": "now", "arguments": {"x": [1, 2]}}</tool_call>')
    assert merged(events) == events
    assert [type(event).__name__ for event in events] == [
        "ContentDelta", "ToolCallStart", "ToolCallDelta", "ToolCallEnd"]  # fmt: skip


def test_ids_are_those_the_models_want() -> None:
    def first(family: str, text: str) -> ToolCall:
        return run(family, [text]).tool_calls[0]

    assert first("hermes", '<tool_call>{"name": "now"}').id.startswith("call_")
    assert len(first("mistral", "[TOOL_CALLS]now{}").id) == 9
    assert first("mistral", "[TOOL_CALLS]now[CALL_ID]abcdefghi[ARGS]{}").id == "abcdefghi"
    kimi = "<|tool_calls_section_begin|><|tool_call_begin|>functions.now:7<|tool_call_argument_begin|>{}"
    assert first("kimi_k2", kimi).id == "functions.now:7"
    twice = [call.id for call in run("kimi_k2", [f"{kimi}<|tool_call_end|>" * 2]).tool_calls]
    assert twice[0] == "functions.now:7" and twice[1].startswith("call_")


TEXT = 'ls "a b"\n\\t 🦜 \\u00e9'


@pytest.mark.parametrize("ascii_only", [True, False])
def test_a_custom_tool_gets_its_text(ascii_only: bool) -> None:
    call = json.dumps({"name": "shell", "arguments": {"input": TEXT}}, ensure_ascii=ascii_only)
    text = f"<tool_call>{call}</tool_call>"
    for deltas in ([text], list(text), [text[i : i + 3] for i in range(0, len(text), 3)]):
        assert shape(run("hermes", deltas)) == (None, None, [("shell", TEXT, True)])


@pytest.mark.parametrize("arguments, text", [
    ('{"other": 1}', '{"other": 1}'), ("{}", ""), ('{"note": 1, "input": "x"}', "x"), ('{"input": 5}', '{"input": 5}'),
    ('{"input": "cut', "cut"), ('{"input": "cut\\', "cut"), ('{"input": "cut\\ud83e\\udd', "cut"),
    ('{ "input" : "a\\\\\\"" }', 'a\\"'),
])  # fmt: skip
def test_custom_input_of_any_form(arguments: str, text: str) -> None:
    whole = f'<tool_call>{{"name": "shell", "arguments": {arguments}'
    for deltas in ([whole], list(whole)):
        assert run("hermes", deltas).tool_calls[0].arguments == text


@pytest.mark.parametrize("value, expected", [
    ("3", 3), ("3.0", 3.0), ("true", True), ("True", True), ("None", None), ("abc", "abc"), ('{"a": 1}', {"a": 1}),
    ("NaN", "NaN"), ("[1", "[1"), ("1e999", "1e999"), ('"q"', "q"),
])  # fmt: skip
def test_text_parameters_of_unknown_type(value: str, expected: object) -> None:
    text = f"<tool_call>f<arg_key>a</arg_key><arg_value>{value}</arg_value></tool_call>"
    assert json.loads(run("glm45", [text]).tool_calls[0].arguments) == {"a": expected}


@pytest.mark.parametrize("value", ["\n", "\nx\n", "x\n\n"])
@pytest.mark.parametrize("key", ["city", "zip", "unknown"])
def test_line_breaks_of_a_value_are_its_own(value: str, key: str) -> None:
    """GLM and DeepSeek V3.2 write none around it, Qwen3-Coder one at each end."""
    glm = f"<tool_call>get_weather<arg_key>{key}</arg_key><arg_value>{value}</arg_value></tool_call>"
    dsml = DSML[: DSML.index("<｜DSML｜parameter")] + (
        f'<｜DSML｜parameter name="{key}" string="true">{value}</｜DSML｜parameter>\n</｜DSML｜invoke>'
    )
    qwen = f"<function=get_weather><parameter={key}>\n{value}\n</parameter></function>"
    for family, text in (("glm45", glm), ("deepseek_v32", dsml), ("qwen3_coder", qwen)):
        for deltas in ([text], list(text)):
            assert json.loads(run(family, deltas).tool_calls[0].arguments) == {key: value}, family


def test_a_string_parameter_stays_text() -> None:
    for value in ("3", "true", '{"a": 1}', "null"):
        text = f"<tool_call>get_weather<arg_key>city</arg_key><arg_value>{value}</arg_value></tool_call>"
        assert json.loads(run("glm45", [text]).tool_calls[0].arguments) == {"city": value}
    text = "<tool_call>get_weather<arg_key>zip</arg_key><arg_value>8001</arg_value></tool_call>"
    assert json.loads(run("glm45", [text]).tool_calls[0].arguments) == {"zip": "8001"}


WORD = {"$ref": "#/$defs/word"}
INDIRECT = {
    "choice": WORD | {"description": "an enumeration in Python"},
    "either": {"anyOf": [{"type": "string"}, {"$ref": "#/$defs/box"}]},
    "all": {"allOf": [WORD]},
    "zod": {"anyOf": [{"not": {}}, {"type": "string"}, False]},
    "free": {"anyOf": [{"type": "string"}, True]},
    "loop": {"anyOf": [{"$ref": "#/$defs/loop"}, {"$ref": "#/$defs/loop"}, {"type": [{}, "array"]}]},
}
DEFS = {"word": {"type": "string", "enum": ["1", "2"]}, "box": {"type": "object"}}
DEFS["loop"] = {"anyOf": [{"$ref": "#/$defs/loop"}, {"type": "string"}]}


@pytest.mark.parametrize("key, value, expected", [
    ("choice", "1", "1"), ("all", "2", "2"), ("either", '{"a": 1}', {"a": 1}), ("either", "5", "5"),
    ("zod", "5", "5"), ("free", "5", 5), ("free", "a", "a"), ("loop", "[1]", [1]),
])  # fmt: skip
def test_types_of_parameters_that_are_named_elsewhere(key: str, value: str, expected: object) -> None:
    tools = ToolSet({"f": {"properties": INDIRECT, "$defs": DEFS}})
    text = f"<tool_call>f<arg_key>{key}</arg_key><arg_value>{value}</arg_value></tool_call>"
    output = parse_whole(FAMILIES["glm45"](tools), text)
    assert json.loads(output.tool_calls[0].arguments) == {key: expected}


@pytest.mark.parametrize("key", ["allOf", "anyOf", "$ref"])
def test_schemas_in_schemas_are_read_to_a_limit(key: str) -> None:
    for levels, is_read in ((MAX_JOIN_DEPTH, True), (MAX_JOIN_DEPTH + 1, False), (5000, False)):
        schema: dict[str, Any] = {"type": "string"}
        parts = [schema]
        for level in range(levels):
            schema = {"$ref": f"#/parts/{level}"} if key == "$ref" else {key: [schema]}
            parts.append(schema)
        assert ("string" in schema_types(schema, {"parts": parts})) == is_read


def test_an_error_inside_a_parser_loses_no_text() -> None:
    class Broken(HermesParser):
        def _calls(self):
            yield from self.content_until("<x>")
            raise KeyError("bug")

    assert parse_whole(Broken(), "a<x>b").content == "a<x>b"


ADVERSARIAL = {
    "hermes": [
        "<tool_call>",
        "<tool_call>{",
        '<tool_call>{"name":',
        '{"a":',
        "[",
        "\\",
        '<tool_call>{"name":"f"}',
        " ",
    ],
    "qwen3_coder": ["<function=", "<function=f>", "<parameter=a>", "\n", "</parameter>", "<tool_call>"],
    "llama3_json": ['{"name":"now"};', "{", "<|python_tag|>", '{"name":', " ", ";"],
    "mistral": ["[TOOL_CALLS]", "[TOOL_CALLS][", "[TOOL_CALLS]f", "[", "[ARGS]", "[TOOL_CALLS]now{}"],
    "deepseek_v3": ["<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜", "```"],
    "deepseek_v32": ["<｜DSML｜function_calls>", "<｜DSML｜invoke", '<｜DSML｜invoke name="f">', "<｜"],
    "glm45": ["<tool_call>", "<tool_call>f<arg_key>", "<arg_key>a</arg_key><arg_value>", "<"],
    "kimi_k2": ["<|tool_calls_section_begin|>", "<|tool_call_begin|>", "<|"],
    "pythonic": ["[now(", "now(),", "[", "(", "'", "\\", "[now(x=["],
    "harmony": ["<|start|>", "<|channel|>", "<|channel|>analysis<|message|>", "<|end|>", "<|"],
    "muse_glimmer": ["<|start|>", "<|message|>", "<|eom|>", " to=f<|message|><atem:invoke", "<atem:", "to="],
}
PREFIXES = {"pythonic": "[", "deepseek_v3": "<｜tool▁calls▁begin｜>", "kimi_k2": "<|tool_calls_section_begin|>"}


def seconds(family: str, text: str, size: int) -> float:
    parser = make(family)
    start = time.process_time()
    for at in range(0, len(text), size):
        parser.feed(text[at : at + size])
    parser.finish()
    return time.process_time() - start


def grows_linearly(family: str, text: str, size: int) -> bool:
    short = min(seconds(family, text[:1_000], size) for _ in range(2))
    return seconds(family, text, size) < 20 * short + 0.01


@pytest.mark.parametrize("family", ADVERSARIAL)
def test_time_is_linear(family: str) -> None:
    """From 1k to 8k characters the time may grow by 8 and some noise, not by 64; a busy machine gets retries."""
    for piece in ADVERSARIAL[family]:
        for prefix in {"", PREFIXES.get(family, "")}:
            for size in (1, 10**9):
                text = prefix + piece * (8_000 // len(piece))
                assert any(grows_linearly(family, text, size) for _ in range(4)), (piece, prefix, size)
