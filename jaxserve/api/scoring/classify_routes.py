"""POST /v1/classify: the labels of a classification head, in vLLM's form."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import orjson
from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from jaxserve.api.docs.openapi import documented
from jaxserve.api.generate.generation import Generation, PromptTask, embeddings, half_of_rows
from jaxserve.api.generate.prompts import TextCut, whole_text
from jaxserve.api.http.body import read_body
from jaxserve.api.http.sse import until_disconnect
from jaxserve.api.respond.wire import json_response
from jaxserve.api.scoring.protocol import Classified, ClassifyRequest
from jaxserve.api.scoring.routes import listed
from jaxserve.api.scoring.task import check_keep, scoring_options
from jaxserve.api.shared.keys import caller_of
from jaxserve.api.shared.state import server_state
from jaxserve.api.tasks.fields import as_prompts
from jaxserve.errors import InvalidValueError
from jaxserve.types.messages import EngineInfo
from jaxserve.types.sampling import EMBED

router = APIRouter()


@router.post("/v1/classify", **documented(Classified, body=ClassifyRequest))
@router.post("/classify", include_in_schema=False)
async def classify(request: Request) -> Response:
    """Return the most likely label of each text, and the probability of every label.

    Raises InvalidValueError if the model has no labels.
    """
    state = server_state(request)
    body = await read_body(request, ClassifyRequest)
    model, info = state.check_model(body.model), state.engine.info
    if not info.labels:
        raise InvalidValueError(f"The model {model!r} does not support classification: it has no head.", param="model")
    check_keep(body.truncate_prompt_tokens)
    how = TextCut(body.truncate_prompt_tokens)
    tokens = [await whole_text(each, how, state) for each in as_prompts(body.input, "input")]
    options = scoring_options(body, "classify")
    tasks = [PromptTask(each, EMBED) for each in tokens]
    generation = Generation(state, options, tasks, caller_of(request), at_once=half_of_rows(info))
    found = await until_disconnect(request, embeddings(generation))
    rows = await state.encoder.run(lambda: _rows(found, body, info), len(found) * len(found[0]))
    return json_response(listed(options.request_id, model, rows, generation.usage.prompt_tokens))


def _rows(found: Sequence[bytes], body: ClassifyRequest, info: EngineInfo) -> list[dict[str, Any]]:
    """Return the results, the probabilities as JSON. found: the float32 numbers of the labels, for each text"""
    numbers = np.frombuffer(b"".join(found), "<f4").reshape(len(found), -1).astype(np.float64)
    if body.use_activation is not False and not info.regression:
        numbers = activated(numbers, info)
    best, count = numbers.argmax(axis=1).tolist(), len(info.labels)
    written = (orjson.Fragment(orjson.dumps(row, option=orjson.OPT_SERIALIZE_NUMPY)) for row in numbers)
    return [
        {"index": index, "label": info.labels[label], "probs": probs, "num_classes": count}
        for index, (label, probs) in enumerate(zip(best, written, strict=True))
    ]


def activated(numbers: np.ndarray, info: EngineInfo) -> np.ndarray:
    """Return probabilities [texts, labels]: a sigmoid for one label or independent ones, else a softmax."""
    if info.multi_label or len(info.labels) == 1:
        return 1 / (1 + np.exp(-np.clip(numbers, -500, 500)))
    shifted = np.exp(numbers - numbers.max(axis=1, keepdims=True))
    return shifted / shifted.sum(axis=1, keepdims=True)
