"""Reasoning parsers by name. gpt-oss's channels carry reasoning and calls at once: see text/output/harmony.py."""

from dataclasses import replace

from jaxserve.text.reasoning.limit import ThinkingLimit
from jaxserve.text.reasoning.think import CallOpening, LaterThoughts, ThinkParser, ThinkTags

__all__ = [
    "REASONING_ALIASES",
    "REASONING_FAMILIES",
    "CallOpening",
    "LaterThoughts",
    "ThinkParser",
    "ThinkTags",
    "ThinkingLimit",
    "reasoning_of_template",
    "think_tags",
]

# format of calls -> how a call begins that ends the thinking without its closing tag
_CALLS: dict[str, tuple[CallOpening, ...]] = {
    **dict.fromkeys(("hermes", "qwen3_coder"), (CallOpening("<tool_call>", ("{", "[{", "<function=")),)),
    "glm45": (CallOpening("<tool_call>", ("<arg_key>", "</tool_call>"), named=True),),
    "kimi_k2": tuple(
        CallOpening(section, ("<|tool_call_begin|>",))
        for section in ("<|tool_calls_section_begin|>", "<|tool_call_section_begin|>")
    ),
    "deepseek_v3": (
        CallOpening("<｜tool▁calls▁begin｜>", ("<｜tool▁call▁begin｜>",)),
        CallOpening("<｜tool▁call▁begin｜>", ("<｜tool▁sep｜>",), named=True, unnamed=("function<｜tool▁sep｜>",)),
    ),
    "deepseek_v32": tuple(
        CallOpening(section, ("<｜DSML｜invoke",)) for section in ("<｜DSML｜function_calls>", "<｜DSML｜tool_calls>")
    ),
    "mistral": (
        CallOpening("[TOOL_CALLS]", ("{", "[ARGS]", "[CALL_ID]"), named=True, unnamed=('{"', "{ ", "{\n", "[{")),
    ),
    "granite": (CallOpening("<|tool_call|>", ("{", "[{")),),
    "internlm": (CallOpening("<|action_start|>", ("<|plugin|>",)),),
    "jamba": (CallOpening("<tool_calls>", ("{", "[{")),),
}

REASONING_FAMILIES: dict[str, ThinkTags] = {
    "qwen3": ThinkTags(calls=_CALLS["hermes"]),
    "deepseek_r1": ThinkTags(always=True),
    "deepseek_v3": ThinkTags(),
    "glm45": ThinkTags(calls=_CALLS["glm45"]),
    "kimi_k2": ThinkTags(calls=_CALLS["kimi_k2"]),
    "kimi": ThinkTags("◁think▷", "◁/think▷"),
    "mistral": ThinkTags("[THINK]", "[/THINK]"),
    "seed_oss": ThinkTags("<seed:think>", "</seed:think>"),
    "cohere": ThinkTags("<|START_THINKING|>", "<|END_THINKING|>"),
    "granite": ThinkTags("Here is my thought process:", "Here is my response:"),
}


def think_tags(family: str | None, tool: str | None = None) -> ThinkTags | None:
    """Return the tags of a family of REASONING_FAMILIES, with the calls of the format `tool`; None for any other."""
    tags = REASONING_FAMILIES.get(family or "")
    return replace(tags, calls=_CALLS[tool]) if tags is not None and tool in _CALLS else tags


# names that users of SGLang and vLLM know
REASONING_ALIASES: dict[str, str] = {
    "qwen": "qwen3",
    "qwen3_thinking": "deepseek_r1",
    "deepseek": "deepseek_r1",
    "deepseek_v31": "deepseek_v3",
    "deepseek_v32": "deepseek_v3",
    "glm": "glm45",
    "glm47": "glm45",
    "holo2": "qwen3",
    "nano_v3": "deepseek_v3",
    "nemotron_v3": "deepseek_v3",
    "think": "deepseek_v3",
    "step3": "deepseek_r1",
    "minimax": "deepseek_r1",
    "minimax_m2": "deepseek_r1",
    "interns1": "qwen3",
    "olmo3": "deepseek_v3",
    "ernie45": "deepseek_v3",
    "magistral": "mistral",
    "gpt_oss": "harmony",
    "openai_gptoss": "harmony",
}


def reasoning_of_template(template: str) -> str | None:
    """Return the family that a chat template's text shows, or None."""
    if "<|channel|>" in template and "<|start|>" in template:
        return "harmony"
    if "</think>" in template or "<think>" in template:
        return _think_family(template)
    by_tag = {tags.start: name for name, tags in REASONING_FAMILIES.items() if tags.start != "<think>"}
    return next((name for tag, name in by_tag.items() if tag in template), None)


def _think_family(template: str) -> str:
    """Return the key in REASONING_FAMILIES of a template with <think> tags.

    These families differ in the tool calls that end the reasoning without </think>. deepseek_r1 is never returned: a
    template does not show that the model thinks without an opening tag.
    """
    if "<|tool_calls_section_begin|>" in template:
        return "kimi_k2"
    if "<arg_key>" in template:
        return "glm45"
    if "<tool_call>" in template:
        return "qwen3"
    return "deepseek_v3"
