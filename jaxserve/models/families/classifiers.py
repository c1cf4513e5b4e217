"""Decoders with a classification head in place of the output head: the last token's state gives a score per label.

Qwen2, Qwen3, Llama, Gemma and the other decoder families, as `...ForSequenceClassification`.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from jaxserve.models.checkpoint.read_config import Json, head_labels
from jaxserve.models.families import gemma, llama
from jaxserve.models.family import Family

_NAMES = {"Gemma3ForCausalLM": "Gemma3TextForSequenceClassification"}  # the plain name has a vision tower


def _with_head(family: Family) -> Family:
    def changes(hf: Json, fields: dict[str, Any]) -> dict[str, Any]:
        return family.changes(hf, fields) | head_labels(hf)

    plain = family.architecture.replace("ForCausalLM", "ForSequenceClassification")
    return dataclasses.replace(family, architecture=_NAMES.get(family.architecture, plain), changes=changes)


_DECODERS = (*llama.FAMILIES, *gemma.FAMILIES)
FAMILIES = tuple(_with_head(family) for family in _DECODERS if isinstance(family, Family))
