"""Parsers of tool calls give back exactly what a family's template writes: hostile values, short strings, mutants."""

import importlib
import importlib.util
import itertools
import json
import logging
import random
import sys
from collections.abc import Iterator, Mapping
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, SourceFileLoader
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from jaxserve.text import tools as tools_package
from jaxserve.text.events import OutputParser
from jaxserve.text.output_parser import REASONING_FAMILIES, ParserChoice
from jaxserve.text.tools.channels import CHANNELS
from jaxserve.text.tools.registry import TOOL_FORMATS
from tests.text.hostile_calls import (
    FAMILIES,
    FORGOT,
    TOOLS,
    TWO_CALLS,
    TWO_READINGS,
    Call,
    hostile_call,
    hostile_text,
    is_ambiguous,
)
from tests.text.whole_outputs import ParsedOutput

MANY = 10_000
QUICK = 100


def thinking_of(family: str, rng: random.Random) -> tuple[str, str]:
    """Return reasoning, and the text that it is written as."""
    reasoning = FAMILIES[family].reasoning
    if reasoning is None or rng.random() < 0.5:
        return "", ""
    thought = "".join(hostile_text(rng).split()) or "hm"
    marks = ("<", "[", "{", "Here")  # a call may end the thinking
    thought = thought if not any(mark in thought for mark in marks) else "I think: " + thought.translate(_NO_TAGS)
    if reasoning == "harmony":
        return thought, f"<|channel|>analysis<|message|>{thought}<|end|><|start|>assistant"
    if reasoning == "muse_glimmer":
        return thought, f" to=self<|message|>{thought}<|eom|><|start|>assistant"
    tags = REASONING_FAMILIES[reasoning]
    return thought, f"{tags.start}{thought}{tags.end}"


_NO_TAGS = str.maketrans(dict.fromkeys("<[{", "("))


def text_for(family: str, rng: random.Random) -> str:
    text = hostile_text(rng)
    own = (*FAMILIES[family].own, "<think>", "</think>")
    return "" if any(mark in text for mark in own) or rng.random() < 0.3 else text


class Sample:
    """One output of a family, and what it means."""

    def __init__(self, family: str, rng: random.Random) -> None:
        form = FAMILIES[family]
        count = 1 if form.single else rng.choice([1, 1, 2, 3])
        calls = (call for call in iter(lambda: hostile_call(rng), None) if not is_ambiguous(family, call))
        self.calls = list(itertools.islice(calls, count))
        texts = [text_for(family, rng) if form.with_text and (i == 0 or form.between) else "" for i in range(count)]
        self.thought, thinking = thinking_of(family, rng)
        self.content = "".join("".join(texts).split())
        self.text = thinking + form.write(self.calls, texts, rng)

    def check(self, output: ParsedOutput) -> None:
        found = [(call.name, read(call.arguments, custom=call.custom)) for call in output.tool_calls]
        wanted = [(call.name, items(call)) for call in self.calls]
        assert found == wanted, (self.text, found, wanted)
        assert "".join((output.content or "").split()) == self.content, (self.text, output.content)
        assert "".join((output.reasoning or "").split()) == "".join(self.thought.split()), (self.text, output.reasoning)


def read(arguments: str, *, custom: bool) -> Any:
    return arguments if custom else json.loads(arguments, object_pairs_hook=list)


def items(call: Call) -> Any:
    """Arguments with the order and the number of their keys."""
    text = json.dumps(call.arguments)
    return call.arguments if isinstance(call.arguments, str) else json.loads(text, object_pairs_hook=list)


def parser_of(family: str) -> OutputParser:
    form = FAMILIES[family]
    return ParserChoice(form.parser, form.reasoning).make(tools=TOOLS)


def parsed(parser: OutputParser, text: str, sizes: Iterator[int]) -> ParsedOutput:
    output, at = ParsedOutput(), 0
    while at < len(text):
        size = next(sizes)
        output.add(parser.feed(text[at : at + size]))
        at += size
    output.add(parser.finish(whole=True))
    assert output.all_ended
    return output


def random_sizes(rng: random.Random) -> Iterator[int]:
    return iter(lambda: rng.choice([1, 1, 2, 3, 7, 40]), 0)


def check_family(family: str, count: int) -> None:
    rng = random.Random(family)
    for _ in range(count):
        sample = Sample(family, rng)
        sample.check(parsed(parser_of(family), sample.text, itertools.repeat(10**9)))
        sample.check(parsed(parser_of(family), sample.text, random_sizes(rng)))


@pytest.mark.parametrize("family", FAMILIES)
def test_hostile_values_come_back_as_they_are(family: str) -> None:
    check_family(family, QUICK)


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_ten_thousand_outputs_with_hostile_values(family: str) -> None:
    check_family(family, MANY)


def test_every_format_has_a_generator() -> None:
    assert {form.parser for form in FAMILIES.values()} == set(TOOL_FORMATS)


@pytest.mark.parametrize("family, text, other, forgot", TWO_READINGS)
def test_what_is_listed_as_ambiguous_has_two_readings(
    family: str, text: Mapping[str, Any], other: Mapping[str, Any], forgot: str
) -> None:
    write, rng = FAMILIES[family].write, random.Random(1)
    one, two = (write([Call("write", dict(arguments))], [""], rng) for arguments in (text, other))
    assert one == (two.replace(f"\n{FORGOT}", "", 1) if forgot else two).replace("None", "null")
    assert is_ambiguous(family, Call("write", dict(text))) and not is_ambiguous(family, Call("write", dict(other)))


@pytest.mark.parametrize("family, text", TWO_CALLS.items())
def test_a_text_with_the_end_of_a_call_and_another_is_ambiguous(family: str, text: str) -> None:
    rng = random.Random(1)
    one = FAMILIES[family].write([Call("write", {"path": text})], [""], rng)
    calls = [Call("write", {"path": path}) for path in "ab"]
    two = {FAMILIES[family].write(calls, ["", ""], random.Random(seed)) for seed in range(9)}
    assert one in two and is_ambiguous(family, Call("write", {"path": text}))


# --- every short string of the pieces of a format

PIECES = {
    "hermes": ["<tool_call>", "</tool_call>", '{"name": "now"', ', "arguments": {', "}", "x", "\n"],
    "qwen3_coder": ["<tool_call>", "<function=write>", "<parameter=path>", "</parameter>", "</function>",
                    "</tool_call>", "\n", "x"],
    "glm45": ["<tool_call>", "write", "<arg_key>", "path", "</arg_key>", "<arg_value>", "</arg_value>", "</tool_call>"],
    "deepseek_v32": ["<｜DSML｜function_calls>", '<｜DSML｜invoke name="write">', "\n", "</｜DSML｜invoke>",
                     '<｜DSML｜parameter name="path" string="true">', "</｜DSML｜parameter>"],
    "deepseek_v3": ["<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>", "now", "<｜tool▁sep｜>", "{}",
                    "<｜tool▁call▁end｜>", "```"],
    "kimi_k2": ["<|tool_calls_section_begin|>", "<|tool_call_begin|>", "functions.now:0",
                "<|tool_call_argument_begin|>", "{}", "<|tool_call_end|>"],
    "mistral": ["[TOOL_CALLS]", "now", "[ARGS]", "{", "}", "[", ']', '"name": "now"'],
    "llama3_json": ["<|python_tag|>", "{", "}", '"name": "now"', ";", '"parameters": ', "["],
    "json": ["[", "]", "{", "}", '"name": "now"', ", "],
    "pythonic": ["[", "now(", ")", "]", "write(path=", "'", ","],
    "granite": ["<|tool_call|>", "[", "]", '{"name": "now"', "}", ","],
    "internlm": ["<|action_start|>", "<|plugin|>", '{"name": "now"', "}", "<|action_end|>"],
    "phi4_mini_json": ["functools", "[", "]", '{"name": "now"', "}", ","],
    "seed_oss": ["<seed:tool_call>", "<function=write>", "<parameter=path>", "</parameter>", "</function>",
                 "</seed:tool_call>", "\n", "x"],
    "mimo": ["<tool_call>", "<function=write>", "<parameter=path>", "</parameter>", "</function>", "</tool_call>",
             "\n", "x"],
    "hy_v3": ["<tool_calls:opensource>", "<tool_call:opensource>", "write", "<tool_sep:opensource>",
              "<arg_key:opensource>", "path", "<arg_value:opensource>", "</tool_call:opensource>"],
    "minimax_m2": ["<minimax:tool_call>", '<invoke name="write">', "\n", "</invoke>", '<parameter name="path">',
                   "</parameter>", "</minimax:tool_call>"],
    "gemma4": ["<|tool_call>", "call:write", "{", "path:", '<|"|>', "}", ",", "<tool_call|>"],
    "apertus": ["<|tools_prefix|>", "[", "]", '{"now": ', "{", "}", "<|tools_suffix|>"],
    "lfm2": ["<|tool_call_start|>", "[", "now(", ")", "]", "write(path=", "'", "<|tool_call_end|>"],
    "olmo3": ["<function_calls>", "now(", ")", "\n", "write(path=", '"', "</function_calls>"],
    "nemotron_json": ["<TOOLCALL>", "[", "]", '{"name": "now"', "}", "</TOOLCALL>"],
    "jamba": ["<tool_calls>", "[", "]", '{"name": "now"', "}", "</tool_calls>"],
    "harmony": ["<|channel|>", "commentary to=functions.now", "<|message|>", "{", "}", "<|call|>", "<|start|>"],
    "muse_glimmer": [" to=now", "<|message|>", "<atem:function_calls>", '<atem:invoke name="now">', "</atem:invoke>",
                     "<|eom|>", "<|start|>", " to=self"],
}  # fmt: skip


def check_short_strings(family: str, length: int, caplog: pytest.LogCaptureFixture) -> None:
    """Nothing raises, cuts do not matter, and of an output without calls nothing is lost."""
    caplog.set_level(logging.ERROR)
    for pieces in itertools.product(PIECES[family], repeat=length):
        text = "".join(pieces)
        whole, cut = (
            parsed(ParserChoice(tool=family).make(tools=TOOLS), text, itertools.repeat(size)) for size in (10**9, 1)
        )
        assert shape(whole) == shape(cut), text
        if family not in CHANNELS and not whole.tool_calls:
            assert (whole.content or "") == text
        for call in whole.tool_calls:
            assert call.name in TOOLS, text
    assert not caplog.records


def shape(output: ParsedOutput) -> tuple[Any, ...]:
    return output.content, output.reasoning, [(call.name, call.arguments, call.custom) for call in output.tool_calls]


@pytest.mark.parametrize("family", PIECES)
@pytest.mark.parametrize("length", [1, 2, 3])
def test_every_short_string(family: str, length: int, caplog: pytest.LogCaptureFixture) -> None:
    check_short_strings(family, length, caplog)


@pytest.mark.slow
@pytest.mark.parametrize("family", PIECES)
@pytest.mark.parametrize("length", [4, 5])
def test_every_longer_string(family: str, length: int, caplog: pytest.LogCaptureFixture) -> None:
    check_short_strings(family, length, caplog)


# --- mutants: each file with one change, which the generator must find

# file of jaxserve/text, a line's text, what it becomes, a family whose calls show it
MUTANTS = [
    ("tools/xml.py", "and key not in self.given and", "and", "qwen3_coder"),
    ("tools/xml.py", "key not in self.given and self.parser.tools.declares", "self.parser.tools.declares",
     "qwen3_coder"),
    ("tools/xml.py", "self.parser.tools.declares(self.name, key))", "True)", "qwen3_coder"),
    ("tools/xml.py", "if (yield from self.reader.ahead(self.ends(tag))):", "if True:", "qwen3_coder"),
    ("tools/xml.py", "if (yield from self.reader.ahead(self.ends(tag))):", "if True:", "glm47"),
    ("tools/xml.py", "if (yield from self.reader.ahead(self.ends(tag))):", "if True:", "deepseek_v32"),
    ("tools/xml.py", "if is_end and not strings.inside:", "if is_end:", "qwen3_coder"),
    ("tools/xml.py", "if is_end and not strings.inside:", "if not strings.inside:", "glm45"),
    ("tools/xml.py", "if first is not None and not (tag and is_value(value, types)):", "if False:", "qwen3_coder"),
    ("tools/xml.py", 'self._escaped = char == "\\\\"', "self._escaped = False", "glm45"),
    ("tools/xml.py", 'held = "\\n" if self.on_own_lines and piece.endswith("\\n") else ""', 'held = ""',
     "qwen3_coder"),
    ("tools/xml.py", "while end != self._value_begin and", "while", "glm45"),
    ("tools/xml.py", "return not self._wrapped or bool((yield from self._behind()))", "return True",
     "qwen3_coder"),
    ("tools/xml.py", 'self.given.add(key)', "pass", "deepseek_v32"),
    ("tools/xml.py", 'if is_text or (is_text is None and types == {"string"}):', "if is_text:", "glm47"),
    ("tools/xml.py", "return self.reader.ended or (yield from self._another_call())", "return True", "glm47"),
    ("tools/base.py", "yield from self.reader.accept(\";\", \",\")", "pass", "llama3_json"),
    ("tools/base.py", 'if (yield from self.reader.accept("]")):', 'if (yield from self.reader.accept("}")):',
     "granite"),
    ("tools/kimi.py", "whole = yield from self.json_arguments()", "whole = False", "kimi_k2"),
    ("reader.py", "min(end + (2 if", "min(end + (1 if", "hermes"),
    ("reader.py", "return _CONTROL.sub(", "return text + _CONTROL.sub(", "mistral"),
    ("reader.py", "if closing != char:", "if closing == char:", "jamba"),
    ("reader.py", "self._at = self._holds.pop()", "self._holds.pop()", "glm47"),
    ("reader.py", "self._at -= start", "self._at = 0", "qwen3_coder"),
    ("reader.py", "if open_ends and not self.closed:", "if False:", "internlm"),
    ("tools/literals.py", "out += _ESCAPE.sub(_unescape, match[\"text\"])", "out += match[\"text\"]", "pythonic"),
    ("tools/deepseek.py", 'yield from self.reader.accept("```json", "```", drop_partial=True)', "pass", "deepseek_v3"),
    ("tools/xml.py", "if (yield from self.reader.ahead(self.ends(tag))):", "if True:", "minimax_m2"),
    ("tools/xml.py", "on_own_lines = False", "on_own_lines = True", "seed_oss"),
    ("tools/xml.py", "self.call_tags = self.forgotten = (self._end,)", "self.call_tags = ()", "hy_v3"),
    ("tools/gemma.py", "if (yield from self.reader.ahead(self._ends_text())):", "if True:", "gemma4"),
    ("tools/gemma.py", "self._write(json.dumps(piece, ensure_ascii=False)[1:-1])", "self._write(piece)", "gemma4"),
    ("tools/gemma.py", "self._write(before + as_json(text.strip(), types))", "self._write(before + text)", "gemma4"),
    ("tools/pythonic.py", "while (yield from self._call()):", "if (yield from self._call()):", "lfm2"),
    ("tools/pythonic.py", 'begin, closing, end = "<function_calls>", "</function_calls>", ""',
     'begin, closing, end = "<function_calls>", "]", ""', "olmo3"),
    ("tools/json_tags.py", 'if (yield from self.reader.peek()) != "{":', 'if (yield from self.reader.peek()) == "{":',
     "apertus"),
    ("tools/mistral.py", "yield from self.reader.accept(ARGS)", "pass", "mistral_named"),
    ("tools/channels.py", "return last if name not in self.tools and last in self.tools else name", "return name",
     "muse_glimmer"),
    ("tools/channels.py", 'elif recipient in ("", "user"):', "elif not recipient:", "muse_glimmer"),
    ("tools/channels.py", "(*self._behind, *parser.ends, START)", "parser.ends", "muse_glimmer"),
]  # fmt: skip


class Mutated(MetaPathFinder):
    """Loads the modules of the parsers anew, one of them changed."""

    def __init__(self, path: Path, old: str, new: str) -> None:
        self.path, self.old, self.new = path, old, new

    def find_spec(self, fullname: str, path: Any, target: ModuleType | None = None) -> ModuleSpec | None:
        if fullname != self.module:
            return None
        mutant = self

        class Changed(SourceFileLoader):
            def get_code(self, fullname: str) -> Any:
                return self.source_to_code(mutant.source.encode(), str(mutant.path))

        return importlib.util.spec_from_file_location(fullname, self.path, loader=Changed(fullname, str(self.path)))

    @property
    def module(self) -> str:
        return "jaxserve." + ".".join(
            self.path.with_suffix("").parts[-(3 if self.path.parent.name == "tools" else 2) :]
        )

    @property
    def source(self) -> str:
        text = self.path.read_text()
        assert self.old in text, f"{self.old!r} is not in {self.path.name}: write the mutant anew"
        return text.replace(self.old, self.new, 1)

    def parsers(self) -> dict[str, type]:
        """Return the parsers of each format, made from the changed file."""
        own = _forget()
        before = dict(vars(sys.modules["jaxserve.text"]))  # a module is an attribute of its package too
        sys.meta_path.insert(0, self)
        try:
            registry = importlib.import_module("jaxserve.text.tools.registry")
            return {name: form.parser for name, form in registry.TOOL_FORMATS.items()}
        finally:
            sys.meta_path.remove(self)
            _forget()
            sys.modules.update(own)
            vars(sys.modules["jaxserve.text"]).update(before)


def _forget() -> dict[str, ModuleType]:
    """Return the loaded modules of the parsers, which the next import loads anew."""
    names = [name for name in sys.modules if name.startswith(("jaxserve.text.tools", "jaxserve.text.reader"))]
    return {name: sys.modules.pop(name) for name in names}


@pytest.mark.slow
@pytest.mark.parametrize("file, old, new, family", MUTANTS)
def test_mutants_are_found(file: str, old: str, new: str, family: str) -> None:
    parser = Mutated(Path(tools_package.__path__[0]).parent / file, old, new).parsers()[FAMILIES[family].parser]
    rng = random.Random(family)
    for _ in range(QUICK * 40):
        sample = Sample(family, rng)
        if sample.thought:  # is not read by these parsers
            continue
        try:
            sample.check(parsed(parser(TOOLS), sample.text, itertools.repeat(10**9)))
            sample.check(parsed(parser(TOOLS), sample.text, random_sizes(rng)))
        except (AssertionError, ValueError):
            return
    pytest.fail("no call showed the mutant")
