"""Fill in the middle: build one prompt from a prefix and a suffix, if the tokenizer has tokens for it."""

from __future__ import annotations

from jaxserve.api.shared.encoding import TextEncoder
from jaxserve.errors import UnsupportedParameterError
from jaxserve.text.tokenizer import Tokenizer

# the tokens before the prefix, the suffix and the middle, per model family
_FAMILIES = (
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),  # Qwen-Coder, CodeGemma
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),  # StarCoder, SantaCoder
    ("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),
    ("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),  # DeepSeek-Coder
    ("▁<PRE>", "▁<SUF>", "▁<MID>"),  # Code Llama
)


async def infill_prompt(
    encoder: TextEncoder, tokenizer: Tokenizer, prefix: str | list[int], suffix: str, limit: int | None
) -> list[int]:
    """Return the token ids of prefix, suffix, middle, in this order.

    limit: the greatest useful number of tokens
    Raises UnsupportedParameterError if the tokenizer has no such tokens, ContextLengthError if a text exceeds `limit`.
    """
    for family in _FAMILIES:
        marks = [tokenizer.token_to_id(token) for token in family]
        if None not in marks:
            before, between, after = (mark for mark in marks if mark is not None)
            head = prefix if isinstance(prefix, list) else await _plain(encoder, prefix, limit, "prompt")
            tail = await _plain(encoder, suffix, limit, "suffix")
            start = tokenizer.encode("", add_special_tokens=True)
            return [*start, before, *head, between, *tail, after]
    raise UnsupportedParameterError("suffix: this model has no fill-in-the-middle tokens.", param="suffix")


async def _plain(encoder: TextEncoder, text: str, limit: int | None, param: str) -> list[int]:
    return await encoder.encode(text, add_special_tokens=False, plain=True, limit=limit, param=param)
