"""Turn texts and token ids into prompts that fit the model: tokenize, check, truncate, continue a session."""

from __future__ import annotations

from jaxserve.api.generate.infill import infill_prompt
from jaxserve.api.protocol.common import SessionParams
from jaxserve.api.shared.keys import Caller
from jaxserve.api.shared.state import ServerState
from jaxserve.api.tasks.task import TextPrompt, Truncation
from jaxserve.errors import ContextLengthError, InvalidValueError
from jaxserve.types.messages import EngineInfo


def check_ids(token_ids: list[int], info: EngineInfo, param: str) -> None:
    """Raises InvalidValueError if a token id is outside the vocabulary."""
    if token_ids and max(token_ids) >= info.vocab_size:
        worst = max(token_ids)
        raise InvalidValueError(f"{param}: {worst} is no token id; the vocabulary has {info.vocab_size}.", param=param)


def truncate(token_ids: list[int], how: Truncation, max_tokens: int | None, limit: int) -> list[int]:
    """Cut a prompt. `limit` is the context length. Raises InvalidValueError if no token would remain."""
    if how.keep is None:
        return token_ids
    if how.keep == 0:
        message = "truncate_prompt_tokens is 0: no token of the prompt would be left."
        raise InvalidValueError(message, param="truncate_prompt_tokens")
    count = how.keep if how.keep >= 0 else max(1, limit - (max_tokens or 1))
    if len(token_ids) <= count:
        return token_ids
    return token_ids[:count] if how.side == "right" else token_ids[len(token_ids) - count :]


async def text_tokens(prompt: TextPrompt, state: ServerState) -> list[int]:
    """Tokenize a prompt. Raises a RequestError for token ids outside the vocabulary or a text beyond the context."""
    info, content = state.engine.info, prompt.content
    if isinstance(content, list):
        check_ids(content, info, prompt.param)
    limit = info.max_model_len if prompt.truncation.keep is None else None
    if prompt.suffix:
        token_ids = await infill_prompt(state.encoder, state.engine.tokenizer, content, prompt.suffix, limit)
    elif isinstance(content, str):
        special = prompt.add_special_tokens
        token_ids = await state.encoder.encode(content, add_special_tokens=special, limit=limit, param=prompt.param)
    else:
        token_ids = content
    return truncate(token_ids, prompt.truncation, prompt.sampling.max_tokens, info.max_model_len)


def session_context(
    token_ids: list[int], session: SessionParams | None, state: ServerState, caller: Caller
) -> list[int]:
    """Return the whole prompt of a request, including its session's tokens if any. Raises a RequestError."""
    if session is None:
        return token_ids
    context = state.sessions.context(session, token_ids, state.engine.tokenizer, caller.owner)
    check_length(context, state.engine.info, "session_params")
    return context


def check_length(token_ids: list[int], info: EngineInfo, param: str) -> None:
    """Raises InvalidValueError for an empty prompt, ContextLengthError if no room is left for one output token."""
    if not token_ids:
        raise InvalidValueError(f"{param} has no tokens.", param=param)
    if len(token_ids) >= info.max_model_len:
        raise ContextLengthError.too_long(len(token_ids), info.max_model_len, param=param)
