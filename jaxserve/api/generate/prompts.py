"""Turn texts and token ids into prompts that fit the model: tokenize, check, truncate, continue a session."""

from __future__ import annotations

from dataclasses import dataclass

from jaxserve.api.generate.infill import infill_prompt
from jaxserve.api.shared.state import ServerState
from jaxserve.api.tasks.task import Continuation, Side, TextPrompt, Truncation
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
    count = how.keep if how.keep >= 0 else max(1, limit - (1 if max_tokens is None else max_tokens))
    if len(token_ids) <= count:
        return token_ids
    return token_ids[:count] if how.side == "right" else token_ids[len(token_ids) - count :]


def cut(token_ids: list[int], frame: list[int], keep: int, side: Side) -> list[int]:
    """Keep at most `keep` tokens, cutting at `side` of the text.

    frame: special tokens that the tokenizer adds around a text; they are kept if there is room
    """
    if len(token_ids) <= keep:
        return token_ids
    before = 0
    while before < len(frame) and token_ids[before] == frame[before]:
        before += 1
    after = len(frame) - before
    if keep < len(frame):
        return token_ids[:keep]
    text, room = token_ids[before : len(token_ids) - after], keep - len(frame)
    kept = text[:room] if side == "right" else text[len(text) - room :]
    return token_ids[:before] + kept + token_ids[len(token_ids) - after :]


@dataclass(frozen=True)
class TextCut:
    """How a text that gets one result is tokenized.

    keep: tokens that remain; -1: as many as fit, None: all, then a longer text is an error
    """

    keep: int | None = None
    side: Side = "right"
    special: bool = True


async def whole_text(prompt: str | list[int], how: TextCut, state: ServerState, param: str = "input") -> list[int]:
    """Tokenize a text that gets one result, or check its token ids. Raises a RequestError."""
    info, tokenizer, keep = state.engine.info, state.engine.tokenizer, how.keep
    if isinstance(prompt, list):
        check_ids(prompt, info, param)
        frame, token_ids = [], prompt
    else:
        frame = tokenizer.encode("") if how.special else []
        limit = info.max_model_len if keep is None else None
        token_ids = await state.encoder.encode(prompt, add_special_tokens=how.special, limit=limit, param=param)
    if keep is not None:
        token_ids = cut(token_ids, frame, min(keep, info.max_model_len) if keep >= 0 else info.max_model_len, how.side)
    if not token_ids:
        raise InvalidValueError(f"{param} has no tokens.", param=param)
    if len(token_ids) > info.max_model_len:
        raise ContextLengthError.too_long(len(token_ids), info.max_model_len, context=info.max_model_len, param=param)
    return token_ids


async def text_tokens(prompt: TextPrompt, state: ServerState) -> list[int]:
    """Tokenize a prompt. Raises a RequestError for token ids outside the vocabulary or a text beyond the context."""
    info, content = state.engine.info, prompt.content
    if isinstance(content, list):
        check_ids(content, info, prompt.param)
    limit = longest_prompt(prompt, info) if prompt.truncation.keep is None else None
    if prompt.suffix:
        token_ids = await infill_prompt(state.encoder, state.engine.tokenizer, content, prompt.suffix, limit)
    elif isinstance(content, str):
        special = prompt.add_special_tokens
        token_ids = await state.encoder.encode(content, add_special_tokens=special, limit=limit, param=prompt.param)
    else:
        token_ids = content
    return truncate(token_ids, prompt.truncation, prompt.sampling.max_tokens, info.max_model_len)


def longest_prompt(prompt: Continuation, info: EngineInfo) -> int:
    """Return how many tokens a prompt may have: the context, less one token to generate unless none is asked for."""
    return info.max_model_len - (prompt.sampling.max_tokens != 0)


def check_length(token_ids: list[int], maximum: int, info: EngineInfo, param: str) -> None:
    """Raises InvalidValueError for an empty prompt, ContextLengthError for one with more than `maximum` tokens."""
    if not token_ids:
        raise InvalidValueError(f"{param} has no tokens.", param=param)
    if len(token_ids) > maximum:
        raise ContextLengthError.too_long(len(token_ids), maximum, context=info.max_model_len, param=param)
