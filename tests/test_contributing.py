"""CONTRIBUTING.md is true: its examples work in one file each, and its numbers of touched files hold."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
TEXT = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")

FAMILY_IMPORTS = """
from typing import Any

from jaxserve.models.families.llama import LlamaForCausalLM
from jaxserve.models.family import Family
from jaxserve.models.checkpoint.read_config import Json, head_dim_or
"""
BUILD_FAMILY = """
import sys

from jaxserve.models import families

families.__path__.append(sys.argv[1])

import jax.numpy as jnp

from jaxserve.models.checkpoint.hf_config import from_hf
from jaxserve.models.checkpoint.structure import build
from tests.models.families import CASES

config = from_hf(CASES["llama3"] | {"architectures": ["ExampleForCausalLM"]})
names = {spec.name for spec in build(config, jnp.dtype("float32")).specs}
print(config.qk_norm, "model.layers.2.self_attn.q_norm.weight" in names)
"""

FORMAT_IMPORTS = """
from jaxserve.text.tools.format import CallFormat, JsonCall, ToolFormat
from jaxserve.text.tools.json_tags import JsonTagParser
"""
USE_FORMAT = """
import sys

from jaxserve.text import tools

tools.__path__.append(sys.argv[1])

from jaxserve.grammar.tools import CallModel, GrammarTool, tool_grammar
from jaxserve.text.output_parser import choose_parsers
from tests.text.whole_outputs import parse_whole

choice = choose_parsers("{{ messages }} Write <call> before each call.")
parser = choice.make(tools=tools.ToolSet(parameters={"f": {}}))
(call,) = parse_whole(parser, '<call>{"name": "f", "arguments": {"x": 1}}</call>').tool_calls
spec = tool_grammar(CallModel(choice.tool), [GrammarTool("f")], required=True)
print(choice.tool, call.name, call.arguments, "<call>" in spec.source)
"""


def example(section: str) -> str:
    """The Python of a section, without its indentation."""
    text = TEXT.partition(f"\n## {section}\n")[2].partition("\n## ")[0]
    block = re.search(r"   ```python\n(.*?)   ```", text, re.DOTALL)
    assert block is not None
    return re.sub(r"^   ", "", block[1], flags=re.MULTILINE)


def run(program: str, directory: Path) -> str:
    done = subprocess.run(
        [sys.executable, "-c", program, str(directory)], cwd=ROOT, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_a_family_is_one_file(tmp_path: Path) -> None:
    (tmp_path / "example.py").write_text(FAMILY_IMPORTS + example("A model family"))
    assert run(BUILD_FAMILY, tmp_path) == "head True"


def test_a_tool_format_is_one_file(tmp_path: Path) -> None:
    (tmp_path / "example.py").write_text(FORMAT_IMPORTS + example("A tool format"))
    assert run(USE_FORMAT, tmp_path) == 'example f {"x": 1} True'


@pytest.mark.parametrize("name", ["presence_penalty", "min_p", "routed_experts"])
def test_no_more_files_than_the_table_says_name_it(name: str) -> None:
    row = re.search(rf"^\|[^|]*counted for `{name}`[^|]*\| (\d+) \|", TEXT, re.MULTILINE)
    assert row is not None
    named = re.compile(rf"\b((return|prompt)_)?{name}\b")
    # lists of other APIs' parameters, and the keys of OpenAI's response object, which stay as they are
    others = (
        "api/known_fields.py",
        "ollama/protocol.py",
        "responses/protocol.py",
        "responses/task.py",
        "api/responses/protocol.py",
    )
    sources = [path for path in (ROOT / "jaxserve").rglob("*.py") if not str(path).endswith(others)]
    files = [path for path in sources if named.search(path.read_text("utf-8"))]
    assert len(files) <= int(row[1]), [str(path.relative_to(ROOT)) for path in files]
