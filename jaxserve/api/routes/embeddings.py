"""POST /v1/embeddings: from an encoder, or from the last token's hidden state of a decoder."""

from __future__ import annotations

import asyncio
import base64
from typing import Any

import numpy as np
import orjson
from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from jaxserve.api.docs.openapi import documented
from jaxserve.api.generate.generation import Generation, PromptTask, embeddings
from jaxserve.api.generate.prompts import TextCut, whole_text
from jaxserve.api.http.body import read_body
from jaxserve.api.http.sse import until_disconnect
from jaxserve.api.protocol.answers import Embeddings
from jaxserve.api.protocol.embeddings import EmbeddingRequest
from jaxserve.api.respond.wire import json_response
from jaxserve.api.shared.keys import caller_of
from jaxserve.api.shared.state import ServerState, server_state
from jaxserve.api.tasks.fields import as_prompts, new_id
from jaxserve.api.tasks.task import RequestOptions
from jaxserve.errors import InvalidValueError, UnsupportedParameterError
from jaxserve.types.messages import EngineInfo
from jaxserve.types.sampling import EMBED

router = APIRouter()


@router.post("/v1/embeddings", **documented(Embeddings, body=EmbeddingRequest))
async def create_embedding(request: Request) -> Response:
    """Return a vector for each input. Inputs of similar meaning have similar vectors."""
    return json_response(await embed(await read_body(request, EmbeddingRequest), request))


async def embed(body: EmbeddingRequest, request: Request) -> dict[str, Any]:
    """Return the answer to `body` in OpenAI's form; its vectors are JSON already. Raises a RequestError."""
    state = server_state(request)
    model = state.check_model(body.model)
    if state.engine.info.task == "classify":
        raise InvalidValueError(f"The model {model!r} does not support embeddings: it classifies texts.", param="model")
    _check(body, state.engine.info)
    prompts = as_prompts(body.input, "input")
    how = TextCut(body.truncate_prompt_tokens, body.truncation_side or "right", body.add_special_tokens is not False)
    before = state.engine.info.embedding_prompt
    texts = [before + prompt if isinstance(prompt, str) else prompt for prompt in prompts]
    tasks = [PromptTask(await whole_text(text, how, state), EMBED) for text in texts]
    request_id = new_id("embd", body.request_id or body.rid)
    options = RequestOptions(request_id=request_id, priority=body.priority or 0, cache_salt=body.cache_salt or "")
    at_once = 2 * state.engine.info.max_num_seqs  # those of a step, and those that wait for the next one
    generation = Generation(state, options, tasks, caller_of(request), at_once=at_once)
    return await until_disconnect(request, _answer(body, model, generation))


def _check(body: EmbeddingRequest, info: EngineInfo) -> None:
    if body.dimensions is not None and body.dimensions > info.embedding_size:
        message = f"dimensions is {body.dimensions}; this model's embeddings have {info.embedding_size}."
        raise InvalidValueError(message, param="dimensions")
    for param, asked in (("normalize", body.normalize), ("use_activation", body.use_activation)):
        if asked is not None and asked != info.embedding_normalized:
            how = "always" if info.embedding_normalized else "never"
            raise UnsupportedParameterError(f"This model's embeddings are {how} scaled to length one.", param=param)


async def _answer(body: EmbeddingRequest, model: str, generation: Generation) -> dict[str, Any]:
    data = []
    for number, raw in enumerate(await embeddings(generation)):
        vector = _encoded(raw, body, generation.state)
        data.append({"object": "embedding", "index": number, "embedding": vector})
        await asyncio.sleep(0)  # a vector of 4,096 numbers takes 0.1 ms
    tokens = generation.usage.prompt_tokens
    usage = {"prompt_tokens": tokens, "total_tokens": tokens}
    return {"object": "list", "data": data, "model": model, "usage": usage}


def _encoded(raw: bytes, body: EmbeddingRequest, state: ServerState) -> orjson.Fragment:
    vector = np.frombuffer(raw, "<f4")
    if body.dimensions is not None:
        vector = vector[: body.dimensions]
        if state.engine.info.embedding_normalized:
            vector = vector / max(float(np.linalg.norm(vector)), 1e-12)
    vector = np.ascontiguousarray(vector, "<f4")
    if body.encoding_format == "base64":
        return orjson.Fragment(b'"%b"' % base64.b64encode(vector.tobytes()))
    return orjson.Fragment(orjson.dumps(vector, option=orjson.OPT_SERIALIZE_NUMPY))
