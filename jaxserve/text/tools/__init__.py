"""Parsers of tool calls. One file per model family declares its formats; `registry` collects them."""

from jaxserve.text.tools.base import ToolParser, ToolSet

__all__ = ["ToolParser", "ToolSet"]
