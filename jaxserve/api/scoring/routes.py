"""Serve POST /v1/rerank in Cohere's and Jina's form, /score and /v1/classify in vLLM's, and OpenAI's /v1/decisions."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import orjson
from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from jaxserve.api.generate.generation import Generation, PromptTask, Usage, embeddings, half_of_rows
from jaxserve.api.generate.planner import TextCut, whole_text
from jaxserve.api.generate.task import RequestOptions, as_prompts, new_id
from jaxserve.api.generate.wire import json_response
from jaxserve.api.http.body import read_body
from jaxserve.api.http.sse import until_disconnect
from jaxserve.api.keys import Caller, caller_of
from jaxserve.api.openapi import documented
from jaxserve.api.scoring.answer import Decider, PairScorer, check_scores_pairs
from jaxserve.api.scoring.protocol import (
    Classified,
    ClassifyRequest,
    Decided,
    DecisionQuestion,
    DecisionRequest,
    Reranked,
    RerankRequest,
    Scored,
    ScoreRequest,
    ScoringFields,
)
from jaxserve.api.scoring.task import check_keep, decision_task, rerank_task, score_task, scoring_options
from jaxserve.api.state import ServerState, server_state
from jaxserve.errors import InvalidValueError
from jaxserve.types.messages import EngineInfo
from jaxserve.types.page_keys import salt_of
from jaxserve.types.sampling import EMBED

router = APIRouter()


@router.post("/v1/rerank", **documented(Reranked, body=RerankRequest))
@router.post("/v2/rerank", include_in_schema=False)
@router.post("/rerank", include_in_schema=False)
async def rerank(request: Request) -> Response:
    """Sort documents by their relevance to a query."""
    body = await read_body(request, RerankRequest)
    answer = answer_rerank(body, server_state(request), caller_of(request))
    return json_response(await until_disconnect(request, answer))


async def answer_rerank(body: RerankRequest, state: ServerState, caller: Caller) -> dict[str, Any]:
    """Return the answer to a body. Raises a RequestError."""
    model, scorer = _scorer(body, state, caller, "rerank")
    task = rerank_task(body)
    scores, tokens = await scorer.scores(task)
    order = sorted(range(len(scores)), key=lambda number: -scores[number])[: body.top_n or None]
    shows = body.return_documents is not False
    results = [
        {"index": number, "relevance_score": scores[number]}
        | ({"document": {"text": task.documents[number]}} if shows else {})
        for number in order
    ]
    return {
        "id": scorer.options.request_id,
        "model": model,
        "results": results,
        "usage": usage(tokens),
        "meta": {"billed_units": {"search_units": 1}},
    }


@router.post("/v1/score", **documented(Scored, body=ScoreRequest))
@router.post("/score", include_in_schema=False)
async def score(request: Request) -> Response:
    """Score pairs of texts: one query with each document, or each query with its document."""
    body = await read_body(request, ScoreRequest)
    answer = answer_score(body, server_state(request), caller_of(request))
    return json_response(await until_disconnect(request, answer))


async def answer_score(body: ScoreRequest, state: ServerState, caller: Caller) -> dict[str, Any]:
    """Return the answer to a body. Raises a RequestError."""
    model, scorer = _scorer(body, state, caller, "score")
    scores, tokens = await scorer.scores(score_task(body))
    data = [{"index": number, "object": "score", "score": value} for number, value in enumerate(scores)]
    return listed(scorer.options.request_id, model, data, tokens)


def _scorer(body: ScoringFields, state: ServerState, caller: Caller, prefix: str) -> tuple[str, PairScorer]:
    """Return the model's name and its scorer. prefix: prefix of the request's id

    Raises ModelNotFoundError, or InvalidValueError if the model cannot score pairs.
    """
    model = state.check_model(body.model)
    check_scores_pairs(state.engine.info, model)
    options = scoring_options(body, prefix).for_adapter(state.adapter_digest(model))
    return model, PairScorer(state, caller, options)


def listed(request_id: str, model: str, data: list[dict[str, Any]], tokens: int) -> dict[str, Any]:
    """Build vLLM's list of results."""
    head = {"id": request_id, "object": "list", "created": int(time.time()), "model": model}
    return head | {"data": data, "usage": usage(tokens)}


def usage(tokens: int) -> dict[str, int]:
    return {"prompt_tokens": tokens, "total_tokens": tokens}


@router.post("/v1/classify", **documented(Classified, body=ClassifyRequest))
@router.post("/classify", include_in_schema=False)
async def classify(request: Request) -> Response:
    """Return the most likely label of each text, and the probability of every label.

    Raises InvalidValueError if the model has no labels.
    """
    body = await read_body(request, ClassifyRequest)
    answer = answer_classify(body, server_state(request), caller_of(request))
    return json_response(await until_disconnect(request, answer))


async def answer_classify(body: ClassifyRequest, state: ServerState, caller: Caller) -> dict[str, Any]:
    """Return the answer to a body. Raises a RequestError."""
    model = state.check_model(body.model)
    info = state.engine.info
    if not info.labels:
        raise InvalidValueError(f"The model {model!r} does not support classification: it has no head.", param="model")
    check_keep(body.truncate_prompt_tokens)
    how = TextCut(body.truncate_prompt_tokens)
    tokens = [await whole_text(each, how, state) for each in as_prompts(body.input, "input")]
    options = scoring_options(body, "classify").for_adapter(state.adapter_digest(model))
    tasks = [PromptTask(each, EMBED) for each in tokens]
    generation = Generation(state, options, tasks, caller, at_once=half_of_rows(info))
    found = await embeddings(generation)
    rows = await state.encoder.run(lambda: _rows(found, body, info), len(found) * len(found[0]))
    return listed(options.request_id, model, rows, generation.usage.prompt_tokens)


def _rows(found: Sequence[bytes], body: ClassifyRequest, info: EngineInfo) -> list[dict[str, Any]]:
    """Return the results, with the probabilities as JSON. found: the float32 logits of the labels, for each text"""
    numbers = np.frombuffer(b"".join(found), "<f4").reshape(len(found), -1).astype(np.float64)
    if body.use_activation is not False and not info.regression:
        numbers = activated(numbers, info)
    best = numbers.argmax(axis=1).tolist()
    count = len(info.labels)
    written = (orjson.Fragment(orjson.dumps(row, option=orjson.OPT_SERIALIZE_NUMPY)) for row in numbers)
    return [
        {"index": index, "label": info.labels[label], "probs": probs, "num_classes": count}
        for index, (label, probs) in enumerate(zip(best, written, strict=True))
    ]


def activated(numbers: np.ndarray, info: EngineInfo) -> np.ndarray:
    """Return probabilities [texts, labels]: the sigmoid for one label or independent labels, else the softmax."""
    if info.multi_label or len(info.labels) == 1:
        return 1 / (1 + np.exp(-np.clip(numbers, -500, 500)))
    shifted = np.exp(numbers - numbers.max(axis=1, keepdims=True))
    return shifted / shifted.sum(axis=1, keepdims=True)


@router.post("/v1/decisions", **documented(Decided, body=DecisionRequest))
async def create_decision(request: Request) -> Response:
    """Answer questions about an input by probabilities."""
    state = server_state(request)
    body = await read_body(request, DecisionRequest)
    model = state.check_generates(body.model)
    task = await state.encoder.run(lambda: decision_task(body), body.size)
    salt = salt_of(None, body.prompt_cache_key)
    options = RequestOptions(request_id=new_id("decision"), cache_salt=salt, adapter=state.adapter_digest(model))
    work = Decider(state, caller_of(request), options).probabilities(task)
    found, generation = await until_disconnect(request, work)
    answers = [answer(each, values) for each, values in zip(body.questions, found, strict=True)]
    return json_response({"answers": answers, "model": model, "usage": _usage(generation.usage)})


def answer(question: DecisionQuestion, probabilities: Sequence[float]) -> dict[str, Any]:
    """Build the answer to a question. probabilities: the probability of each option, in order"""
    head = {"type": question.type, "name": question.name}
    highest = max(probabilities)
    match question.type:
        case "predicate":
            return head | {"probability": probabilities[0]}
        case "choice":
            values = [each.value for each in question.choices or ()]
            rows = [{"value": v, "probability": p} for v, p in zip(values, probabilities, strict=True)]
            best = values[probabilities.index(highest)]
            return head | {"choice": best, "confidence": highest, "probabilities": rows}
        case "score":
            labels = [each.label for each in question.levels or ()]
            rows = [
                {"label": label, "value": place, "probability": p}
                for place, (label, p) in enumerate(zip(labels, probabilities, strict=True))
            ]
            expected = sum(place * p for place, p in enumerate(probabilities))
            return head | {"score": expected, "confidence": highest, "probabilities": rows}


def _usage(usage: Usage) -> dict[str, Any]:
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }
