"""The request fields of the installed SDKs' own types, one a line: `API path`. Runs in a client's environment too.

`python -m tests.clients.sdk_fields` prints them. A path goes into objects and lists: `tools.function.name`.
"""

from __future__ import annotations

import importlib
import sys
import types
import typing
from collections.abc import Iterator
from typing import Any

from typing_extensions import TypeAliasType, get_type_hints, is_typeddict  # a dependency of each of the SDKs

MAX_DEPTH = 3  # objects in objects; what is deeper is a JSON schema or a message of its own

# API -> module and name of the type of its body; a union is of the streamed and the whole form
SOURCES = {
    "chat": ("openai.types.chat.completion_create_params", "CompletionCreateParams"),
    "completions": ("openai.types.completion_create_params", "CompletionCreateParams"),
    "embeddings": ("openai.types.embedding_create_params", "EmbeddingCreateParams"),
    "responses": ("openai.types.responses.response_create_params", "ResponseCreateParams"),
    "messages": ("anthropic.types.beta.message_create_params", "MessageCreateParams"),
    "ollama chat": ("ollama._types", "ChatRequest"),
    "ollama generate": ("ollama._types", "GenerateRequest"),
    "ollama embed": ("ollama._types", "EmbedRequest"),
    "ollama embeddings": ("ollama._types", "EmbeddingsRequest"),
}
_HEADERS = {"betas", "user_profile_id"}  # arguments that the SDK sends as headers
_MESSAGES = {"messages", "input", "system", "instructions", "context"}  # conversations: read by `type`, see the slices


def fields(api: str) -> list[str]:
    """Return the paths of an API's fields, sorted. Raises ImportError if its SDK is not installed."""
    module, name = SOURCES[api]
    kind = getattr(importlib.import_module(module), name)
    return sorted(path for path in set(_paths(kind, "", 0)) if path not in _HEADERS)


def _paths(kind: Any, prefix: str, depth: int) -> Iterator[str]:
    for each in _objects(kind):
        for name, inner in _members(each).items():
            path = prefix + name
            yield path
            if depth < MAX_DEPTH and path not in _MESSAGES:
                yield from _paths(inner, f"{path}.", depth + 1)


def _objects(kind: Any) -> Iterator[Any]:
    """Yield the objects that a type may have: itself, the members of a union, the items of a list."""
    if is_typeddict(kind) or _is_model(kind):
        yield kind
    elif isinstance(kind, TypeAliasType):
        yield from _objects(kind.__value__)
    elif typing.get_origin(kind) not in (dict, None):
        for each in typing.get_args(kind):
            yield from _objects(each)


def _is_model(kind: Any) -> bool:
    return isinstance(kind, type) and not isinstance(kind, types.GenericAlias) and "model_fields" in dir(kind)


def _members(kind: Any) -> dict[str, Any]:
    if is_typeddict(kind):
        return get_type_hints(kind)
    return {field.alias or name: field.annotation for name, field in kind.model_fields.items()}


if __name__ == "__main__":
    for each in sys.argv[1:] or SOURCES:
        for found in fields(each):
            print(each, found, sep="\t")
