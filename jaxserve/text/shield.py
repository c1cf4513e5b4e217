"""Marks on texts of users that look like special tokens, so that they are encoded as plain text after rendering."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

# A Unicode noncharacter, not allowed in interchange: it marks the places where a special token must not be read.
SHIELD = "\ufdd0"


class Shield:
    """Marks what looks like a special token.

    texts: of the special tokens.

    Attributes:
        pattern: finds one of them
    """

    def __init__(self, texts: Iterable[str]) -> None:
        longest_first = sorted(texts, key=len, reverse=True)
        self.pattern = re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")

    def text(self, text: str) -> str:
        """Mark the special tokens in a text. Marks that it already has are dropped."""
        text = text.replace(SHIELD, "")
        return self.pattern.sub(lambda match: match[0][0] + SHIELD + match[0][1:], text)

    def value(self, value: Any) -> Any:
        """Mark the special tokens in the strings of a JSON value, except those of the keys role and type."""
        if isinstance(value, str):
            return self.text(value)
        if isinstance(value, list):
            return [self.value(item) for item in value]
        if isinstance(value, dict):
            return {key: item if key in ("role", "type") else self.value(item) for key, item in value.items()}
        return value
