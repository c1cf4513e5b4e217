"""Serve Ollama's routes below /api for one loaded model.

Routes that fetch, make or remove models answer 501.
"""

from __future__ import annotations

import hashlib
import time
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from jaxserve.api.generate.choice_parser import ChoiceParser
from jaxserve.api.generate.planner import Planner
from jaxserve.api.generate.task import RequestOptions, TextPrompt, new_id
from jaxserve.api.generate.wire import json_response
from jaxserve.api.http.body import read_body
from jaxserve.api.http.errors import OLLAMA
from jaxserve.api.http.sse import EventStream, until_disconnect
from jaxserve.api.keys import caller_of
from jaxserve.api.ollama.answer import OllamaAnswer, loaded, nanoseconds, timestamp
from jaxserve.api.ollama.protocol import (
    API_VERSION,
    OllamaChatRequest,
    OllamaEmbeddingsRequest,
    OllamaEmbedRequest,
    OllamaError,
    OllamaGenerateRequest,
    ShowRequest,
)
from jaxserve.api.ollama.task import chat_prompt, instruction_prompt, output_options
from jaxserve.api.openai.embeddings import EmbeddingRequest, answer_embeddings
from jaxserve.api.openapi import documented
from jaxserve.api.state import ServerState, server_state
from jaxserve.errors import HTTPError, InvalidValueError

NEVER = 2**33  # Unix seconds, the year 2242: the model is not unloaded

router = APIRouter()
_SHOWS = documented(error=OllamaError)


@router.post("/api/chat", **documented(body=OllamaChatRequest, error=OllamaError))
async def chat(request: Request) -> Response:
    """Answer a conversation in Ollama's form, streamed unless `stream` is false."""
    state = server_state(request)
    body = await read_body(request, OllamaChatRequest)
    model = served_model(state, body.model)
    if not body.messages:
        return json_response(loaded("chat", body.model, unload=body.keep_alive in (0, "0", "0s")))
    options = output_options(body)
    plan = await _planner(request, state, model).chat(chat_prompt(body, state))
    answer = OllamaAnswer("chat", plan.generation, plan.make_parser(), options, body.model)
    return await _sent(request, answer, stream=body.stream is not False)


@router.post("/api/generate", **documented(body=OllamaGenerateRequest, error=OllamaError))
async def generate(request: Request) -> Response:
    """Answer one prompt in Ollama's form, streamed unless `stream` is false."""
    state = server_state(request)
    body = await read_body(request, OllamaGenerateRequest)
    model = served_model(state, body.model)
    if not (body.prompt or body.suffix or body.images):
        return json_response(loaded("generate", body.model, unload=body.keep_alive in (0, "0", "0s")))
    options = output_options(body)
    prompt = instruction_prompt(body, state)
    planner = _planner(request, state, model)
    parser: ChoiceParser | None = None
    if isinstance(prompt, TextPrompt):
        generation = await planner.texts([prompt])
    else:
        plan = await planner.chat(prompt)
        generation = plan.generation
        parser = plan.make_parser()
    answer = OllamaAnswer("generate", generation, parser, options, body.model)
    return await _sent(request, answer, stream=body.stream is not False)


@router.post("/api/embed", **documented(body=OllamaEmbedRequest, error=OllamaError))
async def embed_texts(request: Request) -> Response:
    """Return a vector for each text. A text that is too long is cut unless `truncate` is false."""
    started = time.perf_counter()
    body = await read_body(request, OllamaEmbedRequest)
    vectors, usage = await _vectors(request, body)
    counts = {"load_duration": 0, "prompt_eval_count": usage["prompt_tokens"]}
    found = {"model": body.model, "embeddings": vectors, "total_duration": nanoseconds(time.perf_counter() - started)}
    return json_response(found | counts)


@router.post("/api/embeddings", **documented(body=OllamaEmbeddingsRequest, error=OllamaError))
async def embed_text(request: Request) -> Response:
    """Return the vector of one text: the older form of /api/embed."""
    body = await read_body(request, OllamaEmbeddingsRequest)
    if not body.prompt:
        return json_response({"embedding": []})
    vectors, _ = await _vectors(request, OllamaEmbedRequest.model_construct(model=body.model, input=body.prompt))
    return json_response({"embedding": vectors[0]})


async def _vectors(request: Request, body: OllamaEmbedRequest) -> tuple[list[Any], dict[str, int]]:
    model = server_state(request).check_model(_plain(body.model))
    if not body.input:
        return [], {"prompt_tokens": 0}
    keep = None if body.truncate is False else -1
    wanted = EmbeddingRequest.model_construct(
        model=model, input=body.input, dimensions=body.dimensions, truncate_prompt_tokens=keep
    )
    found = answer_embeddings(wanted, server_state(request), caller_of(request))
    answer = await until_disconnect(request, found)
    return [entry["embedding"] for entry in answer["data"]], answer["usage"]


def _planner(request: Request, state: ServerState, model: str) -> Planner:
    options = RequestOptions(request_id=new_id("ollama"), adapter=state.adapter_digest(model))
    return Planner(state, caller_of(request), options)


async def _sent(request: Request, answer: OllamaAnswer, *, stream: bool) -> Response:
    if stream:
        return EventStream(answer.events(), answer.held_bytes, server_state(request), OLLAMA)
    return json_response(await until_disconnect(request, answer.whole()))


def served_model(state: ServerState, name: str) -> str:
    """Return the served name, to which Ollama's clients may add `:latest`. Raises ModelNotFoundError."""
    return state.check_generates(_plain(name))


def _plain(name: str) -> str:
    return name.removesuffix(":latest")


@router.get("/api/version", **_SHOWS)
async def version() -> Response:
    """Show the version of Ollama whose API this is."""
    return json_response({"version": API_VERSION})


@router.get("/api/tags", **_SHOWS)
async def tags(request: Request) -> Response:
    """List the names under which the model is served."""
    return json_response({"models": _models(server_state(request))})


@router.get("/api/ps", **_SHOWS)
async def running(request: Request) -> Response:
    """List the loaded model, under each of its names."""
    state = server_state(request)
    context = state.engine.info.max_model_len
    more = {"expires_at": timestamp(NEVER), "size_vram": _weight_bytes(state), "context_length": context}
    return json_response({"models": [model | more for model in _models(state)]})


@router.post("/api/show", **documented(body=ShowRequest, error=OllamaError))
async def show(request: Request) -> Response:
    """Show one model: its architecture, its context length and its capabilities.

    Raises InvalidValueError without a name.
    """
    state = server_state(request)
    body = await read_body(request, ShowRequest)
    name = body.model or body.name
    if name is None:
        raise InvalidValueError("model is missing.", param="model", code="missing_required_parameter")
    state.check_model(_plain(name))
    info = state.engine.info
    model = _models(state)[0]
    template = state.chat_template
    family = model["details"]["family"]
    return json_response(
        {name: model[name] for name in ("details", "capabilities", "modified_at")}
        | {
            "model_info": {
                "general.architecture": family,
                "general.parameter_count": _num_parameters(state),
                f"{family}.context_length": info.max_model_len,
            },
            "template": "" if template is None else template.source,
            "parameters": "\n".join(f"{key} {value}" for key, value in info.generation_defaults.items()),
            "modelfile": f"FROM {name}",
            "license": "",
        }
    )


def _models(state: ServerState) -> list[dict[str, Any]]:
    info = state.engine.info
    family = info.architecture.lower()
    details = {
        "parent_model": "",
        "format": "safetensors",
        "family": family,
        "families": [family],
        "parameter_size": _count(_num_parameters(state)),
        "quantization_level": {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}.get(info.dtype, info.dtype),
        "context_length": info.max_model_len,
    }
    return [
        {
            "name": name,
            "model": name,
            "modified_at": timestamp(state.created),
            "size": _weight_bytes(state),
            "digest": hashlib.sha256(f"{info.model_path}\n{name}".encode()).hexdigest(),
            "details": details,
            "capabilities": _capabilities(state),
        }
        for name in (*info.served_names, *state.adapters)
    ]


def _capabilities(state: ServerState) -> list[str]:
    task = state.engine.info.task
    if task != "generate":
        return ["embedding"] if task == "embed" else []  # Ollama has no word for a model that classifies
    able = {"tools": state.parsers.tool, "thinking": state.parsers.reasoning, "vision": state.takes_pictures}
    return ["completion", *(name for name, parser in able.items() if parser)]


def _weight_bytes(state: ServerState) -> int:
    return state.engine.info.memory_plan.get("weight_bytes", 0)


def _num_parameters(state: ServerState) -> int:
    return _weight_bytes(state) // (4 if state.engine.info.dtype == "float32" else 2)


def _count(number: int) -> str:
    for size, letter in ((10**9, "B"), (10**6, "M")):
        if number >= size:
            return f"{number / size:.1f}{letter}"
    return f"{number / 1000:.0f}K"


class NotOfferedError(HTTPError):
    status = 501
    code = "not_implemented"


@router.post("/api/pull", include_in_schema=False)
@router.post("/api/push", include_in_schema=False)
@router.post("/api/create", include_in_schema=False)
@router.post("/api/copy", include_in_schema=False)
@router.delete("/api/delete", include_in_schema=False)
async def not_offered(request: Request) -> Response:
    """Raise NotOfferedError: the operator chooses the model when the server starts."""
    raise NotOfferedError("This server serves the model that it was started with; it does not change its models.")
