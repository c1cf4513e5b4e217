"""Requests whose parameters exclude every token: refused on arrival, or ended when the device reports it. No jax."""

from __future__ import annotations

from jaxserve.errors import InvalidValueError
from jaxserve.types.sampling import SamplingParams


def check_allowed(params: SamplingParams, vocab_size: int) -> None:
    """Raise InvalidValueError if the single-token bad_words_token_ids exclude every token that may be sampled."""
    banned = {word[0] for word in params.bad_words_token_ids if len(word) == 1}
    if params.allowed_token_ids is not None:
        allowed = {token for token in params.allowed_token_ids if 0 <= token < vocab_size}
        if not allowed - banned:
            message = "allowed_token_ids leaves no token to sample" + (" beside bad_words" if allowed else "")
            raise InvalidValueError(message, param="allowed_token_ids")
    elif len(banned) >= vocab_size and banned.issuperset(range(vocab_size)):
        raise InvalidValueError("bad_words leaves no token to sample", param="bad_words")


def nothing_allowed(params: SamplingParams) -> str:
    """Return the error message for a request whose parameters exclude every token."""
    fields = {
        "response_format": params.grammar is not None,
        "allowed_token_ids": params.allowed_token_ids is not None,
        "bad_words": bool(params.bad_words_token_ids),
        "logit_bias": bool(params.logit_bias),
    }
    causes = [name for name, given in fields.items() if given] or ["the sampling parameters"]
    return f"no token is left to sample: {' and '.join(causes)} exclude every one"
