"""Cache the text of single tokens for all answers of one server."""

from __future__ import annotations

from jaxserve.text.tokenizer import Tokenizer


class TokenTexts:
    """Cache of the text and bytes of single tokens."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._texts: dict[int, str] = {}

    def text(self, token_id: int) -> str:
        """Decode the token's bytes; an incomplete character becomes U+FFFD."""
        found = self._texts.get(token_id)
        if found is None:
            found = self._texts[token_id] = self._tokenizer.token_bytes(token_id).decode("utf-8", "replace")
        return found

    def bytes(self, token_id: int) -> list[int]:
        return list(self._tokenizer.token_bytes(token_id))

    def name(self, token_id: int, as_id: bool) -> str:
        return f"token_id:{token_id}" if as_id else self.text(token_id)
