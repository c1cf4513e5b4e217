"""Tool-call parsers by name."""

from jaxserve.text.tools.base import ToolParser, ToolSet
from jaxserve.text.tools.deepseek import DeepSeekParser
from jaxserve.text.tools.json_tags import GraniteParser, HermesParser, InternLMParser, JambaParser, Phi4MiniParser
from jaxserve.text.tools.kimi import KimiParser
from jaxserve.text.tools.llama import LlamaJsonParser
from jaxserve.text.tools.mistral import MistralParser
from jaxserve.text.tools.pythonic import PythonicParser
from jaxserve.text.tools.xml import DsmlParser, GlmParser, Qwen3CoderParser

__all__ = ["TOOL_ALIASES", "TOOL_FAMILIES", "ToolParser", "ToolSet", "tool_family_of_template"]

TOOL_FAMILIES: dict[str, type[ToolParser]] = {
    "hermes": HermesParser,
    "qwen3_coder": Qwen3CoderParser,
    "llama3_json": LlamaJsonParser,
    "mistral": MistralParser,
    "deepseek_v3": DeepSeekParser,
    "deepseek_v32": DsmlParser,
    "glm45": GlmParser,
    "kimi_k2": KimiParser,
    "pythonic": PythonicParser,
    "granite": GraniteParser,
    "internlm": InternLMParser,
    "phi4_mini_json": Phi4MiniParser,
    "jamba": JambaParser,
    # for models without a format of their own: calls as plain JSON, which the grammar makes them write
    "json": LlamaJsonParser,
}

# names that users of SGLang and vLLM know
TOOL_ALIASES: dict[str, str] = {
    "qwen": "hermes",
    "qwen25": "hermes",
    "qwen3": "hermes",
    "qwen3_xml": "qwen3_coder",
    "llama3": "llama3_json",
    "llama4": "llama3_json",
    "llama4_json": "llama3_json",
    "llama4_pythonic": "pythonic",
    "toolace": "pythonic",
    "olmo3": "pythonic",
    "deepseekv3": "deepseek_v3",
    "deepseekv31": "deepseek_v3",
    "deepseek_v31": "deepseek_v3",
    "deepseekv32": "deepseek_v32",
    "glm": "glm45",
    "glm47": "glm45",
    "kimi": "kimi_k2",
    "phi4_mini": "phi4_mini_json",
    "openai": "harmony",
    "gpt_oss": "harmony",
}

# the first text found in a template names the family; special ones come before general ones
_TEMPLATE_SIGNS: tuple[tuple[str, str], ...] = (
    ("<|tool_calls_section_begin|>", "kimi_k2"),
    ("｜DSML｜", "deepseek_v32"),
    ("<｜tool▁calls▁begin｜>", "deepseek_v3"),
    ("<arg_key>", "glm45"),
    ("<function=", "qwen3_coder"),
    ("[TOOL_CALLS]", "mistral"),
    ("<tool_calls>", "jamba"),
    ("<tool_call>", "hermes"),
    ("<|tool_call|>", "granite"),
    ("functools", "phi4_mini_json"),
    ("<|action_start|>", "internlm"),
    ("<|python_start|>", "pythonic"),
    ("[func_name1(", "pythonic"),
    ("<|python_tag|>", "llama3_json"),
    ('{"name": function name, "parameters"', "llama3_json"),
)


def tool_family_of_template(template: str) -> str | None:
    """The family that a chat template's text shows, or None."""
    if "<|channel|>" in template and "<|start|>" in template:
        return "harmony"
    return next((name for sign, name in _TEMPLATE_SIGNS if sign in template), None)
