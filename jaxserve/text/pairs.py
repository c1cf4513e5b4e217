"""Pairs of texts as token ids: the form that a model with a classification head was trained on."""

from __future__ import annotations

import re

import tokenizers

from jaxserve.text.tokenizer import LONG_TEXT, Tokenizer

_ROLES = tuple(re.compile(rf"""["']{role}["']""") for role in ("query", "document"))


def has_pair_roles(template: str) -> bool:
    """Return whether a chat template has the roles `query` and `document`."""
    return all(role.search(template) for role in _ROLES)


class PairEncoder:
    """Joins two texts as the tokenizer's post-processor does, e.g. `[CLS] query [SEP] document [SEP]`.

    The texts are encoded without special tokens. A special token that a text spells is read as plain text.
    num_added: number of tokens that the post-processor puts around and between the texts
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._backend = tokenizer.plain_backend()
        self.num_added = self._backend.num_special_tokens_to_add(True)

    def text(self, text: str) -> tokenizers.Encoding:
        """Encode one text of a pair. Encoding a long text releases the GIL."""
        if len(text) <= LONG_TEXT:
            return self._backend.encode(text, add_special_tokens=False)
        return self._backend.encode_batch([text], add_special_tokens=False)[0]

    def joined(self, query: tokenizers.Encoding, document: tokenizers.Encoding, keep: int) -> tuple[list[int], int]:
        """Return (token ids, index of the first token of token type 1; 0 if there is none).

        keep: number of tokens to which the document is cut
        """
        if len(document) > keep:
            document.truncate(keep)
        whole = self._backend.post_process(query, document)
        types = whole.type_ids
        return whole.ids, types.index(1) if 1 in types else 0

    def cut(self, text: str, keep: int) -> str:
        """Return the start of a text, at most `keep` tokens long. If `keep` is negative, cut off that many tokens."""
        encoding = self.text(text)
        keep = keep if keep >= 0 else max(0, len(encoding) + keep)
        if len(encoding) <= keep:
            return text
        return text[: encoding.offsets[keep - 1][1]] if keep else ""
