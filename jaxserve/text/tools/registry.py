"""The tool formats, collected from the modules of this folder."""

from __future__ import annotations

import importlib
import pkgutil
from types import MappingProxyType

from jaxserve.text import tools
from jaxserve.text.tools.format import ToolFormat


def _declared() -> list[ToolFormat]:
    modules = [
        importlib.import_module(f"{tools.__name__}.{each.name}") for each in pkgutil.iter_modules(tools.__path__)
    ]
    return [each for module in modules for each in getattr(module, "FORMATS", ())]


TOOL_FORMATS = MappingProxyType({each.name: each for each in _declared()})
_BY_SIGN = sorted(TOOL_FORMATS.values(), key=lambda each: each.general)


def known_tool_formats() -> dict[str, str]:
    """Return {name or alias: name} of all formats."""
    return {alias: each.name for each in TOOL_FORMATS.values() for alias in (each.name, *each.aliases)}


def tool_format_of_template(template: str) -> str | None:
    """Return the name of the format that a chat template's text shows; None if it shows none."""
    if "<|channel|>" in template and "<|start|>" in template:
        return "harmony"
    return next((each.name for each in _BY_SIGN if any(sign in template for sign in each.signs)), None)
