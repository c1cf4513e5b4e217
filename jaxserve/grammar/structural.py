"""Structural tags: free text in which a trigger begins a part that must match a schema or a grammar.

The older form has `structures` and `triggers` (SGLang, vLLM, xgrammar), the newer one is a tree of `format`s.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from jaxserve.errors import InvalidSchemaError
from jaxserve.grammar.translate import MAX_SOURCE_BYTES, LarkWriter, between_slashes, loads, one_of, quoted
from jaxserve.types.sampling import GrammarSpec

MAX_TAGS = 256
MAX_DEPTH = 16
_EMPTY = '""'


def structural_tag_spec(tag: str | Mapping[str, Any], special_tokens: Mapping[str, int]) -> GrammarSpec:
    """Return the spec of a structural tag, as a Lark grammar.

    special_tokens: text -> id of the tokenizer's special tokens, which may occur in tags
    Raises InvalidSchemaError, which names the part that is wrong or not supported.
    """
    body = loads(tag, "the structural tag") if isinstance(tag, str) else dict(tag)
    if not isinstance(body, dict):
        raise _error("the structural tag must be an object")
    if len(json.dumps(body)) > MAX_SOURCE_BYTES:
        raise _error(f"the structural tag is larger than {MAX_SOURCE_BYTES} bytes")
    writer = LarkWriter(special_tokens)
    builder = _Formats(writer)
    start = builder.build(body["format"], 0) if "format" in body else _older_form(body, builder)
    return GrammarSpec(kind="lark", source=writer.finish(start))


def _error(message: str) -> InvalidSchemaError:
    return InvalidSchemaError(message, param="response_format")


def _older_form(body: Mapping[str, Any], builder: _Formats) -> str:
    structures, triggers = body.get("structures"), body.get("triggers")
    if not isinstance(structures, list) or not isinstance(triggers, list) or not structures:
        raise _error("a structural tag needs `format`, or lists `structures` and `triggers`")
    tags = []
    for structure in structures:
        if not isinstance(structure, dict):
            raise _error("each of structures must be an object")
        content = {"type": "json_schema", "json_schema": structure.get("schema", {})}
        tags.append({"begin": structure.get("begin"), "content": content, "end": structure.get("end")})
    return builder.triggered_tags({"triggers": triggers, "tags": tags}, 0)


class _Formats:
    """One method per format type. Each returns a Lark expression."""

    def __init__(self, writer: LarkWriter) -> None:
        self.writer = writer

    def build(self, node: Any, depth: int) -> str:
        """Return the expression of a format. Raises InvalidSchemaError if it is unknown or nested too deep."""
        if depth > MAX_DEPTH:
            raise _error(f"formats nested deeper than {MAX_DEPTH}")
        kind = node.get("type") if isinstance(node, dict) else None
        method = {
            "const_string": self.const_string,
            "json_schema": self.json_schema,
            "regex": self.regex,
            "any_text": self.any_text,
            "sequence": self.sequence,
            "or": self.either,
            "tag": self.tag,
            "triggered_tags": self.triggered_tags,
            "tags_with_separator": self.tags_with_separator,
        }.get(kind or "")
        if method is None:
            raise _error(f"structural tag: a format of type {kind!r} is not served")
        return method(node, depth)

    def const_string(self, node: Mapping[str, Any], depth: int) -> str:
        return quoted(_text(node, "value"))

    def json_schema(self, node: Mapping[str, Any], depth: int) -> str:
        return self.writer.schema(node.get("json_schema", {}))

    def regex(self, node: Mapping[str, Any], depth: int) -> str:
        return between_slashes(_text(node, "pattern"))

    def any_text(self, node: Mapping[str, Any], depth: int) -> str:
        return self.writer.text()

    def sequence(self, node: Mapping[str, Any], depth: int) -> str:
        parts = " ".join(self.build(item, depth + 1) for item in _list(node, "elements"))
        return self.writer.rule(parts)

    def either(self, node: Mapping[str, Any], depth: int) -> str:
        return one_of([self.build(item, depth + 1) for item in _list(node, "elements")])

    def tag(self, node: Mapping[str, Any], depth: int) -> str:
        begin = _text(node, "begin")
        return self.writer.rule(f"{self.writer.literal(begin)} {self._rest(node, depth)}")

    def triggered_tags(self, node: Mapping[str, Any], depth: int) -> str:
        """Match text, and after a trigger the rest of one of the tags that begin with it.

        Raises InvalidSchemaError if triggers and tags do not match or are too many.
        """
        triggers = [_checked_text(trigger, "triggers") for trigger in _list(node, "triggers")]
        tags = _list(node, "tags")
        if len(tags) > MAX_TAGS or len(triggers) > MAX_TAGS:
            raise _error(f"at most {MAX_TAGS} tags and triggers")
        options = []
        for trigger in triggers:
            rests = [self._after(tag, trigger, depth) for tag in tags if _text(tag, "begin").startswith(trigger)]
            if not rests:
                raise _error(f"no tag begins with the trigger {trigger!r}")
            options.append(self.writer.rule(f"{self.writer.text_until(trigger)} {one_of(rests)}"))
        loose = [tag for tag in tags if not any(_text(tag, "begin").startswith(trigger) for trigger in triggers)]
        if loose:
            raise _error(f"the tag {_text(loose[0], 'begin')!r} begins with no trigger")
        many = one_of(options)
        tail = self.writer.text_without(triggers)
        if node.get("stop_after_first"):
            return f"{many}" if node.get("at_least_one") else one_of([many, tail])
        return f"({many}){'+' if node.get('at_least_one') else '*'} {tail}"

    def tags_with_separator(self, node: Mapping[str, Any], depth: int) -> str:
        tag = one_of([self.tag(item, depth + 1) for item in _list(node, "tags")])
        separator = self.writer.literal(_text(node, "separator"))
        if node.get("stop_after_first"):
            return tag if node.get("at_least_one") else f"({tag})?"
        many = f"{tag} ({separator} {tag})*"
        return many if node.get("at_least_one") else f"({many})?"

    def _after(self, tag: Mapping[str, Any], trigger: str, depth: int) -> str:
        begin = _text(tag, "begin")[len(trigger) :]
        return self.writer.rule(f"{self.writer.literal(begin)} {self._rest(tag, depth)}")

    def _rest(self, tag: Mapping[str, Any], depth: int) -> str:
        """Return the expression for the content and the end of a tag."""
        content, ends = tag.get("content", {"type": "any_text"}), tag.get("end", "")
        ends = ends if isinstance(ends, list) else [ends]
        texts = [_checked_text(end, "end") for end in ends]
        if not texts:
            raise _error("structural tag: end is empty")
        if isinstance(content, dict) and content.get("type") == "any_text" and all(texts):
            return one_of([self.writer.text_until(end) for end in texts])
        closing = [self.writer.literal(text) for text in texts]
        return f"{self.build(content, depth + 1)} {one_of([end or _EMPTY for end in closing])}"


def _list(node: Mapping[str, Any], key: str) -> Sequence[Any]:
    value = node.get(key)
    if not isinstance(value, list) or not value:
        raise _error(f"structural tag: {key} must be a list that is not empty")
    return value


def _text(node: Any, key: str) -> str:
    return _checked_text(node.get(key) if isinstance(node, dict) else None, key)


def _checked_text(value: Any, key: str) -> str:
    if not isinstance(value, str):
        raise _error(f"structural tag: {key} must be a text")
    return value
