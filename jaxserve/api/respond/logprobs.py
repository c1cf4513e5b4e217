"""Log-probabilities in their wire forms: chat's list of objects, completions' parallel arrays, vLLM's prompt list.

All values are the engine's own float32s. The chosen token has the same value wherever it appears.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import Any

from jaxserve.api.shared.token_texts import TokenTexts
from jaxserve.types.step import TokenLogprobs

FLOOR = -9999.0  # OpenAI's stand-in for minus infinity, which JSON does not have


def floor(value: float) -> float:
    return value if value > FLOOR else FLOOR


def _top(entry: TokenLogprobs, count: int, watched: Sequence[int] = ()) -> list[tuple[int, float]]:
    """Return (token id, log-probability) of the `count` most likely tokens.

    If the request names tokens (`watched`) and the entry has their values, return the chosen token and those instead.
    """
    if watched and entry.watched:
        pairs, own = dict(zip(watched, entry.watched, strict=True)), {entry.token_id: entry.logprob}
        return [(i, floor(value)) for i, value in (own | pairs | own).items()]
    likeliest = zip(entry.top_ids[:count], entry.top_logprobs[:count], strict=True)
    return [(i, floor(entry.logprob if i == entry.token_id else value)) for i, value in likeliest]


def chat_logprobs(
    entries: Sequence[TokenLogprobs], top: int, texts: TokenTexts, as_ids: bool, watched: Sequence[int] = ()
) -> dict[str, Any]:
    """Build `choices[].logprobs` of chat/completions."""
    return {"content": [_chat_entry(entry, top, texts, as_ids, watched) for entry in entries], "refusal": None}


def _chat_entry(
    entry: TokenLogprobs, top: int, texts: TokenTexts, as_ids: bool, watched: Sequence[int]
) -> dict[str, Any]:
    alternatives = [_chat_token(i, value, texts, as_ids) for i, value in _top(entry, top, watched)]
    return _chat_token(entry.token_id, floor(entry.logprob), texts, as_ids) | {"top_logprobs": alternatives}


def _chat_token(token_id: int, logprob: float, texts: TokenTexts, as_ids: bool) -> dict[str, Any]:
    return {"token": texts.name(token_id, as_ids), "logprob": logprob, "bytes": texts.bytes(token_id)}


class CompletionLogprobs:
    """The parallel arrays of completions, delta by delta; offsets count characters of the choice's text."""

    def __init__(
        self,
        top: int,
        texts: TokenTexts,
        hidden: frozenset[int],
        as_ids: bool,
        watched: Sequence[int] = (),
        *,
        drops_space: bool = False,
    ) -> None:
        """hidden: special tokens that are omitted from the text. drops_space: the text lacks its first token's space"""
        self._drops_space = drops_space
        self._top = top
        self._watched = watched
        self._texts = texts
        self._hidden = hidden
        self._as_ids = as_ids
        self._offset = 0
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def take(self, entries: Sequence[TokenLogprobs | None], token_ids: Sequence[int]) -> dict[str, Any]:
        """Return the arrays for these tokens. An entry is None for a prompt's first token, which is not predicted."""
        return {
            "tokens": [self._texts.name(i, self._as_ids) for i in token_ids],
            "token_logprobs": [None if entry is None else floor(entry.logprob) for entry in entries],
            "top_logprobs": [None if entry is None else self._alternatives(entry) for entry in entries],
            "text_offset": [self._next_offset(i) for i in token_ids],
        }

    def _alternatives(self, entry: TokenLogprobs) -> dict[str, float]:
        """Map token text to value, including the chosen token. If tokens share a text, the most likely one is used."""
        table = {self._texts.name(entry.token_id, self._as_ids): floor(entry.logprob)}
        for token_id, value in _top(entry, self._top, self._watched):
            name = self._texts.name(token_id, self._as_ids)
            table[name] = max(value, table.get(name, FLOOR))
        return table

    def _next_offset(self, token_id: int) -> int:
        offset = self._offset
        if token_id not in self._hidden:
            text = self._decoder.decode(self._texts_bytes(token_id))
            self._offset += len(text.removeprefix(" ") if self._drops_space else text)
            self._drops_space = False
        return offset

    def _texts_bytes(self, token_id: int) -> bytes:
        return bytes(self._texts.bytes(token_id))


def prompt_logprobs(entries: Sequence[TokenLogprobs | None], top: int, texts: TokenTexts) -> list[Any]:
    """Build vLLM's `prompt_logprobs`: for each token null or {token id: {logprob, rank, decoded_token}}."""
    return [None if entry is None else _ranked(entry, top, texts) for entry in entries]


def _ranked(entry: TokenLogprobs, top: int, texts: TokenTexts) -> dict[str, Any]:
    ranks = [(entry.token_id, floor(entry.logprob), entry.rank)]
    ranks += [(i, v, place) for place, (i, v) in enumerate(_top(entry, top), 1) if i != entry.token_id]
    return {str(i): {"logprob": v, "rank": r, "decoded_token": texts.text(i)} for i, v, r in ranks}
