"""Turn a body's prompt into token ids that fit the model: the four forms of completions, checks, truncation."""

from __future__ import annotations

from typing import Literal

from jaxserve.api.protocol.common import SamplingFields
from jaxserve.api.protocol.generate import GenerateRequest
from jaxserve.api.shared.keys import Caller
from jaxserve.api.shared.state import ServerState
from jaxserve.errors import ContextLengthError, InvalidValueError
from jaxserve.types.messages import EngineInfo

Side = Literal["left", "right"]


def as_prompts(prompt: str | list[str] | list[int] | list[list[int]], param: str) -> list[str | list[int]]:
    """Return one entry per prompt. Raises InvalidValueError for an empty one."""
    prompts: list[str | list[int]]
    if isinstance(prompt, str) or (prompt and isinstance(prompt[0], int)):
        prompts = [prompt]  # type: ignore[list-item]
    else:
        prompts = list(prompt)  # type: ignore[arg-type]
    if not prompts or not all(prompts):
        raise InvalidValueError(f"{param} is empty.", param=param)
    return prompts


def check_ids(token_ids: list[int], info: EngineInfo, param: str) -> None:
    """Raises InvalidValueError if a token id is outside the vocabulary."""
    if token_ids and max(token_ids) >= info.vocab_size:
        worst = max(token_ids)
        raise InvalidValueError(f"{param}: {worst} is no token id; the vocabulary has {info.vocab_size}.", param=param)


def truncate(token_ids: list[int], keep: int | None, side: Side, max_tokens: int | None, limit: int) -> list[int]:
    """Cut to `keep` tokens; -1 keeps what leaves room for the output. `side` is the end that is cut.

    Raises InvalidValueError if no token would remain.
    """
    if keep is None:
        return token_ids
    if keep == 0:
        message = "truncate_prompt_tokens is 0: no token of the prompt would be left."
        raise InvalidValueError(message, param="truncate_prompt_tokens")
    count = keep if keep >= 0 else max(1, limit - (max_tokens or 1))
    if len(token_ids) <= count:
        return token_ids
    return token_ids[:count] if side == "right" else token_ids[len(token_ids) - count :]


def session_context(
    body: SamplingFields | GenerateRequest, state: ServerState, token_ids: list[int], caller: Caller
) -> list[int]:
    """Return the whole prompt of a request, including its session's tokens if any. Raises a RequestError."""
    if body.session_params is None:
        return token_ids
    if body.session_id is not None:
        raise InvalidValueError("Give session_params or session_id, not both.", param="session_id")
    context = state.sessions.context(body.session_params, token_ids, state.engine.tokenizer, caller.owner)
    check_length(context, state.engine.info, "session_params")
    return context


def check_length(token_ids: list[int], info: EngineInfo, param: str) -> None:
    """Raises InvalidValueError for an empty prompt, ContextLengthError if no room is left for one output token."""
    if not token_ids:
        raise InvalidValueError(f"{param} has no tokens.", param=param)
    if len(token_ids) >= info.max_model_len:
        raise ContextLengthError.too_long(len(token_ids), info.max_model_len, param=param)
