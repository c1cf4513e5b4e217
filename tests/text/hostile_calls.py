"""Calls with hostile but legal values, written as each family's chat template renders them.

`AMBIGUOUS` lists the values that cannot be told from another call: a text with all of a call's structure in it. Each
entry is shown to be so by `TWO_READINGS`, and no grammar of required calls lets a model write one.
"""

import json
import random
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from jaxserve.text.tools import ToolSet

WRITE = {
    "type": "object",
    "properties": {
        "path": {"type": "string"},
        "content": {"type": "string"},
        "n": {"type": "integer"},
        "ratio": {"type": "number"},
        "flag": {"type": "boolean"},
        "items": {"type": "array"},
        "options": {"type": "object"},
        "maybe": {"type": ["string", "null"]},
        "any": {},
    },
    "required": ["path"],
}
CLOSED = {**WRITE, "additionalProperties": False}
TOOLS = ToolSet(
    {"write": WRITE, "write_closed": CLOSED, "now": {"type": "object", "properties": {}}}, custom=("shell",)
)

TAGS = {
    "qwen": ["</parameter>", "<parameter=path>", "<parameter=x>", "</function>", "<function=write>", "<function="],
    "tool_call": ["<tool_call>", "</tool_call>", "<tool_call>\n<function=now>\n</function>\n</tool_call>"],
    "glm": ["<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>", "<arg_key>path</arg_key>", "<arg_key>n"],
    "dsml": ["</｜DSML｜parameter>", "</｜DSML｜invoke>", '<｜DSML｜parameter name="path" string="true">', "<｜DSML｜"],
    "json": [
        '{"name": "now", "arguments": {}}',
        "}}",
        '"}',
        "]",
        "[TOOL_CALLS]",
        "[ARGS]",
        "functools[",
        "<|tool_call|>",
    ],
    "kimi": ["<|tool_call_end|>", "<|tool_call_begin|>functions.now:0<|tool_call_argument_begin|>{}"],
    "deepseek": ["<｜tool▁call▁end｜>", "\n```", "<｜tool▁calls▁end｜>", "<｜tool▁sep｜>"],
    "harmony": ["<|end|>", "<|call|>", "<|channel|>final<|message|>", "<|start|>", "<|return|>"],
    "hy": ["<tool_sep:opensource>", "</tool_call:opensource>", "<arg_key:opensource>path</arg_key:opensource>"],
    "invoke": ["</parameter>", "</invoke>", '<invoke name="write">', '<parameter name="path">', "<minimax:tool_call>"],
    "atem": [
        "</atem:parameter>",
        "</atem:invoke>",
        '<atem:invoke name="write">',
        '<atem:parameter name="path">',
        "<atem:function_calls>",
        "<|eom|>",
        " to=user<|message|>",
    ],
    "seed": ["</seed:tool_call>", "<seed:tool_call>", "<seed:think>"],
    "gemma": ['<|"|>', '<|"|>,', '<|"|>}', "<tool_call|>", "<|tool_call>call:now{}", "call:write{", "<channel|>"],
    "other": [
        "<|python_tag|>",
        "now()",
        ")",
        "')",
        "<|action_end|>",
        "</tool_calls>",
        "<think>",
        "</think>",
        "<|tool_call_end|>",
        "</function_calls>",
        "<|tools_suffix|>",
        "</TOOLCALL>",
    ],
}
PLAIN = [
    "",
    " ",
    "\n",
    "a",
    "b c",
    '"',
    "'",
    "\\",
    "\\n",
    "\\u00e9",
    "é",
    "🦜",
    "\u2028",
    "\x00",
    "\t",
    "\r\n",
    "<",
    ">",
]
PLAIN += ["1", "null", "None", "true", "[1]", "{}", "[", "{", '"q"', "'q'", "#", "//", "&amp;", "``", "```json"]
# tags in the order of a call, as in a file about tool calls
STRUCTURES = [
    "x\n</parameter>\n<parameter=path>\ny",
    "x\n</parameter>\n<parameter=unknown>\ny",
    "x\n<parameter=path>\ny\n<parameter=n>\n1",
    "</parameter>\n</function>\nmore",
    "</parameter></function></tool_call>",
    "\n</function>\n</tool_call>\n",
    "</arg_value>\n<arg_key>path</arg_key>\n<arg_value>y",
    "</arg_value><arg_key>unknown</arg_key>",
    "</arg_value>\n</tool_call>",
    '</｜DSML｜parameter>\n<｜DSML｜parameter name="path" string="true">y',
    '</｜DSML｜parameter>\n<｜DSML｜parameter name="unknown" string="true">y',
    "</｜DSML｜parameter>\n</｜DSML｜invoke>\n",
    "</｜DSML｜parameter>\n</｜DSML｜invoke>\n</｜DSML｜function_calls>",
    '</parameter>\n<parameter name="path">y',
    '</parameter>\n<parameter name="unknown">y',
    "</parameter>\n</invoke>\n",
    "</parameter>\n</invoke>\n</minimax:tool_call>",
    "</parameter></function></seed:tool_call>",
    '</atem:parameter>\n<atem:parameter name="path">y',
    '</atem:parameter>\n<atem:parameter name="unknown">y',
    "</atem:parameter>\n</atem:invoke>\n",
    "</atem:parameter>\n</atem:invoke>\n</atem:function_calls><|eom|>",
    "</arg_value:opensource>\n<arg_key:opensource>path</arg_key:opensource>\n<arg_value:opensource>y",
    "</arg_value:opensource>\n</tool_call:opensource>",
    '<|"|>,path:<|"|>y',
    '<|"|>}<tool_call|>',
]
EVERY_TAG = [*STRUCTURES, *(tag for tags in TAGS.values() for tag in tags)]


def hostile_text(rng: random.Random) -> str:
    pieces = [rng.choice(PLAIN if rng.random() < 0.5 else EVERY_TAG) for _ in range(rng.choice([0, 1, 2, 3, 6]))]
    return "\n".join(pieces) if rng.random() < 0.5 else "".join(pieces)


def hostile_value(rng: random.Random, depth: int = 0) -> Any:
    kind = rng.randrange(8 if depth < 3 else 6)
    if kind >= 6:
        values = [hostile_value(rng, depth + 1) for _ in range(rng.randrange(3))]
        return values if kind == 6 else {hostile_text(rng): value for value in values}
    return [hostile_text(rng), rng.randrange(-9, 99), 1.5, True, None, hostile_text(rng)][kind]


def hostile_arguments(rng: random.Random) -> dict[str, Any]:
    makers: dict[str, Callable[[], Any]] = {
        "path": lambda: hostile_text(rng),
        "content": lambda: hostile_text(rng),
        "n": lambda: rng.randrange(-9, 10**6),
        "ratio": lambda: rng.choice([0.5, -1e-9, 3, 1e300]),
        "flag": lambda: rng.random() < 0.5,
        "items": lambda: [hostile_value(rng, 1) for _ in range(rng.randrange(3))],
        "options": lambda: {hostile_text(rng): hostile_value(rng, 1) for _ in range(rng.randrange(3))},
        "maybe": lambda: rng.choice([None, hostile_text(rng)]),
        "any": lambda: hostile_value(rng),
    }
    keys = rng.sample(sorted(set(makers) - {"path"}), rng.randrange(5))
    keys.insert(rng.randrange(len(keys) + 1), "path")
    return {key: makers[key]() for key in keys}


@dataclass(frozen=True)
class Call:
    """arguments: of a custom tool its input"""

    name: str
    arguments: dict[str, Any] | str


def hostile_call(rng: random.Random) -> Call:
    name = rng.choice(["write", "write", "write_closed", "now", "shell"])
    if name == "shell":
        return Call(name, hostile_text(rng))
    return Call(name, {} if name == "now" else hostile_arguments(rng))


def as_mapping(call: Call) -> Mapping[str, Any]:
    return {"input": call.arguments} if isinstance(call.arguments, str) else call.arguments


def to_json(value: Any, rng: random.Random) -> str:
    return json.dumps(value, ensure_ascii=rng.random() < 0.2)


# --- how templates write the calls of one output: (calls, text before each call, rng) -> output

Calls = Sequence[Call]
Writer = Callable[[Calls, Sequence[str], random.Random], str]


def one_by_one(write: Callable[[Call, int, random.Random], str]) -> Writer:
    """Each call stands in tags of its own, with text before it."""

    def output(calls: Calls, texts: Sequence[str], rng: random.Random) -> str:
        written = [text + write(call, i, rng) for i, (text, call) in enumerate(zip(texts, calls, strict=True))]
        return rng.choice(["\n", ""]).join(written)

    return output


def together(begin: str, separator: str, end: str, write: Callable[[Call, int, random.Random], str]) -> Writer:
    """All calls stand in one list or section, with text only before it."""

    def output(calls: Calls, texts: Sequence[str], rng: random.Random) -> str:
        return texts[0] + begin + separator.join(write(call, i, rng) for i, call in enumerate(calls)) + end

    return output


def json_call(key: str) -> Callable[[Call, int, random.Random], str]:
    return lambda call, _, rng: f'{{"name": "{call.name}", "{key}": {to_json(as_mapping(call), rng)}}}'


def around(before: str, write: Callable[[Call, int, random.Random], str], after: str) -> Callable:
    return lambda call, i, rng: (before + write(call, i, rng) + after).replace("INDEX", str(i), 1)


def named(between: str) -> Callable[[Call, int, random.Random], str]:
    return lambda call, _, rng: call.name + between + to_json(as_mapping(call), rng)


def qwen(wrapper: str = "tool_call", line: str = "\n") -> Callable[[Call, int, random.Random], str]:
    """Qwen3-Coder's template writes mappings and lists as JSON, and anything else as Python's str does.

    line: what stands around a value
    """

    def write(call: Call, _: int, rng: random.Random) -> str:
        value = partial(qwen_value, rng=rng, in_python=rng.random() < 0.5)
        parameters = "".join(
            f"<parameter={key}>{line}{value(v)}{line}</parameter>\n" for key, v in as_mapping(call).items()
        )
        return f"<{wrapper}>\n<function={call.name}>\n{parameters}</function>\n</{wrapper}>"

    return write


def qwen_value(each: Any, rng: random.Random, in_python: bool) -> str:
    if isinstance(each, (dict, list)):
        return to_json(each, rng)
    words = {True: "true", False: "false", None: "null"}
    return words[each] if not in_python and (each is None or isinstance(each, bool)) else str(each)


def tagged_value(each: Any, rng: random.Random) -> str:
    return each if isinstance(each, str) else to_json(each, rng)


def glm(line: str, suffix: str = "", separator: str = "") -> Callable[[Call, int, random.Random], str]:
    """line: what stands between tags. suffix: at the end of tags. separator: tag behind the name"""
    s = suffix

    def write(call: Call, _: int, rng: random.Random) -> str:
        parameters = "".join(
            f"<arg_key{s}>{key}</arg_key{s}>{line}<arg_value{s}>{tagged_value(value, rng)}</arg_value{s}>{line}"
            for key, value in as_mapping(call).items()
        )
        return f"<tool_call{s}>{call.name}{separator}{line}{parameters}</tool_call{s}>"

    return write


def dsml(call: Call, _: int, rng: random.Random) -> str:
    parameters = "".join(
        f'<｜DSML｜parameter name="{key}" string="{json.dumps(isinstance(value, str))}">{tagged_value(value, rng)}'
        "</｜DSML｜parameter>\n"
        for key, value in as_mapping(call).items()
    )
    return f'<｜DSML｜invoke name="{call.name}">\n{parameters}</｜DSML｜invoke>\n'


def invoke(call: Call, _: int, rng: random.Random, prefix: str = "") -> str:
    parameters = "".join(
        f'<{prefix}parameter name="{key}">{tagged_value(value, rng)}</{prefix}parameter>\n'
        for key, value in as_mapping(call).items()
    )
    return f'<{prefix}invoke name="{call.name}">\n{parameters}</{prefix}invoke>\n'


def gemma(call: Call, _: int, rng: random.Random) -> str:
    def value(each: Any) -> str:
        if isinstance(each, str):
            return f'<|"|>{each}<|"|>'
        if isinstance(each, bool):
            return "true" if each else "false"
        if isinstance(each, dict):
            return "{" + members(each) + "}"
        return "[" + ",".join(map(value, each)) + "]" if isinstance(each, list) else str(each)

    def members(values: Mapping[str, Any]) -> str:
        return ",".join(f"{key}:{value(each)}" for key, each in values.items())

    return f"<|tool_call>call:{call.name}{{{members(as_mapping(call))}}}<tool_call|>"


def apertus(call: Call, _: int, rng: random.Random) -> str:
    return f'{{"{call.name}": {to_json(as_mapping(call), rng)}}}'


def python_json(call: Call, _: int, rng: random.Random) -> str:
    """OLMo 3 writes the values as JSON."""
    return f"{call.name}({', '.join(f'{key}={to_json(value, rng)}' for key, value in as_mapping(call).items())})"


def python(call: Call, _: int, rng: random.Random) -> str:
    written = ", ".join(f"{key}={value!r}" for key, value in as_mapping(call).items())
    return f"{call.name}({written})"


def harmony(calls: Calls, texts: Sequence[str], rng: random.Random) -> str:
    said = f"<|channel|>commentary<|message|>{texts[0]}<|end|><|start|>assistant" if texts[0] else ""
    head = f"<|channel|>commentary to=functions.{calls[0].name} <|constrain|>json<|message|>"
    return said + head + to_json(as_mapping(calls[0]), rng) + "<|call|>"


def muse(calls: Calls, texts: Sequence[str], rng: random.Random) -> str:
    """Each call is a message to its tool, whose name may have two parts: every second has."""
    messages = [f" to=user<|message|>{texts[0]}"] * bool(texts[0])
    for i, call in enumerate(calls):
        written = f"<atem:function_calls>\n{invoke(call, i, rng, 'atem:')}</atem:function_calls>"
        if i % 2:
            written = written.replace(f'name="{call.name}"', f'name="{call.name}.{call.name}"', 1)
        messages.append(f" to={call.name}<|message|>{written}")
    return "<|eom|><|start|>assistant".join(messages) + "<|eot|>"


KIMI = ("<|tool_calls_section_begin|>", "", "<|tool_calls_section_end|>")
DEEPSEEK = ("<｜tool▁calls▁begin｜>", "\n", "<｜tool▁calls▁end｜>")
V3 = around("<｜tool▁call▁begin｜>function<｜tool▁sep｜>", named("\n```json\n"), "\n```<｜tool▁call▁end｜>")
V31 = around("<｜tool▁call▁begin｜>", named("<｜tool▁sep｜>"), "<｜tool▁call▁end｜>")
MISTRAL = around("[TOOL_CALLS]", named("[ARGS]"), "")


@dataclass(frozen=True)
class Family:
    """parser: of `model.tool_parser`; reasoning: of `model.reasoning_parser`

    with_text: text may stand before the calls, and if `between`, between them; single: there is one call
    own: what text of this family does not contain, because it begins a call
    """

    parser: str
    write: Writer
    reasoning: str | None = None
    with_text: bool = True
    between: bool = False
    single: bool = False
    own: tuple[str, ...] = ()


def tool_call_family(parser: str, write: Callable[[Call, int, random.Random], str], reasoning: str | None) -> Family:
    own = ("<tool_call>", "</tool_call>", "<function=")
    return Family(parser, one_by_one(write), reasoning, between=True, own=own)


FAMILIES = {
    "hermes": tool_call_family("hermes", around("<tool_call>\n", json_call("arguments"), "\n</tool_call>"), "qwen3"),
    "qwen3_coder": tool_call_family("qwen3_coder", qwen(), "qwen3"),
    "mimo": tool_call_family("mimo", qwen(line=""), "qwen3"),
    "seed_oss": Family("seed_oss", one_by_one(qwen("seed:tool_call", "")), "seed_oss", between=True,
                       own=("<seed:tool_call>", "</seed:tool_call>", "<function=", "<seed:think>")),
    "hy_v3": Family(
        "hy_v3", together("<tool_calls:opensource>\n", "\n", "\n</tool_calls:opensource>",
                          glm("\n", ":opensource", "<tool_sep:opensource>")), "hy_v3", own=(":opensource>",)),
    "hy_v3_preview": Family(
        "hy_v3_preview", together("<tool_calls>\n", "\n", "\n</tool_calls>", glm("\n", separator="<tool_sep>")),
        "glm45", own=("<tool_call",)),
    "minimax_m2": Family(
        "minimax_m2", together("<minimax:tool_call>\n", "", "</minimax:tool_call>", invoke), "deepseek_v3",
        own=("<minimax:tool_call>", "<invoke")),
    "gemma4": Family("gemma4", together("", "", "", gemma), "gemma4",
                     own=("<|tool_call>", "<channel|>", "<|channel>thought")),
    "apertus": Family("apertus", together("<|tools_prefix|>[", ", ", "]<|tools_suffix|>", apertus), "apertus",
                      own=("<|tools_prefix|>",)),
    "lfm2": Family("lfm2", together("<|tool_call_start|>[", ", ", "]<|tool_call_end|>", python), "deepseek_v3",
                   own=("<|tool_call_start|>",)),
    "olmo3": Family("olmo3", together("<function_calls>\n", "\n", "\n</function_calls>", python_json), "deepseek_v3",
                    own=("<function_calls>",)),
    "nemotron_json": Family("nemotron_json", together("<TOOLCALL>[", ", ", "]</TOOLCALL>", json_call("arguments")),
                            "deepseek_v3", own=("<TOOLCALL>",)),
    "glm45": tool_call_family("glm45", glm("\n"), "glm45"),
    "glm47": tool_call_family("glm45", glm(""), "glm45"),
    "deepseek_v32": Family(
        "deepseek_v32", together("<｜DSML｜function_calls>\n", "", "</｜DSML｜function_calls>", dsml), "deepseek_v3",
        own=("<｜DSML｜",)),
    "deepseek_v3": Family("deepseek_v3", together(*DEEPSEEK, V3), "deepseek_v3", own=("<｜tool",)),
    "deepseek_v31": Family(
        "deepseek_v3", together(DEEPSEEK[0], "", DEEPSEEK[2], V31), "deepseek_v3", own=("<｜tool",)),
    "kimi_k2": Family(
        "kimi_k2", together(*KIMI, around("<|tool_call_begin|>functions.", named(":INDEX<|tool_call_argument_begin|>"),
                                          "<|tool_call_end|>")), "kimi_k2", own=("<|tool",)),
    "mistral": Family("mistral", together("[TOOL_CALLS][", ", ", "]", json_call("arguments")), "mistral",
                      own=("[TOOL_CALLS]",)),
    "mistral_named": Family("mistral", together("", "", "", MISTRAL), "mistral", own=("[TOOL_CALLS]",)),
    "llama3_json": Family("llama3_json", together("", "; ", "", json_call("parameters")), with_text=False),
    "json": Family("json", together("[", ", ", "]", json_call("parameters")), with_text=False),
    "pythonic": Family("pythonic", together("[", ", ", "]", python), with_text=False),
    "granite": Family("granite", together("<|tool_call|>[", ", ", "]", json_call("arguments")), "granite",
                      own=("<|tool_call|>",)),
    "internlm": Family(
        "internlm", one_by_one(around("<|action_start|><|plugin|>\n", json_call("parameters"), "<|action_end|>")),
        between=True, own=("<|action",)),
    "phi4_mini_json": Family("phi4_mini_json", together("functools[", ", ", "]", json_call("arguments")),
                             own=("functools",)),
    "jamba": Family("jamba", together("<tool_calls>[", ", ", "]</tool_calls>", json_call("arguments")),
                    own=("<tool_calls>",)),
    "harmony": Family("harmony", harmony, "harmony", single=True, own=("<|",)),
    "muse_glimmer": Family("muse_glimmer", muse, "muse_glimmer", own=("<|",)),
}  # fmt: skip


# --- values that have two readings

_OFFERED = "write|write_closed|now|shell"  # names in TOOLS


# signs behind a call that do not belong there, and how a call in another form begins
_STRAY = r"""(?:\s|[])}"'`,;|]|```json)*"""
_STRAY_OR_TAGS = rf"(?:{_STRAY[3:-2]}|</function>|</parameter>|</arg_value>)*"
_IN_JSON = rf"""[{{\[][{{\[\s]*["']name["']\s*:\s*["'](?:{_OFFERED})["']"""
_OTHER_FORM = rf"(?:<function=|{_IN_JSON}|(?:{_OFFERED})\s*<arg_key>)"


def _qwen_ends(text: str, name: str, given: set[str], wrapper: str = "tool_call") -> bool:
    """Return whether a text between Qwen3-Coder's tags contains its own end."""
    behind = rf"{_STRAY_OR_TAGS}(</{wrapper}>|<{wrapper}>|{_OTHER_FORM}|\Z)"
    ends = re.search(rf"</parameter>\s*(</function>{behind}|</{wrapper}>)", text)
    another = rf"</(function|{wrapper})>\s*(</{wrapper}>\s*)?(<{wrapper}>\s*)?<function=({_OFFERED})>"
    forgotten = re.search(rf"\n</function>\s*</{wrapper}>|{another}", text)
    next_keys = re.findall(r"</parameter>\s*<parameter=([^<>\n]+)>", text)
    next_lines = [key for key in re.findall(r"\n<parameter=([^<>\n]+)>", text) if key in WRITE["properties"]]
    return bool(ends or forgotten or any(_may_come(key, name, given) for key in next_keys + next_lines))


def _glm_ends(text: str, name: str, given: set[str], s: str = "") -> bool:
    keys = re.findall(rf"</arg_value{s}>\s*(?:<arg_key{s}>)+([^<\n]+)(?:</arg_key{s}>|<arg_value{s}>)", text)
    another = rf"</tool_call{s}>\s*<tool_call{s}>\s*({_OFFERED})\s*(<arg_key{s}>|<tool_sep{s}>|</tool_call{s}>)"
    behind = r"\s*</tool_call" if s else rf"{_STRAY}(</tool_call|{_OTHER_FORM})"
    call_ends = re.search(rf"</arg_value{s}>{behind}", text) or re.search(another, text)
    return bool(call_ends) or any(_may_come(key, name, given) for key in keys)


def _dsml_ends(text: str, name: str, given: set[str]) -> bool:
    keys = re.findall(r'</｜DSML｜parameter>\s*<｜DSML｜parameter name="([^"<]+)"[^<>]*>', text)
    call_ends = r"</｜DSML｜parameter>\s*</｜DSML｜invoke>\s*(<｜DSML｜invoke|</｜DSML｜(function|tool)_calls>)"
    call_ends += rf'|</｜DSML｜invoke>\s*<｜DSML｜invoke name="({_OFFERED})"'
    return bool(re.search(call_ends, text)) or any(_may_come(key, name, given) for key in keys)


def _invoke_ends(text: str, name: str, given: set[str], p: str = "", behind: str = "</minimax:tool_call>") -> bool:
    keys = re.findall(rf'</{p}parameter>\s*<{p}parameter name="([^"<]+)"[^<>]*>', text)
    call_ends = rf'</{p}parameter>\s*</{p}invoke>\s*(<{p}invoke|{behind})|</{p}invoke>\s*<{p}invoke name="({_OFFERED})"'
    return bool(re.search(call_ends, text)) or any(_may_come(key, name, given) for key in keys)


def _gemma_ends(value: Any) -> bool:
    """Return whether a text of a value, or a key in it, contains its own end: keys have neither quotes nor escapes."""
    if isinstance(value, dict):
        keys = (":" in key or key != key.strip() or key[:1] in ("}", ",") or '<|"|>' in key or "<tool_call|>" in key
                for key in value)  # fmt: skip
        return any(keys) or any(map(_gemma_ends, value.values()))
    if isinstance(value, list):
        return any(map(_gemma_ends, value))
    return isinstance(value, str) and bool(re.search(r'<\|"\|>\s*([,}\]]|$)', value))


def _may_come(key: str, name: str, given: set[str]) -> bool:
    return key not in given and (key in WRITE["properties"] or name == "write")


def _reads_as_json(text: str) -> bool:
    """Return whether a text is a value too, for a parameter that may be something else than a text."""
    try:
        json.loads(text)
    except ValueError:
        return text.strip(" \t\r\n") in ("True", "False", "None")
    return True


AMBIGUOUS = {
    "qwen3_coder": _qwen_ends,
    "glm45": _glm_ends,
    "glm47": _glm_ends,
    "deepseek_v32": _dsml_ends,
    "mimo": _qwen_ends,
    "seed_oss": partial(_qwen_ends, wrapper="seed:tool_call"),
    "hy_v3": partial(_glm_ends, s=":opensource"),
    "hy_v3_preview": _glm_ends,
    "minimax_m2": _invoke_ends,
    "muse_glimmer": partial(_invoke_ends, p="atem:", behind=r"</atem:function_calls>|<\|(eom|eot|start)\|>"),
}
# the others say what is a text
UNTYPED_AS_TEXT = (
    *("qwen3_coder", "glm45", "glm47", "mimo", "seed_oss", "hy_v3", "hy_v3_preview", "minimax_m2", "muse_glimmer"),
)


def is_ambiguous(family: str, call: Call) -> bool:
    """Return whether a call is in the listed set."""
    if family == "gemma4":
        return _gemma_ends(as_mapping(call))
    ends, given = AMBIGUOUS.get(family), set[str]()
    if ends is None:
        return False
    for key, value in as_mapping(call).items():
        given.add(key)
        if not isinstance(value, str):
            continue
        if ends(value, call.name, given):
            return True
        if family in UNTYPED_AS_TEXT and key in ("maybe", "any") and _reads_as_json(value):
            return True
    return False


# for each kind of entry: two calls that a template writes alike. FORGOT: the second is read so from a model that leaves
# out the closing tag, which Qwen3-Coder does
FORGOT = "</parameter>"
TWO_READINGS = [
    ("qwen3_coder", {"path": "a\n</parameter>\n<parameter=content>\nb"}, {"path": "a", "content": "b"}, ""),
    ("qwen3_coder", {"path": "a\n<parameter=content>\nb"}, {"path": "a", "content": "b"}, FORGOT),
    ("qwen3_coder", {"maybe": "null"}, {"maybe": None}, ""),
    ("glm45", {"path": "a</arg_value>\n<arg_key>content</arg_key>\n<arg_value>b"}, {"path": "a", "content": "b"}, ""),
    ("glm47", {"path": "a</arg_value><arg_key>content</arg_key><arg_value>b"}, {"path": "a", "content": "b"}, ""),
    ("glm45", {"any": "1"}, {"any": 1}, ""),
    ("deepseek_v32", {"path": 'a</｜DSML｜parameter>\n<｜DSML｜parameter name="content" string="true">b'},
     {"path": "a", "content": "b"}, ""),
    ("mimo", {"path": "a</parameter>\n<parameter=content>b"}, {"path": "a", "content": "b"}, ""),
    ("seed_oss", {"path": "a</parameter>\n<parameter=content>b"}, {"path": "a", "content": "b"}, ""),
    ("minimax_m2", {"path": 'a</parameter>\n<parameter name="content">b'}, {"path": "a", "content": "b"}, ""),
    ("muse_glimmer", {"path": 'a</atem:parameter>\n<atem:parameter name="content">b'},
     {"path": "a", "content": "b"}, ""),
    ("hy_v3", {"path": "a</arg_value:opensource>\n<arg_key:opensource>content</arg_key:opensource>\n"
                       "<arg_value:opensource>b"}, {"path": "a", "content": "b"}, ""),
    ("gemma4", {"path": 'a<|"|>,content:<|"|>b'}, {"path": "a", "content": "b"}, ""),
    ("gemma4", {"options": {"a:1,b": 2}}, {"options": {"a": 1, "b": 2}}, ""),
]  # fmt: skip
# for the ends of calls: two calls that are written as one is
TWO_CALLS = {
    "qwen3_coder": "a\n</parameter>\n</function>\n</tool_call>\n<tool_call>\n<function=write>\n<parameter=path>\nb",
    "glm45": "a</arg_value>\n</tool_call>\n<tool_call>write\n<arg_key>path</arg_key>\n<arg_value>b",
    "glm47": "a</arg_value></tool_call>\n<tool_call>write<arg_key>path</arg_key><arg_value>b",
    "deepseek_v32": 'a</｜DSML｜parameter>\n</｜DSML｜invoke>\n<｜DSML｜invoke name="write">\n'
                    '<｜DSML｜parameter name="path" string="true">b',
    "mimo": "a</parameter>\n</function>\n</tool_call>\n<tool_call>\n<function=write>\n<parameter=path>b",
    "seed_oss": "a</parameter>\n</function>\n</seed:tool_call>\n<seed:tool_call>\n<function=write>\n"
                "<parameter=path>b",
    "minimax_m2": 'a</parameter>\n</invoke>\n<invoke name="write">\n<parameter name="path">b',
    "muse_glimmer": "a</atem:parameter>\n</atem:invoke>\n</atem:function_calls><|eom|><|start|>assistant to=write"
                    '<|message|><atem:function_calls>\n<atem:invoke name="write.write">\n<atem:parameter name="path">b',
    "hy_v3_preview": "a</arg_value>\n</tool_call>\n<tool_call>write<tool_sep>\n<arg_key>path</arg_key>\n"
                     "<arg_value>b",
    "gemma4": 'a<|"|>}<tool_call|><|tool_call>call:write{path:<|"|>b',
}  # fmt: skip
