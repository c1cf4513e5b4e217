"""POST /v1/completions."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

import msgspec
from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from jaxserve.api.docs.openapi import documented
from jaxserve.api.generate.constraints import checked_grammar
from jaxserve.api.generate.generation import Generation, Job, new_id, prefix_namespace
from jaxserve.api.generate.infill import infill_prompt
from jaxserve.api.generate.prompts import as_prompts, check_ids, check_length, session_context, truncate
from jaxserve.api.generate.sampling import sampling_params
from jaxserve.api.generate.shapes import marked, remembered, shaped
from jaxserve.api.http.body import read_body
from jaxserve.api.http.sse import EventStream, until_disconnect
from jaxserve.api.protocol.answers import Completion
from jaxserve.api.protocol.completions import CompletionRequest
from jaxserve.api.protocol.limits import DEFAULT_COMPLETION_TOKENS, MAX_CHOICES
from jaxserve.api.respond.completion_output import CompletionChoices, Joined
from jaxserve.api.respond.extras import Extras
from jaxserve.api.respond.wire import ChunkWriter, Envelope, check_stream_options, json_answer
from jaxserve.api.shared.keys import Caller, caller_of
from jaxserve.api.shared.state import ServerState, server_state
from jaxserve.errors import InvalidValueError
from jaxserve.types.sampling import GrammarSpec, SamplingParams

router = APIRouter()


@router.post("/v1/completions", **documented(Completion, body=CompletionRequest, events=Completion))
async def create_completion(request: Request) -> Response:
    """Continue one or more prompts."""
    state = server_state(request)
    body = await read_body(request, CompletionRequest)
    _check(body)
    answer = await _Answer.prepare(body, state, caller_of(request))
    if body.stream:
        return EventStream(answer.events(), answer.held_bytes, state.unread)
    return await json_answer(await until_disconnect(request, answer.whole()))


def _check(body: CompletionRequest) -> None:
    check_stream_options(body)
    if body.best_of and body.stream:
        raise InvalidValueError("best_of cannot be streamed.", param="best_of")
    if body.best_of and body.best_of < (body.n or 1):
        raise InvalidValueError(f"best_of ({body.best_of}) is less than n ({body.n}).", param="best_of")
    if body.logprob_token_ids and body.max_tokens == 0:
        message = "logprob_token_ids are given of output tokens, and max_tokens is 0."
        raise InvalidValueError(message, param="logprob_token_ids")
    if body.suffix and body.echo:
        raise InvalidValueError("suffix and echo exclude each other.", param="suffix")


# vLLM's fields, null unless requested
_UNASKED = {"token_ids": None, "prompt_token_ids": None, "prompt_logprobs": None}


class _Answer:
    """The answer to one request."""

    def __init__(self, body: CompletionRequest, model: str, generation: Generation, choices: CompletionChoices) -> None:
        self._body = body
        self._generation = generation
        self.held_bytes = generation.held_bytes
        self._choices = choices
        self._envelope = Envelope(generation.request_id, "text_completion", model)

    @classmethod
    async def prepare(cls, body: CompletionRequest, state: ServerState, caller: Caller) -> _Answer:
        """Check everything that can be wrong with the request and start its generation. Raises InvalidValueError."""
        model = state.check_generates(body.model)
        prompts = as_prompts(body.prompt, "prompt")
        if len(prompts) > 1 and body.session_params is not None:
            raise InvalidValueError("A request of a session has one prompt.", param="prompt")
        if len(prompts) * (body.n or 1) > MAX_CHOICES * 16:
            raise InvalidValueError("prompts times n are more than 2048 choices.", param="n")
        grammar = await checked_grammar(body, state.engine, state.grammars)
        jobs = [await _job(body, prompt, state, grammar, caller) for prompt in prompts]
        texts = [_prompt_text(prompt, job, body, state) for prompt, job in zip(prompts, jobs, strict=True)]
        request_id = new_id("cmpl", body.request_id or body.rid)
        silent = body.max_tokens == 0
        generation = Generation(
            state,
            request_id,
            [remembered(job, state, body.session_params, request_id, caller, silent=silent) for job in jobs],
            body.priority or 0,
            prefix_namespace(body.cache_salt, body.extra_key),
            body.stream_interval or 1,
            caller,
        )
        hidden = state.engine.tokenizer.special_ids
        extras = Extras(body, request_id)
        choices = CompletionChoices(body, jobs, texts, state.token_texts, hidden, extras)
        return cls(body, model, generation, choices)

    async def events(self) -> AsyncGenerator[bytes, None]:
        """Yield the server-sent events of the answer."""
        writer = ChunkWriter(self._envelope, self._generation.usage, self._body)
        async with aclosing(self._generation.outputs()) as outputs:
            async for job, output in outputs:
                self._cut_usage()
                delta = self._choices.delta(job, output)
                if _says_something(delta):
                    yield writer.chunk(delta)
        if writer.include_usage:
            yield writer.usage_chunk()

    async def whole(self) -> dict[str, Any]:
        """Return the unstreamed answer."""
        found: dict[int, Joined] = {}
        scores: dict[int, list[float]] = {}
        async with aclosing(self._generation.outputs()) as outputs:
            async for job, output in outputs:
                delta = self._choices.delta(job, output)
                index = delta["index"]
                found.setdefault(index, Joined()).add(delta)
                scores.setdefault(index, []).extend(entry.logprob for entry in output.logprobs or ())
        self._cut_usage()
        ordered = [found[index].result() for index in sorted(found)]
        return self._envelope.head() | {
            "choices": [_UNASKED | choice for choice in self._best(ordered, scores)],
            "usage": self._generation.usage.as_dict(),
            "system_fingerprint": None,
        }

    def _cut_usage(self) -> None:
        """With max_tokens 0, leave the one token that the engine always samples out of the usage."""
        if self._body.max_tokens == 0:
            self._generation.usage.completion_tokens = 0

    def _best(self, choices: list[dict[str, Any]], scores: dict[int, list[float]]) -> list[dict[str, Any]]:
        """Return, per prompt, the n of best_of choices with the highest mean log-probability, renumbered."""
        n, made = self._body.n or 1, self._body.best_of or 0
        if made <= n:
            return choices
        kept = []
        for start in range(0, len(choices), made):
            group = sorted(choices[start : start + made], key=lambda choice: -_mean(scores[choice["index"]]))
            kept += group[:n]
        return [choice | {"index": index} for index, choice in enumerate(kept)]


def _mean(values: list[float]) -> float:
    return sum(values) / len(values) if values else 0.0


def _says_something(delta: dict[str, Any]) -> bool:
    """Return False for a token whose text is held back (part of a character or of a stop string)."""
    tokens = delta["logprobs"]["tokens"] if delta["logprobs"] is not None else delta.get("token_ids")
    return bool(delta["text"] or tokens or delta["finish_reason"])


async def _job(
    body: CompletionRequest, prompt: str | list[int], state: ServerState, grammar: GrammarSpec | None, caller: Caller
) -> Job:
    info, tokenizer = state.engine.info, state.engine.tokenizer
    if isinstance(prompt, list):
        check_ids(prompt, info, "prompt")
    limit = info.max_model_len if body.truncate_prompt_tokens is None else None
    if body.suffix:
        token_ids = await infill_prompt(state.encoder, tokenizer, prompt, body.suffix, limit)
    elif isinstance(prompt, str):
        special = body.add_special_tokens is not False
        token_ids = await state.encoder.encode(prompt, add_special_tokens=special, limit=limit)
    else:
        token_ids = prompt
    max_tokens = DEFAULT_COMPLETION_TOKENS if body.max_tokens is None else body.max_tokens
    token_ids = truncate(
        token_ids, body.truncate_prompt_tokens, body.truncation_side or "left", max_tokens, info.max_model_len
    )
    token_ids = session_context(body, state, token_ids, caller)
    check_length(token_ids, info, "prompt")
    job = Job(token_ids, _params(body, token_ids, max_tokens, state, grammar))
    return shaped(marked(job, body, state), body, tokenizer, info.eos_token_ids)


def _params(
    body: CompletionRequest, token_ids: list[int], max_tokens: int, state: ServerState, grammar: GrammarSpec | None
) -> SamplingParams:
    wanted = [value for value in (body.prompt_logprobs, body.logprobs if body.echo else None) if value is not None]
    best_of = body.best_of or 0
    params = sampling_params(
        body,
        state.engine.info,
        state.engine.tokenizer,
        max_tokens=max_tokens,
        num_prompt_tokens=len(token_ids),
        logprobs=0 if body.logprobs is None and best_of > (body.n or 1) else body.logprobs,
        prompt_logprobs=max(wanted) if wanted else None,
        grammar=grammar,
    )
    return msgspec.structs.replace(params, n=max(params.n, best_of))


def _prompt_text(prompt: str | list[int], job: Job, body: CompletionRequest, state: ServerState) -> str:
    """Return the text for echo: as it was sent, or decoded from ids."""
    if not (body.echo or body.return_prompt_text):
        return ""
    if isinstance(prompt, str) and body.truncate_prompt_tokens is None and body.session_params is None:
        return prompt
    return state.engine.tokenizer.decode(
        job.prompt_token_ids, skip_special_tokens=body.skip_special_tokens is not False
    )
