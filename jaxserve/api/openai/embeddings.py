"""Serve POST /v1/embeddings, from an encoder or from the hidden state of a decoder's last token."""

from __future__ import annotations

import asyncio
import base64
from typing import Any, Literal

import numpy as np
import orjson
from fastapi import APIRouter
from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response

from jaxserve.api import ranges
from jaxserve.api.answers import Embeddings
from jaxserve.api.fields import Body
from jaxserve.api.generate.generation import Generation, PromptTask, embeddings
from jaxserve.api.generate.planner import TextCut, whole_text
from jaxserve.api.generate.task import RequestOptions, as_prompts, new_id
from jaxserve.api.generate.wire import json_response
from jaxserve.api.http.body import read_body
from jaxserve.api.http.sse import until_disconnect
from jaxserve.api.keys import Caller, caller_of
from jaxserve.api.known_fields import EMBEDDINGS, EVERYWHERE
from jaxserve.api.openai.protocol import Prompt
from jaxserve.api.openapi import documented
from jaxserve.api.state import ServerState, server_state
from jaxserve.errors import InvalidValueError, UnsupportedParameterError
from jaxserve.types.messages import EngineInfo
from jaxserve.types.page_keys import salt_of
from jaxserve.types.sampling import EMBED


class EmbeddingRequest(Body):
    known = EVERYWHERE | EMBEDDINGS

    model: str
    input: Prompt = Field(description="A text, texts, token ids, or lists of them.")
    encoding_format: Literal["float", "base64"] | None = Field(None, description="Default float.")
    dimensions: ranges.TokenCount | None = Field(
        None, description="Keep this many dimensions, normalized to length 1 again."
    )
    normalize: bool | None = Field(
        None, description="Normalize to length 1; only the value in the model's own files is accepted."
    )
    use_activation: bool | None = Field(None, description="The same as normalize.")
    user: str | None = Field(None, description="Ignored.")
    add_special_tokens: bool | None = Field(
        None, description="Add the tokenizer's special tokens to texts. Default true."
    )
    truncate_prompt_tokens: int | None = Field(
        None,
        ge=-1,
        le=2**31 - 1,
        description="Keep this many tokens; -1: as many as fit. Default: a longer input is a 400.",
    )
    truncation_side: Literal["left", "right"] | None = Field(None, description="The end that is cut. Default right.")
    priority: ranges.Priority | None = Field(
        None, description="Lower values run earlier (policy: priority). Default 0."
    )
    cache_salt: ranges.CacheSalt | None = Field(
        None, description="Only requests with the same value share cached prefixes."
    )
    request_id: ranges.Identifier | None = Field(None, description="Id of the request, for aborts and logs.")
    rid: ranges.Identifier | None = Field(None, description="The same as request_id.")


router = APIRouter()


@router.post("/v1/embeddings", **documented(Embeddings, body=EmbeddingRequest))
async def create_embedding(request: Request) -> Response:
    """Return a vector for each input. Inputs of similar meaning have similar vectors."""
    body = await read_body(request, EmbeddingRequest)
    answer = answer_embeddings(body, server_state(request), caller_of(request))
    return json_response(await until_disconnect(request, answer))


async def answer_embeddings(body: EmbeddingRequest, state: ServerState, caller: Caller) -> dict[str, Any]:
    """Return the answer to `body` in OpenAI's form, with vectors that are JSON already. Raises a RequestError."""
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
    options = RequestOptions(
        request_id=request_id, priority=body.priority or 0, cache_salt=salt_of(body.cache_salt, None)
    )
    options = options.for_adapter(state.adapter_digest(model))
    at_once = 2 * state.engine.info.max_num_seqs  # the texts of a step, and the texts that wait for the next step
    return await _answer(body, model, Generation(state, options, tasks, caller, at_once=at_once))


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
        await asyncio.sleep(0)  # encoding a vector of 4,096 values takes 0.1 ms
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
