"""Where a model's chat template comes from. Without Jinja, whose import takes 0.1 s of every start of an engine."""

from __future__ import annotations

from pathlib import Path

from jaxserve.errors import ConfigError
from jaxserve.text.tokenizer import Tokenizer


def template_sources(tokenizer: Tokenizer, override: str | None) -> tuple[str, str | None] | None:
    """Return the text of the template that is used, and of its variant for requests with tools, if there is one."""
    if override is not None:
        return _read_override(override), None
    templates = tokenizer.chat_templates
    if not templates:
        return None
    return templates.get("default") or next(iter(templates.values())), templates.get("tool_use")


def _read_override(value: str) -> str:
    """`value` is a path unless it can only be a template."""
    if "{%" in value or "{{" in value or "\n" in value:
        return value
    try:
        return Path(value).expanduser().read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"model.chat_template: {value!r} is neither a readable file nor a Jinja template ({error})",
            fix="give a path to a .jinja file or the template's text",
        ) from error
