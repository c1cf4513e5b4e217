"""Reasoning parsers, the choice of parsers, and both kinds together."""

import itertools
import json
import random
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tokenizers import Tokenizer as Backend
from tokenizers.models import BPE

from jaxserve.api.generate.planner import RenderedChat, after_reasoning
from jaxserve.errors import ConfigError
from jaxserve.text.output_parser import REASONING_FAMILIES, ParserChoice, ThinkParser, choose_parsers
from jaxserve.text.renderer import Renderer
from jaxserve.text.template_worker import TemplateInput
from jaxserve.text.tokenizer import Tokenizer
from jaxserve.text.tools import ToolSet
from jaxserve.text.tools.channels import CHANNELS
from jaxserve.types.sampling import GrammarSpec
from tests.text import hostile_calls
from tests.text.whole_outputs import ParsedOutput, parse_whole

TOOLS = ToolSet(parameters={"f": {"type": "object", "properties": {}}})
CALL = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'


def run(choice: ParserChoice, deltas: list[str], **arguments: Any) -> ParsedOutput:
    parser, output = choice.make(**arguments), ParsedOutput()
    for delta in deltas:
        output.add(parser.feed(delta))
    output.add(parser.finish())
    return output


# reasoning family, end of the prompt, output, reasoning, content
CASES = [
    ("qwen3", "", "<think>\nLet me see.\n\n</think>\n\nIt is 4.", "Let me see.", "It is 4."),
    ("qwen3", "<think>\n", "Let me see.\n</think>\n\nIt is 4.\n", "Let me see.", "It is 4.\n"),
    ("qwen3", "<think>\n\n</think>\n\n", "It is 4.", None, "It is 4."),
    ("qwen3", "", "It is 4.", None, "It is 4."),
    ("qwen3", "", " \n It is 4.", None, " \n It is 4."),
    ("qwen3", "", "<think>\n\n</think>\n\nNo thought.", None, "No thought."),
    ("qwen3", "", "a <think>b</think> c", None, "a <think>b</think> c"),
    ("qwen3", "<think>", "cut by the length", "cut by the length", None),
    ("qwen3", "<think>", "<think>said twice</think>x", "said twice", "x"),
    ("qwen3", "<think>", "a </thin b </think> c", "a </thin b", "c"),
    ("qwen3", "user wrote <think>\nassistant", "x</think>", None, "x"),
    # lone end tags, second blocks, and tags that are only mentioned
    ("qwen3", "<think>", "a</think>\n\n</think>\n\nb </think> c\n</think>\n", "a", "b c\n"),
    ("qwen3", "<think>\n\n</think>\n\n", "</think>\n\nHi", None, "Hi"),
    ("qwen3", "", "<think>a</think>b<think>c</think>d", "a\nc", "bd"),
    ("qwen3", "", "<think>a</think>b\n\n<think>\nc\n</think>\n\nd", "a\nc", "b\n\nd"),
    ("qwen3", "", "<think>a</think>b. <think>c</think> d", "a\nc", "b. d"),
    ("qwen3", "", "<think>a</think>b<think>never closed", "a\nnever closed", "b"),
    ("qwen3", "", "<think>a</think><think>b</think>c", "a\nb", "c"),
    ("qwen3", "", "Sure.\n<think>\nc\n</think>\nd", "c", "Sure.\nd"),
    ("qwen3", "", "<think>a</think>Use `<think>` and `</think>`.", "a", "Use `<think>` and `</think>`."),
    ("qwen3", "", "<think>a</think>The <think> tag, closed by </think>.", "a", "The <think> tag, closed by </think>."),
    ("qwen3", "", '<think>a</think>re.search("<think>(.*)</think>")', "a", 're.search("<think>(.*)</think>")'),
    (
        "qwen3",
        "",
        "<think>a</think>```\n<think>\nx\n</think>\n```\nb</think>",
        "a",
        "```\n<think>\nx\n</think>\n```\nb",
    ),
    ("mistral", "", "[THINK]a[/THINK]b[/THINK]\n[THINK]c[/THINK]d", "a\nc", "b\nd"),
    ("ernie45", "<think>\n", "a\n</think>\n\n<response>\nb\n\nc\n</response>\n", "a", "b\n\nc"),
    ("ernie45", "<think>\n", "a\n</think>\n\nb </response>\n", "a", "b </response>\n"),
    ("ernie45", "", "<think>a</think><response>`</response>` ends it</response>", "a", "`</response>` ends it"),
    ("ernie45", "<think>", "a</think><response>cut by the le", "a", "cut by the le"),
    (
        "granite",
        "",
        "Here is my thought process: a Here is my response: b Here is my response: c",
        "a",
        "b Here is my response: c",
    ),
    ("deepseek_r1", "", "silently opened</think>x", "silently opened", "x"),
    ("deepseek_r1", "<think>\n</think>", "x", None, "x"),
    ("mistral", "", "[THINK]a[/THINK]b", "a", "b"),
    ("kimi", "◁think▷", "a◁/think▷b", "a", "b"),
    ("gemma4", "<|turn>model\n", "<|channel>thought\nLet me see.\n<channel|>It is 4.", "Let me see.", "It is 4."),
    ("gemma4", "<|turn>model\n<|channel>thought\n<channel|>", "It is 4.", None, "It is 4."),
    ("gemma4", "<|turn>model\n<|channel>thought\n", "a<channel|>b", "a", "b"),
    ("apertus", "", "<|inner_prefix|>a<|inner_suffix|>b", "a", "b"),
    ("hy_v3", "<think:opensource>", "a</think:opensource>b", "a", "b"),
    ("seed_oss", "", "<seed:think>a</seed:think>b", "a", "b"),
]


@pytest.mark.parametrize("family, prompt, text, reasoning, content", CASES)
def test_think_tags(family: str, prompt: str, text: str, reasoning: str | None, content: str | None) -> None:
    choice = ParserChoice(reasoning=family)
    for deltas in ([text], list(text), [text[i : i + 5] for i in range(0, len(text), 5)]):
        output = run(choice, deltas, prompt=prompt)
        assert (output.reasoning, output.content) == (reasoning, content)


def test_continued_text_decides_for_itself() -> None:
    choice = ParserChoice(reasoning="qwen3")
    inside = run(choice, ["b</think>c"], prompt="...<think>a", continued="<think>a")
    assert (inside.reasoning, inside.content) == ("b", "c")
    outside = run(choice, ["c"], prompt="...", continued="<think>a</think>b")
    assert (outside.reasoning, outside.content) == (None, "c")


@pytest.mark.parametrize("text", ["<think>\na <tool_call> b\n</think>\n\nok " + CALL, "<think>never closed " + CALL])
def test_reasoning_then_calls(text: str) -> None:
    choice = ParserChoice(tool="hermes", reasoning="deepseek_v3")
    closed = "</think>" in text
    for deltas in ([text], list(text)):
        output = run(choice, deltas, tools=TOOLS)
        assert output.reasoning == ("a <tool_call> b" if closed else "never closed")
        assert [call.name for call in output.tool_calls] == ["f"]
        kept = run(choice, deltas, tools=TOOLS, separate_reasoning=False)
        assert kept.reasoning is None
        assert (kept.content or "").strip() == text.removesuffix(" " + CALL)
        assert len(kept.tool_calls) == 1


def test_a_call_may_end_the_thinking() -> None:
    output = run(ParserChoice(tool="hermes", reasoning="qwen3"), list("<think>hm\n" + CALL), tools=TOOLS)
    assert (output.reasoning, output.content, len(output.tool_calls)) == ("hm", None, 1)


# reasoning family, its family of calls, texts within the thinking that are no call, a call
OPENINGS = [
    ("qwen3", "hermes", ["<tool_call>", "`<tool_call>` and", "<tool_call></tool_call>"], CALL),
    ("qwen3", "hermes", ["<tool_call><tool_call>"], '<tool_call>\n[{"name": "f", "arguments": {}}]</tool_call>'),
    ("qwen3", "qwen3_coder", ["<tool_call>\n<func"], "<tool_call>\n<function=f>\n</function>\n</tool_call>"),
    ("glm45", "glm45", ["<tool_call> f is", "<tool_call>g\n<arg_key>", "<tool_call>"], "<tool_call>f\n</tool_call>"),
    ("glm45", "glm45", ["<tool_call>f</"], "<tool_call>f\n<arg_key>x</arg_key><arg_value>1</arg_value></tool_call>"),
    (
        *("kimi_k2", "kimi_k2", ["<|tool_calls_section_begin|> comes first"]),
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{}<|tool_call_end|>",
    ),
]


DEEPSEEK = "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>"
OPENINGS += [
    ("deepseek_v3", "deepseek_v3", ["<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>g<"], DEEPSEEK),
    (
        *("deepseek_r1", "deepseek_v3", ["<｜tool▁calls▁begin｜> then"]),
        "<｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n{}\n```<｜tool▁call▁end｜>",
    ),
    (
        *("deepseek_v3", "deepseek_v32", ["<｜DSML｜function_calls> comes"]),
        '<｜DSML｜function_calls>\n<｜DSML｜invoke name="f">\n</｜DSML｜invoke>\n</｜DSML｜function_calls>',
    ),
    ("mistral", "mistral", ["[TOOL_CALLS]", "[TOOL_CALLS] f is", "[TOOL_CALLS]g{"], "[TOOL_CALLS]f[ARGS]{}"),
    ("mistral", "mistral", ["[TOOL_CALLS] g"], '[TOOL_CALLS] [{"name": "f", "arguments": {}}]'),
    ("mistral", "mistral", ["[TOOL_CALLS]f"], "[TOOL_CALLS]f{}"),
    ("deepseek_v3", "hermes", ["<tool_call>"], CALL),
    ("seed_oss", "seed_oss", ["<seed:tool_call>"], "<seed:tool_call>\n<function=f>\n</function>\n</seed:tool_call>"),
    (
        *("hy_v3", "hy_v3", ["<tool_calls:opensource> then"]),
        "<tool_calls:opensource>\n<tool_call:opensource>f<tool_sep:opensource>\n</tool_call:opensource>\n"
        "</tool_calls:opensource>",
    ),
    (
        *("deepseek_v3", "minimax_m2", ["<minimax:tool_call>"]),
        '<minimax:tool_call>\n<invoke name="f">\n</invoke>\n</minimax:tool_call>',
    ),
    ("gemma4", "gemma4", ["<|tool_call> call"], "<|tool_call>call:f{}<tool_call|>"),
    ("apertus", "apertus", ["<|tools_prefix|>"], '<|tools_prefix|>[{"f": {}}]<|tools_suffix|>'),
    ("deepseek_v3", "lfm2", ["<|tool_call_start|>"], "<|tool_call_start|>[f()]<|tool_call_end|>"),
    ("deepseek_v3", "olmo3", ["<function_calls>", "<function_calls>g("], "<function_calls>\nf()\n</function_calls>"),
    ("deepseek_v3", "nemotron_json", ["<TOOLCALL>"], '<TOOLCALL>[{"name": "f", "arguments": {}}]</TOOLCALL>'),
]


@pytest.mark.parametrize("reasoning, tool, mentions, call", OPENINGS)
def test_a_tag_behind_a_call_that_was_made_while_thinking(
    reasoning: str, tool: str, mentions: list[str], call: str
) -> None:
    """The call has ended the thinking; the end tag is lone, and a second block is reasoning."""
    start, end = REASONING_FAMILIES[reasoning].start, REASONING_FAMILIES[reasoning].end
    for tail, reasoned, content in (
        (f"\n{end}", "hm", None),
        (f"\n{end}\n\nOK.", "hm", "OK."),
        (f"\n{start}more{end}OK.", "hm\nmore", "OK."),
        (f"\n{end}\n{call}\n{end}OK.", "hm", "OK."),
    ):
        text = f"{start}hm\n{call}{tail}"
        for deltas in ([text], list(text)):
            output = run(ParserChoice(tool=tool, reasoning=reasoning), deltas, tools=TOOLS)
            assert (output.reasoning, output.content) == (reasoned, content), tail
            assert [each.name for each in output.tool_calls] == ["f"] * text.count(call)


def test_tags_in_a_constrained_answer_are_its_text() -> None:
    choice, text = ParserChoice(reasoning="qwen3"), '{"a": "x</think>y <think>z"}'
    for deltas in ([text], list(text)):
        assert run(choice, deltas, answer_is_literal=True).content == text
        assert run(choice, ["<think>"], answer_is_literal=True, thinks=False).content == "<think>"


@pytest.mark.parametrize("reasoning, tool, mentions, call", OPENINGS)
def test_only_a_call_ends_the_thinking(reasoning: str, tool: str, mentions: list[str], call: str) -> None:
    choice, tags = ParserChoice(tool=tool, reasoning=reasoning), REASONING_FAMILIES[reasoning]
    for mention in mentions:
        text = f"{tags.start}I could write {mention} here. Let me think on.{tags.end}A tag."
        for deltas in ([text], list(text)):
            for tools in (TOOLS, None):
                output = run(choice, deltas, tools=tools)
                assert output.reasoning == f"I could write {mention} here. Let me think on.", (mention, tools)
                assert (output.content, output.tool_calls) == ("A tag.", [])
        text = f"{tags.start}I write {mention} or {call}"
        for deltas in ([text], list(text)):
            output = run(choice, deltas, tools=TOOLS)
            assert output.reasoning == f"I write {mention} or" and output.content is None
            assert [call.name for call in output.tool_calls] == ["f"]


@pytest.mark.parametrize("reasoning, tool, mentions, call", OPENINGS)
def test_without_tools_no_call_ends_the_thinking(reasoning: str, tool: str, mentions: list[str], call: str) -> None:
    choice, tags = ParserChoice(tool=tool, reasoning=reasoning), REASONING_FAMILIES[reasoning]
    text = f"{tags.start}I write {call} or so.{tags.end}Done."
    for deltas in ([text], list(text)):
        assert run(choice, deltas).reasoning == f"I write {call} or so."
        kept = run(choice, deltas, tools=TOOLS, separate_reasoning=False)
        assert (kept.content or "").startswith(f"{tags.start}I write") and [c.name for c in kept.tool_calls] == ["f"]


@pytest.mark.parametrize("family", [name for name, tags in REASONING_FAMILIES.items() if tags.calls])
def test_text_that_may_be_a_call_survives(family: str) -> None:
    tags = REASONING_FAMILIES[family]
    parts = [tags.end, " ", "\n", "f", "fg", "{", "<function=", "<arg_key>", "<|tool_call_begin|>"]
    parts += tags.markers(tools=True)
    rng = random.Random(family)
    for _ in range(300):
        text = "".join(rng.choices(parts, k=10))
        seen = []
        for deltas in ([text], list(text)):
            parser, output = ThinkParser(tags, inside=True, keep=True, tools=("f", "fg")), ParsedOutput()
            for delta in deltas:
                output.add(parser.feed(delta))
            output.add(parser.finish())
            assert (output.reasoning or "") + (output.content or "") == text
            seen.append((output.reasoning, output.content))
        assert seen[0] == seen[1]


def families() -> list[str]:
    return [*REASONING_FAMILIES, *CHANNELS]


HOSTILE = (
    *(
        "a",
        "naïve",
        "日本",
        "👩‍👩‍👧",
        " ",
        "\n",
        "\n\n",
        "`x`",
        "```\ncode\n```\n",
        '"quoted"',
        "\\",
        "<",
        ">",
        "</",
        "<|",
        "[",
        "◁",
        "{}",
    ),
    *(
        "Here is my",
        "It is 4.",
        '{"a": [1, "b"]}',
        "<b>bold</b>",
        "- item\n",
        "to=",
        "assistant",
        "final",
        "f",
        "a < b > c",
    ),
)


def hostile_output(family: str, rng: random.Random) -> tuple[str, str, str]:
    """Return an output as the family writes it, its reasoning and its answer without white space at their ends."""

    def words(count: int) -> str:
        return "".join(rng.choices(HOSTILE, k=rng.randrange(1, count))).strip()

    others = [tag for name, tags in REASONING_FAMILIES.items() if name != family for tag in (tags.start, tags.end)]
    tags = REASONING_FAMILIES.get(family)
    own = ("<|channel|>", "<|start|>") if tags is None else (tags.start, tags.end)
    foreign = [tag for tag in others if tag not in own and not any(each in tag for each in own)]
    thought, answer = (
        words(12) + rng.choice(["", rng.choice(foreign)]),
        words(12) + rng.choice(["", rng.choice(foreign)]),
    )
    second = words(6) if rng.random() < 0.3 else ""
    if family == "harmony":
        text = f"<|channel|>analysis<|message|>{thought}<|end|>"
        if second:
            text += f"<|start|>assistant<|channel|>analysis<|message|>{second}<|end|>"
        text += f"<|start|>assistant<|channel|>final<|message|>{answer}<|return|>"
        return text, thought + ("\n" + second if second else ""), answer
    if tags is None:
        text = f" to=self<|message|>{thought}<|eom|>"
        if second:
            text += f"<|start|>assistant to=self<|message|>{second}<|eom|>"
        text += f"<|start|>assistant to=user<|message|>{answer}<|eot|>"
        return text, thought + ("\n" + second if second else ""), answer
    start = "" if tags.always and rng.random() < 0.5 else tags.start + rng.choice(["", "\n"])
    text = start + thought + rng.choice(["", "\n", " "]) + tags.end + rng.choice(["", "\n\n"])
    if second and not tags.start[0].isalpha():
        text += tags.start + second + tags.end + rng.choice(["", "\n"])
        thought += "\n" + second
    stray = rng.choice(["", "\n" + tags.end + "\n"]) if not tags.start[0].isalpha() and in_plain_text(answer) else ""
    return text + answer + stray, thought, answer


def in_plain_text(text: str) -> bool:
    """Return whether a tag in the next line is outside of code."""
    return sum(line.lstrip().startswith("```") for line in text.split("\n")) % 2 == 0


def check_hostile_texts(family: str, count: int) -> None:
    """Whole and at random cuts, the split is that of the generator, and no character is lost."""
    rng = random.Random(family)
    choice = ParserChoice(reasoning=family)
    for _ in range(count):
        text, thought, answer = hostile_output(family, rng)
        whole = run(choice, [text])
        assert ((whole.reasoning or "").strip(), (whole.content or "").strip()) == (thought.strip(), answer.strip()), (
            text
        )
        for _ in range(3):
            borders = sorted({0, len(text), *(rng.randrange(len(text)) for _ in range(rng.randrange(1, 20)))})
            deltas = [text[a:b] for a, b in itertools.pairwise(borders)]
            assert run(choice, deltas) == whole, deltas
        assert run(choice, list(text)) == whole, text
        kept = run(choice, list(text), separate_reasoning=False)
        assert kept.reasoning is None and (family in CHANNELS or kept.content == text)


@pytest.mark.parametrize("family", families())
def test_hostile_texts_around_and_inside_the_thinking(family: str) -> None:
    check_hostile_texts(family, 100)


@pytest.mark.slow
@pytest.mark.parametrize("family", families())
def test_five_hundred_hostile_texts_around_and_inside_the_thinking(family: str) -> None:
    check_hostile_texts(family, 500)


def test_without_tools_calls_stay_text() -> None:
    assert run(ParserChoice(tool="hermes"), [CALL]).content == CALL
    both = run(ParserChoice(tool="hermes", reasoning="qwen3"), ["<think>a</think>" + CALL], separate_reasoning=False)
    assert both.content == "<think>a</think>" + CALL


HARMONY = (
    "<|channel|>analysis<|message|>They ask 2+2.<|end|><|start|>assistant<|channel|>analysis<|message|>Easy.<|end|>"
    "<|start|>assistant<|channel|>final<|message|>It is 4.<|return|>"
)


def test_harmony_channels() -> None:
    choice = choose_parsers(None, tool="openai", reasoning="gpt-oss")
    for deltas in ([HARMONY], list(HARMONY)):
        output = run(choice, deltas, tools=TOOLS)
        assert (output.reasoning, output.content) == ("They ask 2+2.\nEasy.", "It is 4.")
        kept = run(choice, deltas, separate_reasoning=False)
        assert (kept.reasoning, kept.content) == (None, "They ask 2+2.\nEasy.It is 4.")


@pytest.mark.parametrize("text, reasoning, content, called", [
    ("<|channel|>analysis<|message|>Easy.<|channel|>final<|message|>Four.", "Easy.", "Four.", []),
    ("<|channel|>analysis<|message|>Easy.<|channel|>commentary to=functions.f<|message|>{}<|call|>",
     "Easy.", None, ["f"]),
    ("<|channel|>final<|message|>A <|channel|> b.", None, "A <|channel|> b.", []),
    ('<|channel|>commentary to="functions.f" json<|message|>{}<|call|>', None, None, ["f"]),
])  # fmt: skip
def test_harmony_messages_without_an_end_and_recipients_in_quotes(
    text: str, reasoning: str | None, content: str | None, called: list[str]
) -> None:
    choice = choose_parsers(None, tool="openai", reasoning="gpt-oss")
    for deltas in ([text], list(text)):
        output = run(choice, deltas, tools=TOOLS)
        assert (output.reasoning, output.content or None) == (reasoning, content)
        assert [call.name for call in output.tool_calls] == called


def test_harmony_published_stream(shared_data: Any) -> None:
    text = (shared_data / "golden/harmony/test_streamable_parser.txt").read_text()
    for deltas in ([text], list(text)):
        output = run(choose_parsers(None, tool="harmony", reasoning="harmony"), deltas, tools=TOOLS)
        assert output.reasoning is not None and output.reasoning.startswith(
            'User asks "Who is the current US president?"'
        )
        assert output.tool_calls == []


TEMPLATES = {
    "Qwen/Qwen3-0.6B": ("hermes", "qwen3"),
    "Qwen/Qwen2.5-7B-Instruct": ("hermes", None),
    "meta-llama/Llama-3.1-8B-Instruct": ("llama3_json", None),
    "mistralai/Mistral-Nemo-Instruct-2407": ("mistral", None),
    "moonshotai/Kimi-K2-Thinking": ("kimi_k2", "kimi_k2"),
    "zai-org/GLM-5.1": ("glm45", "glm45"),
    "NousResearch/Hermes-2-Pro-Llama-3-8B (JSON Schema)": ("hermes", None),
    "CohereLabs/command-a-reasoning-08-2025": (None, "cohere"),
    "Qwen/Qwen3.5-4B": ("qwen3_coder", "qwen3"),
    "LiquidAI/LFM2.5-VL-450M": ("lfm2", "deepseek_v3"),
    "openbmb/MiniCPM3-4B": (None, None),
    "ai21labs/AI21-Jamba-Large-1.6": ("jamba", None),
}


def test_chosen_by_published_templates(shared_data: Any) -> None:
    cases = json.loads((shared_data / "golden/chat_templates/hfjs_e2e.json").read_text())["custom"]
    found = {name: choose_parsers(cases[name]["chat_template"]) for name in TEMPLATES}
    assert {name: (choice.tool, choice.reasoning) for name, choice in found.items()} == TEMPLATES


FILES = {
    "tool_chat_template_deepseekv3.jinja": "deepseek_v3",
    "tool_chat_template_deepseekr1.jinja": "deepseek_v3",
    "tool_chat_template_granite.jinja": "granite",
    "tool_chat_template_hermes.jinja": "hermes",
    "tool_chat_template_internlm2_tool.jinja": "internlm",
    "tool_chat_template_llama3.1_json.jinja": "llama3_json",
    "tool_chat_template_llama3.2_pythonic.jinja": "pythonic",
    "tool_chat_template_llama4_pythonic.jinja": "pythonic",
    "tool_chat_template_mistral.jinja": "mistral",
    "tool_chat_template_phi4_mini.jinja": "phi4_mini_json",
    "tool_chat_template_toolace.jinja": "pythonic",
}


def test_chosen_by_collected_templates(shared_data: Any) -> None:
    folder = shared_data / "chat_templates/vllm"
    assert {name: choose_parsers((folder / name).read_text()).tool for name in FILES} == FILES


# family -> how its template writes calls and thinking, and the formats that are chosen
SIGNS = {
    "Qwen3, EXAONE 4, ERNIE 4.5, Granite 4, MiMo-7B": ("<tool_call> {\"name\": <think>", "hermes", "qwen3"),
    "ERNIE 4.5 Thinking": ("<tool_call> {\"name\": </think> <response>", "hermes", "ernie45"),
    "Qwen3-Coder, Qwen3.5, Nemotron 3, Step 3.7": (
        "<function=' <parameter=' + args_name + '>\\n' }} <tool_call> <think>", "qwen3_coder", "qwen3"),
    "MiMo V2": ("<function=' <parameter=' + args_name + '>' }} <tool_call> <think>", "mimo", "qwen3"),
    "GLM-4.5, 4.6": (
        "'\\n<tool_call>' + tc.name }}\\n<arg_key>{{ k }}</arg_key>\\n<arg_value> </think>", "glm45", "glm45"),
    "GLM-4.7, Laguna": ("<tool_call>{name}<arg_key>{k}</arg_key><arg_value>{v}</arg_value> <think>", "glm45", "glm45"),
    "Hy3": ("<tool_calls:opensource> <tool_sep:opensource> <arg_key:opensource> <think:opensource>", "hy_v3", "hy_v3"),
    "Hy3 preview": ("<tool_calls> <tool_call> <tool_sep> <arg_key> <think>", "hy_v3_preview", "glm45"),
    "MiniMax M2": ("toolcall_begin_token = '<minimax:tool_call>' <invoke name= <think>", "minimax_m2", "deepseek_v3"),
    "Kimi K2 to K2.7": ("<|tool_calls_section_begin|> <think></think>", "kimi_k2", "kimi_k2"),
    "DeepSeek V3, R1, V3.1": ("<｜tool▁calls▁begin｜> </think>", "deepseek_v3", "deepseek_v3"),
    "Mistral, Ministral 3, Magistral": ("[TOOL_CALLS] [ARGS] [THINK]", "mistral", "mistral"),
    "Seed-OSS": ("<seed:tool_call> <function= <parameter= <seed:think>", "seed_oss", "seed_oss"),
    "Gemma 4": ("'<|tool_call>call:' + name <|channel>thought\\n <channel|> <|think|>", "gemma4", "gemma4"),
    "Apertus": ("<|tools_prefix|>[ <|inner_prefix|>", "apertus", "apertus"),
    "LFM2": ('"<|tool_call_start|>[" "]<|tool_call_end|>" <think>', "lfm2", "deepseek_v3"),
    "OLMo 3": ("<function_calls> <functions> <think>", "olmo3", "deepseek_v3"),
    "Nemotron Nano 2": ("<TOOLCALL>[ </TOOLCALL> <think>", "nemotron_json", "deepseek_v3"),
    "Granite 3": ("<|tool_call|>[ Here is my thought process:", "granite", "granite"),
    "Llama 3.x": ("<|python_tag|>", "llama3_json", None),
    "Llama 4": ("<|python_start|>[func_name1(", "pythonic", None),
    "gpt-oss": ("<|start|>assistant<|channel|>", "harmony", "harmony"),
    "Muse Glimmer": ("<|start|>assistant to=self<|message|> <atem:function_calls>", "muse_glimmer", "muse_glimmer"),
}  # fmt: skip


def test_chosen_by_the_signs_of_each_family() -> None:
    for family, (text, tool, reasoning) in SIGNS.items():
        assert choose_parsers(text) == ParserChoice(tool, reasoning), family


def test_the_table_in_the_docs_is_what_is_chosen() -> None:
    docs = (Path(__file__).parents[2] / "docs/models.md").read_text(encoding="utf-8")
    rows = [f"| {family} | {tool} | {reasoning or '-'} |" for family, (_, tool, reasoning) in SIGNS.items()]
    assert "\n".join(rows) in docs


def test_names_of_other_servers() -> None:
    assert choose_parsers(None, tool="qwen25", reasoning="deepseek-r1") == ParserChoice("hermes", "deepseek_r1")
    assert choose_parsers("<tool_call></think>", tool="none", reasoning="none") == ParserChoice()
    assert choose_parsers("plain") == choose_parsers(None) == ParserChoice()
    assert (
        choose_parsers("plain</think>", "<tool_call>").tool == choose_parsers("<tool_call>", "plain").tool == "hermes"
    )
    with pytest.raises(ConfigError, match="tool_parser") as caught:
        choose_parsers(None, tool="qwen26")
    assert "hermes" in str(caught.value.fix)
    with pytest.raises(ConfigError, match="reasoning_parser"):
        choose_parsers(None, reasoning="x")


def test_special_tokens_that_must_be_seen(shared_data: Any) -> None:
    tokenizer = Tokenizer.from_directory(shared_data / "tokenizers/minimind")
    choice = ParserChoice(tool="hermes", reasoning="qwen3")
    visible = choice.visible_token_ids(tokenizer, tools=True)
    assert set(visible) <= tokenizer.special_ids
    names = {tokenizer.id_to_token(i) for i in visible}
    assert names == {m for m in choice.markers(tools=True) if tokenizer.token_to_id(m) in tokenizer.special_ids}


def gemma_tokenizer() -> Tokenizer:
    backend = Backend(BPE({char: i for i, char in enumerate("thoug")}, []))
    backend.add_special_tokens(["<|channel>", "<channel|>", "<|tool_call>", "<tool_call|>", '<|"|>'])
    return Tokenizer(backend)


def test_the_tokens_of_a_tag_of_several_tokens_are_seen() -> None:
    """Gemma 4 opens its thinking with a special token and a word."""
    tokenizer, choice = gemma_tokenizer(), ParserChoice("gemma4", "gemma4")
    for tools, count in ((False, 2), (True, 5)):
        assert len(set(choice.visible_token_ids(tokenizer, tools=tools))) == count


def test_a_constrained_answer_may_come_after_a_tag_of_several_tokens() -> None:
    tokenizer = gemma_tokenizer()
    state: Any = SimpleNamespace(engine=SimpleNamespace(tokenizer=tokenizer), parsers=ParserChoice("gemma4", "gemma4"))
    prompt: Any = SimpleNamespace(continued="")
    spec, model = GrammarSpec(kind="regex", source="a"), "<|turn>model\n"
    begin, end = (tokenizer.token_to_id(text) for text in ("<|channel>", "<channel|>"))
    for text, after, unless in (
        (model, (end,), (begin,)),
        (f"{model}<|channel>thought\n", (end,), ()),
        (f"{model}<|channel>thought<channel|>", (), ()),
    ):  # fmt: skip
        found = after_reasoning(spec, prompt, RenderedChat([], text), state, off=False)
        assert (found.begin_after, found.begin_unless) == (after, unless), text


def test_prompt_of_a_real_template_opens_or_closes(shared_data: Any, load_renderer: Callable[..., Renderer]) -> None:
    template = load_renderer(Tokenizer.from_directory(shared_data / "tokenizers/qwen3"))
    choice = choose_parsers(template.source)
    assert choice == ParserChoice("hermes", "qwen3") and choice.think_tags is not None
    conversation = TemplateInput([{"role": "user", "content": "<think>"}], kwargs={"enable_thinking": False})
    prompt = template.render(conversation)
    assert not choice.think_tags.opened_by(prompt)
    assert parse_whole(choice.make(prompt=prompt), "x").reasoning is None


@pytest.mark.parametrize("family", REASONING_FAMILIES)
def test_any_text_survives(family: str) -> None:
    tags = REASONING_FAMILIES[family]
    rng = random.Random(family)
    for _ in range(100):
        text = "".join(
            rng.choices([tags.start, tags.end, " ", "\n", "a", tags.end[:3], *tags.markers(tools=True)], k=12)
        )
        whole = run(ParserChoice(reasoning=family), [text])
        assert run(ParserChoice(reasoning=family), list(text)) == whole
        kept = run(ParserChoice(reasoning=family), list(text), separate_reasoning=False)
        assert (kept.content or "") == text
        joined = (whole.reasoning or "") + (whole.content or "")
        left = text.replace(tags.start, "").replace(tags.end, "")
        assert sorted("".join(left.split())) == sorted(
            "".join(joined.replace(tags.start, "").replace(tags.end, "").split())
        )


MARKED = sorted(set(hostile_calls.FAMILIES) - {*CHANNELS, "llama3_json", "json", "pythonic"})
WRITE_TOOLS = ToolSet({"write": {"type": "object", "properties": {"path": {"type": "string"}}}})


@pytest.mark.parametrize("family", sorted(REASONING_FAMILIES))
def test_calls_and_tags_too_many_in_every_format(family: str) -> None:
    """A call within the thinking is a call, end tags about it are dropped, and second blocks are reasoning."""
    begin, end = REASONING_FAMILIES[family].start, REASONING_FAMILIES[family].end
    for name in sorted(set(hostile_calls.FAMILIES) - set(CHANNELS)):
        form = hostile_calls.FAMILIES[name]
        call = form.write([hostile_calls.Call("write", {"path": "a"})], [""], random.Random(1))
        for text, content, reasoning in (
            (f"{begin}hm{end}{call}", None, "hm"),
            (f"{begin}hm{end}\n{begin} so {end}{end}\n{call}", None, "hm\nso"),
            (f"{begin}hm{end}{call}{begin}so{end}Hi", "Hi", "hm\nso"),
            *([(f"{begin}hm {call}{end}\nDone.", "Done.", "hm"), (f"{begin}hm {call}", None, "hm")]
              if name in MARKED else ()),
        ):  # fmt: skip
            for deltas in ([text], list(text)):
                output = run(ParserChoice(form.parser, family), deltas, tools=WRITE_TOOLS)
                assert (output.content, output.reasoning) == (content, reasoning), (name, text)
                assert [each.arguments for each in output.tool_calls] == ['{"path": "a"}'], (name, text)
