"""Limits on the tokenizer of an untrusted file: the time and memory that it may take, and the ids that it may make."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers.models import BPE

from jaxserve.errors import ModelLoadError
from jaxserve.text.stop import check_pattern

MAX_VOCABULARY = 2**22  # the largest published vocabulary has 262,144
MAX_ADDED = 2**15  # tokens; published tokenizers have 6,500 at most, and ten times as many take seconds to look for
MAX_GROWTH = 64  # characters that the normalizer may put in place of one; sentencepiece's sign for a space is one
MAX_FRAME_IDS = 256  # ids that the post-processor may put around a text


def refuse_costly(backend: tokenizers.Tokenizer, file: Path) -> None:
    """Raise ModelLoadError, which names the file, if the tokenizer can take too much time or memory."""
    try:
        _check_backend(backend)
    except ValueError as error:
        raise ModelLoadError(f"{file} is not served: {error}") from error


def _check_backend(backend: tokenizers.Tokenizer) -> None:
    """Raise ValueError if the tokenizer can take too much time or memory, or can make ids outside the vocabulary."""
    parts = _parts(backend)
    steps = [step for part in parts.values() for step in _steps(part)]
    for step in steps:
        pattern = step.get("pattern")
        if isinstance(pattern, dict) and isinstance(pattern.get("Regex"), str):
            try:
                check_pattern(pattern["Regex"])
            except ValueError as error:
                raise ValueError(f"the pattern {pattern['Regex'][:60]!r} may take very long: {error}") from None
    grown = [len(step.get("content") or "") for step in _steps(parts["normalizer"]) if step.get("type") == "Replace"]
    if math.prod(max(1, size) for size in grown) > MAX_GROWTH:
        raise ValueError(f"its normalizer may make a text {MAX_GROWTH} times as long and more")
    added = [i for step in steps for token in _tokens(step) for i in token.get("ids") or ()]
    size = max(backend.get_vocab_size(with_added_tokens=True), *backend.get_added_tokens_decoder(), 0) + 1
    if len(added) > MAX_FRAME_IDS or any(not 0 <= i < size for i in added):
        raise ValueError("its post-processor adds ids that are not in the vocabulary, or too many")
    if len(backend.get_added_tokens_decoder()) > MAX_ADDED:
        raise ValueError(f"it has more than {MAX_ADDED} added tokens")
    if size > MAX_VOCABULARY:
        raise ValueError(f"its token ids reach {size}, and {MAX_VOCABULARY} is the limit")


def _parts(backend: tokenizers.Tokenizer) -> dict[str, Any]:
    """Return the JSON of everything but the vocabulary, which may have megabytes."""
    blank = tokenizers.Tokenizer(BPE())
    for name in ("normalizer", "pre_tokenizer", "post_processor", "decoder"):
        part = getattr(backend, name)
        if part is not None:
            setattr(blank, name, part)
    return json.loads(blank.to_str())


def _steps(part: Any) -> list[dict[str, Any]]:
    """Return a step and, if it is a Sequence, the steps inside it."""
    if not isinstance(part, dict):
        return []
    lists = [part.get(name) or [] for name in ("normalizers", "pretokenizers", "processors", "decoders")]
    return [part, *(step for each in lists for inner in each for step in _steps(inner))]


def _tokens(step: dict[str, Any]) -> list[dict[str, Any]]:
    special = step.get("special_tokens") if step.get("type") == "TemplateProcessing" else None
    return list(special.values()) if isinstance(special, dict) else []
