"""Read a task from the body of /v1/completions."""

from __future__ import annotations

from dataclasses import dataclass, replace

from jaxserve.api.protocol.completions import CompletionRequest
from jaxserve.api.protocol.limits import DEFAULT_COMPLETION_TOKENS, MAX_CHOICES
from jaxserve.api.shared.state import ServerState
from jaxserve.api.tasks.constraints import constraint
from jaxserve.api.tasks.fields import as_prompts, generation_mode, output_options, request_options, truncation
from jaxserve.api.tasks.sampling import sampling_params
from jaxserve.api.tasks.task import OutputOptions, RequestOptions, TextPrompt
from jaxserve.errors import InvalidValueError
from jaxserve.types.sampling import SamplingParams


@dataclass(frozen=True, kw_only=True)
class CompletionOptions:
    """What the answer shows, and in which form.

    scoring: max_tokens is 0. The engine always samples one token; it is dropped.
    num_choices: of each prompt in the answer; made: of each prompt in the engine
    best_first: the choices that are made come best first
    hides_special: leave special tokens out of the offsets of log-probabilities
    """

    output: OutputOptions
    echo: bool = False
    scoring: bool = False
    num_choices: int = 1
    made: int = 1
    best_first: bool = False
    hides_special: bool = True


@dataclass(frozen=True, kw_only=True)
class CompletionTask:
    """All that a body of completions asks for."""

    prompts: list[TextPrompt]
    request: RequestOptions
    options: CompletionOptions


def completion_task(body: CompletionRequest, state: ServerState) -> CompletionTask:
    """Read and check a body. Raises a RequestError that names the field."""
    prompts = as_prompts(body.prompt, "prompt")
    _check(body, len(prompts))
    continuation = TextPrompt(
        content="",
        suffix=body.suffix or "",
        add_special_tokens=body.add_special_tokens is not False,
        sampling=_sampling(body, state),
        constraint=constraint(body, state.engine.tokenizer),
        mode=generation_mode(body, keeps_output=body.max_tokens != 0),
        truncation=truncation(body),
        experts_from=body.routed_experts_start_len,
    )
    options = CompletionOptions(
        output=output_options(body, logprobs=body.logprobs),
        echo=bool(body.echo),
        scoring=body.max_tokens == 0,
        num_choices=body.n or 1,
        made=max(body.n or 1, body.best_of or 0),
        best_first=bool(body.use_beam_search),
        hides_special=body.skip_special_tokens is not False,
    )
    return CompletionTask(
        prompts=[replace(continuation, content=prompt) for prompt in prompts],
        request=request_options(body, "cmpl"),
        options=options,
    )


def _check(body: CompletionRequest, num_prompts: int) -> None:
    if body.best_of and body.stream:
        raise InvalidValueError("best_of cannot be streamed.", param="best_of")
    if body.best_of and body.best_of < (body.n or 1):
        raise InvalidValueError(f"best_of ({body.best_of}) is less than n ({body.n}).", param="best_of")
    if body.logprob_token_ids and body.max_tokens == 0:
        message = "logprob_token_ids are given of output tokens, and max_tokens is 0."
        raise InvalidValueError(message, param="logprob_token_ids")
    if body.suffix and body.echo:
        raise InvalidValueError("suffix and echo exclude each other.", param="suffix")
    if num_prompts > 1 and body.session_params is not None:
        raise InvalidValueError("A request of a session has one prompt.", param="prompt")
    if num_prompts * (body.n or 1) > MAX_CHOICES * 16:
        raise InvalidValueError("prompts times n are more than 2048 choices.", param="n")


def _sampling(body: CompletionRequest, state: ServerState) -> SamplingParams:
    wanted = [value for value in (body.prompt_logprobs, body.logprobs if body.echo else None) if value is not None]
    made = max(body.n or 1, body.best_of or 0)
    return sampling_params(
        body,
        state,
        max_tokens=DEFAULT_COMPLETION_TOKENS if body.max_tokens is None else body.max_tokens,
        logprobs=0 if body.logprobs is None and made > (body.n or 1) else body.logprobs,
        prompt_logprobs=max(wanted) if wanted else None,
        n=made,
    )
