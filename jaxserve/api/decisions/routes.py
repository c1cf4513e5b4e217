"""OpenAI's POST /v1/decisions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from jaxserve.api.decisions.probabilities import Decider
from jaxserve.api.decisions.protocol import Decided, DecisionQuestion, DecisionRequest
from jaxserve.api.decisions.task import decision_task
from jaxserve.api.docs.openapi import documented
from jaxserve.api.generate.generation import Usage
from jaxserve.api.http.body import read_body
from jaxserve.api.http.sse import until_disconnect
from jaxserve.api.respond.wire import json_response
from jaxserve.api.shared.keys import caller_of
from jaxserve.api.shared.state import server_state
from jaxserve.api.tasks.fields import new_id, prefix_namespace
from jaxserve.api.tasks.task import RequestOptions

router = APIRouter()


@router.post("/v1/decisions", **documented(Decided, body=DecisionRequest))
async def create_decision(request: Request) -> Response:
    """Answer questions about an input by probabilities."""
    state = server_state(request)
    body = await read_body(request, DecisionRequest)
    model = state.check_generates(body.model)
    task = await state.encoder.run(lambda: decision_task(body), body.size)
    salt = prefix_namespace(None, body.prompt_cache_key)
    options = RequestOptions(request_id=new_id("decision"), cache_salt=salt)
    work = Decider(state, caller_of(request), options).probabilities(task)
    found, generation = await until_disconnect(request, work)
    answers = [answer(each, values) for each, values in zip(body.questions, found, strict=True)]
    return json_response({"answers": answers, "model": model, "usage": _usage(generation.usage)})


def answer(question: DecisionQuestion, probabilities: Sequence[float]) -> dict[str, Any]:
    """Build the answer to a question. probabilities: of its options, in order"""
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
