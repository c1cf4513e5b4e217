"""Run the code of HTTP routes for an engine of this program, so that its answers are those over HTTP.

`Engine` runs the coroutines in a thread with an event loop, `AsyncEngine` in the caller's loop.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import msgspec
import numpy as np
import orjson
from pydantic import BaseModel

from jaxserve.api.answers import ChatCompletion, ChatCompletionChunk
from jaxserve.api.fields import Body
from jaxserve.api.http.body import validated
from jaxserve.api.keys import DEFAULT_CALLER
from jaxserve.api.openai.answer import ChatAnswer
from jaxserve.api.openai.embeddings import EmbeddingRequest, answer_embeddings
from jaxserve.api.openai.protocol import ChatCompletionRequest
from jaxserve.api.openai.routes import answer_chat
from jaxserve.api.scoring.protocol import (
    ClassAnswer,
    Classified,
    ClassifyRequest,
    Reranked,
    RerankRequest,
    RerankResult,
    ScoreRequest,
)
from jaxserve.api.scoring.routes import answer_classify, answer_rerank, answer_score
from jaxserve.api.state import EngineProtocol, ServerState, check_pictures, check_template, check_vocabulary
from jaxserve.engine.engine import Params, params_for, progress_bar
from jaxserve.errors import InvalidValueError
from jaxserve.log import recorded_request
from jaxserve.telemetry.metrics import Metrics
from jaxserve.telemetry.tracing import make_tracing
from jaxserve.types.sampling import GrammarSpec, SamplingParams

_PROGRESS = ("progress", "use_tqdm")  # ours, and vLLM's for the same

B = TypeVar("B", bound=Body)
T = TypeVar("T")


class Routes:
    """The routes of one engine. Making one blocks: it starts the process that renders the chat template.

    Raises ConfigError if the chat template, the tokenizer or the processor of pictures does not fit the model.
    """

    def __init__(self, engine: EngineProtocol) -> None:
        self.state = ServerState(engine, engine.config, Metrics(), make_tracing(engine.config.logging))
        try:
            check_template(self.state)
            check_vocabulary(self.state)
            check_pictures(self.state)
        except BaseException:
            self.state.stop_rendering()
            self.state.stop_pictures()
            raise
        template, texts = self.state.chat_template, self.state.text_work
        # they do not refer to the state, which refers to the engine
        self.stops: list[Callable[[], object]] = [texts.stop, self.state.template_work.stop]
        self.stops += [] if template is None else [template.stop]
        self.stops += [self.state.picture_work.stop, self.state.picture_fetches.stop]
        self.stops += [self.state.pictures.stop] if self.state.takes_pictures else []

    def _body(self, fields: dict[str, Any], kind: type[B]) -> B:
        """Validate the fields of a route. Raises InvalidValueError for one that the route does not know."""
        fields = {"model": self.state.engine.info.served_names[0]} | fields
        try:
            data = orjson.dumps(fields, default=_plain, option=orjson.OPT_SERIALIZE_NUMPY)
        except orjson.JSONEncodeError as error:
            raise InvalidValueError(f"a field is no JSON: {error}") from None
        body, unknown = validated(data, kind)
        for name in unknown:
            if name in fields:
                raise InvalidValueError(f"the route has no field {name}", param=name)
        self.state.unknown_fields.note("in process", unknown)
        return body

    async def embed(self, texts: Any, fields: dict[str, Any]) -> np.ndarray:
        """Return the embedding of each text, float32 [n, D]."""
        body = self._body(fields | {"input": _inputs(texts), "encoding_format": "base64"}, EmbeddingRequest)
        answer = await answer_embeddings(body, self.state, DEFAULT_CALLER)
        rows = [np.frombuffer(base64.b64decode(each["embedding"]), "<f4") for each in _data(answer)["data"]]
        return np.stack(rows).astype(np.float32)

    async def score(self, queries: Any, documents: Any, fields: dict[str, Any]) -> list[float]:
        """Return the score of each pair."""
        body = self._body(fields | {"queries": _inputs(queries), "documents": _inputs(documents)}, ScoreRequest)
        return [each["score"] for each in _data(await answer_score(body, self.state, DEFAULT_CALLER))["data"]]

    async def rerank(self, query: str, documents: Any, fields: dict[str, Any]) -> list[RerankResult]:
        """Return the documents by their relevance, the best first."""
        body = self._body(fields | {"query": query, "documents": _inputs(documents)}, RerankRequest)
        return Reranked.model_validate(_data(await answer_rerank(body, self.state, DEFAULT_CALLER))).results

    async def classify(self, texts: Any, fields: dict[str, Any]) -> list[ClassAnswer]:
        """Return the labels of each text."""
        body = self._body(fields | {"input": _inputs(texts)}, ClassifyRequest)
        return Classified.model_validate(_data(await answer_classify(body, self.state, DEFAULT_CALLER))).data

    async def begin(self, fields: dict[str, Any]) -> ChatAnswer:
        """Start a conversation. Raises InvalidValueError for a field that is unknown or names another engine."""
        messages = fields["messages"]
        if isinstance(messages, Sequence) and messages and isinstance(messages[0], list | tuple):
            raise InvalidValueError("these are several conversations: use chat_all", param="messages")
        body = self._body(fields, ChatCompletionRequest)
        for name in ("data_parallel_rank", "routed_dp_rank"):
            if getattr(body, name):
                raise InvalidValueError(f"{name} is {getattr(body, name)}, and there is one engine, 0", param=name)
        return await answer_chat(body, self.state, DEFAULT_CALLER)

    async def whole(self, answers: Sequence[ChatAnswer]) -> list[ChatCompletion]:
        """Return whole answers. If one fails, the others are aborted, and its error is raised."""
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(_awaited(answer.whole())) for answer in answers]
        except BaseExceptionGroup as errors:
            raise errors.exceptions[0] from None
        return [ChatCompletion.model_validate_json(orjson.dumps(task.result())) for task in tasks]


@contextlib.contextmanager
def shown_progress(fields: dict[str, Any], unit: str) -> Iterator[None]:
    """Show a bar of the prompts that end during the body, if `fields` have progress, or use_tqdm as vLLM calls it.

    The two are taken out of `fields`, because no route has them.
    """
    asked = [fields.pop(name, False) for name in _PROGRESS]
    with recorded_request() as record, progress_bar(unit, shown=any(asked)) as show:
        record.on_ended = show
        yield


def each_of(conversations: Any) -> Sequence[Any]:
    """Return several conversations. Raises InvalidValueError if it is not a list, or one conversation."""
    if isinstance(conversations, str | bytes | Mapping) or not isinstance(conversations, Sequence):
        message = f"conversations are a list of lists of messages, not {type(conversations).__name__}"
        raise InvalidValueError(message, param="messages")
    if conversations and isinstance(conversations[0], Mapping):
        raise InvalidValueError("this is one conversation: use chat", param="messages")
    return conversations


def chunk_of(event: bytes) -> ChatCompletionChunk:
    """Parse an HTTP event of a streamed conversation back into a chunk."""
    return ChatCompletionChunk.model_validate_json(event.removeprefix(b"data: "))


# fields of SamplingParams that chat/completions does not have under the same name -> its own field or way
_OF_THE_ROUTE = {
    "bad_words_token_ids": "bad_words",
    "thinking": "thinking_token_budget",
    "extras": "the field of docs/routes.md that asks for it",
    "watermark_key": "watermark",
    "visible_token_ids": "skip_special_tokens",
    "embed": "Engine.generate",
    "second_text": "Engine.generate",
}


def chat_fields(params: Params | Sequence[Params] | None, fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of the route: sampling parameters under its names, and `fields`, which replace them.

    `sampling_params` among the fields is vLLM's name of `params`. Raises InvalidValueError for a parameter that the
    route lacks.
    """
    given_fields = dict(fields)
    for name in _PROGRESS:
        if given_fields.pop(name, False):
            raise InvalidValueError(f"a stream shows no progress: leave {name} out", param=name)
    named = given_fields.pop("sampling_params", None)
    if params is not None and named is not None:
        raise InvalidValueError("params and sampling_params are the same; give one", param="params")
    if (params := named if params is None else params) is None:
        return given_fields
    if isinstance(params, list | tuple) and len(params) != 1:
        raise InvalidValueError("a conversation has one params; chat_all takes a list, one for each", param="params")
    (params,) = params_for([""], params)
    given = msgspec.structs.asdict(params)
    usual = msgspec.structs.asdict(SamplingParams())
    for name, instead in _OF_THE_ROUTE.items():
        if given.pop(name) != usual[name]:
            raise InvalidValueError(f"params.{name}: in a conversation give {instead}", param=name)
    given.pop("grouped")  # only batches use it
    grammar: GrammarSpec | None = given.pop("grammar")
    if grammar is not None:
        if grammar.begin_after:  # the route finds the end of the thinking itself
            raise InvalidValueError("params.grammar: in a conversation it begins after the thinking", param="grammar")
        given["structured_outputs"] = _structured(grammar)
    if given["logprobs"] is not None:
        given |= {"logprobs": True, "top_logprobs": given["logprobs"]}
    given["logit_bias"] = {str(token_id): bias for token_id, bias in params.logit_bias.items()}
    return {name: value for name, value in given.items() if value not in (None, ())} | given_fields


def _structured(grammar: GrammarSpec) -> dict[str, Any]:
    """Return a constraint as the field of the route."""
    match grammar.kind:
        case "json_schema":
            return {"json": grammar.source}
        case "json_object":
            return {"json_object": True}
        case "choice":
            return {"choice": orjson.loads(grammar.source)}
        case "regex":
            return {"regex": grammar.source}
        case _:
            return {"grammar": grammar.source}


def fields_of_all(
    count: int, params: Params | Sequence[Params] | None, fields: Mapping[str, Any]
) -> list[dict[str, Any]]:
    """Return the fields of each of `count` conversations, see `chat_fields`.

    params: for all, or a list of one for each
    """
    given_fields = dict(fields)
    several = given_fields.pop("sampling_params", None) if params is None else params
    if not isinstance(several, list | tuple):
        return [chat_fields(params, fields)] * count
    if len(several) != count:
        raise InvalidValueError(f"there are {count} conversations and {len(several)} params", param="params")
    return [chat_fields(each, given_fields) for each in several]


def _inputs(texts: Any) -> Any:
    """Return texts or token ids as a route takes them: arrays and tuples are lists.

    Raises InvalidValueError for a value that is neither a text nor a list.
    """
    if isinstance(texts, str):
        return texts
    if isinstance(texts, np.ndarray):
        return texts.tolist()
    if isinstance(texts, bytes | bytearray | Mapping) or not isinstance(texts, Sequence):
        message = f"texts are a text or a list of texts or token ids, not {type(texts).__name__}"
        raise InvalidValueError(message, param="input")
    return [each.tolist() if isinstance(each, np.ndarray) else each for each in texts]


def _data(answer: dict[str, Any]) -> dict[str, Any]:
    """Return the answer of a route as plain data."""
    return orjson.loads(orjson.dumps(answer))


async def _awaited(work: Awaitable[T]) -> T:
    return await work


def _plain(value: Any) -> Any:
    """Convert a message of an earlier answer to the dict that a client would send."""
    if isinstance(value, BaseModel):
        return value.model_dump(exclude_none=True)
    raise TypeError(f"{type(value).__name__} is no JSON")
