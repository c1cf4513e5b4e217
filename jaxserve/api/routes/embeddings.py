"""POST /v1/embeddings: from an encoder, or from the last token's hidden state of a decoder."""

from __future__ import annotations

import base64
from contextlib import aclosing
from typing import Any

import numpy as np
import orjson
from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from jaxserve.api.docs.openapi import documented
from jaxserve.api.generate.generation import Generation, PromptTask
from jaxserve.api.generate.prompts import check_ids
from jaxserve.api.http.body import read_body
from jaxserve.api.http.sse import until_disconnect
from jaxserve.api.protocol.answers import Embeddings
from jaxserve.api.protocol.embeddings import EmbeddingRequest
from jaxserve.api.shared.state import ServerState, server_state
from jaxserve.api.tasks.fields import as_prompts, new_id
from jaxserve.api.tasks.task import RequestOptions, Side
from jaxserve.errors import ContextLengthError, InvalidValueError, UnsupportedParameterError
from jaxserve.types.messages import EngineInfo
from jaxserve.types.sampling import SamplingParams

router = APIRouter()
EMBED = SamplingParams(embed=True, max_tokens=0)


@router.post("/v1/embeddings", **documented(Embeddings, body=EmbeddingRequest))
async def create_embedding(request: Request) -> Response:
    """Return a vector for each input. Inputs of similar meaning have similar vectors."""
    state = server_state(request)
    body = await read_body(request, EmbeddingRequest)
    model = state.check_model(body.model)
    _check(body, state.engine.info)
    prompts = as_prompts(body.input, "input")
    tasks = [PromptTask(await _token_ids(prompt, body, state), EMBED) for prompt in prompts]
    request_id = new_id("embd", body.request_id or body.rid)
    options = RequestOptions(request_id=request_id, priority=body.priority or 0, cache_salt=body.cache_salt or "")
    generation = Generation(state, options, tasks)
    content = await until_disconnect(request, _answer(body, model, generation))
    return Response(orjson.dumps(content, option=orjson.OPT_SERIALIZE_NUMPY), media_type="application/json")


def _check(body: EmbeddingRequest, info: EngineInfo) -> None:
    if body.dimensions is not None and body.dimensions > info.embedding_size:
        message = f"dimensions is {body.dimensions}; this model's embeddings have {info.embedding_size}."
        raise InvalidValueError(message, param="dimensions")
    for param, asked in (("normalize", body.normalize), ("use_activation", body.use_activation)):
        if asked is not None and asked != info.embedding_normalized:
            how = "always" if info.embedding_normalized else "never"
            raise UnsupportedParameterError(f"This model's embeddings are {how} scaled to length one.", param=param)


async def _token_ids(prompt: str | list[int], body: EmbeddingRequest, state: ServerState) -> list[int]:
    info, tokenizer = state.engine.info, state.engine.tokenizer
    if isinstance(prompt, list):
        check_ids(prompt, info, "input")
        frame, token_ids = [], prompt
    else:
        frame = tokenizer.encode("") if body.add_special_tokens is not False else []
        limit = info.max_model_len if body.truncate_prompt_tokens is None else None
        special = body.add_special_tokens is not False
        token_ids = await state.encoder.encode(prompt, add_special_tokens=special, limit=limit, param="input")
    keep = body.truncate_prompt_tokens
    if keep is not None:
        keep = info.max_model_len if keep < 0 else keep
        token_ids = cut(token_ids, frame, keep, body.truncation_side or "right")
    if not token_ids:
        raise InvalidValueError("input has no tokens.", param="input")
    if len(token_ids) > info.max_model_len:
        raise ContextLengthError.too_long(len(token_ids), info.max_model_len, param="input")
    return token_ids


def cut(token_ids: list[int], frame: list[int], keep: int, side: Side) -> list[int]:
    """Keep at most `keep` tokens, cutting at `side` of the text.

    frame: special tokens that the tokenizer adds around a text; they are kept if there is room
    """
    if len(token_ids) <= keep:
        return token_ids
    before = 0
    while before < len(frame) and token_ids[before] == frame[before]:
        before += 1
    after = len(frame) - before
    if keep < len(frame):
        return token_ids[:keep]
    text, room = token_ids[before : len(token_ids) - after], keep - len(frame)
    kept = text[:room] if side == "right" else text[len(text) - room :]
    return token_ids[:before] + kept + token_ids[len(token_ids) - after :]


async def _answer(body: EmbeddingRequest, model: str, generation: Generation) -> dict[str, Any]:
    found: dict[int, bytes] = {}
    async with aclosing(generation.outputs()) as outputs:
        async for number, output in outputs:
            if output.embedding is None:
                raise InvalidValueError("The request was aborted.", code="request_aborted")
            found[number] = output.embedding
    data = [
        {"object": "embedding", "index": number, "embedding": _encoded(found[number], body, generation.state)}
        for number in range(len(generation.prompts))
    ]
    tokens = generation.usage.prompt_tokens
    usage = {"prompt_tokens": tokens, "total_tokens": tokens}
    return {"object": "list", "data": data, "model": model, "usage": usage}


def _encoded(raw: bytes, body: EmbeddingRequest, state: ServerState) -> np.ndarray | str:
    vector = np.frombuffer(raw, "<f4")
    if body.dimensions is not None:
        vector = vector[: body.dimensions]
        if state.engine.info.embedding_normalized:
            vector = vector / max(float(np.linalg.norm(vector)), 1e-12)
    vector = np.ascontiguousarray(vector, "<f4")
    return base64.b64encode(vector.tobytes()).decode() if body.encoding_format == "base64" else vector
