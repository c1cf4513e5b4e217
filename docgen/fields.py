"""Write docs/fields.md and docs/fields_of_others.md: what becomes of every known field of every API.

python -m docgen.fields
"""

from __future__ import annotations

import typing
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Literal, NamedTuple

from pydantic import BaseModel

from jaxserve.api.anthropic.protocol import CountTokensRequest, MessagesRequest
from jaxserve.api.fields import Body, NestedObject
from jaxserve.api.known_fields import EVERYWHERE
from jaxserve.api.ollama.protocol import (
    OllamaChatRequest,
    OllamaEmbeddingsRequest,
    OllamaEmbedRequest,
    OllamaGenerateRequest,
)
from jaxserve.api.openai.embeddings import EmbeddingRequest
from jaxserve.api.openai.protocol import ChatCompletionRequest, CompletionRequest
from jaxserve.api.responses.protocol import ResponsesRequest
from jaxserve.api.scoring.protocol import ClassifyRequest, RerankRequest, ScoreRequest
from jaxserve.api.sglang.protocol import GenerateRequest

LIST = Path(__file__).parents[1] / "tests" / "api" / "known_fields.txt"

# API -> (route, model of its body)
APIS: dict[str, tuple[str, type[Body]]] = {
    "chat": ("/v1/chat/completions", ChatCompletionRequest),
    "completions": ("/v1/completions", CompletionRequest),
    "embeddings": ("/v1/embeddings", EmbeddingRequest),
    "responses": ("/v1/responses", ResponsesRequest),
    "messages": ("/v1/messages", MessagesRequest),
    "count_tokens": ("/v1/messages/count_tokens", CountTokensRequest),
    "ollama chat": ("/api/chat", OllamaChatRequest),
    "ollama generate": ("/api/generate", OllamaGenerateRequest),
    "ollama embed": ("/api/embed", OllamaEmbedRequest),
    "ollama embeddings": ("/api/embeddings", OllamaEmbeddingsRequest),
    "generate": ("/generate", GenerateRequest),
    "rerank": ("/v1/rerank", RerankRequest),
    "score": ("/v1/score", ScoreRequest),
    "classify": ("/v1/classify", ClassifyRequest),
}


class Verdict(NamedTuple):
    """What becomes of a field. reason: of a refusal"""

    kind: Literal["served", "ignored", "refused", "unknown"]
    reason: str = ""


def verdict(model: type[BaseModel], path: str) -> Verdict:
    """Return what becomes of a field, named by its path in the body without indices of lists."""
    name, _, rest = path.partition(".")
    field = {each.alias or key: each for key, each in model.model_fields.items()}.get(name)
    if field is None:
        return _unserved(model, name)
    said = field.description or ""
    if said.startswith(("Ignored", "Refused", "Accepted and ignored")):
        return Verdict("refused", said.partition(":")[2].strip()) if said.startswith("Refused") else Verdict("ignored")
    parts = list(_objects(field.annotation)) if rest else []
    if not parts:
        return Verdict("served")
    verdicts = [verdict(part, rest) for part in parts]
    return next((each for each in verdicts if each.kind != "unknown"), verdicts[0])


def _unserved(model: type[BaseModel], name: str) -> Verdict:
    assert issubclass(model, Body | NestedObject)
    if name in model.known.refused:
        return Verdict("refused", model.known.refused[name].reason)
    is_open = "unknown_fields" in vars(model)  # its other fields are read by `type`, or have no effect
    return Verdict("ignored" if is_open or name in model.known.ignored | model.known.dropped else "unknown")


def _objects(annotation: Any) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for each in typing.get_args(annotation):
        yield from _objects(each)


def listed() -> list[tuple[str, str]]:
    """Return (API, path) of each field of the committed list."""
    lines = [line for line in LIST.read_text("utf-8").splitlines() if line and not line.startswith("#")]
    return [(api, path) for line in lines for api, path in [line.split("\t")]]


def reference() -> dict[str, str]:
    """Return {file below docs/: page}: what holds on every route with OpenAI's routes, and the other APIs' routes."""
    everywhere = ["## Every route\n", *_tables(Body, EVERYWHERE.refused.keys() | EVERYWHERE.ignored)]
    first = list(APIS).index("messages")  # a page for all would have more than 30 KB
    return {
        "fields.md": "\n".join([_HEAD, *everywhere, *_sections(list(APIS)[:first])]),
        "fields_of_others.md": "\n".join([_HEAD_OF_OTHERS, *_sections(list(APIS)[first:])]),
    }


def _sections(apis: Iterable[str]) -> Iterator[str]:
    """Yield each route's own fields."""
    paths = listed()
    for api in apis:
        route, model = APIS[api]
        known = {path for each, path in paths if each == api}
        known |= model.model_fields.keys() | model.known.refused.keys() | model.known.ignored | model.known.dropped
        everywhere = (EVERYWHERE.refused.keys() | EVERYWHERE.ignored) - model.model_fields.keys()
        yield f"## `{route}`\n"
        yield from _tables(model, known - everywhere)


def _tables(model: type[Body], paths: Iterable[str]) -> Iterator[str]:
    found = {path: verdict(model, path) for path in sorted(paths)}
    for kind, title in (("served", "Served"), ("ignored", "Harmless to ignore")):
        if names := [f"`{path}`" for path, each in found.items() if each.kind == kind]:
            yield f"{title}: {', '.join(names)}.\n"
    rows: dict[str, list[str]] = {}
    for path, each in found.items():
        if each.kind == "refused":
            rows.setdefault(each.reason, []).append(f"`{path}`")
    if rows:
        shown = [f"| {', '.join(names)} | {reason} |" for reason, names in rows.items()]
        yield "\n".join(["| refused | why |", "|---|---|", *shown, ""])


_HEAD = """# Known fields

Made by `python -m docgen.fields`; a test holds it to the code. Every field of the SDKs of OpenAI, Anthropic and Ollama,
and of SGLang, vLLM, llama.cpp, TGI and others, is one of three things on each route: served ([routes.md](routes.md)
has its type and limits), harmless to ignore, or refused with a 400 that names it, because without it the request would
mean something else. A refused field that is null, false, empty or has its neutral value is accepted. A field that is
not here has no effect and is logged once. The routes of Anthropic, Ollama and SGLang, and those that score and rank,
are on [a page of their own](fields_of_others.md).
"""

_HEAD_OF_OTHERS = """# Known fields of other APIs

Made by `python -m docgen.fields`; a test holds it to the code. What holds on every route, and what served, harmless
and refused mean, is in [fields.md](fields.md).
"""


if __name__ == "__main__":
    for name, page in reference().items():
        (LIST.parents[2] / "docs" / name).write_text(page, "utf-8")
