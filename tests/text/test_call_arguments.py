"""Arguments of calls are JSON in UTF-8, also where a model does not write them so."""

import json
from typing import Any

import orjson
import pytest

from jaxserve.text.events import ToolCallDelta, ToolCallStart
from jaxserve.text.output_parser import ParserChoice
from jaxserve.text.tools import ToolSet
from jaxserve.text.tools.registry import TOOL_FORMATS
from tests.text.whole_outputs import ParsedOutput

TOOLS = ToolSet({"f": {"type": "object", "properties": {"x": {"type": "array"}}}}, custom=("note",))


@pytest.mark.parametrize(
    "family, text, arguments",
    [
        ("pythonic", r'[f(s="\ud83e\udd9c")]', '{"s": "🦜"}'),
        ("pythonic", r'[f(s="a\ud83eb")]', '{"s": "a\ufffdb"}'),
        ("hermes", r'<tool_call>{"name": "f", "arguments": "{\"s\": \"\udd9c\"}"}</tool_call>', '{"s": "\ufffd"}'),
        ("hermes", r'<tool_call>{"name": "note", "arguments": {"input": "a\ud83e b"}}</tool_call>', "a\ufffd b"),
        ("hermes", r'<tool_call>{"name": "note", "arguments": {"input": "\ud83e\udd9c"}}</tool_call>', "🦜"),
        ("glm45", r'<tool_call>f<arg_key>x</arg_key><arg_value>["\ud83e"]</arg_value>', '{"x": ["\ufffd"]'),
    ],
)
def test_a_call_with_half_a_character_can_be_written(family: str, text: str, arguments: str) -> None:
    for size in (1, 3, len(text)):
        joined = arguments_of(family, text, size)
        assert joined == arguments and orjson.dumps(joined), size


@pytest.mark.parametrize("family, call", [
    ("hermes", '<tool_call>{"name": "f", "arguments": ARGUMENTS}</tool_call>'),
    ("hermes", '<tool_call>{"arguments": ARGUMENTS, "name": "f"}</tool_call>'),
    ("mistral", "[TOOL_CALLS]f[ARGS]ARGUMENTS"),
    ("llama3_json", '{"name": "f", "parameters": ARGUMENTS}'),
])  # fmt: skip
def test_line_breaks_in_strings_are_escaped(family: str, call: str) -> None:
    """A model writes code as it is, with line breaks and tabs."""
    text = call.replace("ARGUMENTS", '{\n  "code": "if x:\n\ty = \'\\\\n\'\r\n", "n": 1\n}')
    for size in (1, 3, len(text)):
        assert json.loads(arguments_of(family, text, size)) == {"code": "if x:\n\ty = '\\n'\r\n", "n": 1}


def test_of_arguments_that_are_there_twice_the_first_count() -> None:
    for second in ("arguments", "parameters"):
        call = f'<tool_call>{{"name": "f", "arguments": {{"x": [1]}}, "{second}": {{"x": [2]}}}}</tool_call>'
        assert arguments_of("hermes", call, 3) == '{"x": [1]}'


def arguments_of(family: str, text: str, size: int) -> str:
    """The arguments of all calls in a text that comes in pieces."""
    parser = TOOL_FORMATS[family].parser(TOOLS)
    events = [event for at in range(0, len(text), size) for event in parser.feed(text[at : at + size])]
    return "".join(event.text for event in events + parser.finish() if isinstance(event, ToolCallDelta))


WRITE = {
    "type": "object",
    "properties": {
        "path": {"type": "string"},
        "content": {"type": "string"},
        "n": {"type": "integer"},
        "tags": {"type": "array"},
        "options": {"type": "object"},
    },
    "required": ["path"],
}
WRITE_TOOLS = ToolSet({"write": WRITE, "now": {"type": "object", "properties": {}}})
QWEN = "<tool_call>\n<function=write>\n%s\n</function>\n</tool_call>"
GLM = "<tool_call>write%s</tool_call>"
DSML = '<｜DSML｜function_calls>\n<｜DSML｜invoke name="write">\n%s\n</｜DSML｜invoke>\n</｜DSML｜function_calls>'
PATH = {"path": "a"}


def calls_of(family: str, text: str, *, whole: bool = True) -> tuple[str, list[tuple[str, str]]]:
    """Content and calls of a text, which are the same however it is cut."""
    found = []
    for size in (1, 3, len(text)):
        parser = ParserChoice(tool=family).make(tools=WRITE_TOOLS)
        output = ParsedOutput()
        for at in range(0, len(text), size):
            output.add(parser.feed(text[at : at + size]))
        output.add(parser.finish(whole=whole))
        assert output.all_ended
        found.append((output.content or "", [(call.name, call.arguments) for call in output.tool_calls]))
    assert found[0] == found[1] == found[2]
    return found[0]


@pytest.mark.parametrize("family, text", [
    ("qwen3_coder", QWEN % '{"path": "a"}'),
    ("hermes", QWEN % "<parameter=path>\na\n</parameter>"),
    ("glm45", GLM % '\n{"path": "a"}\n'),
    ("deepseek_v32", DSML % '{"path": "a"}'),
    ("hermes", '<tool_call>{"name": "write", "path": "a"}</tool_call>'),
    ("hermes", """<tool_call>{"name": "write", "arguments": "{'path': 'a'}"}</tool_call>"""),
    ("hermes", '<tool_call>```json\n{"name": "write", "arguments": {"path": "a"}}\n```\n</tool_call>'),
    ("hermes", '<tool_call>{{"name": "write", "arguments": {"path": "a"}}}</tool_call>'),
    ("hermes", '<tool_call>{"name": "write", "arguments": {"path": "a"</tool_call>'),
    ("qwen3_coder", QWEN % '{"path": "a"}}'),
    ("qwen3_coder", QWEN % '{"name": "write", "arguments": {"path": "a"}}'),
    ("glm45", GLM % '\n{"path": "a"}}'),
    *((family, f'<tool_call>\n<tool_call>\n{call}\n</tool_call>\n</tool_call>') for family, call in (
        ("hermes", '{"name": "write", "arguments": {"path": "a"}}'),
        ("qwen3_coder", "<function=write>\n<parameter=path>\na\n</parameter>\n</function>"),
        ("glm45", "write<arg_key>path</arg_key><arg_value>a</arg_value>"),
    )),
    ("kimi_k2", '<|tool_call_begin|>functions.write:0<|tool_call_argument_begin|>{"path": "a"<|tool_call_end|>'),
    ("hermes", "<tool_call>{'name': 'write', 'arguments': {'path': 'a'}}</tool_call>"),
    ("internlm", '<|action_start|><|plugin|>{"name": "write", "parameters": {"path": "a"<|action_end|>'),
    ("jamba", '<tool_calls>[{"name": "write", "arguments": {"path": "a"\n</tool_calls>'),
    ("nemotron_json", '<TOOLCALL>[{"name": "write", "arguments": {"path": "a"</TOOLCALL>'),
    ("apertus", '<|tools_prefix|>[{"write": {"path": "a"<|tools_suffix|>'),
    ("harmony", '<|channel|>commentary to=functions.write json<|message|>{"path": "a"<|call|>'),
    *(("deepseek_v3", f"<｜tool▁call▁begin｜>{call}<｜tool▁call▁end｜>") for call in (
        'write<｜tool▁sep｜>{"path": "a"', 'write<｜tool▁sep｜>{"path": "a"}\n```\n',
        'function<｜tool▁sep｜>write\n```json\n{"path": "a"\n```',
        'function<｜tool▁sep｜>write\n```json\n{"path": "a"}}```',
    )),
])  # fmt: skip
def test_parameters_in_another_form_are_read(family: str, text: str) -> None:
    content, calls = calls_of(family, text)
    assert (content, [(name, json.loads(arguments)) for name, arguments in calls]) == ("", [("write", PATH)])


@pytest.mark.parametrize("family, text", [
    ("qwen3_coder", QWEN % "path: a"),
    ("qwen3_coder", QWEN % '{"path": a}'),
    ("qwen3_coder", QWEN % "<path>a</path>"),
    ("glm45", GLM % "\n<arg_value>a</arg_value>\n"),
    ("glm45", GLM % "(path=a)"),
    ("deepseek_v32", DSML % "<path>a</path>"),
    ("hermes", '<tool_call>{"name": "write", "arguments": "a"}</tool_call>'),
    ("hermes", '<tool_call>{"name": "write", "arguments": a}</tool_call>'),
    ("hermes", '<tool_call>{"name": "write", path: a}</tool_call>'),
    ("mistral", '[TOOL_CALLS][{"name": "write", "arguments": [1]}]'),
])  # fmt: skip
def test_a_call_whose_parameters_cannot_be_read_is_text(family: str, text: str) -> None:
    assert calls_of(family, text) == (text, [])


@pytest.mark.parametrize("family, text", [
    ("qwen3_coder", "<tool_call>\n<function=write>\n<parameter=path>\na"),
    ("qwen3_coder", "<tool_call>\n<function=write>\n<parameter=path>\na\n</parameter>"),
    ("qwen3_coder", "<tool_call>\n<function=write>\n<parameter=path>\na\n</function>"),
    ("glm45", "<tool_call>write<arg_key>path</arg_key><arg_value>a"),
    ("glm45", "<tool_call>write<arg_key>path</arg_key><arg_value>a</tool_call>"),
    ("glm45", "<tool_call>write<arg_key>path</arg_key><arg_value>a</arg_value>"),
    ("deepseek_v32", DSML[: DSML.index("%")] + '<｜DSML｜parameter name="path" string="true">a'),
    ("hermes", '<tool_call>{"name": "write", "arguments": {"path": "a"'),
    ("mistral", '[TOOL_CALLS]write[ARGS]{"path": "a"'),
    ("kimi_k2", '<|tool_call_begin|>functions.write:0<|tool_call_argument_begin|>{"path": "a"'),
    ("deepseek_v3", '<｜tool▁call▁begin｜>write<｜tool▁sep｜>{"path": "a"'),
    ("llama3_json", '{"name": "write", "parameters": {"path": "a"'),
    ("pythonic", "[write(path='a'"),
    ("gemma4", '<|tool_call>call:write{path:<|"|>a'),
    ("gemma4", '<|tool_call>call:write{path:<|"|>a<|"|>,n'),
    ("harmony", '<|channel|>commentary to=functions.write <|constrain|>json<|message|>{"path": "a"'),
])  # fmt: skip
def test_what_the_model_left_open_at_its_own_end_is_closed(family: str, text: str) -> None:
    _, calls = calls_of(family, text)
    assert [(name, json.loads(arguments)) for name, arguments in calls] == [("write", PATH)]
    closed = text.endswith(("</function>", "</tool_call>"))
    for _, arguments in calls_of(family, text, whole=False)[1]:  # one that was cut by its length stays open
        assert arguments.endswith("}") is closed


@pytest.mark.parametrize("family, begin", [
    ("hermes", "<tool_call>"), ("hermes", "<tool_call>["), ("qwen3_coder", "<tool_call>"), ("glm45", "<tool_call>"),
    ("granite", "<|tool_call|>["), ("internlm", "<|action_start|><|plugin|>"), ("phi4_mini_json", "functools["),
    ("jamba", "<tool_calls>["), ("mistral", "[TOOL_CALLS]["), ("mistral", "[TOOL_CALLS]"), ("llama3_json", ""),
    ("llama3_json", "<|python_tag|>"), ("json", "["),
])  # fmt: skip
@pytest.mark.parametrize("call", [
    '{"name": "write"', '{"name": "write", "', '{"name": "write", "ARGUMENTS": ', '{"function": {"name": "write", "ARG',
    '{"id": "1", "name": "write", "pa', "{'name': 'write', ", '{"name": "write", "ARGUMENTS": "',
])  # fmt: skip
def test_a_call_in_json_that_is_cut_after_its_name_is_started(family: str, begin: str, call: str) -> None:
    """Its arguments are empty: it is not whole. After another call it is the second."""
    key = "parameters" if family in ("internlm", "llama3_json", "json") else "arguments"
    text = call.replace("ARGUMENTS", key)
    assert calls_of(family, begin + text, whole=False) == ("", [("write", "")])
    assert calls_of(family, begin + text, whole=True) == (begin + text, [])
    first = f'{{"name": "write", "{key}": {{"path": "a"}}}}'
    calls = [("write", '{"path": "a"}'), ("write", "")]
    assert calls_of(family, f"{begin}{first}, {text}", whole=False) == ("", calls)


@pytest.mark.parametrize("family, text, arguments", [
    ("hermes", r'<tool_call>{"name": "write", "arguments": "{\"path\": \"a', '{"path": "a'),
    ("hermes", r'<tool_call>{"name": "write", "arguments": "{\"path\": \"a\\', '{"path": "a\\'),
    ("hermes", r'<tool_call>{"name": "write", "arguments": "{\"path\": \"a' + "\\", '{"path": "a'),
    ("hermes", r'<tool_call>{"name": "write", "arguments": "{\"path\": \"a\"}', '{"path": "a"}'),
    ("llama3_json", '{"name": "write", "path": "a', '{"path": "a'),
    ("mistral", '[TOOL_CALLS][{"name": "write", "id": 1, "path": "a", "n": 1', '{"path": "a", "n": 1'),
    ("qwen3_coder", '<tool_call>\n<function=write>\n{"path": "a', '{"path": "a'),
    ("glm45", '<tool_call>write\n{"path": "a"', '{"path": "a"'),
    ("pythonic", "[write(path='a', tags=[1, 'b", '{"path": "a", "tags": [1, "b'),
    ("pythonic", "[write(path='a', n=", '{"path": "a"'),
    ("pythonic", "[write(path='''a'", '{"path": "a'),
    ("pythonic", "[write(path='a\\'", '{"path": "a\''),
    ("pythonic", "[write(path='''", '{"path": "'),
    ("qwen3_coder", "<tool_call>\n<function=write>\n<para", ""),
    ("qwen3_coder", "<tool_call>\n<function=write>\n<parameter=pa", ""),
    ("glm45", "<tool_call>write<arg_key>pa", ""),
    ("deepseek_v32", DSML[: DSML.index("%")] + "<｜DSML｜parameter na", ""),
    ("pythonic", "[write(pa", ""),
])  # fmt: skip
def test_a_call_that_is_cut_has_what_its_arguments_have_so_far(family: str, text: str, arguments: str) -> None:
    assert calls_of(family, text, whole=False) == ("", [("write", arguments)])


@pytest.mark.parametrize("family, text", [
    ("hermes", '<tool_call>{"na'), ("hermes", '<tool_call>{"arguments": {"path": "a'), ("hermes", "Now <tool_call>"),
    ("qwen3_coder", "<function=wri"), ("glm45", "<tool_call>write"), ("deepseek_v32", '<｜DSML｜invoke name="wr'),
    ("mistral", "[TOOL_CALLS]write[CALL_ID]1"), ("granite", '<|tool_call|>[{"name": "wri'), ("pythonic", "[write"),
    ("kimi_k2", "<|tool_calls_section_begin|><|tool_call_begin|>functions.write:0"),
    ("kimi_k2", '<|tool_call_begin|>0<|tool_call_argument_begin|>{"path": "a'),
    ("deepseek_v3", "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>wri"),
    ("internlm", '<|action_start|><|plugin|>{"parameters": {"path": "a"}, "na'), ("jamba", "<tool_calls>["),
])  # fmt: skip
def test_a_call_that_is_cut_before_its_name_is_text(family: str, text: str) -> None:
    """Nothing that a model wrote vanishes, but beside calls the mere head of another."""
    for whole in (False, True):
        assert calls_of(family, text, whole=whole) == (text, [])
    if family == "hermes":
        content, calls = calls_of(family, f"<tool_call>{NOW_CALL}</tool_call>{text}", whole=False)
        assert (content, calls) == ({"Now <tool_call>": "Now"}.get(text, text * ("path" in text)), [("now", "{}")])


@pytest.mark.parametrize("value, key, expected", [
    ("['x', None, (1, True)]", "tags", ["x", None, [1, True]]), ("{'a': True}", "options", {"a": True}),
    ("{'it\\'s': \"q\"}", "options", {"it's": "q"}), ("{'a', 'b'}", "tags", ["a", "b"]),
    (r"[r'\d', u'x', 1_000]", "tags", [r"\d", "x", 1000]), ("['x'", "tags", "['x'"), ("['x']", "path", "['x']"),
])  # fmt: skip
@pytest.mark.parametrize("family, call", [
    ("qwen3_coder", QWEN % "<parameter=KEY>\nVALUE\n</parameter>"),
    ("glm45", GLM % "<arg_key>KEY</arg_key><arg_value>VALUE</arg_value>"),
    ("deepseek_v32", DSML % '<｜DSML｜parameter name="KEY" string="false">VALUE</｜DSML｜parameter>'),
])  # fmt: skip
def test_python_literals_are_read_where_a_list_or_an_object_is_wanted(
    family: str, call: str, value: str, key: str, expected: object
) -> None:
    _, calls = calls_of(family, call.replace("KEY", key).replace("VALUE", value))
    assert json.loads(calls[0][1]) == {key: expected}


@pytest.mark.parametrize("call", [
    '<tool_call>{"name": "write", "arguments": ARGUMENTS}</tool_call>', "[TOOL_CALLS]write[ARGS]ARGUMENTS",
    '{"name": "write", "parameters": ARGUMENTS}',
    "<|tool_call_begin|>functions.write:0<|tool_call_argument_begin|>ARGUMENTS<|tool_call_end|>",
    "<｜tool▁call▁begin｜>write<｜tool▁sep｜>ARGUMENTS<｜tool▁call▁end｜>",
    "<|channel|>commentary to=functions.write json<|message|>ARGUMENTS<|call|>",
])  # fmt: skip
def test_arguments_written_as_a_python_dict_are_json(call: str) -> None:
    families = {
        "<tool": "hermes",
        "[TOOL": "mistral",
        '{"nam': "llama3_json",
        "<|too": "kimi_k2",
        "<｜too": "deepseek_v3",
    }
    family = families.get(call[:5], "harmony")
    for written, wanted in (
        ("""{'path': 'it\\'s "q"\\n', 'tags': [True, None, 'None', "x's"], 'n': 1}""",
         {"path": 'it\'s "q"\n', "tags": [True, None, "None", "x's"], "n": 1}),
        ("""{'path': r'C:\\new', 'tags': ('x', (None,), {'a', "b,"}, {1}), 'n': 1_000, }""",
         {"path": "C:\\new", "tags": ["x", [None], ["a", "b,"], [1]], "n": 1000}),
        ("""{"path": '''a"\n''', "tags": [1, 2,], "options": {u'k': {}, 'l': 0x1F,},\n}""",
         {"path": 'a"\n', "tags": [1, 2], "options": {"k": {}, "l": 31}}),
        ("""{"path": "(1_0,)", "tags": [NaN, -Infinity, -1_000, 1.5e3, [], ""], "options": {"None": None}}""",
         {"path": "(1_0,)", "tags": [None, None, -1000, 1500.0, [], ""], "options": {"None": None}}),
    ):  # fmt: skip
        content, calls = calls_of(family, call.replace("ARGUMENTS", written))
        found = [(name, json.loads(arguments)) for name, arguments in calls]
        assert (content, found) == ("", [("write", wanted)])


@pytest.mark.parametrize("parameters", [
    "<arg_key>path</arg_key>a</arg_value>", "<arg_key>path</arg_key></arg_key><arg_value>a</arg_value>",
    "<arg_key><arg_key>path</arg_key>\n<arg_value>a</arg_value>", "<arg_key>path<arg_value>a</arg_value>",
    "path</arg_key><arg_value>a</arg_value>", " path</arg_key><arg_value>a</arg_value>",
    "<arg_key>path</arg_key>\na</arg_value>\n",
    "<arg_key>path</arg_key><arg_key>path</arg_key><arg_value>a</arg_value>",
    "<arg_key>n</arg_key>\n<arg_key>path</arg_key><arg_value>a</arg_value>",
    "<arg_key>path<arg_key><arg_value>a</arg_value>", "<arg_key>path</arg_value><arg_value>a</arg_value>",
    "<arg_key>path</arg_key>a", "</arg_key><arg_key>path</arg_key><arg_value>a</arg_value>",
    "<arg_value>\n<arg_key>path</arg_key><arg_value>a</arg_value>",
])  # fmt: skip
def test_glm_leaves_out_tags_or_writes_them_twice(parameters: str) -> None:
    second = "<arg_key>n</arg_key>1</arg_value>"
    for text, wanted in ((parameters, PATH), (parameters + second, PATH | {"n": 1})):
        content, calls = calls_of("glm45", GLM % text)
        assert (content, [(name, json.loads(arguments)) for name, arguments in calls]) == ("", [("write", wanted)])
    assert calls_of("glm45", "<tool_call>now</arg_value></tool_call>") == ("", [("now", "{}")])


@pytest.mark.parametrize("family, begin, call, end", [
    ("glm45", "", "<tool_call>write<arg_key>KEY</arg_key><arg_value>VALUE</tool_call>", ""),
    ("glm45", "", "<tool_call>write\n<arg_key>KEY</arg_key>\n<arg_value>VALUE\n</tool_call>\n", ""),
    ("hy_v3_preview", "<tool_calls>\n", "<tool_call>write<tool_sep>\n<arg_key>KEY</arg_key>\n<arg_value>VALUE"
     "</tool_call>\n", "</tool_calls>"),
    ("deepseek_v32", "<｜DSML｜function_calls>\n", '<｜DSML｜invoke name="write">\n<｜DSML｜parameter name="KEY">VALUE'
     "</｜DSML｜invoke>\n", "</｜DSML｜function_calls>"),
    ("minimax_m2", "<minimax:tool_call>\n", '<invoke name="write">\n<parameter name="KEY">VALUE</invoke>\n',
     "</minimax:tool_call>"),
    ("qwen3_coder", "", "<tool_call>\n<function=write>\n<parameter=KEY>\nVALUE</function>\n</tool_call>\n", ""),
    ("qwen3_coder", "", "<tool_call>\n<function=write>\n<parameter=KEY>\nVALUE\n</tool_call>\n", ""),
    ("qwen3_coder", "", "<function=write>\n<parameter=KEY>\nVALUE</function>\n", ""),
    ("mimo", "", "<tool_call>\n<function=write>\n<parameter=KEY>VALUE</function>\n</tool_call>\n", ""),
    ("seed_oss", "", "<seed:tool_call>\n<function=write>\n<parameter=KEY>VALUE</function>\n</seed:tool_call>\n", ""),
])  # fmt: skip
@pytest.mark.parametrize("key, first, second", [("path", "a", "b"), ("n", 1, 2)])
def test_a_value_without_its_end_tag_does_not_take_in_the_next_call(
    family: str, begin: str, call: str, end: str, key: str, first: Any, second: Any
) -> None:
    values = [call.replace("KEY", key).replace("VALUE", str(value)) for value in (first, second)]
    _, calls = calls_of(family, begin + "".join(values) + end)
    found = [{key: value.strip() if isinstance(value, str) else value} for key, value in
             (next(iter(json.loads(arguments).items())) for _, arguments in calls)]  # fmt: skip
    assert found == [{key: first}, {key: second}]


WRITE_CALL = '{"name": "write", "arguments": {"path": "a"}}'
NOW_CALL = '{"name": "now", "arguments": {}}'
GLM_CALL = "write<arg_key>path</arg_key><arg_value>a</arg_value>"
QWEN_CALL, NOW_IN_TAGS = QWEN[12:-13] % "<parameter=path>\na\n</parameter>", "<function=now>\n</function>"


@pytest.mark.parametrize("family, text", [
    *((family, f"<tool_call>{WRITE_CALL}{between}{NOW_CALL}{after}</tool_call>")
      for family in ("hermes", "qwen3_coder", "glm45")
      for between in ("", "\n", ", ", "}\n") for after in ("", "}", "\n}\n")),
    ("hermes", f"<tool_call>[{WRITE_CALL}}}, {NOW_CALL}]</tool_call>"),
    *((family, f"<tool_call>{WRITE_CALL}{between}{NOW_IN_TAGS}{after}</tool_call>")
      for family in ("hermes", "qwen3_coder", "glm45")
      for between in ("", "\n", "\n}\n") for after in ("", "]", ")\n")),
    *((family, f"<tool_call>{first}{between}{second}{after}</tool_call>")
      for family in ("hermes", "qwen3_coder", "glm45") for first in (WRITE_CALL, QWEN_CALL, GLM_CALL)
      for second in (NOW_CALL, NOW_IN_TAGS) for between, after in (("\n", ""), (" }} ]", "`}"))),
    *((family, f"<tool_call>{text}</tool_call>") for family in ("hermes", "qwen3_coder", "glm45") for text in (
        f"[{WRITE_CALL}]\n[{NOW_CALL}]", f"[[{WRITE_CALL}],[{NOW_CALL}]]", f"{WRITE_CALL}|{NOW_CALL}</function>",
        f"({WRITE_CALL})\n{NOW_CALL}", f"`{WRITE_CALL}`\n```json\n{NOW_CALL}\n```",
        f"{QWEN_CALL}</function>\n{NOW_IN_TAGS}</function>", f"{WRITE_CALL}, {NOW_CALL}</parameter></function>'",
    )),
    ("hermes", f"<tool_call>{QWEN_CALL}{NOW_IN_TAGS}</tool_call>"),
    ("hermes", f"<tool_call>{WRITE_CALL}\n<tool_call>\n{NOW_CALL}]</tool_call>"),
    ("granite", f"<|tool_call|>[{WRITE_CALL}}}, {NOW_CALL}}}]"),
    ("granite", f"<|tool_call|>{WRITE_CALL}\n{NOW_CALL}"),
    ("internlm", f"<|action_start|><|plugin|>{WRITE_CALL}{NOW_CALL}}}<|action_end|>"),
    ("jamba", f"<tool_calls>[{WRITE_CALL}}}{NOW_CALL}]</tool_calls>"),
    ("phi4_mini_json", f"functools[{WRITE_CALL}}}, {NOW_CALL}]"),
    ("mistral", f"[TOOL_CALLS]{WRITE_CALL}}}{NOW_CALL}"),
    ("mistral", '[TOOL_CALLS]write[ARGS]{"path": "a"}}[TOOL_CALLS]now[ARGS]{}}'),
    ("llama3_json", f"{WRITE_CALL}}}{NOW_CALL}}}"),
    ("kimi_k2", '<|tool_calls_section_begin|><|tool_call_begin|>write:0<|tool_call_argument_begin|>{"path": "a"}}'
                "<|tool_call_end|><|tool_call_begin|>now:1<|tool_call_argument_begin|>{}}<|tool_call_end|>"),
    ("deepseek_v3", '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>write<｜tool▁sep｜>{"path": "a"}}<｜tool▁call▁end｜>'
                    "<｜tool▁call▁begin｜>now<｜tool▁sep｜>{}}<｜tool▁call▁end｜><｜tool▁calls▁end｜>"),
])  # fmt: skip
def test_a_second_object_is_a_call_and_braces_too_many_are_none(family: str, text: str) -> None:
    assert calls_of(family, text) == ("", [("write", '{"path": "a"}'), ("now", "{}")])


@pytest.mark.parametrize("family", ["hermes", "qwen3_coder", "glm45"])
@pytest.mark.parametrize("first", [WRITE_CALL, QWEN_CALL, GLM_CALL])
def test_a_call_with_keys_behind_another_is_a_call(family: str, first: str) -> None:
    text = f"<tool_call>{first}\n{GLM_CALL}}}</tool_call>"
    assert calls_of(family, text) == ("", [("write", '{"path": "a"}')] * 2)


@pytest.mark.parametrize("written, call_id", [
    ("functions_write_3", "functions.write:3"), ("functionswrite5", "functions.write:5"), ("0", "functions.write:0"),
    ("functions.write5", "functions.write:5"), ("call00003", "functions.write:0"), ("write", "write"),
    ("functions.write:7", "functions.write:7"), ("Functions-Write-2", "functions.write:2"),
    ("call_0123456789abcdef", "functions.write:0"), ("toolu_01234567", "functions.write:0"),
    ("call_1_0", "functions.write:0"), ("#1", "functions.write:0"), ("`functions.write:2`", "functions.write:2"),
    ('"functions.write:1"', "functions.write:1"), ("functions.functions.write:4", "functions.write:4"),
    ("call_write_1", "functions.write:1"), ("tool_write_6", "functions.write:6"), ("write-call-0", "functions.write:0"),
    ("functions.write_0:3", "functions.write:3"), ("functions.Write:2", "functions.write:2"),
    ("functions.write[4]", "functions.write:0"), ("<functions.write:1>", "functions.write:1"),
    ("functions.write:zero", "functions.write:0"), ("call_write_1a2b3c", "functions.write:0"),
    ("fc_functions.write:0", "functions.write:0"), ("default_api.write:0", "functions.write:0"),
    ("toolu_01A09q90qw90lq917835lq9", "functions.write:0"), ("x8Kd02mPq", "functions.write:0"),
    ("tool_call_0", "functions.write:0"), ("functions.None:0", "functions.write:0"), ("fc_0abc", "functions.write:0"),
])  # fmt: skip
def test_kimis_ids_as_clients_change_them(written: str, call_id: str) -> None:
    arguments = '{"path": "a"}'
    text = f"<|tool_call_begin|>{written}<|tool_call_argument_begin|>{arguments}<|tool_call_end|>"
    text = f"<|tool_calls_section_begin|>{text}<|tool_calls_section_end|>"
    assert calls_of("kimi_k2", text) == ("", [("write", arguments)])
    parser = ParserChoice(tool="kimi_k2").make(tools=WRITE_TOOLS)
    assert next(event for event in parser.feed(text) if isinstance(event, ToolCallStart)).id == call_id
    for other in ("functions.nope:0", "nope", "write_file_v2", "functions.rewrite:0"):  # other tools' names
        assert calls_of("kimi_k2", text.replace(written, other))[1] == []


@pytest.mark.parametrize("written", ["functions.page2:0", "functions.page20", "functionspage2_3", "page_2"])
def test_kimis_ids_of_a_name_that_ends_in_a_digit(written: str) -> None:
    text = f"<|tool_call_begin|>{written}<|tool_call_argument_begin|>{{}}<|tool_call_end|>"
    parser = ParserChoice(tool="kimi_k2").make(tools=ToolSet({"page2": {}, "pages": {}}))
    assert [event.name for event in parser.feed(text) if isinstance(event, ToolCallStart)] == ["page2"]


@pytest.mark.parametrize("arguments", ['{"path": "a"', '"{\\"path\\": \\"a\\"}"', "{'path': 'a'}", '{"path": "a"}}'])
def test_arguments_behind_an_id_without_a_name(arguments: str) -> None:
    text = f"<|tool_call_begin|>0<|tool_call_argument_begin|>{arguments}<|tool_call_end|>"
    assert calls_of("kimi_k2", text) == ("", [("write", '{"path": "a"}')])


@pytest.mark.parametrize("family, first, second", [
    ("qwen3_coder", "<parameter=n>\n1\n</parameter>\n", "<parameter=n>\n2\n</parameter>"),
    ("glm45", "<arg_key>n</arg_key><arg_value>1</arg_value>", "<arg_key>n</arg_key><arg_value>2</arg_value>"),
])  # fmt: skip
def test_of_a_parameter_that_is_there_twice_the_first_counts(family: str, first: str, second: str) -> None:
    text = (QWEN if family == "qwen3_coder" else GLM) % (first + second)
    assert calls_of(family, text) == ("", [("write", '{"n": 1}')])
