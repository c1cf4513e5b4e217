"""Make requests with the fields of the routes' schemas, in unusual sizes, depths and types."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import NamedTuple

from pydantic import BaseModel

from jaxserve.api.anthropic.protocol import MessagesRequest
from jaxserve.api.ollama.protocol import OllamaChatRequest, OllamaEmbedRequest, OllamaGenerateRequest
from jaxserve.api.openai.embeddings import EmbeddingRequest
from jaxserve.api.openai.protocol import ChatCompletionRequest, CompletionRequest
from jaxserve.api.responses.protocol import CreateConversationRequest, ResponsesRequest
from jaxserve.api.scoring.protocol import ClassifyRequest, DecisionRequest, RerankRequest, ScoreRequest
from jaxserve.api.sglang.protocol import DetokenizeRequest, GenerateRequest, TokenizeRequest

# route -> (its body, fields that make the smallest request, as JSON)
ROUTES: dict[str, tuple[type[BaseModel], dict[str, str]]] = {
    "/v1/chat/completions": (
        ChatCompletionRequest,
        {"model": '"demo"', "messages": '[{"role":"user","content":"Hi"}]', "max_tokens": "2"},
    ),
    "/v1/completions": (CompletionRequest, {"model": '"demo"', "prompt": '"Hi"', "max_tokens": "2"}),
    "/v1/responses": (ResponsesRequest, {"model": '"demo"', "input": '"Hi"', "max_output_tokens": "2"}),
    "/v1/messages": (
        MessagesRequest,
        {"model": '"demo"', "messages": '[{"role":"user","content":"Hi"}]', "max_tokens": "2"},
    ),
    "/api/chat": (
        OllamaChatRequest,
        {"model": '"demo"', "messages": '[{"role":"user","content":"Hi"}]', "options": '{"num_predict":2}'},
    ),
    "/api/generate": (
        OllamaGenerateRequest,
        {"model": '"demo"', "prompt": '"Hi"', "options": '{"num_predict":2}'},
    ),
    "/api/embed": (OllamaEmbedRequest, {"model": '"demo"', "input": '"Hi"'}),
    "/v1/conversations": (CreateConversationRequest, {"items": '[{"role":"user","content":"Hi"}]'}),
    "/v1/embeddings": (EmbeddingRequest, {"model": '"demo"', "input": '"Hi"'}),
    "/v1/rerank": (RerankRequest, {"model": '"demo"', "query": '"Hi"', "documents": '["Hi"]'}),
    "/v1/score": (ScoreRequest, {"model": '"demo"', "queries": '"Hi"', "documents": '"Hi"'}),
    "/v1/classify": (ClassifyRequest, {"model": '"demo"', "input": '"Hi"'}),
    "/v1/decisions": (
        DecisionRequest,
        {"model": '"demo"', "input": '"Hi"', "questions": '[{"type":"predicate","instructions":"true?"}]'},
    ),
    "/generate": (GenerateRequest, {"text": '"Hi"', "sampling_params": '{"max_new_tokens":2}'}),
    "/tokenize": (TokenizeRequest, {"prompt": '"Hi"'}),
    "/detokenize": (DetokenizeRequest, {"tokens": "[5]"}),
}
OUTPUT_LENGTHS = (
    "max_tokens",
    "max_completion_tokens",
    "max_output_tokens",
    "ignore_eos",
    "min_tokens",
    "options",
)  # never stretched
SMALL = (1, 30, 1000)
SIZES = (*SMALL, 20_000, 100_000, 400_000)
DEPTHS = (2, 150, 199, 5000, 100_000)
WORDS = ("a", "word ", "a b.", "\\n", "\\u00e9", "<|im_start|>", "[{,:", "日本", "\\\\", "1")
ATOMS = ("null", "true", "0", "-1", "1e99", "1e400", "5", '"a"', '""', "{}", "[]", "9" * 5000)
MAX_VALUE = 3_000_000  # characters of a list or an object, roughly
PART = '{{"role":"user","type":"text","name":"a","function":{{"name":"f","arguments":{0}}},"content":{0},"text":{0}}}'


class Stretched(NamedTuple):
    """A request. changed: the fields that differ from the smallest request, for reports."""

    path: str
    changed: tuple[str, ...]
    body: bytes


def stretched(rng: random.Random) -> Stretched:
    """Return a request with one or two stretched fields; one in ten has many unknown fields too."""
    path = rng.choice(sorted(ROUTES))
    model, fields = ROUTES[path]
    names = {field.alias or name for name, field in model.model_fields.items()} - {*OUTPUT_LENGTHS, "model"}
    known = [*sorted(names), "x_unknown"]
    changed = {rng.choice(known): _value(rng) for _ in range(rng.choice((1, 2)))}
    extra = {f"field_{number}": "0" for number in range(rng.choice(SIZES))} if rng.randrange(10) == 0 else {}
    parts = [f'"{name}":{value}' for name, value in (fields | changed | extra).items()]
    shown = (*changed, f"{len(extra)} unknown fields") if extra else tuple(changed)
    return Stretched(path, shown, ("{" + ",".join(parts) + "}").encode())


def _value(rng: random.Random) -> str:
    kinds: tuple[Callable[[random.Random], str], ...] = (_plain, _many, _nested, _many_of_many)
    return rng.choice(kinds)(rng)


def _plain(rng: random.Random) -> str:
    return _text(rng, SIZES) if rng.random() < 0.5 else rng.choice(ATOMS)


def _text(rng: random.Random, sizes: tuple[int, ...]) -> str:
    word = rng.choice(WORDS)
    return '"' + word * (rng.choice(sizes) // len(word) + 1) + '"'


def _part(rng: random.Random) -> str:
    return PART.format(_text(rng, SMALL) if rng.random() < 0.5 else rng.choice(ATOMS))


def _many(rng: random.Random) -> str:
    return _entries(rng, SIZES, _part(rng) if rng.random() < 0.5 else rng.choice(ATOMS))


def _many_of_many(rng: random.Random) -> str:
    kinds: tuple[Callable[[random.Random], str], ...] = (_plain, _part, lambda r: _entries(r, SMALL, r.choice(ATOMS)))
    return _entries(rng, SMALL, rng.choice(kinds)(rng))


def _entries(rng: random.Random, sizes: tuple[int, ...], item: str) -> str:
    count = max(1, min(rng.choice(sizes), MAX_VALUE // (len(item) + 10)))
    if rng.random() < 0.5:
        return "{" + ",".join([f'"k{number}":{item}' for number in range(count)]) + "}"
    return "[" + ",".join([item] * count) + "]"


def _nested(rng: random.Random) -> str:
    depth, item = rng.choice(DEPTHS), rng.choice(ATOMS)
    opening, closing = rng.choice((('{"a":', "}"), ("[", "]")))
    return opening * depth + item + closing * depth
