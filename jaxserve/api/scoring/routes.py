"""POST /v1/rerank in Cohere's and Jina's form, and POST /score in vLLM's."""

from __future__ import annotations

import time
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from jaxserve.api.docs.openapi import documented
from jaxserve.api.http.body import read_body
from jaxserve.api.http.sse import until_disconnect
from jaxserve.api.respond.wire import json_response
from jaxserve.api.scoring.pair_scores import PairScorer, check_scores_pairs
from jaxserve.api.scoring.protocol import Reranked, RerankRequest, Scored, ScoreRequest, ScoringFields
from jaxserve.api.scoring.task import rerank_task, score_task, scoring_options
from jaxserve.api.shared.keys import caller_of
from jaxserve.api.shared.state import server_state

router = APIRouter()


@router.post("/v1/rerank", **documented(Reranked, body=RerankRequest))
@router.post("/v2/rerank", include_in_schema=False)
@router.post("/rerank", include_in_schema=False)
async def rerank(request: Request) -> Response:
    """Sort documents by their relevance to a query."""
    body = await read_body(request, RerankRequest)
    model, scorer = _scorer(request, body, "rerank")
    task = rerank_task(body)
    scores, tokens = await until_disconnect(request, scorer.scores(task))
    order = sorted(range(len(scores)), key=lambda number: -scores[number])[: body.top_n or None]
    shows = body.return_documents is not False
    results = [
        {"index": number, "relevance_score": scores[number]}
        | ({"document": {"text": task.documents[number]}} if shows else {})
        for number in order
    ]
    return json_response(
        {
            "id": scorer.options.request_id,
            "model": model,
            "results": results,
            "usage": usage(tokens),
            "meta": {"billed_units": {"search_units": 1}},
        }
    )


@router.post("/v1/score", **documented(Scored, body=ScoreRequest))
@router.post("/score", include_in_schema=False)
async def score(request: Request) -> Response:
    """Score pairs of texts: one query with each document, or each query with its document."""
    body = await read_body(request, ScoreRequest)
    model, scorer = _scorer(request, body, "score")
    scores, tokens = await until_disconnect(request, scorer.scores(score_task(body)))
    data = [{"index": number, "object": "score", "score": value} for number, value in enumerate(scores)]
    return json_response(listed(scorer.options.request_id, model, data, tokens))


def _scorer(request: Request, body: ScoringFields, prefix: str) -> tuple[str, PairScorer]:
    """Return the model's name and its scorer. prefix: of the request's id.

    Raises ModelNotFoundError, or InvalidValueError if the model cannot score pairs.
    """
    state = server_state(request)
    model = state.check_model(body.model)
    check_scores_pairs(state.engine.info, model)
    return model, PairScorer(state, caller_of(request), scoring_options(body, prefix))


def listed(request_id: str, model: str, data: list[dict[str, Any]], tokens: int) -> dict[str, Any]:
    """Build vLLM's list of results."""
    head = {"id": request_id, "object": "list", "created": int(time.time()), "model": model}
    return head | {"data": data, "usage": usage(tokens)}


def usage(tokens: int) -> dict[str, int]:
    return {"prompt_tokens": tokens, "total_tokens": tokens}
