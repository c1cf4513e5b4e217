"""When a sequence has thought for as long as it may."""

from __future__ import annotations

from collections.abc import Collection

from jaxserve.text.reasoning.think import ThinkParser, ThinkTags


class ThinkingLimit:
    """Counts the tokens of one output, and follows its text, until the thinking is over or has taken too long.

    tokens: how many the output may have before its thinking is ended
    inside: the prompt leaves the model within its thinking; else the output may open it
    tools: names of the request's tools, whose calls end the thinking too
    """

    def __init__(self, tags: ThinkTags, tokens: int, *, inside: bool, tools: Collection[str] = ()) -> None:
        self._parser = ThinkParser(tags, inside=inside, tools=tools)
        self._left = tokens

    @property
    def exceeded(self) -> bool:
        """The output still thinks and has had all its tokens."""
        return self._left <= 0 and self._parser.thinking is True

    def add(self, text: str) -> None:
        """Take one token's text. Time is linear in the text of the thinking."""
        self._left -= 1
        if text and self._parser.thinking is not False:
            self._parser.feed(text)
